"""Row-wise quantization on a GPU: one read of the activations, one write of their codes.

A row of n values is g groups of s columns (one group of n where scales are per token). One program holds a whole row in
registers, as a tile [g, s] padded to powers of two. Codes leave in the order that the products of `product_kernels`
read: for 4-bit weights two planes, even columns and odd ones, each padded with zeros to whole 32-bit words of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops import packing
from rotaquant.ops.device_features import programmatic_launch

_ELEMENTS_PER_WARP = 1024


@triton.jit
def symmetric_codes(values, scale, bits: tl.constexpr):
    """Codes int8 of float32 `values` against `scale` (broadcast), rounded half to even; NaN gives zero."""
    half: tl.constexpr = 1 << (bits - 1)
    steps = tl.div_rn(values, scale)
    steps = tl.where(steps == steps, steps, 0.0)
    # Bounds are integers, so clamping first changes nothing and keeps the rounding trick in its range.
    steps = tl.minimum(tl.maximum(steps, -half * 1.0), half * 1.0 - 1.0)
    # Adding 1.5 * 2**23 leaves no bit for a fraction: the sum is rounded as IEEE rounds, half to even.
    return ((steps + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def symmetric_scale(values, axis: tl.constexpr, clip_ratio, bits: tl.constexpr):
    """Step sizes over `axis`, kept as a dimension of one: as `reference.symmetric_scale`, NaN and infinity included."""
    largest = tl.max(tl.abs(values), axis, keep_dims=True)
    broken = tl.max((values != values).to(tl.int32), axis, keep_dims=True)
    scale = tl.div_rn(largest * clip_ratio, tl.full(largest.shape, (1 << (bits - 1)) - 1, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(broken > 0, float("nan"), scale)


@triton.jit
def store_codes(codes, out, row, groups, size, stride, plane, planar: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Write a row's codes [G, S] in natural order, or as planes of even and odd columns."""
    group = tl.arange(0, G)[:, None]
    base = out + row.to(tl.int64) * stride
    if planar:
        even, odd = tl.split(codes.reshape(G, S // 2, 2))
        column = tl.arange(0, S // 2)[None, :]
        # A single group writes its padding too, up to the end of the plane.
        inside = (group < groups) & (column < (plane if G == 1 else size // 2))
        target = base + group * (size // 2) + column
        tl.store(target, even, mask=inside)
        tl.store(target + plane, odd, mask=inside)
    else:
        column = tl.arange(0, S)[None, :]
        inside = (group < groups) & (column < (plane if G == 1 else size))
        tl.store(base + group * size + column, codes, mask=inside)


@triton.jit
def _quantize_rows(
    x,
    out,
    scales,
    x_stride,
    groups,
    size,
    stride,
    plane,
    clip_ratio,
    bits: tl.constexpr,
    planar: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    group = tl.arange(0, G)[:, None]
    column = tl.arange(0, S)[None, :]
    inside = (group < groups) & (column < size)
    values = tl.load(x + row.to(tl.int64) * x_stride + group * size + column, mask=inside, other=0.0).to(tl.float32)
    scale = symmetric_scale(values, 1, clip_ratio, bits)
    codes = symmetric_codes(values, scale, bits)
    store_codes(codes, out, row, groups, size, stride, plane, planar, G, S)
    tl.store(scales + row.to(tl.int64) * groups + group, scale, mask=group < groups)


@triton.jit
def _rmsnorm_quantize(
    x,
    residual,
    total,
    out,
    scales,
    x_stride,
    residual_stride,
    total_stride,
    width,
    eps,
    groups,
    size,
    stride,
    plane,
    clip_ratio,
    bits: tl.constexpr,
    planar: tl.constexpr,
    ADD: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)[:, None]
    column = tl.arange(0, S)[None, :]
    inside = (group < groups) & (column < size)
    offset = group * size + column
    values = tl.load(x + row * x_stride + offset, mask=inside, other=0.0)
    if ADD:
        values = values + tl.load(residual + row * residual_stride + offset, mask=inside, other=0.0)
        tl.store(total + row * total_stride + offset, values, mask=inside)
    dtype = values.dtype
    values = values.to(tl.float32)
    mean = tl.sum(tl.sum(values * values, 1), 0) / width
    values = (values * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))).to(dtype).to(tl.float32)
    scale = symmetric_scale(values, 1, clip_ratio, bits)
    codes = symmetric_codes(values, scale, bits)
    store_codes(codes, out, row, groups, size, stride, plane, planar, G, S)
    tl.store(scales + row * groups + group, scale, mask=group < groups)


class RowShape:
    """How a row of `columns` lies in a program's registers and in the codes that leave it."""

    def __init__(self, columns: int, group_size: int | None, planar: bool) -> None:
        self.size = group_size or columns
        self.groups = columns // self.size
        self.plane = packing.plane_columns(columns, planar)
        self.planes = 2 if planar else 1
        widest = self.planes * self.plane if self.groups == 1 else self.size
        self.tile = (triton.next_power_of_2(self.groups), max(triton.next_power_of_2(widest), 2))
        warps = self.tile[0] * self.tile[1] // _ELEMENTS_PER_WARP
        self.warps = min(max(warps, 1), 32)
        # Padding behind several groups is no group's to write.
        self.padded_apart = self.groups > 1 and self.planes * self.plane != columns

    def codes(self, rows: int, device: torch.device) -> Tensor:
        """An int8 tensor `[rows, planes, plane]` to be written."""
        make = torch.zeros if self.padded_apart else torch.empty
        return make(rows, self.planes, self.plane, dtype=torch.int8, device=device)


def quantize_rows(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    """Quantize `[m, n]` to int8 codes `[m, planes, plane]` and float32 scales `[m, groups]`; rows may be strided."""
    rows, columns = x.shape
    shape = RowShape(columns, group_size, planar)
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = shape.codes(rows, x.device)
    scales = torch.empty(rows, shape.groups, dtype=torch.float32, device=x.device)
    if rows == 0:
        return codes, scales
    pdl = programmatic_launch(x.device)
    _quantize_rows[(rows,)](
        x, codes, scales, x.stride(0), shape.groups, shape.size, codes.stride(0), shape.plane, clip_ratio,
        bits, planar, *shape.tile, pdl, num_warps=shape.warps, enable_fp_fusion=False, launch_pdl=pdl,
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
    shape = RowShape(columns, group_size, planar)
    x = x if x.stride(1) == 1 else x.contiguous()
    other = x if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    codes = shape.codes(rows, x.device)
    scales = torch.empty(rows, shape.groups, dtype=torch.float32, device=x.device)
    if rows == 0:
        return codes, scales, total
    pdl = programmatic_launch(x.device)
    _rmsnorm_quantize[(rows,)](
        x, other, total, codes, scales, x.stride(0), other.stride(0), total.stride(0), columns, eps,
        shape.groups, shape.size, codes.stride(0), shape.plane, clip_ratio,
        bits, planar, residual is not None, *shape.tile, pdl,
        num_warps=shape.warps, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return codes, scales, total
