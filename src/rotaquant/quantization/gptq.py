"""GPTQ (arXiv 2210.17323): quantize columns one by one, pushing each column's error onto those still to come.

Legend: W a weight `[out, in]`, H = XᵀX `[in, in]` the Hessian of its inputs X, U the upper Cholesky factor of H⁻¹.
The error that column j leaves is spread over the columns k > j in proportion U[j, k] / U[j, j].
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotaquant.ops import reference
from rotaquant.quantization.weights import QuantizedWeight
from rotaquant.recipe import Gptq, IntFormat

_DAMPING_STEPS = 6  # each ten times the last: beyond that the Hessian tells nothing


def output_error(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> float:
    """Relative squared error of the layer's output, tr(D H Dᵀ) / tr(W H Wᵀ) with D = W - Ŵ."""
    weight = weight.float()
    difference = weight - quantized.dequantize()
    lost = torch.sum((difference @ hessian) * difference, dtype=torch.float64)
    whole = torch.sum((weight @ hessian) * weight, dtype=torch.float64)
    return (lost / whole.clamp_min(1e-30)).item()


def inverse_cholesky(hessian: Tensor, damping: float) -> Tensor | None:
    """U with UᵀU = (H + damping·mean(diag H)·I)⁻¹, damping raised tenfold while the factorisation fails.

    Returns float32 `[in, in]`, or `None` when no damping makes H positive definite.
    """
    H = hessian.double()
    diagonal = H.diagonal()
    mean = diagonal.mean()
    if not torch.isfinite(mean) or mean <= 0:
        return None
    eye = torch.eye(H.shape[0], dtype=H.dtype, device=H.device)
    for step in range(_DAMPING_STEPS):
        lower, failed = torch.linalg.cholesky_ex(H + eye * (damping * 10**step * mean))
        if failed.item() == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if failed.item() == 0 and bool(torch.isfinite(upper).all()):
                return upper.float()
    return None


def gptq(weight: Tensor, hessian: Tensor, fmt: IntFormat, scale: Tensor, settings: Gptq) -> QuantizedWeight | None:
    """Quantize `weight` on the grid of `scale` so that its output error over the Hessian is small.

    weight `[out, in]`, hessian `[in, in]`, scale `[out, groups]` as stored. Columns that never see an input (zero on
    H's diagonal) are rounded to nearest. Returns `None` when the Hessian cannot be factored.
    """
    W = weight.float().clone()
    H = hessian.float().clone()
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1.0
    columns = W.shape[1]
    column_scale = scale.float().repeat_interleave(columns // scale.shape[1], dim=1)
    order = torch.arange(columns, device=W.device)
    if settings.activation_order:
        order = torch.argsort(H.diagonal(), descending=True, stable=True)
        W, column_scale, H = W[:, order], column_scale[:, order], H[order][:, order]
    upper = inverse_cholesky(H, settings.damping)
    if upper is None:
        return None
    codes = _quantize_columns(W, upper, column_scale, fmt.bits, settings.block_size)
    return QuantizedWeight(codes[:, torch.argsort(order)], scale)


def _quantize_columns(W: Tensor, upper: Tensor, column_scale: Tensor, bits: int, block_size: int) -> Tensor:
    # Work on the transpose: a column of W is then one contiguous row.
    rows, scales = W.T.contiguous(), column_scale.T.contiguous()
    codes = torch.empty(rows.shape, dtype=torch.int8, device=W.device)
    for start in range(0, rows.shape[0], block_size):
        stop = min(start + block_size, rows.shape[0])
        errors = torch.empty(stop - start, rows.shape[1], device=W.device)
        for j in range(start, stop):
            code = reference.symmetric_codes(rows[j], scales[j], bits)
            codes[j] = code.to(torch.int8)
            errors[j - start] = (rows[j] - code * scales[j]) / upper[j, j]
            rows[j + 1 : stop].addr_(upper[j, j + 1 : stop], errors[j - start], alpha=-1.0)
        rows[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1.0)
    return codes.T.contiguous()
