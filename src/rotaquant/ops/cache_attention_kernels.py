"""Attention of a few queries over the packed cache, in one launch; see `cache_layout` for what a page holds.

Legend: a key is s·c + lo with codes c, so q·k = s·(q·c) + lo·Σq; a value's share in the output is (p·s)·c + p·lo. The
products with codes run on matrix units, scales and lowest values outside of them. A row of the first product is one
query of one head: the heads that share a key/value head meet its codes together. Codes are unpacked in registers, one
plane at a time: element h of a token holds channels 4h to 4h + 3, of which plane n is channel 4h + n.

Each warp takes tokens of its own and keeps its own maximum and sums; they meet once, at the end. Where several programs
share a sequence, each writes its part, and the last to arrive adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops.cache_attention_plans import AttentionPlan, choose, elements_of, fitted, kernel_bits
from rotaquant.ops.cache_attention_units import (
    dot,
    elements,
    key_plane,
    planes_of_rows,
    rows_of_planes,
    scale_and_lowest,
    sum_over_warps,
    value_plane,
)
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat
from rotaquant.ops.device_features import inline_assembly, programmatic_launch

_LOG2_E = 1.4426950408889634
_COMBINED_VALUES = 128  # of a thread at a time, while parts are added up


@triton.jit
def _parts(
    partial, statistics, place, known, c, peak, weight, tile, HP: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Add parts of rows, at `place` `[rows]` or (AXIS) `[parts, rows]`, to a running peak, weight and tile."""
    peaks = tl.load(statistics + place * 2, mask=known, other=-1e30, cache_modifier=".cg")
    weights = tl.load(statistics + place * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
    if AXIS:
        tiles = tl.load(
            partial + place[:, :, None] * (4 * HP) + c[None, None, :], mask=known[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(peaks, 0))
        fade, fades = tl.exp2(peak - higher), tl.exp2(peaks - higher[None, :])
        weight = weight * fade + tl.sum(weights * fades, 0)
        tile = tile * fade[:, None] + tl.sum(tiles * fades[:, :, None], 0)
    else:
        tiles = tl.load(
            partial + place[:, None] * (4 * HP) + c[None, :], mask=known[:, None], other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        higher = tl.maximum(peak, peaks)
        fade, fades = tl.exp2(peak - higher), tl.exp2(peaks - higher)
        weight = weight * fade + weights * fades
        tile = tile * fade[:, None] + tiles * fades[:, None]
    return higher, weight, tile


@triton.jit
def _combine(
    partial, statistics, sinks, out, pair, first, total_rows, splits, first_query, first_head, heads, group,
    D: tl.constexpr, M: tl.constexpr, HP: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of rows `first` to `first + M`, ROWS at a time, and store the output.

    PARTS reads are on their way at once. A single warp has them as one tensor; several warps would have to exchange
    sums of such a one, which took longer than all else, and take part after part.
    """
    c = tl.arange(0, 4 * HP)
    for start in range(first, tl.minimum(first + M, total_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        alive = row < total_rows
        peak = tl.full((ROWS,), -1e30, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        tile = tl.zeros((ROWS, 4 * HP), tl.float32)
        for i in range(0, splits, PARTS):
            if W == 1:
                part = i + tl.arange(0, PARTS)
                known = (part < splits)[:, None] & alive[None, :]
                place = (pair * splits + part).to(tl.int64)[:, None] * total_rows + row[None, :]
                peak, weight, tile = _parts(partial, statistics, place, known, c, peak, weight, tile, HP, True)
            else:
                for j in tl.static_range(PARTS):
                    part = i + j + tl.zeros((ROWS,), tl.int32)
                    known = alive & (part < splits)
                    place = (pair * splits + part).to(tl.int64) * total_rows + row
                    peak, weight, tile = _parts(partial, statistics, place, known, c, peak, weight, tile, HP, False)
        if SINKS:
            sink = tl.load(sinks + first_head + row % group, mask=alive, other=0.0)
            weight += tl.exp2(sink * 1.4426950408889634 - peak)
        tile = tile / tl.where(weight == 0.0, 1.0, weight)[:, None]
        to = (first_query + row // group) * heads + first_head + row % group
        place = out + to.to(tl.int64)[:, None] * D + c[None, :]
        tl.store(place, tile.to(out.dtype.element_ty), mask=alive[:, None] & (c < D)[None, :])


_VARYING = [
    "table_batch", "mask_batch", "mask_head", "mask_query", "mask_first",
    "kv_heads", "group", "queries", "window", "splits",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    q, pages, table, lengths, mask, sinks, out, partial, statistics, arrivals,
    q_batch, q_token, q_head, table_batch, mask_batch, mask_head, mask_query, mask_first,
    kv_heads, group, queries, window, scale, softcap, splits,
    D: tl.constexpr, key_bits: tl.constexpr, value_bits: tl.constexpr, kind: tl.constexpr,
    VALUE_HALF: tl.constexpr, T: tl.constexpr, M: tl.constexpr, HP: tl.constexpr, W: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SINGLE: tl.constexpr, ALONE: tl.constexpr, WINDOW: tl.constexpr,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # ALONE: no other program has a part of these rows. SINGLE: one query. M rows are a block of group * queries.
    H: tl.constexpr = D // 4
    KB: tl.constexpr = D if key_bits == 8 else D * key_bits // 8
    VB: tl.constexpr = D if value_bits == 8 else D * value_bits // 8
    HEAD: tl.constexpr = T * (KB + VB + 8)
    UNITS: tl.constexpr = T // KEYS
    KEY_OFFSET: tl.constexpr = 128.0 if key_bits == 4 and ASM and kind == tl.bfloat16 else 0.0
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    head = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(lengths + b)
    row = block * M + tl.arange(0, M)
    own = row // group
    alive = row < group * queries
    c = tl.arange(0, 4 * HP)
    h = tl.arange(0, HP)
    inside = h < H
    w = tl.arange(0, W)
    k = tl.arange(0, KEYS)
    q_row = b.to(tl.int64) * q_batch + own * q_token + (head * group + row % group) * q_head
    rows = tl.load(q + q_row[:, None] + c[None, :], mask=alive[:, None] & (c < D)[None, :], other=0.0)
    total = tl.broadcast_to(tl.sum(rows.to(tl.float32), 1)[None, :, None], (W, M, 1))
    q0, q1, q2, q3 = planes_of_rows(rows, M, HP)
    q0, q1 = tl.broadcast_to(q0[None], (W, M, HP)), tl.broadcast_to(q1[None], (W, M, HP))
    q2, q3 = tl.broadcast_to(q2[None], (W, M, HP)), tl.broadcast_to(q3[None], (W, M, HP))
    # The last slot that a row sees.
    last = length - 1 if SINGLE else length - queries + own
    first = 0
    if WINDOW:
        first = tl.maximum(length - queries - window + 1, 0)
    first_unit = first // KEYS
    units = tl.cdiv(length, KEYS)
    share = tl.cdiv(tl.cdiv(units - first_unit, splits), W) * W
    begin = first_unit + split * share
    end = tl.minimum(begin + share, units)
    most = tl.full((W, M, 1), -1e30, tl.float32)
    weight = tl.zeros((W, M, 1), tl.float32)
    lows = tl.zeros((W, M, 1), tl.float32)
    a0, a1 = tl.zeros((W, M, HP), tl.float32), tl.zeros((W, M, HP), tl.float32)
    a2, a3 = tl.zeros((W, M, HP), tl.float32), tl.zeros((W, M, HP), tl.float32)
    for step in tl.range(begin, end, W, num_stages=STAGES):
        unit = step + w
        offset = tl.load(table + b * table_batch + unit // UNITS, mask=unit < end, other=0)
        base = pages + tl.multiple_of(offset + head * HEAD, 16)
        token = ((unit % UNITS) * KEYS)[:, None] + k[None, :]
        slot = unit[:, None] * KEYS + k[None, :]
        here = (slot < length) & (unit < end)[:, None]
        keys, key_upper = elements(base, token, h, inside, key_bits, H, KB, H == HP)
        values, value_upper = elements(base + T * KB, token, h, inside, value_bits, H, VB, H == HP)
        parameters = (base + T * (KB + VB)).to(tl.pointer_type(tl.int32))[:, None] + token
        # Memory beyond the end may hold anything: infinity times nothing is no number.
        key_word = tl.load(parameters, mask=here, other=0)
        value_word = tl.load(parameters + T, mask=here, other=0)
        kt, ku = tl.trans(keys, 0, 2, 1), tl.trans(key_upper, 0, 2, 1)
        score = tl.zeros((W, M, KEYS), tl.float32)
        score = dot(q0, key_plane(kt, ku, 0, key_bits, kind, ASM), score, ASM)
        score = dot(q1, key_plane(kt, ku, 1, key_bits, kind, ASM), score, ASM)
        score = dot(q2, key_plane(kt, ku, 2, key_bits, kind, ASM), score, ASM)
        score = dot(q3, key_plane(kt, ku, 3, key_bits, kind, ASM), score, ASM)
        s, lo = scale_and_lowest(key_word)
        s = s * scale
        lo = lo * scale - KEY_OFFSET * s
        score = score * s[:, None, :] + lo[:, None, :] * total
        if SOFTCAP:
            # softcap is times log2(e) as the scores are: tanh(x) = 1 - 2 / (exp(2x) + 1).
            score = softcap - 2.0 * softcap / (tl.exp2(score / softcap * 2.885390081777927) + 1.0)
        if SINGLE:
            seen = here[:, None, :]
            if WINDOW:
                seen = seen & (slot > last - window)[:, None, :]
        else:
            seen = here[:, None, :] & (slot[:, None, :] <= last[None, :, None])
            if WINDOW:
                seen = seen & (slot[:, None, :] > (last - window)[None, :, None])
        if MASK:
            place = mask + b * mask_batch + (head * group + row % group)[None, :, None] * mask_head
            place += own[None, :, None] * mask_query + (slot - mask_first)[:, None, :]
            known = here[:, None, :] & alive[None, :, None] & (slot >= mask_first)[:, None, :]
            seen = seen & (tl.load(place, mask=known, other=0) != 0)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 2, keep_dims=True))
        p = tl.exp2(score - higher)
        fade = tl.exp2(most - higher)
        most = higher
        s, lo = scale_and_lowest(value_word)
        lo = lo + VALUE_HALF * s
        weight = weight * fade + tl.sum(p, 2, keep_dims=True)
        lows = lows * fade + tl.sum(p * lo[:, None, :], 2, keep_dims=True)
        p = (p * s[:, None, :]).to(tl.bfloat16)
        a0 = dot(p, value_plane(values, value_upper, 0, value_bits, VALUE_HALF, ASM), a0 * fade, ASM)
        a1 = dot(p, value_plane(values, value_upper, 1, value_bits, VALUE_HALF, ASM), a1 * fade, ASM)
        a2 = dot(p, value_plane(values, value_upper, 2, value_bits, VALUE_HALF, ASM), a2 * fade, ASM)
        a3 = dot(p, value_plane(values, value_upper, 3, value_bits, VALUE_HALF, ASM), a3 * fade, ASM)
    peak = tl.max(most, 0)
    fade = tl.exp2(most - peak[None])
    weight = tl.sum(tl.sum(weight * fade, 0), 1)
    tile = sum_over_warps((rows_of_planes(a0, a1, a2, a3, W, M, HP) + lows) * fade, W, M, 4 * HP)
    peak = tl.sum(peak, 1)
    pair = b * kv_heads + head
    total_rows = group * queries
    out_row = (b * queries + own) * (kv_heads * group) + head * group + row % group
    if ALONE:
        if SINKS:
            sink = tl.load(sinks + head * group + row % group, mask=alive, other=0.0) * 1.4426950408889634
            weight += tl.exp2(sink - peak)
        tile = tile / tl.where(weight == 0.0, 1.0, weight)[:, None]
        place = out + out_row.to(tl.int64)[:, None] * D + c[None, :]
        tl.store(place, tile.to(out.dtype.element_ty), mask=alive[:, None] & (c < D)[None, :])
    else:
        part = (pair * splits + split).to(tl.int64) * total_rows + row
        tl.store(partial + part[:, None] * (4 * HP) + c[None, :], tile, mask=alive[:, None])
        tl.store(statistics + part * 2, peak, mask=alive)
        tl.store(statistics + part * 2 + 1, weight, mask=alive)
        tl.debug_barrier()
        blocks = tl.num_programs(0) // splits
        arrived = tl.atomic_add(arrivals + pair * blocks + block, 1)
        if arrived == splits - 1:
            tl.debug_barrier()
            tl.store(arrivals + pair * blocks + block, 0)
            _combine(
                partial, statistics, sinks, out, pair, block * M, total_rows, splits, b * queries, head * group,
                kv_heads * group, group, D, M, HP, W, PARTS, ROWS, SINKS,
            )  # fmt: skip


def attend(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    arrivals: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    form: PageFormat,
    *,
    longest: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    mask_first: int = 0,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """`cache_reference.attend` of a query `[batch, queries, heads, head_dim]` of 16 bits over pages.

    `arrivals` int32 is zero and is left so: one for each row of the table, key/value head and block of 16 rows.
    `longest` is no less than any length. `mask` is bool or uint8 `[batch, 1 or heads, queries, n]` from slot
    `mask_first` on.
    """
    batch, queries, heads, head_dim = query.shape
    group = heads // form.kv_heads
    rows = 16
    blocks = triton.cdiv(group * queries, rows)
    reach = longest if window is None else min(longest, window + queries - 1)
    plan = plan or choose(batch * form.kv_heads * blocks, reach, query.device)
    plan = fitted(plan, form, query.device)
    splits = plan.splits
    width = elements_of(head_dim)
    out = torch.empty(batch, queries, heads, head_dim, dtype=query.dtype, device=query.device)
    parts = batch * heads * queries * splits if splits > 1 else 0
    scratch = torch.empty(parts * (4 * width + 2), dtype=torch.float32, device=query.device)
    pdl, asm = programmatic_launch(query.device), inline_assembly(query.device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    if mask is not None:
        mask = mask.expand(batch, heads, queries, mask.shape[-1])
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
    together = min(triton.next_power_of_2(min(group * queries, rows)), 8)
    at_once = _COMBINED_VALUES * plan.warps * 32 // (together * 4 * width)
    at_once = max(1, min(triton.next_power_of_2(splits), at_once, 8))
    _attend[(splits * blocks, form.kv_heads, batch)](
        query, pages, table, lengths, query if mask is None else mask, query if sinks is None else sinks, out,
        scratch, scratch[parts * 4 * width :], arrivals,
        query.stride(0), query.stride(1), query.stride(2), table.stride(0),
        *((0, 0, 0) if mask is None else mask.stride()[:3]), mask_first,
        form.kv_heads, group, queries, window or 0, scaling * _LOG2_E, (softcap or 0.0) * _LOG2_E, splits,
        head_dim, kernel_bits(form.key_bits), kernel_bits(form.value_bits),
        tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float16,
        1 << (form.value_bits - 1), PAGE_TOKENS, rows, width, plan.warps, plan.keys, plan.stages,
        at_once, together, queries == 1, splits == 1, window is not None,
        mask is not None, softcap is not None, sinks is not None, asm, pdl,
        num_warps=plan.warps, maxnreg=plan.registers, launch_pdl=pdl,
    )  # fmt: skip
    return out
