"""What a step adds to the packed cache, in one launch: RoPE, rotation, quantization and the write to the page.

A program takes ROWS heads of tokens: of keys, of values, or of queries, which are turned and rotated beside the keys.
The rotation is a product with a matrix of small integers, exact in 16 bits, and a constant; it runs on matrix units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops.cache import Turn
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat
from rotaquant.ops.cache_reference import ROPE_STYLES
from rotaquant.ops.device_features import inline_assembly, programmatic_launch

_ROWS = 16
_STRIP = 64  # channels of a row that are turned and multiplied at a time


@triton.jit
def _turned(x, cos, sin, c, inside, R, STYLE: tl.constexpr):
    """Channels c of rows at x, turned by their angles and rounded where a model in their dtype rounds.

    STYLE is a place in `ROPE_STYLES`.
    """
    values = tl.load(x + c, mask=inside, other=0.0)
    if STYLE == 0:
        return values
    else:
        kind: tl.constexpr = x.dtype.element_ty
        if STYLE <= 2:
            partner = tl.where(c < R // 2, c + R // 2, c - R // 2)
            minus = c < R // 2
        else:
            partner = c ^ 1
            minus = c % 2 == 0
        angle = c
        if STYLE == 2:
            angle = tl.where(minus, c, c - R // 2)
        if STYLE == 4:
            angle = c // 2
        turns = inside & (c < R)
        other = tl.load(x + partner, mask=turns, other=0.0).to(tl.float32)
        other = tl.where(minus, -other, other)
        along = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        across = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        first = (values.to(tl.float32) * along).to(kind).to(tl.float32)
        second = (other * across).to(kind).to(tl.float32)
        return (first + second).to(kind)


@triton.jit
def _rotated(
    x, cos, sin, rotation, alive, R, norm, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
    STYLE: tl.constexpr, ROTATES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows at x `[ROWS, DP]`, turned and rotated, in float32."""
    column = tl.arange(0, DP)[None, :]
    if ROTATES:
        total = tl.zeros((ROWS, DP), tl.float32)
        for start in tl.static_range(0, DP, STRIP):
            c = start + tl.arange(0, STRIP)[None, :]
            part = _turned(x, cos, sin, c, alive & (c < D), R, STYLE)
            line = start + tl.arange(0, STRIP)[:, None]
            matrix = tl.load(rotation + line * D + column, mask=(line < D) & (column < D), other=0.0)
            if ASM:
                total = tl.dot(part, matrix, total)
            else:
                # The interpreter takes bfloat16 for integers.
                total += tl.dot(part.to(tl.float32), matrix.to(tl.float32))
        return total * norm
    else:
        return _turned(x, cos, sin, column, alive & (column < D), R, STYLE).to(tl.float32)


@triton.jit
def _half(x):
    """Float32 in fp16, saturating; what is no number stays none."""
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -65504.0), 65504.0)).to(tl.float16)


@triton.jit
def _word(scale, lowest):
    """Two fp16 values as one word."""
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (lowest.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _dense(codes, bits: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr):
    """Codes int32 `[ROWS, DP]` as bytes of 8 / bits codes."""
    many: tl.constexpr = 8 // bits
    shifted = codes << (bits * (tl.arange(0, DP) % many))[None, :]
    return tl.sum(shifted.reshape(ROWS, DP // many, many), 2).to(tl.uint8)


@triton.jit
def _store_bytes(place, codes, alive, D: tl.constexpr, bits: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr):
    c = tl.arange(0, DP * bits // 8)[None, :]
    tl.store(place + c, _dense(codes, bits, ROWS, DP), mask=alive & (c < D * bits // 8))


@triton.jit
def _quantize(
    values, codes_at, parameters_at, alive, clip_ratio, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    bits: tl.constexpr,
):  # fmt: skip
    """Quantize rows of float32 `[ROWS, DP]` as `reference.quantize_asymmetric` does, and store them."""
    top: tl.constexpr = (1 << bits) - 1
    column = tl.arange(0, DP)[None, :]
    low = tl.min(tl.where(column < D, values, float("inf")), 1, keep_dims=True)
    high = tl.max(tl.where(column < D, values, float("-inf")), 1, keep_dims=True)
    # A minimum passes over what is no number.
    lost = tl.max((values != values).to(tl.int32), 1, keep_dims=True) > 0
    low = tl.where(lost, float("nan"), low)
    high = tl.where(lost, float("nan"), high)
    center, half_width = (low + high) * 0.5, (high - low) * clip_ratio * 0.5
    scale = _half(tl.div_rn(2.0 * half_width, tl.full(half_width.shape, top, tl.float32)))
    flat = scale.to(tl.float32) == 0.0
    scale = tl.where(flat, tl.full(scale.shape, 1.0, tl.float16), scale)
    lowest = _half(tl.where(flat, center, center - half_width))
    steps = tl.div_rn(values - lowest.to(tl.float32), tl.broadcast_to(scale.to(tl.float32), values.shape))
    steps = tl.where(steps != steps, 0.0, steps)
    steps = tl.minimum(tl.maximum(steps, 0.0), top * 1.0)
    # Adding 1.5 * 2**23 leaves no bit for a fraction, and rounds as IEEE does.
    codes = (steps + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    tl.store(parameters_at, _word(scale, lowest), mask=alive)
    if bits > 4:
        tl.store(codes_at + column, codes.to(tl.uint8), mask=alive & (column < D))
    elif bits == 3:
        _store_bytes(codes_at, codes & 3, alive, D, 2, ROWS, DP)
        _store_bytes(codes_at + D // 4, codes >> 2, alive, D, 1, ROWS, DP)
    else:
        _store_bytes(codes_at, codes, alive, D, bits, ROWS, DP)


@triton.jit(do_not_specialize=["tokens", "length", "table_batch"])
def _append(
    pages, table, first, query, keys, values, positions, cos, sin, rotation, out,
    tokens, length, heads, kv_heads, table_batch, query_batch, query_token, query_head, key_batch, key_token, key_head,
    value_batch, value_token, value_head, position_batch, angle_batch, angle_token, R, norm, key_clip, value_clip,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
    key_bits: tl.constexpr, value_bits: tl.constexpr, STYLE: tl.constexpr, ROTATES: tl.constexpr,
    POSITIONS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs (i, 0) have keys, (i, 1) values, (i, 2) queries; a row is a head of a token.
    KB: tl.constexpr = D if key_bits > 4 else D * key_bits // 8
    VB: tl.constexpr = D if value_bits > 4 else D * value_bits // 8
    HEAD: tl.constexpr = T * (KB + VB + 8)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mine = heads if part == 2 else kv_heads
    token, head = row // mine, row % mine
    b, t = token // length, token % length
    alive = row < tokens * mine
    angles = b.to(tl.int64) * angle_batch + t * angle_token
    if part == 2:
        x = query + b.to(tl.int64) * query_batch + t.to(tl.int64) * query_token + head * query_head
        turned = _rotated(
            x, cos + angles, sin + angles, rotation, alive, R, norm, D, DP, ROWS, STRIP, STYLE, ROTATES, ASM
        )  # fmt: skip
        column = tl.arange(0, DP)[None, :]
        tl.store(out + row.to(tl.int64) * D + column, turned.to(out.dtype.element_ty), mask=alive & (column < D))
    else:
        slot = tl.load(first + b, mask=alive, other=0) + t
        offset = tl.load(table + b * table_batch + slot // T, mask=alive, other=0)
        base = pages + offset + head * HEAD
        place = slot % T
        parameters = (base + T * (KB + VB)).to(tl.pointer_type(tl.int32)) + place
        if part == 0:
            x = keys + b.to(tl.int64) * key_batch + t.to(tl.int64) * key_token + head * key_head
            turned = _rotated(
                x, cos + angles, sin + angles, rotation, alive, R, norm, D, DP, ROWS, STRIP, STYLE, ROTATES, ASM
            )  # fmt: skip
            _quantize(turned, base + place * KB, parameters, alive, key_clip, D, DP, ROWS, key_bits)
            if POSITIONS:
                position = tl.load(positions + b * position_batch + t, mask=alive & (head == 0), other=0)
                at = (pages + offset + kv_heads * HEAD).to(tl.pointer_type(tl.int32)) + place
                tl.store(at, position.to(tl.int32), mask=alive & (head == 0))
        else:
            x = values + b.to(tl.int64) * value_batch + t.to(tl.int64) * value_token + head * value_head
            column = tl.arange(0, DP)[None, :]
            row_values = tl.load(x + column, mask=alive & (column < D), other=0.0).to(tl.float32)
            codes_at = base + T * KB + place * VB
            _quantize(row_values, codes_at, parameters + T, alive, value_clip, D, DP, ROWS, value_bits)


def _width(turn: Turn) -> int:
    """Channels that RoPE turns."""
    return 0 if turn.cos is None else turn.cos.shape[-1] * (2 if turn.style == "half-once" else 1)


def append(
    pages: Tensor,
    table: Tensor,
    first: Tensor,
    query: Tensor | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    form: PageFormat,
    clips: tuple[float, float],
    turn: Turn,
) -> Tensor | None:
    """`cache_reference.append` of keys and values `[batch, length, kv_heads, head_dim]` of 16 bits, which `turn` turns.

    Gives the query `[batch, length, heads, head_dim]` turned alike, if there is one. `positions` is `[batch or 1,
    length]`.
    """
    batch, length, kv_heads, head_dim = keys.shape
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    out = None
    if query is not None:
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch * length == 0:
        return out
    heads = kv_heads if query is None else query.shape[2]
    padded = max(16, triton.next_power_of_2(head_dim))
    programs = triton.cdiv(batch * length * max(heads, kv_heads), _ROWS)
    turned = keys if query is None else query
    cos, sin = (keys if x is None else x.contiguous() for x in (turn.cos, turn.sin))
    angle_strides = (0, 0) if turn.cos is None else (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1))
    pdl, asm = programmatic_launch(keys.device), inline_assembly(keys.device)
    if positions is not None:
        positions = positions.contiguous()
    _append[(programs, 2 if query is None else 3)](
        pages, table, first, turned, keys, values, first if positions is None else positions, cos, sin,
        keys if turn.rotation is None else turn.rotation, keys if out is None else out,
        batch * length, length, heads, kv_heads, table.stride(0),
        *turned.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        0 if positions is None or positions.shape[0] == 1 else positions.stride(0), *angle_strides,
        _width(turn), turn.norm, *clips, head_dim, padded, PAGE_TOKENS, _ROWS, min(_STRIP, padded),
        form.key_bits, form.value_bits, ROPE_STYLES.index(turn.style), turn.rotation is not None,
        form.has_positions, asm, pdl, num_warps=4, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return out
