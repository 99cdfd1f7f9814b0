"""The operations as torch sees them: registered out of place, with fakes, so that compiling and capturing know them.

On the CPU each is its definition in `reference`; on a CUDA device it is a Triton kernel. Kernels are imported when the
first one runs: Triton is no requirement of the package.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache

import torch
from torch import Tensor

from rotaquant.ops import packing, reference

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

    Gives codes, scales and the sum, in the dtype of x. A norm's gain is folded into the weights that read it.
    """
    return torch.ops.rotaquant.rmsnorm_quantize(x, residual, eps, bits, clip_ratio, group_size, planar)


def w4a16_matmul(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Product of float activations and packed 4-bit weights: `[m, k]`, int32 `[n, words]` -> `[m, n]` as x.

    `weight_scale` is `[n, 1 or groups]`. On a GPU x has 16 bits and sums are float32.
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
    `[n, 1 or groups]`, plus bias `[n]`, then the cast.
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


# --- fakes -----------------------------------------------------------------------------------------------------


def _quantize_rows_fake(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty((rows, 2 if planar else 1, packing.plane_columns(columns, planar)), dtype=torch.int8)
    return codes, x.new_empty((rows, columns // (group_size or columns)), dtype=torch.float32)


def _product_fake(
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((codes.shape[0], weight_packed.shape[0]), dtype=dtype)


def _rmsnorm_quantize_fake(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_quantize_rows_fake(x, bits, clip_ratio, group_size, planar), x.new_empty(x.shape)


def _w4a16_fake(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight_packed.shape[0]))


torch.library.register_fake("rotaquant::quantize_rows", _quantize_rows_fake, lib=LIBRARY)
torch.library.register_fake("rotaquant::rmsnorm_quantize", _rmsnorm_quantize_fake, lib=LIBRARY)
torch.library.register_fake("rotaquant::w4a16_matmul", _w4a16_fake, lib=LIBRARY)
for _name in ("int4_matmul", "int8_matmul"):
    torch.library.register_fake(f"rotaquant::{_name}", _product_fake, lib=LIBRARY)


# --- the definitions -------------------------------------------------------------------------------------------


def _quantize_rows_cpu(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    codes, scale = reference.quantize_rows(x, bits, clip_ratio, group_size)
    return packing.to_planes(codes, planar), scale


def _product_cpu(weight_bits: int) -> object:
    def run(
        codes: Tensor,
        token_scale: Tensor,
        weight_packed: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        columns = codes.shape[1] * codes.shape[2]
        weight = packing.unpack_weight(weight_packed, weight_bits, columns)
        rows = packing.from_planes(codes, columns)
        out = reference.quantized_matmul(rows, token_scale, weight, weight_scale, (8, weight_bits))
        return (out if bias is None else out + bias.to(out.dtype)).to(dtype)

    return run


def _rmsnorm_quantize_cpu(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # An operation's outputs are never its inputs.
    total = x.clone() if residual is None else x + residual
    return *_quantize_rows_cpu(reference.rms_norm(total, eps), bits, clip_ratio, group_size, planar), total


def _w4a16_cpu(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    codes = packing.unpack_weight(weight_packed, 4, x.shape[1])
    weight = reference.dequantize_groups(codes, weight_scale, x.dtype)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


LIBRARY.impl("quantize_rows", _quantize_rows_cpu, "CPU")
LIBRARY.impl("rmsnorm_quantize", _rmsnorm_quantize_cpu, "CPU")
LIBRARY.impl("w4a16_matmul", _w4a16_cpu, "CPU")
LIBRARY.impl("int4_matmul", _product_cpu(4), "CPU")
LIBRARY.impl("int8_matmul", _product_cpu(8), "CPU")


# --- the kernels -----------------------------------------------------------------------------------------------


def _quantize_rows_cuda(
    x: Tensor, bits: int, clip_ratio: float, group_size: int | None, planar: bool
) -> tuple[Tensor, Tensor]:
    from rotaquant.ops import quantize_kernels

    return quantize_kernels.quantize_rows(x, bits, clip_ratio, group_size, planar)


def _product_cuda(
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    from rotaquant.ops import product_kernels

    return product_kernels.product(codes, token_scale, weight_packed, weight_scale, bias, dtype)


def _rmsnorm_quantize_cuda(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    planar: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from rotaquant.ops import quantize_kernels

    codes, scale, total = quantize_kernels.rmsnorm_quantize(x, residual, eps, bits, clip_ratio, group_size, planar)
    return codes, scale, x.clone() if residual is None else total


def _w4a16_cuda(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    if x.element_size() != 2:
        return _w4a16_cpu(x, weight_packed, weight_scale, bias)
    from rotaquant.ops import weight_only_kernels

    return weight_only_kernels.product(x, weight_packed, weight_scale, bias)


LIBRARY.impl("quantize_rows", _quantize_rows_cuda, "CUDA")
LIBRARY.impl("rmsnorm_quantize", _rmsnorm_quantize_cuda, "CUDA")
LIBRARY.impl("w4a16_matmul", _w4a16_cuda, "CUDA")
LIBRARY.impl("int4_matmul", _product_cuda, "CUDA")
LIBRARY.impl("int8_matmul", _product_cuda, "CUDA")
