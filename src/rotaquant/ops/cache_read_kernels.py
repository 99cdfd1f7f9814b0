"""Keys and values out of the packed cache, in one launch: what prefill attention takes a chunk of heads from.

What a page holds of a head is a run of codes, and so is what becomes of them: a program takes TILE groups of eight
channels of it, of keys or of values, and a group's place tells its token. So heads of any width leave no thread idle
but at a tile's end, and a group's numbers are 16 bytes, which a thread stores at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops.cache_attention_plans import kernel_bits
from rotaquant.ops.cache_attention_units import scale_and_lowest
from rotaquant.ops.cache_layout import HEAD_UNIT, PAGE_TOKENS, PageFormat
from rotaquant.ops.device_features import programmatic_launch

_TILES = (1024, 512, 256)  # groups of a program, the best first
_GROUPS_OF_A_THREAD = 4  # loads that are on their way at once


@triton.jit
def _numbers(base, group, token, known, bits: tl.constexpr, D: tl.constexpr):
    """Codes `[groups, 8]` as int32, of groups counted from the page's first; `base` is where a head's codes begin.

    A thread reads a group at a time, and threads side by side read groups side by side. More of them to a thread, in
    16 bytes, would have to change threads before they are stored, which is where most of the bytes are.
    """
    n = tl.arange(0, 8)[None, :]
    if bits == 8:
        word = tl.load(base.to(tl.pointer_type(tl.int64)) + group, mask=known, other=0)
        half = tl.where(n < 4, word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None])
        return (half >> (8 * (n % 4))) & 0xFF
    elif bits == 4:
        word = tl.load(base.to(tl.pointer_type(tl.int32)) + group, mask=known, other=0)
        return (word[:, None] >> (4 * n)) & 0xF
    elif bits == 2:
        word = tl.load(base.to(tl.pointer_type(tl.int16)) + group, mask=known, other=0).to(tl.int32)
        return (word[:, None] >> (2 * n)) & 3
    else:
        c = group % (D // 8)
        line = base + token * (D * 3 // 8)
        if D % 16 == 0:
            word = tl.load(line.to(tl.pointer_type(tl.int16)) + c, mask=known, other=0).to(tl.int32)
        else:
            # A token's bytes are odd in number: every other one begins between words.
            word = tl.load(line + 2 * c, mask=known, other=0).to(tl.int32)
            word |= tl.load(line + 2 * c + 1, mask=known, other=0).to(tl.int32) << 8
        upper = tl.load(line + D // 4 + c, mask=known, other=0).to(tl.int32)
        return ((word[:, None] >> (2 * n)) & 3) | (((upper[:, None] >> n) & 1) << 2)


@triton.jit
def _side(
    codes, parameters, out, row, first, start, stop, group, bits: tl.constexpr, D: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Store groups of a page whose first token has slot `first`, those of slots `start` to `stop`, from `row` on."""
    token = group // (D // 8)
    slot = first + token
    known = (token < T) & (slot >= start) & (slot < stop)
    numbers = _numbers(codes, group, token, known, bits, D)
    scale, lowest = scale_and_lowest(tl.load(parameters.to(tl.pointer_type(tl.int32)) + token, mask=known, other=0))
    # A code of 8 bits times a scale of 11 is exact in float32: also where it is fused, the sum alone is rounded.
    x = numbers.to(tl.float32) * scale[:, None] + lowest[:, None]
    place = out + (row + (first - start)) * D + group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(place, x.to(out.dtype.element_ty), mask=known[:, None])


# A row of a table begins at any of its entries.
@triton.jit(do_not_specialize=["table_batch", "start", "stop", "first_head"], do_not_specialize_on_alignment=["table"])
def _read(
    pages, table, keys, values, table_batch, start, stop, first_head, D: tl.constexpr, T: tl.constexpr,
    TILE: tl.constexpr, key_bits: tl.constexpr, value_bits: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs (i, 2h, b) have tile i of the pages' keys, (i, 2h + 1, b) of their values.
    KB: tl.constexpr = D * key_bits // 8
    VB: tl.constexpr = D * value_bits // 8
    TILES: tl.constexpr = (T * D // 8 + TILE - 1) // TILE
    head, b = tl.program_id(1) // 2, tl.program_id(2)
    column = start // T + tl.program_id(0) // TILES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = tl.load(table + b.to(tl.int64) * table_batch + column)
    base = pages + offset + (first_head + head) * (T * (KB + VB + 8))
    row = (b * (tl.num_programs(1) // 2) + head).to(tl.int64) * (stop - start)
    group = (tl.program_id(0) % TILES) * TILE + tl.arange(0, TILE)
    parameters = base + T * (KB + VB)
    if tl.program_id(1) % 2 == 0:
        _side(base, parameters, keys, row, column * T, start, stop, group, key_bits, D, T)
    else:
        _side(base + T * KB, parameters + 4 * T, values, row, column * T, start, stop, group, value_bits, D, T)


def _tile(head_dim: int) -> int:
    """Groups of a program: those that leave the fewest threads idle at a page's end."""
    groups = PAGE_TOKENS * head_dim // HEAD_UNIT
    return min(_TILES, key=lambda tile: triton.cdiv(groups, tile) * tile)


def read(
    pages: Tensor,
    table: Tensor,
    start: int,
    stop: int,
    heads: tuple[int, int],
    form: PageFormat,
    dtype: torch.dtype,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`cache_reference.read` in a dtype of 16 bits, `[batch, heads, stop - start, head_dim]` contiguous, or into `out`.

    `heads` is the first and the one after the last; `table` int64 `[batch, columns]` counts bytes from `pages` on.
    """
    batch, count, length = table.shape[0], heads[1] - heads[0], stop - start
    shape = batch, count, length, form.head_dim
    keys, values = out or [torch.empty(shape, dtype=dtype, device=pages.device) for _ in range(2)]
    if keys.numel() == 0:
        return keys, values
    tile = _tile(form.head_dim)
    tiles = triton.cdiv(PAGE_TOKENS * form.head_dim // HEAD_UNIT, tile)
    columns = triton.cdiv(stop, PAGE_TOKENS) - start // PAGE_TOKENS
    pdl = programmatic_launch(pages.device)
    _read[(columns * tiles, 2 * count, batch)](
        pages, table, keys, values, table.stride(0), start, stop, heads[0], form.head_dim, PAGE_TOKENS, tile,
        kernel_bits(form.key_bits), kernel_bits(form.value_bits), pdl,
        num_warps=tile // (32 * _GROUPS_OF_A_THREAD), enable_fp_fusion=True, launch_pdl=pdl,
    )  # fmt: skip
    return keys, values
