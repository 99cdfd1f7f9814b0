"""Products of integer codes for few tokens, where the time is that of reading the weights; see `product_kernels`.

Slices of K lie along a batch dimension, so that a narrow layer occupies all warps. The first lines of the weights are
asked for before the activations are there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rotaquant.ops.product_units import even_codes, odd_codes, scaled, whole_codes


@triton.jit
def product_sliced(
    w,
    x,
    out,
    token_scale,
    weight_scale,
    bias,
    N,
    M,
    H,
    PACKED: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
):
    pn = tl.program_id(0)
    rn = pn * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, SLICES)[:, None] * BK + tl.arange(0, BK)[None, :]
    planes: tl.constexpr = 2 if PACKED else 1
    if PDL:
        _fetch_ahead(w, pn, N, H, BN, LINES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wp = w + (rn % N).to(tl.int64)[None, :, None] * H + rk[:, None, :]
    xp = x + (rm % M)[None, None, :] * (planes * H) + rk[:, :, None]
    acc = tl.zeros((SLICES, BN, BM), tl.int32)
    for k in tl.range(0, H, BK * SLICES, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
            even = tl.load(xp)
        else:
            packed = tl.load(wp, mask=(k + rk < H)[:, None, :], other=0)
            even = tl.load(xp, mask=(k + rk < H)[:, :, None], other=0)
        if PACKED:
            if EVEN:
                odd = tl.load(xp + H)
            else:
                odd = tl.load(xp + H, mask=(k + rk < H)[:, :, None], other=0)
            acc = tl.dot(even_codes(packed, ASM), even, acc, out_dtype=tl.int32)
            acc = tl.dot(odd_codes(packed, ASM), odd, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(whole_codes(packed, ASM), even, acc, out_dtype=tl.int32)
        wp += BK * SLICES
        xp += BK * SLICES
    t = tl.load(token_scale + rm, mask=rm < M, other=0.0)
    c = tl.load(weight_scale + rn, mask=rn < N, other=0.0).to(tl.float32)
    total = scaled(tl.sum(acc, 0), t[None, :], c[:, None], PACKED)
    if BIAS:
        total += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    op = out + rm.to(tl.int64)[None, :] * N + rn[:, None]
    tl.store(op, total.to(out.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


@triton.jit
def _fetch_ahead(w, pn, N, H, BN: tl.constexpr, LINES: tl.constexpr):
    """Ask for the first lines of a program's weights while its predecessor still runs; weights are nobody's output."""
    if LINES > 0:
        start = (pn * BN).to(tl.int64) * H
        offset = start + tl.arange(0, LINES) * 128
        offset = tl.minimum(offset, tl.cast(N, tl.int64) * H - 1)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [w + offset], dtype=tl.int32, is_pure=False, pack=1
        )
