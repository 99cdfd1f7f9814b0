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

_LIBRARY = torch.library.Library("rotaquant", "DEF")
_PRODUCT = (
    "(Tensor codes, Tensor token_scale, Tensor weight_packed, Tensor weight_scale, Tensor? bias, ScalarType dtype)"
    " -> Tensor"
)
_LIBRARY.define("quantize_rows(Tensor x, int bits, float clip_ratio, int? group_size, bool planar) -> (Tensor, Tensor)")
_LIBRARY.define(f"int4_matmul{_PRODUCT}")
_LIBRARY.define(f"int8_matmul{_PRODUCT}")


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


torch.library.register_fake("rotaquant::quantize_rows", _quantize_rows_fake, lib=_LIBRARY)
for _name in ("int4_matmul", "int8_matmul"):
    torch.library.register_fake(f"rotaquant::{_name}", _product_fake, lib=_LIBRARY)


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


_LIBRARY.impl("quantize_rows", _quantize_rows_cpu, "CPU")
_LIBRARY.impl("int4_matmul", _product_cpu(4), "CPU")
_LIBRARY.impl("int8_matmul", _product_cpu(8), "CPU")


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


_LIBRARY.impl("quantize_rows", _quantize_rows_cuda, "CUDA")
_LIBRARY.impl("int4_matmul", _product_cuda, "CUDA")
_LIBRARY.impl("int8_matmul", _product_cuda, "CUDA")
