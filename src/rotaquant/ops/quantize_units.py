"""What kernels that quantize a row share: its largest magnitude, its scale and its codes, as functions of registers.

Where ASM is false the kernel runs in Triton's interpreter, or on a device that has no PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def magnitudes(values, ASM: tl.constexpr):
    """Absolute values in a form that `largest` compares, NaN above infinity."""
    # The interpreter is slow at reductions other than its own; as integers, magnitudes order the same way.
    return tl.abs(values) if ASM else values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(a, b):
    """The larger of two `magnitudes`."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(values, whole: tl.constexpr, ASM: tl.constexpr):
    """The largest of `magnitudes` `[rows, columns]`: of all, a scalar, or of each row `[rows, 1]`."""
    if ASM:
        return tl.reduce(values, None if whole else 1, larger, keep_dims=not whole)
    else:
        return tl.max(values, None if whole else 1, keep_dims=not whole).to(tl.float32, bitcast=True)


@triton.jit
def symmetric_scale(magnitude, clip_ratio, bits: tl.constexpr):
    """Step sizes for rows of that largest magnitude: as `reference.symmetric_scale`, NaN and infinity included."""
    scale = tl.div_rn(magnitude * clip_ratio, tl.full(magnitude.shape, (1 << (bits - 1)) - 1, tl.float32))
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def rounded(steps):
    """Float32 values below 128 as int8, rounded half to even."""
    # Adding 1.5 * 2**23 leaves no bit for a fraction: the sum is rounded as IEEE rounds, and its lowest byte is the
    # integer.
    return (steps + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def clamped(steps, scale, bits: tl.constexpr, LOW: tl.constexpr):
    """Quotients within the grid, and zero where the scale is not finite; LOW says whether any can lie below it."""
    half: tl.constexpr = 1 << (bits - 1)
    # A comparison drops NaN, and what is finite over an infinite scale is zero.
    high = tl.where(scale < float("inf"), half * 1.0 - 1.0, 0.0)
    steps = tl.minimum(steps, high)
    return tl.maximum(steps, -half * 1.0) if LOW else steps


@triton.jit
def symmetric_codes(values, scale, bits: tl.constexpr, LOW: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 of float32 `values` against `scale` (broadcast), rounded half to even; zero where it is not finite."""
    if ASM:
        # Markstein's division: from the rounded reciprocal and quotient, one step by the exact remainder gives the
        # rounded quotient, where nothing overflows or is lost below the smallest numbers: hence `ordinary_shift`.
        inverse, negative = tl.div_rn(1.0, scale), -scale
        steps = values * inverse
        steps = tl.fma(tl.fma(steps, negative, values), inverse, steps)
    else:
        steps = tl.div_rn(values, scale)
    return rounded(clamped(steps, scale, bits, LOW))


@triton.jit
def ordinary_shift(scale):
    """A power of two that brings a very small or large scale among ordinary numbers."""
    return tl.where(scale < 2.0**-60, 2.0**80, tl.where(scale > 2.0**60, 2.0**-80, 1.0))


def reaches_below(bits: int, clip_ratio: float) -> bool:
    """Whether a clipped row's most negative value can round to below the lowest code."""
    half = 1 << (bits - 1)
    return clip_ratio * (half + 0.25) < half - 1


def by_words(*tensors: Tensor) -> bool:
    """Whether rows can be read two columns of 16 bits at a time."""
    return all(
        t.element_size() == 2 and t.shape[1] % 2 == 0 and t.stride(0) % 2 == 0 and t.data_ptr() % 4 == 0
        for t in tensors
    )
