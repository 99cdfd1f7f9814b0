"""Weight grids: clip search and round-to-nearest. Tensors in, tensors out.

Legend: W a weight `[out, in]`; codes are int8 `[out, in]`, scales `[out, groups]` in the dtype that is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaquant.ops import reference
from rotaquant.recipe import IntFormat

# The published numbers were made by a search over |error|**2.4. Squared error, the default of `clip_norm`, gave better
# models with GPTQ and the same without (docs/decisions.md).
CLIP_GRID = tuple(round(1.0 - 0.01 * step, 2) for step in range(80))
_SEARCHED_AT_A_TIME = 1 << 18


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes int8 `[out, in]` and scales `[out, groups]`: the weight is codes times the scale of their group."""

    codes: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the codes stand for, `[out, in]`."""
        return reference.dequantize_groups(self.codes, self.scale, dtype)


def weight_scale(weight: Tensor, fmt: IntFormat, dtype: torch.dtype) -> Tensor:
    """The step size of every row (or group of a row): `[out, in]` -> `[out, groups]` in `dtype`."""
    groups = weight.float().unflatten(-1, (-1, fmt.group_size or weight.shape[-1]))
    if fmt.clip_ratio == "search":
        # Rows are independent: a few at a time stay in the processor's cache through all ratios.
        parts = groups.split(max(1, _SEARCHED_AT_A_TIME // weight.shape[-1]))
        return torch.cat([_search_scale(part, fmt, dtype) for part in parts]).squeeze(-1)
    return reference.symmetric_scale(groups, fmt.bits, fmt.clip_ratio, dtype).squeeze(-1)


def _search_scale(groups: Tensor, fmt: IntFormat, dtype: torch.dtype) -> Tensor:
    best_scale = reference.symmetric_scale(groups, fmt.bits, CLIP_GRID[0], dtype)
    best_error = _grid_error(groups, best_scale, fmt)
    for ratio in CLIP_GRID[1:]:
        scale = reference.symmetric_scale(groups, fmt.bits, ratio, dtype)
        error = _grid_error(groups, scale, fmt)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _grid_error(groups: Tensor, scale: Tensor, fmt: IntFormat) -> Tensor:
    codes = reference.symmetric_codes(groups, scale, fmt.bits)
    error = codes.mul_(scale.float()).sub_(groups)
    if fmt.clip_norm == 2.0:
        return error.square_().sum(dim=-1, keepdim=True)
    return error.abs_().pow_(fmt.clip_norm).sum(dim=-1, keepdim=True)


def round_to_nearest(weight: Tensor, fmt: IntFormat, scale: Tensor) -> QuantizedWeight:
    """Quantize every weight to the nearest code of its stored scale."""
    groups = weight.float().unflatten(-1, (scale.shape[-1], -1))
    codes = reference.symmetric_codes(groups, scale.unsqueeze(-1), fmt.bits)
    return QuantizedWeight(codes.to(torch.int8).flatten(-2), scale)
