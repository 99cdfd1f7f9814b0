"""Products of one 16-bit token with packed 4-bit weights, without the matrix unit: what is stored is read once.

Legend: N outputs, W words of eight weights a row. Column j of a word is nibble j, offset by 8.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def product_single(
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
