"""What attention over the packed cache does to tiles: codes as numbers, rows as planes of channels, sums over warps.

Codes are unpacked in registers, a plane at a time: element h of a token holds channels 4h to 4h + 3, and plane n is
channel 4h + n of each. Where ASM is false the kernel runs in Triton's interpreter, or on a device that has no PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, ASM: tl.constexpr):
    """acc plus a product of matrices of 16 bits; the interpreter, whose bfloat16 is integers, has it in float32."""
    return tl.dot(a, b, acc) if ASM else acc + tl.dot(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def key_plane(x, upper, n: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, ASM: tl.constexpr):
    """Channels n of elements in `kind`: the codes, plus `_key_offset`."""
    if bits == 4 and ASM:
        # A nibble below the bits of 128 (of 1024, in float16) is the number 128 + code, exactly: no conversion.
        if kind == tl.bfloat16:
            if n == 0:
                return tl.inline_asm_elementwise(
                    "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;",
                    "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
            elif n == 1:
                return tl.inline_asm_elementwise(
                    "{ .reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
                    "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
            elif n == 2:
                return tl.inline_asm_elementwise(
                    "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
                    "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
            else:
                return tl.inline_asm_elementwise(
                    "{ .reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
                    "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
        else:
            return plain_plane(x, upper, n, bits).to(tl.float32).to(kind)
    else:
        return plain_plane(x, upper, n, bits).to(tl.float32).to(kind)


@triton.jit
def value_plane(x, upper, n: tl.constexpr, bits: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Channels n of elements in bfloat16: codes minus HALF, half their range: what is small is rounded by little.

    The 128 of `key_plane` must not stay in this product: taken out of long sums afterwards it would leave nothing.
    """
    if bits == 4 and ASM:
        # 0x3F80 is one, 0xC308 is -136; sm_80 has no sum alone.
        if n == 0:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, c; mov.b32 o, 0x3F803F80; mov.b32 c, 0xC308C308;"
                " lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, o, c; }",
                "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif n == 1:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, c; mov.b32 o, 0x3F803F80; mov.b32 c, 0xC308C308; shr.u32 t, $1, 4;"
                " lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, o, c; }",
                "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif n == 2:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, c; mov.b32 o, 0x3F803F80; mov.b32 c, 0xC308C308; shr.u32 t, $1, 8;"
                " lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, o, c; }",
                "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, c; mov.b32 o, 0x3F803F80; mov.b32 c, 0xC308C308; shr.u32 t, $1, 12;"
                " lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, o, c; }",
                "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        return (plain_plane(x, upper, n, bits) - HALF).to(tl.float32).to(tl.bfloat16)


@triton.jit
def plain_plane(x, upper, n: tl.constexpr, bits: tl.constexpr):
    """Channels n of elements as int32 codes."""
    if bits == 3:
        return ((x.to(tl.int32) >> (2 * n)) & 3) | (((upper.to(tl.int32) >> n) & 1) << 2)
    else:
        return (x.to(tl.int32) >> (bits * n)) & ((1 << bits) - 1)


@triton.jit
def scale_and_lowest(word):
    """The two fp16 values of words, as float32."""
    scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def elements(base, token, h, inside, bits: tl.constexpr, H: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr):
    """Elements `[warps, tokens, HP]` of the codes that begin at `base`, and the bytes of upper bits (of 3)."""
    kind: tl.constexpr = tl.int16 if bits == 4 else (tl.int32 if bits == 8 else tl.uint8)
    start = base.to(tl.pointer_type(kind))[:, None, None]
    width: tl.constexpr = STEP // (2 if bits == 4 else (4 if bits == 8 else 1))
    place = start + token[:, :, None] * width + h[None, None, :]
    x = tl.load(place) if WHOLE else tl.load(place, mask=inside[None, None, :], other=0)
    if bits == 3:
        place = start + token[:, :, None] * width + H + h[None, None, :] // 2
        upper = tl.load(place, mask=inside[None, None, :], other=0)
        return x, upper >> (4 * (h[None, None, :] % 2)).to(tl.uint8)
    else:
        return x, x


@triton.jit
def planes_of_rows(rows, M: tl.constexpr, HP: tl.constexpr):
    """Rows `[M, 4 * HP]` as four planes `[M, HP]`: channels 4h, 4h + 1, 4h + 2, 4h + 3."""
    pairs = rows.reshape(M, HP, 2, 2)
    even, odd = tl.split(pairs)
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def rows_of_planes(c0, c1, c2, c3, W: tl.constexpr, M: tl.constexpr, HP: tl.constexpr):
    """Planes `[W, M, HP]` as rows `[W, M, 4 * HP]`: undoes `planes_of_rows`."""
    return tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(W, M, 4 * HP)


@triton.jit
def sum_over_warps(x, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Sum `[W, M, N]` over its first axis, by one exchange of all of it."""
    if W == 1:
        return tl.sum(x, 0)
    elif W == 2:
        first, second = tl.split(x.permute(1, 2, 0))
        return first + second
    else:
        first, second = tl.split(x.permute(1, 2, 0).reshape(M, N, W // 2, 2))
        pairs = first + second
        if W == 4:
            first, second = tl.split(pairs)
            return first + second
        else:
            return tl.sum(pairs, 2)
