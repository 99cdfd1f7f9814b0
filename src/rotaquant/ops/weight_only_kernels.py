"""Products of 16-bit activations with packed 4-bit weights on a GPU: what is stored is read, and widened on the way.

Legend: N outputs, M tokens, K inputs. A byte holds columns 2j (low nibble) and 2j+1 (high nibble), offset by 8; the
activations are read two columns at a time, so that a tile of bytes meets a tile of even and one of odd columns. For few
tokens one kernel does it all, limited by the bytes of the weights; a single token goes without the matrix unit. For
many, the weight is widened once to 16 bits and cuBLAS multiplies: there arithmetic is what takes the time, and it is
the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops.device_features import inline_assembly, multiprocessors, programmatic_launch

FEW_TOKENS = 64


@triton.jit
def _widened(nibble, kind: tl.constexpr):
    """Codes 0..15 as the values -8..7 in a 16-bit type."""
    if kind == tl.bfloat16:
        # The mantissa of 128 counts in ones: to set its lowest bits adds the code, without a conversion.
        value = (nibble.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return value - 136.0
    else:
        value = (nibble.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return value - 1032.0


@triton.jit
def _sixteenths(packed, position: tl.constexpr):
    """1 + n/16 in float32 for the code n = 0..15 whose lowest bit is at `position` of a word."""
    # To set the highest bits of the mantissa of one takes a shift and a mask, and no conversion.
    aligned = packed << (19 - position) if position <= 19 else packed >> (position - 19)
    return ((aligned & 0x00780000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _single(
    w, x, out, scale, bias, N, W, groups, size, x_stride,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Words of eight weights, W of them a row; words of two activations, four for each of those.
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64)
    rk = tl.arange(0, BK)
    kind: tl.constexpr = x.dtype.element_ty
    wp = w + (rn % N).to(tl.int64)[:, None] * W + rk[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    xp = (x + m * x_stride).to(tl.pointer_type(tl.int32)) + 4 * rk
    total = tl.zeros((BN, BK), tl.float32)
    for k in tl.range(0, W, BK, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
        else:
            packed = tl.load(wp, mask=(k + rk < W)[None, :], other=0)
        sums = tl.zeros((BN, BK), tl.float32)
        inputs = tl.zeros((BK,), tl.float32)
        for pair in tl.static_range(4):
            if EVEN:
                words = tl.load(xp + pair)
            else:
                words = tl.load(xp + pair, mask=k + rk < W, other=0)
            even = words.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
            odd = (words >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
            sums += _sixteenths(packed, 8 * pair) * even[None, :]
            sums += _sixteenths(packed, 8 * pair + 4) * odd[None, :]
            inputs += even + odd
        # (n - 8) / 16 = (1 + n / 16) - 1.5
        sums = (sums - 1.5 * inputs[None, :]) * 16.0
        if GROUPED:
            group = tl.minimum((k + rk) // size, groups - 1)
            c = tl.load(scale + (rn % N).to(tl.int64)[:, None] * groups + group[None, :])
            sums = sums * c.to(tl.float32)
        total += sums
        wp += BK
        xp += 4 * BK
    result = tl.sum(total, 1)
    if not GROUPED:
        result = result * tl.load(scale + rn % N).to(tl.float32)
    if BIAS:
        result += tl.load(bias + rn % N).to(tl.float32)
    tl.store(out + m * N + rn, result.to(out.dtype.element_ty), mask=rn < N)


@triton.jit
def _few(
    w, x, out, scale, bias, N, M, H, groups, size, x_stride,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = x.dtype.element_ty
    # Rows beyond the end read others twice; they are not stored. Columns come in pairs, as words of 32 bits.
    wp = w + (rn % N).to(tl.int64)[:, None] * H + rk[None, :]
    xp = (x + (rm % M).to(tl.int64) * x_stride).to(tl.pointer_type(tl.int32))[None, :] + rk[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
            words = tl.load(xp)
        else:
            packed = tl.load(wp, mask=(k + rk < H)[None, :], other=0)
            words = tl.load(xp, mask=(k + rk < H)[:, None], other=0)
        low, high = _widened(packed & 0xF, kind), _widened(packed >> 4, kind)
        even = words.to(tl.int16).to(kind, bitcast=True)
        odd = (words >> 16).to(tl.int16).to(kind, bitcast=True)
        if ASM:
            sums = tl.dot(high, odd, tl.dot(low, even))
        else:
            # The interpreter takes bfloat16 for integers.
            sums = tl.dot(low.to(tl.float32), even.to(tl.float32)) + tl.dot(high.to(tl.float32), odd.to(tl.float32))
        if GROUPED:
            # A step lies within one group.
            c = tl.load(scale + (rn % N).to(tl.int64) * groups + k // size).to(tl.float32)
            sums = sums * c[:, None]
        total += sums
        wp += BK
        xp += BK
    if not GROUPED:
        total = total * tl.load(scale + rn % N).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(bias + rn % N).to(tl.float32)[:, None]
    op = out + rm.to(tl.int64)[None, :] * N + rn[:, None]
    tl.store(op, total.to(out.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


@triton.jit
def _widen(w, out, scale, columns, words, groups, size, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = column < columns
    packed = tl.load(w + row * words + column // 2, mask=inside, other=0)
    code = ((packed >> (4 * (column % 2))) & 0xF).to(tl.float32) - 8.0
    c = tl.load(scale + row * groups + column // size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (code * c).to(out.dtype.element_ty), mask=inside)


def widen(weight_packed: Tensor, weight_scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Packed weights int32 `[n, words]` as `[n, columns]` in `dtype`: codes times the scale of their group."""
    outputs, groups = weight_scale.shape
    out = torch.empty(outputs, columns, dtype=dtype, device=weight_packed.device)
    block = min(triton.next_power_of_2(columns), 2048)
    w = weight_packed.view(torch.uint8)
    if out.numel():
        _widen[(outputs, triton.cdiv(columns, block))](
            w, out, weight_scale, columns, w.shape[1], groups, columns // groups, block, num_warps=4
        )
    return out


def product(
    x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None, few: int = FEW_TOKENS
) -> Tensor:
    """Product of `[m, k]` in 16 bits and packed weights int32 `[n, words]` -> `[m, n]` in the dtype of x.

    `weight_scale` is `[n, 1 or groups]`; groups are of whole words of weights. Sums are float32.
    """
    # Kernels know no strides but those of rows that follow one another.
    weight_packed, weight_scale = weight_packed.contiguous(), weight_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    tokens, columns = x.shape
    outputs, groups = weight_scale.shape
    half, size = weight_packed.shape[1] * 4, columns // groups // 2
    step = next((step for step in (128, 64, 32) if size % step == 0), 0) if groups > 1 else 128
    if tokens > few or columns % 2 or step == 0:
        wide = widen(weight_packed, weight_scale, columns, x.dtype)
        return torch.nn.functional.linear(x, wide, None if bias is None else bias.to(x.dtype))
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0 or outputs == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4 or half * 2 != columns:
        # Whole words of weights and pairs of columns; what is added meets zeros.
        x = torch.nn.functional.pad(x, (0, 2 * half - columns)).contiguous()
    pdl = programmatic_launch(x.device)
    if tokens == 1:
        words, block = weight_packed.shape[1], 128
        _single[(triton.cdiv(outputs, 16), tokens)](
            weight_packed, x, out, weight_scale, out if bias is None else bias,
            outputs, words, groups, size // 4, x.stride(0), 16, block, 4,
            words % block == 0, groups > 1, bias is not None, pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return out
    tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block = 32 if outputs < 64 * 2 * multiprocessors(x.device) else 64
    _few[(triton.cdiv(outputs, block), triton.cdiv(tokens, tile))](
        weight_packed.view(torch.uint8), x, out, weight_scale, out if bias is None else bias,
        outputs, tokens, half, groups, size, x.stride(0), block, tile, step, 4,
        half % step == 0, groups > 1, bias is not None, inline_assembly(x.device), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
