"""Every operation once in plain PyTorch: its definition, the CPU backend, the oracle of tests and the baseline.

Integers are exact here: a matrix product of codes is computed in float32 over stretches of columns that are short
enough for every partial sum to be an integer below 2**24, and the stretches are added in int32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

_FLOAT32_EXACT = 1 << 24


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales and transforms are computed: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- symmetric grids -------------------------------------------------------------------------------------------


def symmetric_scale(rows: Tensor, bits: int, clip_ratio: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Step sizes of symmetric grids over the last axis, as stored: `[..., n]` -> `[..., 1]` in `dtype`.

    A scale that is zero after its cast (a row of zeros, or underflow) is one.
    """
    scale = (rows.abs().amax(dim=-1, keepdim=True) * clip_ratio / ((1 << (bits - 1)) - 1)).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def symmetric_codes(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Integer codes of `rows` against stored scales, in the floating dtype of `rows` (round half to even)."""
    half = 1 << (bits - 1)
    return torch.round(rows / scale.to(rows.dtype)).clamp_(-half, half - 1)


def quantize_rows(x: Tensor, bits: int, clip_ratio: float, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize activations per token, or per group of a token: `[..., n]` -> int8 `[..., n]`, `[..., groups]`.

    Scales are in `compute_dtype(x.dtype)`. A row that is not finite keeps a scale that is not, so that it spoils no
    other row and is not mistaken for data.
    """
    x = x.to(compute_dtype(x.dtype))
    grouped = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    scale = symmetric_scale(grouped, bits, clip_ratio, x.dtype)
    codes = symmetric_codes(grouped, scale, bits)
    return torch.nan_to_num_(codes, nan=0.0).to(torch.int8).flatten(-2), scale.squeeze(-1)


def dequantize_groups(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times the scale of their group: int8 `[..., n]`, `[..., groups]` -> `[..., n]` in `dtype`."""
    compute = compute_dtype(dtype)
    grouped = codes.to(compute).unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.to(compute).unsqueeze(-1)).flatten(-2).to(dtype)


# --- asymmetric grids ------------------------------------------------------------------------------------------


def quantize_asymmetric(x: Tensor, bits: int, clip_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows with an offset: `[..., n]` -> uint8 `[..., n]`, fp16 scale and lowest value `[..., 1]`.

    Scale and offset saturate at fp16's range and the codes are taken against the stored values; x ~ codes*scale+lo.
    A constant row has scale one and comes back as its value (in fp16).
    """
    x = x.to(compute_dtype(x.dtype))
    top = (1 << bits) - 1
    low, high = x.aminmax(dim=-1, keepdim=True)
    center, half_width = (low + high) / 2, clip_ratio * (high - low) / 2
    scale = _saturating_half(2 * half_width / top)
    flat = scale == 0
    scale = torch.where(flat, torch.ones_like(scale), scale)
    lowest = _saturating_half(torch.where(flat, center, center - half_width))
    codes = torch.round((x - lowest.to(x.dtype)) / scale.to(x.dtype)).clamp_(0, top)
    return torch.nan_to_num_(codes, nan=0.0).to(torch.uint8), scale, lowest


def dequantize_asymmetric(codes: Tensor, scale: Tensor, lowest: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `quantize_asymmetric`: `codes*scale + lowest` in `dtype`."""
    compute = compute_dtype(dtype)
    return (codes.to(compute) * scale.to(compute) + lowest.to(compute)).to(dtype)


def _saturating_half(x: Tensor) -> Tensor:
    limit = torch.finfo(torch.float16).max
    return x.clamp(-limit, limit).to(torch.float16)


# --- norms -----------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Rows divided by their root mean square, in the dtype of x: computed in `compute_dtype`, as stock norms do."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


# --- rotations -------------------------------------------------------------------------------------------------


def sylvester_transform(x: Tensor) -> Tensor:
    """Multiply the last axis (a power of two) by the orthonormal Sylvester matrix, by butterflies."""
    size, span = x.shape[-1], 1
    while span < size:
        pairs = x.unflatten(-1, (size // (2 * span), 2, span))
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((even + odd, even - odd), dim=-2).flatten(-3)
        span *= 2
    return x * (size**-0.5)


def rotate_rows(x: Tensor, base: Tensor, blocks: int) -> Tensor:
    """x (I_blocks (x) base (x) Sylvester) over the last axis; `base` is orthonormal `[order, order]`.

    Computed in `compute_dtype`, returned so: a quantizer that follows wants the unrounded values.
    """
    compute = compute_dtype(x.dtype)
    order = base.shape[0]
    width = x.shape[-1]
    x = x.to(compute).unflatten(-1, (blocks, order, width // (blocks * order)))
    if order > 1:
        x = torch.matmul(base.to(compute).mT, x)
    if x.shape[-1] > 1:
        x = _sylvester_by_products(x)
    return x.flatten(-3)


def mix_rows(x: Tensor, matrix: Tensor, shards: int = 1) -> Tensor:
    """x (I_shards (x) matrix (x) I) over the last axis.

    `matrix` `[k, k]` mixes, within each shard, k stretches of channels at equal position.
    """
    compute = compute_dtype(x.dtype)
    stretches = x.to(compute).unflatten(-1, (shards, matrix.shape[0], -1))
    return torch.matmul(matrix.to(compute).mT, stretches).flatten(-3)


def rotate_by_factors(x: Tensor, left: Tensor, right: Tensor | None, norm: float) -> Tensor:
    """norm * left X (H_C ⊗ right), each row of x as X `[A, C*B]`: the rotations of `factors`, in `compute_dtype`.

    `left` `[A, A]`, `right` `[B, B]` and H_C Sylvester's matrix; without `right`, norm * left X.
    """
    compute = compute_dtype(x.dtype)
    tile = x.to(compute).unflatten(-1, (left.shape[0], -1))
    tile = torch.matmul(left.to(compute), tile)
    if right is not None:
        chunks = tile.unflatten(-1, (-1, right.shape[0])) @ right.to(compute)
        butterflies = _sylvester(chunks.shape[-2], compute, x.device) * chunks.shape[-2] ** 0.5
        tile = torch.matmul(butterflies, chunks).flatten(-2)
    return tile.flatten(-2) * norm


# Gates of feed-forward layers. "gelu_tanh" is gelu by its tanh formula.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}

_SYLVESTER_TILE = 64


def _sylvester_by_products(x: Tensor) -> Tensor:
    """The Sylvester transform as dense products over factors of at most 64: far fewer passes than butterflies."""
    size = x.shape[-1]
    shape = x.shape
    left = 1
    while size > 1:
        tile = min(size, _SYLVESTER_TILE)
        matrix = _sylvester(tile, x.dtype, x.device)
        if size == tile:
            x = x.reshape(-1, left, tile) @ matrix
        else:
            x = torch.matmul(matrix, x.reshape(-1, left, tile, size // tile))
        left, size = left * tile, size // tile
    return x.reshape(shape)


def _sylvester(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return sylvester_transform(torch.eye(size, dtype=dtype, device=device))


# --- attention -------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention: `[batch, heads, m, d]` over `[batch, kv_heads, n, d]` -> `[batch, heads, m, d]`.

    `mask` is boolean (true: attend) or added to the scores; without one every query sees every key. `softcap` bounds
    scores by cap·tanh(score/cap); `sinks` `[heads]` are scores of a key without value. Computed in `compute_dtype`.
    """
    compute = compute_dtype(query.dtype)
    heads, length = query.shape[1], keys.shape[2]
    keys, values = (x.to(compute).repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
    scores = query.to(compute) @ keys.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(compute).min)
    elif mask is not None:
        scores = scores + mask.to(compute)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(compute).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return (weights @ values).to(query.dtype)


# --- products --------------------------------------------------------------------------------------------------


def int_matmul(a: Tensor, a_bits: int, b: Tensor, b_bits: int) -> Tensor:
    """Exact product of codes: int8 `[m, k]` and int8 `[n, k]` -> int32 `[m, n]`."""
    largest = 1 << (a_bits - 1 + b_bits - 1)
    stretch = _FLOAT32_EXACT // largest
    columns = a.shape[-1]
    if columns <= stretch:
        return (a.float() @ b.float().T).to(torch.int32)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for start in range(0, columns, stretch):
        part = slice(start, start + stretch)
        total += (a[:, part].float() @ b[:, part].float().T).to(torch.int32)
    return total


def quantized_matmul(
    codes: Tensor, token_scale: Tensor, weight: Tensor, weight_scale: Tensor, bits: tuple[int, int]
) -> Tensor:
    """Scaled product of activation and weight codes.

    codes int8 `[m, k]`, token_scale `[m, groups or 1]`, weight int8 `[n, k]`, weight_scale `[n, groups or 1]`, bits of
    activations and weights -> `[m, n]` in the dtype of `token_scale`. Per group an exact int32 accumulator, then sums
    in that dtype in the order of the groups.
    """
    groups = max(token_scale.shape[-1], weight_scale.shape[-1])
    size = codes.shape[-1] // groups
    token_scale = token_scale.expand(-1, groups)
    weight_scale = weight_scale.to(token_scale.dtype).expand(-1, groups)
    total: Tensor | None = None
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        sums = int_matmul(codes[:, part], bits[0], weight[:, part], bits[1]).to(token_scale.dtype)
        scaled = sums * token_scale[:, group, None] * weight_scale[None, :, group]
        total = scaled if total is None else total + scaled
    assert total is not None
    return total
