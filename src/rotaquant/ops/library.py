"""The operations as torch sees them: registered out of place, with fakes, so that compiling and capturing know them.

On the CPU each is its definition in `reference`; on a CUDA device it is a Triton kernel. Kernels are imported when the
first one runs: Triton is no requirement of the package. Operands that do not fit raise `RotaquantError` (`checks`),
the same on every device. The product of float activations has a gradient; integers have none.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from rotaquant.ops import checks, packing, reference
from rotaquant.ops.product_plans import MOST_SINGLE

logger = logging.getLogger(__name__)

LIBRARY = torch.library.Library("rotaquant", "DEF")
_PRODUCT = (
    "(Tensor codes, Tensor token_scale, Tensor weight_packed, Tensor weight_scale, Tensor? bias, ScalarType dtype)"
    " -> Tensor"
)
LIBRARY.define("quantize_rows(Tensor x, int bits, float clip_ratio, int? group_size, bool planar) -> (Tensor, Tensor)")
LIBRARY.define(
    "rmsnorm_quantize(Tensor x, Tensor? residual, float eps, int bits, float clip_ratio, int? group_size, bool planar)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define("w4a16_matmul(Tensor x, Tensor weight_packed, Tensor weight_scale, Tensor? bias) -> Tensor")
LIBRARY.define(
    "quantize_matmul(Tensor x, int bits, float clip_ratio, int? group_size, int weight_bits, Tensor weight_packed,"
    " Tensor weight_scale, Tensor? bias) -> Tensor"
)
LIBRARY.define(f"int4_matmul{_PRODUCT}")
LIBRARY.define(f"int8_matmul{_PRODUCT}")


@lru_cache(maxsize=1)
def triton_missing() -> str | None:
    """Why kernels cannot be had in this installation, said once to the log too, or `None` if they can."""
    if importlib.util.find_spec("triton") is None:
        reason = "the package triton is not installed (pip install triton)"
        if torch.cuda.is_available():
            logger.warning("products of codes run by their definition, right but slow: %s", reason)
        return reason
    return None


def quantize_rows(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None = None, planar: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantize activations per token or group: `[m, n]` -> int8 `[m, planes, plane]`, float32 `[m, groups]`.

    `reference.quantize_rows` with its codes in the order of `packing.to_planes`: `planar` for a product with 4-bit
    weights, else for one with 8-bit weights.
    """
    return torch.ops.rotaquant.quantize_rows(x, bits, clip_ratio, group_size, planar)


def rmsnorm_quantize(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None = None,
    planar: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add `residual` `[m, n]` to x (if any), normalise rows by their root mean square, quantize as `quantize_rows`.

    Gives codes, scales and the sum; `residual` has the dtype of x. A norm's gain is folded into the weights that read
    it.
    """
    return torch.ops.rotaquant.rmsnorm_quantize(x, residual, eps, bits, clip_ratio, group_size, planar)


def w4a16_matmul(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Product of float activations and packed 4-bit weights: `[m, k]`, int32 `[n, words]` -> `[m, n]` as x.

    `weight_scale` is `[n, 1 or groups]`. On a GPU x has 16 bits and sums are float32. x and bias have gradients.
    """
    return torch.ops.rotaquant.w4a16_matmul(x, weight_packed, weight_scale, bias)


def int4_matmul(
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Scaled product with packed 4-bit weights: codes int8 `[m, 2, plane]`, int32 `[n, words]` -> `[m, n]` in `dtype`.

    `reference.quantized_matmul`: exact int32 sums, then float32 times token scale `[m, 1 or groups]` times weight scale
    `[n, 1 or groups]`, plus bias `[n]`, then the cast. With groups the inputs are a multiple of 8: whole words.
    """
    return torch.ops.rotaquant.int4_matmul(codes, token_scale, weight_packed, weight_scale, bias, dtype)


def int8_matmul(
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As `int4_matmul` with 8-bit weights: codes int8 `[m, 1, plane]`."""
    return torch.ops.rotaquant.int8_matmul(codes, token_scale, weight_packed, weight_scale, bias, dtype)


def quantize_matmul(
    x: Tensor,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    weight_bits: int,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """`quantize_rows`, then `int4_matmul` or `int8_matmul` by `weight_bits`: `[m, k]` -> `[m, n]` as x.

    On a GPU one kernel for single tokens that are not too wide, two otherwise; the numbers are the same.
    """
    return torch.ops.rotaquant.quantize_matmul(
        x, bits, clip_ratio, group_size, weight_bits, weight_packed, weight_scale, bias
    )


# --- fakes -----------------------------------------------------------------------------------------------------


def _quantize_rows_fake(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    checks.rows("x", x)
    checks.grid(x.shape[1], bits, clip_ratio, group_size, planar)
    return codes_like(x, group_size, planar)


def codes_like(x: Tensor, group_size: int | None, planar: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows like x, without values."""
    rows, columns = x.shape
    codes = x.new_empty((rows, 2 if planar else 1, packing.plane_columns(columns, planar)), dtype=torch.int8)
    scales = x.new_empty((rows, columns // (group_size or columns)), dtype=reference.compute_dtype(x.dtype))
    return codes, scales


def _rmsnorm_quantize_fake(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if residual is not None:
        checks.alike("residual", residual, "x", x)
    return *_quantize_rows_fake(x, bits, clip_ratio, group_size, planar), x.new_empty(x.shape)


def _w4a16_fake(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    checks.float_product(x, weight_packed, weight_scale, bias)
    return x.new_empty((x.shape[0], weight_packed.shape[0]))


def _product_fake(
    weight_bits: int,
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    checks.integer_product(codes, token_scale, weight_packed, weight_scale, bias, weight_bits, dtype)
    return codes.new_empty((codes.shape[0], weight_packed.shape[0]), dtype=dtype)


def _quantize_matmul_fake(
    x: Tensor,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    weight_bits: int,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    checks.quantizing_product(x, bits, clip_ratio, group_size, weight_bits, weight_packed, weight_scale, bias)
    return x.new_empty((x.shape[0], weight_packed.shape[0]))


# --- the definitions, and the kernels ----------------------------------------------------------------------------


def _quantize_rows(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    checks.rows("x", x)
    checks.grid(x.shape[1], bits, clip_ratio, group_size, planar)
    return _quantize_checked(x, bits, clip_ratio, group_size, planar)


def _quantize_checked(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    if not _by_kernel(x):
        return _quantize_by_definition(x, bits, clip_ratio, group_size, planar)
    from rotaquant.ops import quantize_kernels

    return quantize_kernels.quantize_rows(x, bits, clip_ratio, group_size, planar)


def _by_kernel(x: Tensor) -> bool:
    # Kernels compute in float32; float64 is for checking.
    return x.is_cuda and x.dtype != torch.float64


def _quantize_by_definition(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    codes, scale = reference.quantize_rows(x, bits, clip_ratio, group_size)
    return packing.to_planes(codes, planar), scale.contiguous()


def _rmsnorm_quantize(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    checks.rows("x", x)
    checks.grid(x.shape[1], bits, clip_ratio, group_size, planar)
    if residual is not None:
        checks.alike("residual", residual, "x", x)
    if _by_kernel(x):
        from rotaquant.ops import quantize_kernels

        codes, scale, total = quantize_kernels.rmsnorm_quantize(x, residual, eps, bits, clip_ratio, group_size, planar)
    else:
        total = x if residual is None else x + residual
        normed = reference.rms_norm(total, eps)
        codes, scale = _quantize_by_definition(normed, bits, clip_ratio, group_size, planar)
    # An operation's outputs are never its inputs.
    return codes, scale, x.clone(memory_format=torch.contiguous_format) if residual is None else total.contiguous()


def _w4a16(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    checks.float_product(x, weight_packed, weight_scale, bias)
    if not x.is_cuda or x.element_size() != 2:
        weight = _float_weight(weight_packed, weight_scale, x.shape[1], x.dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    from rotaquant.ops import weight_only_kernels

    return weight_only_kernels.product(x, weight_packed, weight_scale, bias)


def _float_weight(weight_packed: Tensor, weight_scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return reference.dequantize_groups(packing.unpack_weight(weight_packed, 4, columns), weight_scale, dtype)


def _product(
    weight_bits: int,
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    checks.integer_product(codes, token_scale, weight_packed, weight_scale, bias, weight_bits, dtype)
    return _multiply_checked(weight_bits, codes, token_scale, weight_packed, weight_scale, bias, dtype)


def _multiply_checked(
    weight_bits: int,
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if _by_kernel(token_scale):
        from rotaquant.ops import product_kernels

        return product_kernels.product(codes, token_scale, weight_packed, weight_scale, bias, dtype)
    columns = codes.shape[1] * codes.shape[2]
    weight = packing.unpack_weight(weight_packed, weight_bits, columns)
    rows = packing.from_planes(codes, columns)
    out = reference.quantized_matmul(rows, token_scale, weight, weight_scale, (8, weight_bits))
    return (out if bias is None else out + bias.to(out.dtype)).to(dtype)


def _quantize_matmul(
    x: Tensor,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    weight_bits: int,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    checks.quantizing_product(x, bits, clip_ratio, group_size, weight_bits, weight_packed, weight_scale, bias)
    if _by_kernel(x) and group_size is None and len(x) <= MOST_SINGLE:
        from rotaquant.ops import product_kernels

        out = product_kernels.quantizing_product(x, weight_packed, weight_scale, bias, bits, clip_ratio, weight_bits)
        if out is not None:
            return out
    codes, scale = _quantize_checked(x, bits, clip_ratio, group_size, weight_bits == 4)
    return _multiply_checked(weight_bits, codes, scale, weight_packed, weight_scale, bias, x.dtype)


# --- gradients -------------------------------------------------------------------------------------------------


def _w4a16_keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight_packed, weight_scale, bias = inputs
    ctx.save_for_backward(weight_packed, weight_scale)
    ctx.columns, ctx.bias_dtype = x.shape[1], None if bias is None else bias.dtype


def _w4a16_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    """Gradients of x and bias: codes have none, and scales belong to their codes."""
    x_grad = bias_grad = None
    if ctx.needs_input_grad[0]:
        # Widened anew: to keep it would undo what packing saves.
        weight_packed, weight_scale = ctx.saved_tensors
        x_grad = grad @ _float_weight(weight_packed, weight_scale, ctx.columns, grad.dtype)
    if ctx.needs_input_grad[3]:
        bias_grad = grad.sum(0).to(ctx.bias_dtype)
    return x_grad, None, None, bias_grad


# --- registration ----------------------------------------------------------------------------------------------


def register(name: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    """Register an operation's implementation, one for all devices, and its fake."""
    torch.library.register_fake(f"rotaquant::{name}", fake, lib=LIBRARY)
    # Torch would differentiate a definition, and no kernel: what has a gradient has one by `register_autograd`.
    ungraded = torch.no_grad()(run)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, ungraded, device)


register("quantize_rows", _quantize_rows, _quantize_rows_fake)
register("rmsnorm_quantize", _rmsnorm_quantize, _rmsnorm_quantize_fake)
register("quantize_matmul", _quantize_matmul, _quantize_matmul_fake)
register("w4a16_matmul", _w4a16, _w4a16_fake)
register("int4_matmul", partial(_product, 4), partial(_product_fake, 4))
register("int8_matmul", partial(_product, 8), partial(_product_fake, 8))
torch.library.register_autograd("rotaquant::w4a16_matmul", _w4a16_backward, setup_context=_w4a16_keep, lib=LIBRARY)
