"""Products of single tokens with packed weights, where the time is that of reading the weights; see `product_kernels`.

A program takes tile after tile of rows and keeps their weights in flight: the first tile is asked for before the kernel
waits for its predecessor, whose output it is not, and every further one while that before it is multiplied. There is
no matrix unit in it: four products an instruction keep up with memory.

The token comes as codes, or as it is: then each program quantizes it for itself, once, and keeps it in registers. That
is little work for a row that is read anyhow, and spares a kernel and the wait for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops.device_features import inline_assembly, multiprocessors, programmatic_launch
from rotaquant.ops.product_plans import Plan
from rotaquant.ops.product_units import scaled
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

_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _four_products(a, b, acc, ASM: tl.constexpr):
    """acc plus the dot product of the four signed bytes of two words."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            acc += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
        return acc


@triton.jit
def _pair(words, kind: tl.constexpr):
    """The two values of 16 bits in each word, as float32."""
    low = words.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _row_scale(x, size, clip_ratio, bits: tl.constexpr, kind: tl.constexpr, BX: tl.constexpr, ASM: tl.constexpr):
    """The step size of a row of `size` words of two values."""
    place = tl.arange(0, BX)[None, :]
    low, high = _pair(tl.load(x + place, mask=place < size, other=0), kind)
    most = larger(magnitudes(low, ASM), magnitudes(high, ASM))
    for k in range(BX, size, BX):
        low, high = _pair(tl.load(x + k + place, mask=k + place < size, other=0), kind)
        most = larger(most, larger(magnitudes(low, ASM), magnitudes(high, ASM)))
    return symmetric_scale(largest(most, True, ASM), clip_ratio, bits)


@triton.jit
def _row_codes(
    x, first, W, size, scale, shift, bits: tl.constexpr, kind: tl.constexpr,
    PACKED: tl.constexpr, BK: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words of codes `[BK]` that meet BK words of weights, from word `first` on: even columns and odd ones.

    Eight-bit weights have all their columns in both.
    """
    if bits == 0:
        column = first + tl.arange(0, BK)
        even = tl.load(x + column, mask=column < W, other=0)
        odd = even
        if PACKED:
            odd = tl.load(x + W + column, mask=column < W, other=0)
        return even, odd
    else:
        many: tl.constexpr = 4 if PACKED else 2
        place = tl.arange(0, many * BK)
        low, high = _pair(tl.load(x + first * many + place, mask=first * many + place < size, other=0), kind)
        low = symmetric_codes(low * shift, scale * shift, bits, LOW, ASM).to(tl.int32) & 0xFF
        high = symmetric_codes(high * shift, scale * shift, bits, LOW, ASM).to(tl.int32) & 0xFF
        if PACKED:
            at = 8 * (place % 4)
            return tl.sum((low << at).reshape(BK, 4), 1), tl.sum((high << at).reshape(BK, 4), 1)
        else:
            both = tl.sum(((low | (high << 8)) << (16 * (place % 2))).reshape(BK, 2), 1)
            return both, both


@triton.jit
def _weights(w, tile, k, N, W, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Words of BN rows from column k on; rows beyond the end read others twice, which are not stored."""
    row = (tile * BN + tl.arange(0, BN)) % N
    column = k + tl.arange(0, BK)
    place = w + row.to(tl.int64)[:, None] * W + column[None, :]
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=(column < W)[None, :], other=0)


@triton.jit
def _products(packed, even, odd, acc, PACKED: tl.constexpr, ASM: tl.constexpr):
    """acc plus the products of words of weights `[BN, BK]` with words of codes `[BK]`."""
    even, odd = tl.broadcast(even[None, :], packed)[0], tl.broadcast(odd[None, :], packed)[0]
    if PACKED:
        # As in `even_codes` and `odd_codes`, on words: the mask and the sign's flip are one instruction.
        acc = _four_products(((packed << 4) & -0x0F0F0F10) ^ -0x7F7F7F80, even, acc, ASM)
        return _four_products((packed & -0x0F0F0F10) ^ -0x7F7F7F80, odd, acc, ASM)
    else:
        return _four_products(packed ^ -0x7F7F7F80, even, acc, ASM)


@triton.jit
def _store(
    acc, t, out, weight_scale, bias, tile, N, PACKED: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    rn = tile * BN + tl.arange(0, BN)
    c = tl.load(weight_scale + rn, mask=rn < N, other=0.0).to(tl.float32)
    total = scaled(tl.sum(acc, 1), t, c, PACKED)
    if BIAS:
        total += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)
    tl.store(out + rn, total.to(out.dtype.element_ty), mask=rn < N)


@triton.jit
def product_single(
    w, x, out, token_scale, weight_scale, bias, N, W, size, x_stride, clip_ratio,
    bits: tl.constexpr, kind: tl.constexpr, PACKED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, ONE_STEP: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Here w and x are words of four bytes. Rows of w have W; tokens of x have `size`, or planes of W where they are
    # codes already, which `bits` = 0 says.
    first = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    packed = _weights(w, first, 0, N, W, BN, BK, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x += m * x_stride
    out += m * N
    if bits > 0:
        t = _row_scale(x, size, clip_ratio, bits, kind, BK * (4 if PACKED else 2), ASM)
        shift = ordinary_shift(t)
    else:
        t = tl.load(token_scale + m)
        shift = t
    tiles = tl.cdiv(N, BN)
    step = tl.num_programs(0)
    if ONE_STEP:
        # The token stays in registers, and the next rows are on their way while these are multiplied.
        even, odd = _row_codes(x, 0, W, size, t, shift, bits, kind, PACKED, BK, LOW, ASM)
        for tile in range(first, tiles, step):
            following = _weights(w, tl.minimum(tile + step, tiles - 1), 0, N, W, BN, BK, EVEN)
            acc = _products(packed, even, odd, tl.zeros((BN, BK), tl.int32), PACKED, ASM)
            _store(acc, t, out, weight_scale, bias, tile, N, PACKED, BN, BIAS)
            packed = following
    else:
        acc = tl.zeros((BN, BK), tl.int32)
        for k in range(0, W, BK):
            # Nothing is read beyond the last step.
            following = _weights(w, first, k + BK, N, W, BN, BK, False)
            even, odd = _row_codes(x, k, W, size, t, shift, bits, kind, PACKED, BK, LOW, ASM)
            acc = _products(packed, even, odd, acc, PACKED, ASM)
            packed = following
        _store(acc, t, out, weight_scale, bias, first, N, PACKED, BN, BIAS)


def takes(x: Tensor) -> bool:
    """Whether the kernel quantizes tokens like x itself: of 16 bits, and read by words of two."""
    # Torch views two values as one only from an even one of their storage on, wherever that lies.
    return x.dtype in _KINDS and x.stride(1) == 1 and by_words(x) and x.storage_offset() % 2 == 0


def launch_quantizing(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor,
    plan: Plan, bits: int, clip_ratio: float, packed: bool,
) -> None:  # fmt: skip
    """Write to `out` `[m, n]` the product of tokens `[m, k]`, each quantized, and packed weights int32 `[n, words]`."""
    size = x.shape[1] // 2
    _launch((weight, x.view(torch.int32), weight_scale, weight_scale, bias, out), plan, size, packed,
            bits, _KINDS[x.dtype], clip_ratio)  # fmt: skip


def launch_codes(
    codes: Tensor, token_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor,
    plan: Plan,
) -> None:  # fmt: skip
    """Write to `out` `[m, n]` the product of codes int8 `[m, planes, plane]` and packed weights int32 `[n, words]`."""
    words = codes.flatten(1).view(torch.int32)
    operands = weight, words, token_scale, weight_scale, bias, out
    _launch(operands, plan, words.shape[1], codes.shape[1] == 2, 0, tl.bfloat16, 1.0)


def _launch(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], plan: Plan, size: int, packed: bool,
    bits: int, kind: tl.dtype, clip_ratio: float,
) -> None:  # fmt: skip
    weight, x, token_scale, weight_scale, bias, out = operands
    (outputs, words), step = weight.shape, plan.bytes // 4
    programs = triton.cdiv(outputs, plan.outputs)
    if plan.resident and words <= step:
        programs = min(programs, plan.resident * multiprocessors(x.device))
    pdl = programmatic_launch(x.device)
    product_single[(programs, x.shape[0])](
        weight, x, out, token_scale, weight_scale, out if bias is None else bias,
        outputs, words, size, x.stride(0), clip_ratio, bits, kind, packed, plan.outputs, step,
        words % step == 0, words <= step, bias is not None, bits > 0 and reaches_below(bits, clip_ratio),
        inline_assembly(x.device), pdl, num_warps=plan.warps, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
