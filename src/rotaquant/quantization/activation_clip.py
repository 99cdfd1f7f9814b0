"""Search the clip ratio of an activation site: the least output error of the linears that read it.

Legend: X sampled inputs `[rows, in]` of a site, Ŵ the quantized weights that read it, stacked `[out, in]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotaquant.ops import reference
from rotaquant.recipe import IntFormat

ACTIVATION_GRID = tuple(round(1.0 - 0.05 * step, 2) for step in range(11))


def search_activation_clip(inputs: Tensor, weight: Tensor, target: Tensor, fmt: IntFormat) -> float:
    """The ratio of `ACTIVATION_GRID` whose quantized inputs give outputs nearest to `target`.

    inputs `[rows, in]`, weight `[out, in]` as the layer will hold it, target `[rows, out]`.
    """
    best_ratio, best_error = ACTIVATION_GRID[0], float("inf")
    for ratio in ACTIVATION_GRID:
        codes, scale = reference.quantize_rows(inputs, fmt.bits, ratio, fmt.group_size)
        output = reference.dequantize_groups(codes, scale, torch.float32) @ weight.T
        error = (output - target).square().sum(dtype=torch.float64).item()
        if error < best_error:
            best_ratio, best_error = ratio, error
    return best_ratio
