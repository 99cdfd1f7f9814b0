"""How a quantized linear runs on kernels: which layouts have them, and its three steps - rotate, quantize, multiply.

An input is encoded once, as codes and scales of its rows (or rotated, where activations stay float), and meets the
weight of one linear, or of several that read the same input, in one product.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rotaquant import ops
from rotaquant.hadamard import Factorisation
from rotaquant.ops.factors import Factors, mix_factors, rotation_factors
from rotaquant.ops.library import triton_missing
from rotaquant.ops.rotations import has_kernel
from rotaquant.recipe import IntFormat
from rotaquant.rotation.plan import HeadMix
from rotaquant.runtime.layout import LinearLayout

logger = logging.getLogger(__name__)

# Asked once: torch.compile cannot trace the question.
_TRITON_MISSING = triton_missing()
_WIDEST_INPUT = 65536
_GROUP_UNIT = 8

Grid = tuple[int, float, int | None, bool]


@dataclass(frozen=True, eq=False)
class KernelWeight:
    """A weight as kernels read it: words of 4 or 8 bit codes `[out, words]`, scales `[out, groups]`, bias `[out]`."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None


def device_has_kernels(device: torch.device) -> bool:
    """Whether there are kernels for a device in this installation."""
    return device.type == "cuda" and _TRITON_MISSING is None


def kernels_run_on(x: Tensor) -> bool:
    """Whether operations on `x` have kernels; float64 is for checking, on the definition."""
    return device_has_kernels(x.device) and x.dtype != torch.float64 and x.numel() > 0


def has_product(layout: LinearLayout, columns: int) -> bool:
    """Whether there is a kernel for the product of a linear of this layout with inputs of `columns`."""
    weights, activations = layout.weights, layout.activations
    if weights is None or columns > _WIDEST_INPUT:
        return False
    if activations is None:
        return weights.bits <= 4 and _is_of_whole_words(weights)
    return _is_of_whole_words(weights) and _is_of_whole_words(activations)


def _is_of_whole_words(fmt: IntFormat) -> bool:
    """Whether groups are whole words of packed weights: only there do planes of groups lie side by side."""
    return fmt.group_size is None or fmt.group_size % _GROUP_UNIT == 0


def kernel_bits(weights: IntFormat) -> int:
    """The bits of a packed weight that kernels read in place of those stored."""
    return 4 if weights.bits <= 4 else 8


@lru_cache(maxsize=64)
def factors_on(
    transform: Factorisation | HeadMix, columns: int, device: torch.device, dtype: torch.dtype
) -> Factors | None:
    """The matrices of an online rotation as kernels take them, or `None` where they cannot apply it."""
    # All layers share them, in whatever mode the first of them was called.
    with torch.inference_mode(False):
        if isinstance(transform, HeadMix):
            factors = mix_factors(transform.matrix(), transform.shards, columns)
        else:
            factors = rotation_factors(transform)
        _tell_what_is_slow(transform, factors, columns, device, dtype)
        return None if factors is None else factors.to(device, dtype)


def _tell_what_is_slow(
    transform: Factorisation | HeadMix,
    factors: Factors | None,
    columns: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Say it where an online rotation has no kernel on a device that has kernels; asked once for each."""
    if not device_has_kernels(device):
        return
    if factors is None:
        logger.warning("no kernel applies this rotation, which runs by its definition: %s", transform.describe())
    elif dtype.itemsize > 2:
        logger.warning("rotations of %s run by their definition; kernels take a model in bfloat16 or float16", dtype)
    elif device.type == "cuda" and not has_kernel(columns, dtype, device, factors.order, factors.right):
        logger.warning(
            "the kernel of this rotation wants more shared memory than this device has; it runs by its definition: %s",
            transform.describe(),
        )


def rotate(x: Tensor, factors: Factors) -> Tensor:
    """Rows `[m, n]` rotated, in their own dtype."""
    return ops.hadamard(x, factors)


def encode(x: Tensor, layout: LinearLayout, factors: Factors | None) -> tuple[Tensor, ...]:
    """Rows `[m, n]` as `multiply` takes them, rotated by `factors` where there are some."""
    if layout.activations is None:
        return (x if factors is None else ops.hadamard(x, factors),)
    grid = _grid(layout)
    return ops.quantize_rows(x, *grid) if factors is None else ops.hadamard_quantize(x, factors, *grid)


def encode_gated(
    gate: Tensor, up: Tensor, activation: str, layout: LinearLayout, factors: Factors
) -> tuple[Tensor, ...]:
    """`encode` of act(gate) * up, rounded where torch rounds."""
    return ops.gated_hadamard_quantize(gate, up, activation, factors, *_grid(layout))


def _grid(layout: LinearLayout) -> Grid:
    weights, activations = layout.weights, layout.activations
    assert weights is not None and activations is not None and isinstance(activations.clip_ratio, float)
    return activations.bits, activations.clip_ratio, activations.group_size, kernel_bits(weights) == 4


def encode_and_multiply(x: Tensor, weight: KernelWeight, layout: LinearLayout) -> Tensor:
    """`multiply` of rows `[m, n]` that are quantized as they are, not rotated: `[m, out]` in the dtype of x."""
    if layout.activations is None:
        return multiply((x,), weight, layout, x.dtype)
    bits, clip_ratio, group_size, packed = _grid(layout)
    return ops.quantize_matmul(
        x, bits, clip_ratio, group_size, 4 if packed else 8, weight.packed, weight.scale, weight.bias
    )


def multiply(encoded: tuple[Tensor, ...], weight: KernelWeight, layout: LinearLayout, dtype: torch.dtype) -> Tensor:
    """The scaled product of an encoded input `[m, ...]` with a weight, plus its bias: `[m, out]` in `dtype`."""
    if layout.activations is None:
        (x,) = encoded
        return ops.w4a16_matmul(x, weight.packed, weight.scale, weight.bias)
    assert layout.weights is not None
    codes, token_scale = encoded
    product = ops.int4_matmul if kernel_bits(layout.weights) == 4 else ops.int8_matmul
    return product(codes, token_scale, weight.packed, weight.scale, weight.bias, dtype)
