"""What the kernels of products share: packed codes as signed bytes, and sums as scaled values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def even_codes(packed, ASM: tl.constexpr):
    """The low nibbles of bytes as signed values, times 16."""
    if ASM:
        # (x << 4 & 0xF0) ^ 0x80 on four bytes at once: 0x6A is the truth table of (a & b) ^ c.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A; }",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return ((packed << 4) ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def odd_codes(packed, ASM: tl.constexpr):
    """The high nibbles of bytes as signed values, times 16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return ((packed & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def whole_codes(packed, ASM: tl.constexpr):
    """Bytes offset by 128 as signed values."""
    if ASM:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return (packed ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def scaled(acc, token_scale, weight_scale, PACKED: tl.constexpr):
    if PACKED:
        acc = acc >> 4
    return (acc.to(tl.float32) * token_scale) * weight_scale
