"""Row-wise quantization on a GPU: one read of the activations, one write of their codes.

A row of n values is g groups of s columns (one group of n where scales are per token). One program holds a whole row in
registers, as up to three tiles of a power of two of columns (or of groups), so that little is computed for padding:
beside memory, what limits these kernels is the number of instructions for a value. Codes leave in the order that the
products of `product_kernels` read: for 4-bit weights two planes, even columns and odd ones, each padded with zeros to
whole 32-bit words of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops import packing
from rotaquant.ops.device_features import inline_assembly, programmatic_launch
from rotaquant.ops.quantize_units import (
    by_words,
    larger,
    largest,
    magnitudes,
    ordinary_shift,
    reaches_below,
    symmetric_codes,
    symmetric_scale,
)

_PARTS = 3
_VALUES_PER_THREAD = 32
_MANY_ROWS = 512


@triton.jit
def _place(first, P: tl.constexpr, S: tl.constexpr):
    """Groups and columns of the part of P columns (S is 0: one group), or of P groups, that starts at `first`."""
    if S == 0:
        return tl.zeros((1, 1), tl.int32), first + tl.arange(0, P)[None, :]
    else:
        return first + tl.arange(0, P)[:, None], tl.arange(0, S)[None, :]


@triton.jit
def load_part(
    x, first, groups, size, planar: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """A part of the row at `x`, in its dtype: even columns and odd ones where planar, else all columns, twice.

    Each is `[1, P]`, or `[P, S]` in groups, and zero beyond the row's end.
    """
    group, column = _place(first, P, S)
    if not planar:
        values = tl.load(x + group * size + column, mask=(group < groups) & (column < size), other=0.0)
        return values, values
    elif WORDS:
        # Two columns of 16 bits at once: they are apart without moving between threads.
        half = size // 2
        word = tl.load(
            x.to(tl.pointer_type(tl.int32)) + group * half + column, mask=(group < groups) & (column < half), other=0
        )
        kind = x.dtype.element_ty
        return word.to(tl.int16).to(kind, bitcast=True), (word >> 16).to(tl.int16).to(kind, bitcast=True)
    else:
        start = x + group * size + 2 * column
        inside = (group < groups) & (2 * column < size)
        even = tl.load(start, mask=inside, other=0.0)
        return even, tl.load(start + 1, mask=inside & (2 * column + 1 < size), other=0.0)


@triton.jit
def _store_part(
    even, odd, scale, out, scales, first, groups, size, plane,
    bits: tl.constexpr, planar: tl.constexpr, P: tl.constexpr, S: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write a part's codes to its row at `out`, in natural order or as planes, and scales of groups to `scales`."""
    group, column = _place(first, P, S)
    own = size // 2 if planar else size
    # A single group writes its padding too, up to the end of the plane.
    inside = (group < groups) & (column < (plane if S == 0 else own))
    # Four codes a thread, as many as it loads at once: more would make its loads less coalesced.
    target = tl.max_contiguous(out + group * own + column, (1, 4))
    if S > 0:
        tl.store(scales + group, scale, mask=group < groups)
    if ASM:
        # A row's own scale is nearly always ordinary; groups would need a branch for each.
        shift = ordinary_shift(scale)
        scale = scale * shift
        if S > 0:
            even, odd = even * shift, odd * shift
        elif shift != 1.0:
            even, odd = even * shift, odd * shift
    tl.store(target, symmetric_codes(even, scale, bits, LOW, ASM), mask=inside)
    if planar:
        tl.store(tl.max_contiguous(target + plane, (1, 4)), symmetric_codes(odd, scale, bits, LOW, ASM), mask=inside)


@triton.jit
def _largest_of_part(even, odd, planar: tl.constexpr, S: tl.constexpr, ASM: tl.constexpr):
    values = magnitudes(even, ASM)
    if planar:
        values = larger(values, magnitudes(odd, ASM))
    return largest(values, S == 0, ASM)


@triton.jit
def quantize_parts(
    e0, o0, e1, o1, e2, o2, out, scales, groups, size, plane, clip_ratio, bits: tl.constexpr, planar: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, S: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a row in up to three parts of float32 values; a part of size 0 is not looked at."""
    m0 = _largest_of_part(e0, o0, planar, S, ASM)
    m1 = m0
    m2 = m0
    if P1 > 0:
        m1 = _largest_of_part(e1, o1, planar, S, ASM)
    if P2 > 0:
        m2 = _largest_of_part(e2, o2, planar, S, ASM)
    if S == 0:
        m0 = larger(larger(m0, m1), m2)
        m1 = m0
        m2 = m0
    scale = symmetric_scale(m0, clip_ratio, bits)
    _store_part(e0, o0, scale, out, scales, 0, groups, size, plane, bits, planar, P0, S, LOW, ASM)
    if S == 0:
        tl.store(scales, scale)
    if P1 > 0:
        scale = symmetric_scale(m1, clip_ratio, bits)
        _store_part(e1, o1, scale, out, scales, P0, groups, size, plane, bits, planar, P1, S, LOW, ASM)
    if P2 > 0:
        scale = symmetric_scale(m2, clip_ratio, bits)
        _store_part(e2, o2, scale, out, scales, P0 + P1, groups, size, plane, bits, planar, P2, S, LOW, ASM)


@triton.jit
def _quantize_rows(
    x, out, scales, x_stride, out_stride, groups, size, plane, clip_ratio,
    bits: tl.constexpr, planar: tl.constexpr, WORDS: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, S: tl.constexpr,
    LOW: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    e0, o0 = load_part(x, 0, groups, size, planar, WORDS, P0, S)
    e1, o1 = e0, o0
    e2, o2 = e0, o0
    if P1 > 0:
        e1, o1 = load_part(x, P0, groups, size, planar, WORDS, P1, S)
    if P2 > 0:
        e2, o2 = load_part(x, P0 + P1, groups, size, planar, WORDS, P2, S)
    quantize_parts(
        e0.to(tl.float32), o0.to(tl.float32), e1.to(tl.float32), o1.to(tl.float32), e2.to(tl.float32),
        o2.to(tl.float32), out + row * out_stride, scales + row * groups,
        groups, size, plane, clip_ratio, bits, planar, P0, P1, P2, S, LOW, ASM,
    )  # fmt: skip


@triton.jit
def _sum_part(
    x, residual, total, first, groups, size, planar: tl.constexpr, WORDS: tl.constexpr, ADD: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A part of a row plus the residual's, written to `total`, or the row's alone; and the sum of its squares."""
    even, odd = load_part(x, first, groups, size, planar, WORDS, P, S)
    if ADD:
        more_even, more_odd = load_part(residual, first, groups, size, planar, WORDS, P, S)
        even += more_even
        odd += more_odd
        group, column = _place(first, P, S)
        step: tl.constexpr = 2 if planar else 1
        target = total + group * size + step * column
        inside = (group < groups) & (step * column < size)
        if planar:
            both = tl.join(even, odd)
            pair = tl.arange(0, 2)[None, None, :]
            tl.store(target[:, :, None] + pair, both, mask=inside[:, :, None] & (2 * column[:, :, None] + pair < size))
        else:
            tl.store(target, even, mask=inside)
    wide = even.to(tl.float32)
    squares = wide * wide
    if planar:
        wide = odd.to(tl.float32)
        squares += wide * wide
    return even, odd, tl.sum(tl.sum(squares, 1), 0)


@triton.jit
def _normed(values, factor):
    # Stock norms round to the model's dtype before anything reads them.
    return (values.to(tl.float32) * factor).to(values.dtype).to(tl.float32)


@triton.jit
def _rmsnorm_quantize(
    x, residual, total, out, scales, x_stride, residual_stride, total_stride, out_stride, width, eps,
    groups, size, plane, clip_ratio,
    bits: tl.constexpr, planar: tl.constexpr, WORDS: tl.constexpr, ADD: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, S: tl.constexpr,
    LOW: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    total += row * total_stride
    e0, o0, squares = _sum_part(x, residual, total, 0, groups, size, planar, WORDS, ADD, P0, S)
    e1, o1 = e0, o0
    e2, o2 = e0, o0
    if P1 > 0:
        e1, o1, more = _sum_part(x, residual, total, P0, groups, size, planar, WORDS, ADD, P1, S)
        squares += more
    if P2 > 0:
        e2, o2, more = _sum_part(x, residual, total, P0 + P1, groups, size, planar, WORDS, ADD, P2, S)
        squares += more
    factor = tl.div_rn(1.0, tl.sqrt_rn(squares / width + eps))
    quantize_parts(
        _normed(e0, factor), _normed(o0, factor), _normed(e1, factor), _normed(o1, factor), _normed(e2, factor),
        _normed(o2, factor), out + row * out_stride, scales + row * groups,
        groups, size, plane, clip_ratio, bits, planar, P0, P1, P2, S, LOW, ASM,
    )  # fmt: skip


def _parts(count: int) -> tuple[int, int, int]:
    """Three powers of two, the last ones perhaps 0, that hold `count` between them with little to spare."""
    parts = []
    for _ in range(_PARTS - 1):
        # A part covers all the rest where a smaller one would leave more than an eighth to be padded.
        whole = triton.next_power_of_2(count)
        if count <= 64 or whole - count <= whole // 16:
            break
        parts.append(whole // 2)
        count -= whole // 2
    parts.append(max(triton.next_power_of_2(count), 2))
    return (*parts, *([0] * (_PARTS - len(parts))))


@dataclass(frozen=True)
class RowShape:
    """How a row lies in a program's registers and in the codes that leave it.

    `parts` count columns of a plane where there is one group, else groups of `padded_size` columns of a plane.
    """

    groups: int
    size: int
    planes: int
    plane: int
    parts: tuple[int, int, int]
    padded_size: int

    def warps(self, rows: int) -> int:
        """Warps of a program: few where rows are many, whose programs hide one another's waiting."""
        values = self.planes * sum(self.parts) * max(self.padded_size, 1)
        most = 4 if rows >= _MANY_ROWS else 16
        return min(max(triton.next_power_of_2(values) // (32 * _VALUES_PER_THREAD), 1), most)

    def codes(self, rows: int, device: torch.device) -> Tensor:
        """An int8 tensor `[rows, planes, plane]` to be written."""
        # Padding behind several groups is no group's to write.
        apart = self.groups > 1 and self.planes * self.plane != self.groups * self.size
        make = torch.zeros if apart else torch.empty
        return make(rows, self.planes, self.plane, dtype=torch.int8, device=device)


@lru_cache(maxsize=256)
def row_shape(columns: int, group_size: int | None, planar: bool) -> RowShape:
    """The shape of a row of `columns`."""
    size = group_size or columns
    groups, planes, plane = columns // size, 2 if planar else 1, packing.plane_columns(columns, planar)
    parts = _parts(plane if groups == 1 else groups)
    padded_size = 0 if groups == 1 else max(triton.next_power_of_2(size // planes), 2)
    return RowShape(groups, size, planes, plane, parts, padded_size)


def quantize_rows(
    x: Tensor,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
    warps: int | None = None,
    registers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `[m, n]` to int8 codes `[m, planes, plane]` and float32 scales `[m, groups]`; rows may be strided."""
    rows, columns = x.shape
    shape = row_shape(columns, group_size, planar)
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = shape.codes(rows, x.device)
    scales = torch.empty(rows, shape.groups, dtype=torch.float32, device=x.device)
    if rows == 0:
        return codes, scales
    pdl = programmatic_launch(x.device)
    _quantize_rows[(rows,)](
        x, codes, scales, x.stride(0), codes.stride(0), shape.groups, shape.size, shape.plane, clip_ratio,
        bits, planar, by_words(x), *shape.parts, shape.padded_size,
        reaches_below(bits, clip_ratio), inline_assembly(x.device), pdl,
        num_warps=shape.warps(rows), enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return codes, scales


def rmsnorm_quantize(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add `residual` `[m, n]` (if any), normalise by the root mean square, quantize.

    Gives codes and scales as `quantize_rows`, and the sum, which is `x` itself where there is no residual. The gain
    of the norm is folded into the weights that read it.
    """
    rows, columns = x.shape
    shape = row_shape(columns, group_size, planar)
    x = x if x.stride(1) == 1 else x.contiguous()
    other = x if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    codes = shape.codes(rows, x.device)
    scales = torch.empty(rows, shape.groups, dtype=torch.float32, device=x.device)
    if rows == 0:
        return codes, scales, total
    pdl = programmatic_launch(x.device)
    _rmsnorm_quantize[(rows,)](
        x, other, total, codes, scales, x.stride(0), other.stride(0), total.stride(0), codes.stride(0), columns, eps,
        shape.groups, shape.size, shape.plane, clip_ratio, bits, planar, by_words(x, other, total),
        residual is not None,
        *shape.parts, shape.padded_size,
        reaches_below(bits, clip_ratio), inline_assembly(x.device), pdl,
        num_warps=shape.warps(rows), enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return codes, scales, total
