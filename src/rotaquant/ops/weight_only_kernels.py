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
def _widened(nibble, kind: tl.constexpr, ASM: tl.constexpr):
    """Codes 0..15 as the values -8..7 in a 16-bit type, over `_unit(kind)`; in the interpreter in float32."""
    if kind == tl.bfloat16:
        # The mantissa of 2**-4 counts in units of 2**-11: to set its lowest bits adds the code, without a conversion.
        value = (nibble.to(tl.int16) | 0x3D80).to(tl.bfloat16, bitcast=True)
        # The interpreter subtracts bfloat16 as integers.
        value = value if ASM else value.to(tl.float32)
        return value - 0.06640625
    else:
        value = (nibble.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return value - 1032.0


@triton.jit
def _unit(kind: tl.constexpr):
    """What `_widened` divides by: sums over a step of activations as large as bfloat16 holds stay finite."""
    return 2048.0 if kind == tl.bfloat16 else 1.0


@triton.jit
def _sixty_fourths(packed, upper, position: tl.constexpr):
    """(n - 8) / 64 in float32, exactly, for the code n whose lowest bit is at `position`; `upper` is `packed >> 12`."""
    # Set in the mantissa of a power of two, a code is so many units above it. Where it is decides which power's
    # mantissa counts in units of 1/64: most take a mask and no shift.
    word = packed if position <= 16 else upper
    at: tl.constexpr = position if position <= 16 else position - 12
    value = ((word & (0xF << at)) | ((127 + 17 - at) << 23)).to(tl.float32, bitcast=True)
    return value - ((1 << (17 - at)) * 1.0 + 0.125)


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
    if not GROUPED:
        c = tl.load(scale + rn % N).to(tl.float32)[:, None] * 64.0
    for k in tl.range(0, W, BK, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
        else:
            packed = tl.load(wp, mask=(k + rk < W)[None, :], other=0)
        upper = packed >> 12
        # Eight products over 64 add up to no more than the largest activation: no sum overflows before its scale.
        sums = tl.zeros((BN, BK), tl.float32)
        for pair in tl.static_range(4):
            if EVEN:
                words = tl.load(xp + pair)
            else:
                words = tl.load(xp + pair, mask=k + rk < W, other=0)
            even = words.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
            odd = (words >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
            sums += _sixty_fourths(packed, upper, 8 * pair) * even[None, :]
            sums += _sixty_fourths(packed, upper, 8 * pair + 4) * odd[None, :]
        if GROUPED:
            group = tl.minimum((k + rk) // size, groups - 1)
            c = tl.load(scale + (rn % N).to(tl.int64)[:, None] * groups + group[None, :]).to(tl.float32) * 64.0
        total += sums * c
        wp += BK
        xp += 4 * BK
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + rn % N).to(tl.float32)
    tl.store(out + m * N + rn, result.to(out.dtype.element_ty), mask=rn < N)


@triton.jit
def _few(
    w, x, out, scale, bias, N, M, H, groups, size, x_stride,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, FINE: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # A step lies within one group, or (FINE) takes several.
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
    if not GROUPED:
        c = tl.load(scale + rn % N).to(tl.float32)[:, None] * _unit(kind)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
            words = tl.load(xp)
        else:
            packed = tl.load(wp, mask=(k + rk < H)[None, :], other=0)
            words = tl.load(xp, mask=(k + rk < H)[:, None], other=0)
        low, high = _widened(packed & 0xF, kind, ASM), _widened(packed >> 4, kind, ASM)
        even = words.to(tl.int16).to(kind, bitcast=True)
        odd = (words >> 16).to(tl.int16).to(kind, bitcast=True)
        if FINE:
            group = tl.minimum((k + rk) // size, groups - 1)
            c = tl.load(scale + (rn % N).to(tl.int64)[:, None] * groups + group[None, :]).to(tl.float32) * _unit(kind)
            low, high = low.to(tl.float32) * c, high.to(tl.float32) * c
            if ASM:
                low, high = low.to(kind), high.to(kind)
        if ASM:
            sums = tl.dot(high, odd, tl.dot(low, even))
        else:
            # The interpreter takes bfloat16 for integers.
            sums = tl.dot(low.to(tl.float32), even.to(tl.float32)) + tl.dot(high.to(tl.float32), odd.to(tl.float32))
        if FINE:
            total += sums
        else:
            if GROUPED:
                c = tl.load(scale + (rn % N).to(tl.int64) * groups + k // size).to(tl.float32)[:, None] * _unit(kind)
            total += sums * c
        wp += BK
        xp += BK
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

    `weight_scale` is `[n, 1 or groups]`. Sums are float32; where groups are of fewer than 64 columns, several tokens
    meet weights that were rounded to the dtype of x, as in the definition.
    """
    # Kernels know no strides but those of rows that follow one another.
    weight_packed, weight_scale = weight_packed.contiguous(), weight_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    tokens, columns = x.shape
    outputs, groups = weight_scale.shape
    if tokens > few or columns // groups % 2:
        wide = widen(weight_packed, weight_scale, columns, x.dtype)
        return torch.nn.functional.linear(x, wide, None if bias is None else bias.to(x.dtype))
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0 or outputs == 0:
        return out
    padded = weight_packed.shape[1] * 8
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4 or padded != columns:
        # Whole words of weights and pairs of columns; what is added meets zeros.
        x = torch.nn.functional.pad(x, (0, padded - columns)).contiguous()
    size = columns // groups
    launch = _launch_single if tokens == 1 and (groups == 1 or size % 8 == 0) else _launch_few
    launch((weight_packed, x, out, weight_scale, out if bias is None else bias), size, bias is not None)
    return out


_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _launch_single(operands: _Operands, size: int, biased: bool) -> None:
    w, x, out, scale, _ = operands
    (outputs, groups), words, block = scale.shape, w.shape[1], 128
    pdl = programmatic_launch(x.device)
    _single[(triton.cdiv(outputs, 16), 1)](
        *operands, outputs, words, groups, size // 8, x.stride(0), 16, block, 4,
        words % block == 0, groups > 1, biased, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _launch_few(operands: _Operands, size: int, biased: bool) -> None:
    w, x, out, scale, bias = operands
    tokens, (outputs, groups), half = len(x), scale.shape, w.shape[1] * 4
    pdl = programmatic_launch(x.device)
    tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block, stages = (32, 4) if outputs < 62 * multiprocessors(x.device) else (64, 3)
    step = 128 if groups == 1 else next((step for step in (128, 64, 32) if size // 2 % step == 0), 0)
    fine, step = step == 0, step or 64
    _few[(triton.cdiv(outputs, block), triton.cdiv(tokens, tile))](
        w.view(torch.uint8), x, out, scale, bias,
        outputs, tokens, half, groups, size // 2, x.stride(0), block, tile, step, stages,
        half % step == 0, groups > 1, fine, biased, inline_assembly(x.device), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
