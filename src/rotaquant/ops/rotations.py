"""The online rotations as torch sees them: registered out of place, with fakes, so that it compiles and captures them.

On the CPU each is its definition in `reference`; on a CUDA device it is a Triton kernel, for activations of 16 bits and
the rotations that `factors` can split. Float32 activations are rotated by their definition there too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotaquant.ops import checks, reference
from rotaquant.ops.factors import Factors
from rotaquant.ops.library import LIBRARY, codes_like, quantize_rows, register

_ROTATION = "Tensor left, int order, Tensor? right, float norm"
_GRID = "int bits, float clip_ratio, int? group_size, bool planar"
LIBRARY.define(f"rotate(Tensor x, {_ROTATION}, ScalarType dtype) -> Tensor")
LIBRARY.define(f"rotate_quantize(Tensor x, {_ROTATION}, {_GRID}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"gated_rotate_quantize(Tensor gate, Tensor up, str activation, {_ROTATION}, {_GRID}) -> (Tensor, Tensor)"
)


def hadamard(x: Tensor, factors: Factors, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate rows: `[m, n]` -> `[m, n]` in `dtype`, by default that of x. Section 4.1 of the paper, stage 1b.

    `factors` come from `rotation_factors`, for a Hadamard transform of the whole row, or from `mix_factors`, for a mix
    of heads (`head_mix`). Sums are float32; on a GPU, of a row's values to 16 bits after the first of two products.
    x has a gradient.
    """
    return torch.ops.rotaquant.rotate(x, *_fields(factors), dtype or x.dtype)


def head_mix(x: Tensor, factors: Factors, dtype: torch.dtype | None = None) -> Tensor:
    """`hadamard` by factors of `mix_factors`: heads are mixed at equal channel. Stage 1c of the paper."""
    return hadamard(x, factors, dtype)


def hadamard_quantize(
    x: Tensor, factors: Factors, bits: int, clip_ratio: float, group_size: int | None = None, planar: bool = True
) -> tuple[Tensor, Tensor]:
    """`hadamard`, then `quantize_rows`, in one read and one write: `[m, n]` -> codes and scales."""
    return torch.ops.rotaquant.rotate_quantize(x, *_fields(factors), bits, clip_ratio, group_size, planar)


def silu_mul_hadamard_quantize(
    gate: Tensor,
    up: Tensor,
    factors: Factors,
    bits: int,
    clip_ratio: float,
    group_size: int | None = None,
    planar: bool = True,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, each rounded to its dtype as a model does, then `hadamard_quantize`; rows may be strided."""
    return gated_hadamard_quantize(gate, up, "silu", factors, bits, clip_ratio, group_size, planar)


def gelu_mul_hadamard_quantize(
    gate: Tensor,
    up: Tensor,
    factors: Factors,
    bits: int,
    clip_ratio: float,
    group_size: int | None = None,
    planar: bool = True,
) -> tuple[Tensor, Tensor]:
    """`silu_mul_hadamard_quantize` with gelu by its tanh formula, which Gemma uses."""
    return gated_hadamard_quantize(gate, up, "gelu_tanh", factors, bits, clip_ratio, group_size, planar)


def gated_hadamard_quantize(
    gate: Tensor,
    up: Tensor,
    activation: str,
    factors: Factors,
    bits: int,
    clip_ratio: float,
    group_size: int | None = None,
    planar: bool = True,
) -> tuple[Tensor, Tensor]:
    """activation(gate) * up, then `hadamard_quantize`; `activation` is a key of `reference.ACTIVATIONS`."""
    return torch.ops.rotaquant.gated_rotate_quantize(
        gate, up, activation, *_fields(factors), bits, clip_ratio, group_size, planar
    )


def _fields(factors: Factors) -> tuple[Tensor, int, Tensor | None, float]:
    return factors.left, factors.order, factors.right, factors.norm


# --- fakes -----------------------------------------------------------------------------------------------------


def _rotate_fake(x: Tensor, left: Tensor, order: int, right: Tensor | None, norm: float, dtype: torch.dtype) -> Tensor:
    checks.rows("x", x)
    checks.rotation(x, left, order, right)
    return x.new_empty(x.shape, dtype=dtype)


def _rotate_quantize_fake(
    x: Tensor,
    left: Tensor,
    order: int,
    right: Tensor | None,
    norm: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor]:
    checks.rows("x", x)
    checks.rotation(x, left, order, right)
    checks.grid(x.shape[1], bits, clip_ratio, group_size, planar)
    return codes_like(x, group_size, planar)


def _gated_rotate_quantize_fake(
    gate: Tensor,
    up: Tensor,
    activation: str,
    left: Tensor,
    order: int,
    right: Tensor | None,
    norm: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor]:
    checks.rows("gate", gate)
    checks.alike("up", up, "gate", gate)
    checks.activation(activation)
    return _rotate_quantize_fake(gate, left, order, right, norm, bits, clip_ratio, group_size, planar)


# --- the definitions, and the kernels ---------------------------------------------------------------------------


def has_kernel(columns: int, dtype: torch.dtype, device: torch.device, order: int, right: Tensor | None) -> bool:
    """Whether a rotation of rows of `columns` by these factors runs on a kernel there, and not by its definition."""
    if device.type != "cuda":
        return False
    from rotaquant.ops import rotation_kernels

    return rotation_kernels.supports(columns, dtype, order, right, device)


def _by_kernel(x: Tensor, order: int, right: Tensor | None) -> bool:
    return has_kernel(x.shape[1], x.dtype, x.device, order, right)


def _rotate(x: Tensor, left: Tensor, order: int, right: Tensor | None, norm: float, dtype: torch.dtype) -> Tensor:
    checks.rows("x", x)
    checks.rotation(x, left, order, right)
    if not _by_kernel(x, order, right):
        return reference.rotate_by_factors(x, left[:order, :order], right, norm).to(dtype).contiguous()
    from rotaquant.ops import rotation_kernels

    return rotation_kernels.rotate(x, left, order, right, norm, dtype)


def _rotate_quantize(
    x: Tensor,
    left: Tensor,
    order: int,
    right: Tensor | None,
    norm: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor]:
    checks.rows("x", x)
    checks.rotation(x, left, order, right)
    checks.grid(x.shape[1], bits, clip_ratio, group_size, planar)
    if group_size is not None or not _by_kernel(x, order, right):
        rotated = _rotate(x, left, order, right, norm, reference.compute_dtype(x.dtype))
        return quantize_rows(rotated, bits, clip_ratio, group_size, planar)
    from rotaquant.ops import rotation_kernels

    return rotation_kernels.rotate_quantize(x, None, None, left, order, right, norm, bits, clip_ratio, planar)


def _gated_rotate_quantize(
    gate: Tensor,
    up: Tensor,
    activation: str,
    left: Tensor,
    order: int,
    right: Tensor | None,
    norm: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor]:
    checks.rows("gate", gate)
    checks.alike("up", up, "gate", gate)
    checks.activation(activation)
    if group_size is not None or not _by_kernel(gate, order, right):
        x = reference.ACTIVATIONS[activation](gate) * up
        return _rotate_quantize(x, left, order, right, norm, bits, clip_ratio, group_size, planar)
    checks.rotation(gate, left, order, right)
    checks.grid(gate.shape[1], bits, clip_ratio, group_size, planar)
    from rotaquant.ops import rotation_kernels

    return rotation_kernels.rotate_quantize(gate, up, activation, left, order, right, norm, bits, clip_ratio, planar)


# --- the gradient ----------------------------------------------------------------------------------------------


def _rotate_keep(
    ctx: Any, inputs: tuple[Tensor, Tensor, int, Tensor | None, float, torch.dtype], output: Tensor
) -> None:
    x, left, order, right, norm, _ = inputs
    ctx.save_for_backward(left, right)
    ctx.order, ctx.norm, ctx.dtype = order, norm, x.dtype


def _rotate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of x is the rotation by transposed factors; the factors are constants."""
    left, right = ctx.saved_tensors
    back = None if right is None else right.mT
    # Kernels take `left` in the dtype of what it meets.
    x_grad = torch.ops.rotaquant.rotate(grad, left.mT.to(grad.dtype), ctx.order, back, ctx.norm, ctx.dtype)
    return x_grad, None, None, None, None, None


register("rotate", _rotate, _rotate_fake)
register("rotate_quantize", _rotate_quantize, _rotate_quantize_fake)
register("gated_rotate_quantize", _gated_rotate_quantize, _gated_rotate_quantize_fake)
torch.library.register_autograd("rotaquant::rotate", _rotate_backward, setup_context=_rotate_keep, lib=LIBRARY)
