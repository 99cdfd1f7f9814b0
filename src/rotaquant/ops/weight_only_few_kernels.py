"""Products of few 16-bit tokens with packed 4-bit weights, where the time is that of reading the weights.

Legend: N outputs, M tokens, H bytes a row of weights. A byte holds columns 2j (low nibble) and 2j+1 (high nibble),
offset by 8; so activations come as planes `[m, 2, H]`, the even columns and the odd ones, and a tile of bytes meets a
tile of each. Nibbles become 16-bit values by setting bits of a mantissa, and are scaled when their sum is known.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_planes(
    x, planes, M, columns, H, row_stride, column_stride, WORDS: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rows of tokens as planes, zeros beyond their columns and beyond M; WORDS: two columns a load."""
    m = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    kind: tl.constexpr = x.dtype.element_ty
    length = tl.where(m < M, columns, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if WORDS:
        words = tl.load((x + m * row_stride).to(tl.pointer_type(tl.int32)) + j, mask=2 * j < length, other=0)
        even = words.to(tl.int16).to(kind, bitcast=True)
        odd = (words >> 16).to(tl.int16).to(kind, bitcast=True)
    else:
        start = x + m * row_stride + (2 * j).to(tl.int64) * column_stride
        even = tl.load(start, mask=2 * j < length, other=0.0)
        odd = tl.load(start + column_stride, mask=2 * j + 1 < length, other=0.0)
    target = planes + m * (2 * H) + j
    tl.store(target, even, mask=j < H)
    tl.store(target + H, odd, mask=j < H)


def _spread(kind: str, power: int, one: int, less: int) -> tl.constexpr:
    """Assembly that makes of four bytes two pairs of 16-bit values of their low nibbles, and two of their high ones.

    Set in the lowest bits of the mantissa of a power of two, a nibble counts in its units: no conversion takes place.
    Then 1 * value + less takes away the power and 8 units.
    """
    lines = [".reg .b32 first, second, power, one, less;", "prmt.b32 first, $4, 0, 0x4140;"]
    lines += ["prmt.b32 second, $4, 0, 0x4342;", f"mov.b32 power, {power:#x};"]
    lines += [f"mov.b32 one, {one:#x};", f"mov.b32 less, {less:#x};"]
    for low, high in (("$0", "$1"), ("$2", "$3")):
        lines += [
            f"lop3.b32 {low}, first, 0x000F000F, power, 0xEA;",
            f"lop3.b32 {high}, second, 0x000F000F, power, 0xEA;",
        ]
        lines += ["shr.b32 first, first, 4;", "shr.b32 second, second, 4;"] if low == "$0" else []
        lines += [f"fma.rn.{kind} {out}, {out}, one, less;" for out in (low, high)]
    return tl.constexpr("{ " + " ".join(lines) + " }")


# Of 2**-17, whose mantissa counts in units of 2**-24, and of 1024, whose mantissa counts in ones.
_SPREAD_BFLOAT16 = _spread("bf16x2", 0x37003700, 0x3F803F80, 0xB708B708)
_SPREAD_FLOAT16 = _spread("f16x2", 0x64006400, 0x3C003C00, 0xE408E408)


@triton.jit
def _unit(kind: tl.constexpr):
    """What `_widened` divides by: sums of 65536 activations as large as bfloat16 holds stay finite until scaled."""
    return 16777216.0 if kind == tl.bfloat16 else 1.0


@triton.jit
def _widened(packed, kind: tl.constexpr, ASM: tl.constexpr):
    """The low and the high nibbles of bytes as the values -8..7 in a 16-bit type, over `_unit(kind)`."""
    if ASM:
        if kind == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _SPREAD_BFLOAT16, "=&r,=&r,=&r,=&r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                _SPREAD_FLOAT16, "=&r,=&r,=&r,=&r,r", [packed], (tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        # The interpreter takes bfloat16 for integers.
        low, high = (packed & 0xF).to(tl.float32) - 8.0, (packed >> 4).to(tl.float32) - 8.0
        return low / _unit(kind), high / _unit(kind)


@triton.jit
def _times(low, high, even, odd, total, ASM: tl.constexpr):
    """`total` and the products of both planes."""
    if ASM:
        return tl.dot(high, odd, tl.dot(low, even, total))
    else:
        total += tl.dot(low.to(tl.float32), even.to(tl.float32))
        return total + tl.dot(high.to(tl.float32), odd.to(tl.float32))


@triton.jit
def _store_tile(total, out, scale, bias, row, rn, rm, N, M, GROUPED: tl.constexpr, BIAS: tl.constexpr):
    """Sums, scaled where their groups were not, plus the bias of their outputs."""
    kind: tl.constexpr = out.dtype.element_ty
    if not GROUPED:
        total = total * tl.load(scale + row).to(tl.float32)[:, None] * _unit(kind)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    target = out + rm.to(tl.int64)[None, :] * N + rn[:, None]
    tl.store(target, total.to(kind), mask=(rm < M)[None, :] & (rn < N)[:, None])


@triton.jit
def product_tile(
    w, planes, out, scale, bias, N, M, H, groups, size,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    GROUPED: tl.constexpr, FINE: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of outputs by a program; a step lies within one group of `size` bytes, or (FINE) takes several."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = planes.dtype.element_ty
    # Outputs beyond the end read the weights of others, tokens beyond it are zeros; neither is stored.
    row = (rn % N).to(tl.int64)
    wp = w + row[:, None] * H + rk[None, :]
    xp = planes + rm.to(tl.int64)[None, :] * (2 * H) + rk[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
            even = tl.load(xp)
            odd = tl.load(xp + H)
        else:
            packed = tl.load(wp, mask=(k + rk < H)[None, :], other=0)
            even = tl.load(xp, mask=(k + rk < H)[:, None], other=0.0)
            odd = tl.load(xp + H, mask=(k + rk < H)[:, None], other=0.0)
        low, high = _widened(packed, kind, ASM)
        if FINE:
            group = tl.minimum((k + rk) // size, groups - 1)
            c = tl.load(scale + row[:, None] * groups + group[None, :]).to(tl.float32) * _unit(kind)
            low, high = low.to(tl.float32) * c, high.to(tl.float32) * c
            if ASM:
                low, high = low.to(kind), high.to(kind)
            total = _times(low, high, even, odd, total, ASM)
        elif GROUPED:
            c = tl.load(scale + row * groups + k // size).to(tl.float32)[:, None] * _unit(kind)
            total += _times(low, high, even, odd, tl.zeros((BN, BM), tl.float32), ASM) * c
        else:
            total = _times(low, high, even, odd, total, ASM)
        wp += BK
        xp += BK
    _store_tile(total, out, scale, bias, row, rn, rm, N, M, GROUPED, BIAS)


@triton.jit
def product_sliced(
    w, planes, out, scale, bias, N, M, H, groups, size,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of outputs by a program, slices of K along a batch dimension: so a narrow layer occupies all warps."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, SLICES)[:, None] * BK + tl.arange(0, BK)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = planes.dtype.element_ty
    row = (rn % N).to(tl.int64)
    wp = w + row[None, :, None] * H + rk[:, None, :]
    xp = planes + rm.to(tl.int64)[None, None, :] * (2 * H) + rk[:, :, None]
    total = tl.zeros((SLICES, BN, BM), tl.float32)
    for k in tl.range(0, H, BK * SLICES, num_stages=STAGES):
        if EVEN:
            packed = tl.load(wp)
            even = tl.load(xp)
            odd = tl.load(xp + H)
        else:
            packed = tl.load(wp, mask=(k + rk < H)[:, None, :], other=0)
            even = tl.load(xp, mask=(k + rk < H)[:, :, None], other=0.0)
            odd = tl.load(xp + H, mask=(k + rk < H)[:, :, None], other=0.0)
        low, high = _widened(packed, kind, ASM)
        if GROUPED:
            group = tl.minimum((k + tl.arange(0, SLICES) * BK) // size, groups - 1)
            c = tl.load(scale + row[None, :] * groups + group[:, None]).to(tl.float32)[:, :, None] * _unit(kind)
            total += _times(low, high, even, odd, tl.zeros((SLICES, BN, BM), tl.float32), ASM) * c
        else:
            total = _times(low, high, even, odd, total, ASM)
        wp += BK * SLICES
        xp += BK * SLICES
    _store_tile(tl.sum(total, 0), out, scale, bias, row, rn, rm, N, M, GROUPED, BIAS)
