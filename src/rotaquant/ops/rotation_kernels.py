"""Online rotations on a GPU, alone or between an activation function and quantization: one read and one write a row.

Legend: a row is a tile X `[A, C * B]`, and Y = norm * left X (H_C ⊗ right), see `factors`. Both products run on matrix
units. X is in 16 bits and `left` integers, so the first is exact but for its float32 sums; its result is split in two
halves of bfloat16, which hold 16 bits of it, for the second. H_C is additions in registers, between the two.

A program keeps `left` and `right` and takes row after row. `left` is padded to a power of two, or to two of them one
after the other: A = 172 to 128 + 64. Matrix units leave neighbouring columns in different threads; where codes go to
planes of even and odd columns, the columns of `right` are laid out so that a thread's codes are neighbours in a plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops import packing
from rotaquant.ops.device_features import inline_assembly, multiprocessors, programmatic_launch, shared_memory
from rotaquant.ops.factors import LARGEST_TILE, left_parts
from rotaquant.ops.quantize_units import (
    by_words,
    clamped,
    larger,
    largest,
    magnitudes,
    reaches_below,
    rounded,
    symmetric_scale,
)

ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}


@triton.jit
def _dot(a, b, ASM: tl.constexpr):
    """A product of matrices of 16 bits; the interpreter, which takes bfloat16 for integers, has it in float32."""
    return tl.dot(a, b) if ASM else tl.dot(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def _sigmoid(x, ASM: tl.constexpr):
    if ASM:
        # Without the care for the smallest numbers that exp and division take: beside one they are nothing.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr, ASM: tl.constexpr):
    if ACTIVATION == 1:
        return x * _sigmoid(x, ASM)
    elif ACTIVATION == 2:
        # (1 + tanh(u)) / 2 is the logistic function of 2u, here with u = sqrt(2 / pi) * (x + 0.044715 * x**3).
        return x * _sigmoid(x * (1.5957691216057308 + 0.07135481282553233 * x * x), ASM)
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _rounded_product(first, second, up, kind: tl.constexpr):
    """Words of two values: `first` and `second` rounded to 16 bits times those in `up`, rounded again."""
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            # Multiplied and minus zero added: sm_80 has no product alone.
            "{ .reg .b32 t, z; mov.b32 z, 0x80008000; cvt.rn.bf16x2.f32 t, $2, $1; fma.rn.bf16x2 $0, t, $3, z; }",
            "=r,f,f,r", [first, second, up], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.f16x2.f32 t, $2, $1; mul.rn.f16x2 $0, t, $3; }",
            "=r,f,f,r", [first, second, up], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _unpacked(word, kind: tl.constexpr):
    """The two values of 16 bits in a word, in their dtype."""
    return word.to(tl.int16).to(kind, bitcast=True), (word >> 16).to(tl.int16).to(kind, bitcast=True)


@triton.jit
def _tile(
    x, up, A, rest, first: tl.constexpr, AP: tl.constexpr, CB: tl.constexpr, ACTIVATION: tl.constexpr,
    WORDS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows `first`, ... of a row's tile `[AP, CB]` in its dtype, gated where there is an activation.

    A gate is applied as a model applies it in its dtype: rounded after the activation and after the product.
    """
    a = first + tl.arange(0, AP)[:, None]
    kind: tl.constexpr = x.dtype.element_ty
    if ACTIVATION > 0 and WORDS:
        # Two values at a time: most of the instructions that move 16 bits about fall away.
        c = tl.arange(0, CB // 2)[None, :]
        inside = (a < A) & (c < rest // 2)
        place = a * (rest // 2) + c
        gate = tl.load(x.to(tl.pointer_type(tl.int32)) + place, mask=inside, other=0)
        more = tl.load(up.to(tl.pointer_type(tl.int32)) + place, mask=inside, other=0)
        if kind == tl.bfloat16:
            low, high = (gate << 16).to(tl.float32, bitcast=True), (gate & -65536).to(tl.float32, bitcast=True)
        else:
            low, high = _unpacked(gate, kind)
            low, high = low.to(tl.float32), high.to(tl.float32)
        word = _rounded_product(_activation(low, ACTIVATION, ASM), _activation(high, ACTIVATION, ASM), more, kind)
        low, high = _unpacked(word, kind)
        return tl.join(low, high).reshape(AP, CB)
    else:
        c = tl.arange(0, CB)[None, :]
        inside = (a < A) & (c < rest)
        values = tl.load(x + a * rest + c, mask=inside, other=0.0)
        if ACTIVATION > 0:
            more = tl.load(up + a * rest + c, mask=inside, other=0.0).to(tl.float32)
            values = _activation(values.to(tl.float32), ACTIVATION, ASM).to(kind).to(tl.float32)
            values = (values * more).to(kind)
        return values


@triton.jit
def _left_block(left, i: tl.constexpr, j: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, AP: tl.constexpr):
    """A block of `left` `[AP, AP]`: rows of the result from j on, columns from i on."""
    row = j + tl.arange(0, HEIGHT)[:, None]
    column = i + tl.arange(0, WIDTH)[None, :]
    return tl.load(left + row * AP + column)


@triton.jit
def _right_matrix(right, width, B: tl.constexpr, APART: tl.constexpr):
    """`right` `[B, B]`, twice one below the other; with APART its columns are laid out for `_even_and_odd`."""
    row = (tl.arange(0, 2 * B) % B)[:, None]
    column = tl.arange(0, B)[None, :]
    if APART:
        # Threads of a matrix unit's result hold neighbours in pairs, four threads side by side, then the same again. So
        # a column 2 * (8 * pairs * t + 2 * pair + e) + parity goes to parity, then pair, then thread t, then e.
        matrix = tl.load(right + row * B + column).reshape(2 * B, 4, B // 16, 2, 2)
        return matrix.permute(0, 4, 2, 1, 3).reshape(2 * B, B)
    else:
        return tl.load(right + row * width + column, mask=(row < width) & (column < width), other=0.0)


@triton.jit
def _upper(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _times_right(z, right, AP: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr):
    """Float32 z `[AP, B]` times a matrix of bfloat16, by z's upper and lower halves side by side."""
    bits = z.to(tl.int32, bitcast=True)
    # Cut off, not rounded: the lower half takes what is left, and to cut is one instruction for two values.
    rest = z - (bits & -65536).to(tl.float32, bitcast=True)
    both = tl.join(_upper(bits), _upper(rest.to(tl.int32, bitcast=True)))
    return _dot(both.permute(0, 2, 1).reshape(AP, 2 * B), right, ASM)


@triton.jit
def _halves(z, AP: tl.constexpr, HALF: tl.constexpr):
    return tl.split(z.reshape(AP, 2, HALF).permute(0, 2, 1))


@triton.jit
def _joined(first, second, AP: tl.constexpr, HALF: tl.constexpr):
    return tl.join(first, second).permute(0, 2, 1).reshape(AP, 2 * HALF)


@triton.jit
def _two(z, right, AP: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr):
    a, b = _halves(z, AP, B)
    return _joined(_times_right(a + b, right, AP, B, ASM), _times_right(a - b, right, AP, B, ASM), AP, B)


@triton.jit
def _right_side(z, right, AP: tl.constexpr, C: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr):
    """z `[AP, C * B]` times H_C ⊗ right."""
    if C == 1:
        return _times_right(z, right, AP, B, ASM)
    elif C == 2:
        return _two(z, right, AP, B, ASM)
    else:
        a, b = _halves(z, AP, 2 * B)
        return _joined(_two(a + b, right, AP, B, ASM), _two(a - b, right, AP, B, ASM), AP, 2 * B)


@triton.jit
def _even_and_odd(codes, AP: tl.constexpr, C: tl.constexpr, B: tl.constexpr, APART: tl.constexpr):
    """A tile `[AP, C * B]` as its even and its odd columns, `[AP, C * B / 2]` each."""
    if APART:
        tile = codes.reshape(AP, C, 2, B // 16, 4, 2)
        even, odd = tl.split(tile.permute(0, 1, 4, 3, 5, 2))
        return even.reshape(AP, C * B // 2), odd.reshape(AP, C * B // 2)
    else:
        return tl.split(codes.reshape(AP, C * B // 2, 2))


@triton.jit
def _store_codes(
    y, scale, norm, out, A, rest, plane, first: tl.constexpr, bits: tl.constexpr, planar: tl.constexpr,
    AP: tl.constexpr, C: tl.constexpr, B: tl.constexpr, APART: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    # Sums in another order differ by more than a product with the reciprocal does from a division.
    factor = tl.minimum(tl.div_rn(norm, scale), 1e38)
    codes = rounded(clamped(y * factor, scale, bits, LOW))
    a = first + tl.arange(0, AP)[:, None]
    if planar:
        even, odd = _even_and_odd(codes, AP, C, B, APART)
        c = tl.arange(0, C * B // 2)[None, :]
        inside = (a < A) & (c < rest // 2)
        target = tl.max_contiguous(out + a * (rest // 2) + c, (1, 8))
        tl.store(target, even, mask=inside)
        tl.store(tl.max_contiguous(target + plane, (1, 8)), odd, mask=inside)
    else:
        c = tl.arange(0, C * B)[None, :]
        tl.store(out + a * rest + c, codes, mask=(a < A) & (c < rest))


@triton.jit
def _rotate(
    x, up, left, right, out, scales, rows, x_stride, up_stride, out_stride, A, rest, width, plane, norm, clip_ratio,
    ACTIVATION: tl.constexpr, WORDS: tl.constexpr, bits: tl.constexpr, planar: tl.constexpr, RIGHT: tl.constexpr,
    APART: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr, C: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
    LOW: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # `bits` is 0 where the result is stored as it is.
    block00 = _left_block(left, 0, 0, A0, A0, A0 + A1)
    if A1 > 0:
        block01 = _left_block(left, A0, 0, A1, A0, A0 + A1)
        block10 = _left_block(left, 0, A0, A0, A1, A0 + A1)
        block11 = _left_block(left, A0, A0, A1, A1, A0 + A1)
    if RIGHT:
        matrix = _right_matrix(right, width, B, APART)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # More than 2**31 elements are addressed by products in 64 bits.
    x_step, up_step, out_step = tl.cast(x_stride, tl.int64), tl.cast(up_stride, tl.int64), tl.cast(out_stride, tl.int64)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x0 = _tile(x + row * x_step, up + row * up_step, A, rest, 0, A0, C * B, ACTIVATION, WORDS, ASM)
        y0 = _dot(block00, x0, ASM)
        if A1 > 0:
            x1 = _tile(x + row * x_step, up + row * up_step, A, rest, A0, A1, C * B, ACTIVATION, WORDS, ASM)
            y0 += _dot(block01, x1, ASM)
            y1 = _dot(block10, x0, ASM) + _dot(block11, x1, ASM)
        if RIGHT:
            y0 = _right_side(y0, matrix, A0, C, B, ASM)
            if A1 > 0:
                y1 = _right_side(y1, matrix, A1, C, B, ASM)
        target = out + row * out_step
        if bits > 0:
            magnitude = largest(magnitudes(y0, ASM), True, ASM)
            if A1 > 0:
                magnitude = larger(magnitude, largest(magnitudes(y1, ASM), True, ASM))
            scale = symmetric_scale(magnitude * norm, clip_ratio, bits)
            tl.store(scales + row, scale)
            _store_codes(y0, scale, norm, target, A, rest, plane, 0, bits, planar, A0, C, B, APART, LOW)
            if A1 > 0:
                _store_codes(y1, scale, norm, target, A, rest, plane, A0, bits, planar, A1, C, B, APART, LOW)
        else:
            a = tl.arange(0, A0)[:, None]
            c = tl.arange(0, C * B)[None, :]
            tl.store(target + a * rest + c, (y0 * norm).to(out.dtype.element_ty), mask=(a < A) & (c < rest))
            if A1 > 0:
                a = A0 + tl.arange(0, A1)[:, None]
                tl.store(target + a * rest + c, (y1 * norm).to(out.dtype.element_ty), mask=(a < A) & (c < rest))


def supports(columns: int, dtype: torch.dtype, order: int, right: Tensor | None, device: torch.device) -> bool:
    """Whether the kernels apply this rotation to rows of `columns` on a device."""
    if dtype not in {torch.bfloat16, torch.float16} or columns % 8 or columns % order:
        return False
    rest = columns // order
    butterflies, tile = _right_shape(rest, right)
    whole = right is None or butterflies * right.shape[0] == rest
    left = sum(left_parts(order))
    if not whole or butterflies not in {1, 2, 4} or left * butterflies * tile > LARGEST_TILE:
        return False
    return choose((left, butterflies * tile), device) is not None


def _right_shape(rest: int, right: Tensor | None) -> tuple[int, int]:
    """C and the padded B of a tile of `rest` columns."""
    if right is None:
        return 1, max(16, triton.next_power_of_2(rest))
    return rest // right.shape[0], max(16, triton.next_power_of_2(right.shape[0]))


@dataclass(frozen=True, kw_only=True)
class RotationPlan:
    """Warps of a program, stages of its loop over rows, programs a multiprocessor holds, registers of a thread."""

    warps: int
    stages: int
    resident: int
    registers: int | None = None


def choose(tile: tuple[int, int], device: torch.device) -> RotationPlan | None:
    """The plan for rows that are tiles of that padded shape, measured on an H200; `None` where the device has no room.

    Where there is less room than on that device, fewer rows are on their way at once.
    """
    plan, room = _standard(tile[0] * tile[1]), shared_memory(device)
    stages = next((count for count in range(plan.stages, 0, -1) if _shared_bytes(tile, count) <= room), None)
    return None if stages is None else replace(plan, stages=stages)


def _shared_bytes(tile: tuple[int, int], stages: int) -> int:
    """No less than what a program takes: `left`, a row to multiply, rows of two inputs on their way, and exchanges."""
    rows, columns = tile
    return 2 * rows * rows + 2 * rows * columns * (2 * stages - 1) + 32768


def _standard(values: int) -> RotationPlan:
    if values <= 8192:
        return RotationPlan(warps=4, stages=2, resident=4, registers=128)
    if values <= 12288:
        return RotationPlan(warps=8, stages=3, resident=1)
    if values <= 16384:
        # Two programs a multiprocessor hide each other's waiting, where they fit.
        return RotationPlan(warps=8, stages=1, resident=2, registers=128)
    return RotationPlan(warps=8, stages=1, resident=1)


def rotate(x: Tensor, left: Tensor, order: int, right: Tensor | None, norm: float, dtype: torch.dtype) -> Tensor:
    """Rotate rows `[m, n]` of 16 bits; `[m, n]` in `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x, None, None, (left, order, right, norm), out, None, 0, 1.0, None)
    return out


def rotate_quantize(
    x: Tensor,
    up: Tensor | None,
    activation: str | None,
    left: Tensor,
    order: int,
    right: Tensor | None,
    norm: float,
    bits: int,
    clip_ratio: float,
    planar: bool,
    plan: RotationPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate rows `[m, n]` of 16 bits, gated with `up` where there is an activation, and quantize each.

    Gives codes int8 `[m, planes, plane]` and float32 scales `[m, 1]`; rows may be strided. Rows whose values are all
    below 1e-37 lose digits.
    """
    rows, columns = x.shape
    shape = (rows, 2 if planar else 1, packing.plane_columns(columns, planar))
    codes = torch.empty(shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _launch(x, up, activation, (left, order, right, norm), codes, scales, bits, clip_ratio, plan)
    return codes, scales


def _launch(
    x: Tensor,
    up: Tensor | None,
    activation: str | None,
    rotation: tuple[Tensor, int, Tensor | None, float],
    out: Tensor,
    scales: Tensor | None,
    bits: int,
    clip_ratio: float,
    plan: RotationPlan | None,
) -> None:
    rows, columns = x.shape
    left, order, right, norm = rotation
    if not supports(columns, x.dtype, order, right, x.device):
        raise RotaquantError(f"no kernel rotates rows of {columns} in {x.dtype} by a matrix of order {order}")
    if rows == 0:
        return
    left, right = left.contiguous(), None if right is None else right.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    other = x if up is None else up if up.stride(1) == 1 else up.contiguous()
    pdl, asm = programmatic_launch(x.device), inline_assembly(x.device)
    rest = columns // order
    butterflies, tile = _right_shape(rest, right)
    planar = scales is not None and out.shape[1] == 2
    whole = right is not None and right.shape[0] == tile
    words = asm and rest % 2 == 0 and by_words(x, other)
    plan = plan or choose((left.shape[0], butterflies * tile), x.device)
    assert plan is not None
    programs = min(rows, multiprocessors(x.device) * plan.resident) if asm else rows
    below = bits > 0 and reaches_below(bits, clip_ratio)
    _rotate[(programs,)](
        x, other, left, left if right is None else right, out, x if scales is None else scales,
        rows, x.stride(0), other.stride(0), out.stride(0), order, rest, tile if right is None else right.shape[0],
        packing.plane_columns(columns, planar), norm, clip_ratio,
        ACTIVATIONS[activation], words, bits, planar, right is not None, planar and whole,
        *left_parts(order), butterflies, tile, plan.stages, below,
        asm, pdl, num_warps=plan.warps, maxnreg=plan.registers, launch_pdl=pdl,
    )  # fmt: skip
