"""The operations on the paged cache in plain PyTorch: their definitions, see `cache_layout` for the pages.

A sequence is a row of a table: its pages' offsets, in bytes, from the start of `pages` uint8 `[n, page_bytes]`. A
token's slot is its place in its sequence: it lies in page `slot // PAGE_TOKENS` of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotaquant.ops import reference
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat, pack_codes, unpack_codes

Clips = tuple[float, float]

# How channels are paired (see `Rope`), or that they are not turned.
ROPE_STYLES = ("none", "half", "half-once", "interleaved", "interleaved-from-halves")


def append(
    pages: Tensor,
    table: Tensor,
    first: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    form: PageFormat,
    clips: Clips,
) -> None:
    """Quantize keys (rotated) and values `[batch, length, kv_heads, head_dim]` into slots `first` `[batch]` onwards.

    `table` int64 `[batch, columns]`; `positions` int32 `[batch, length]` where the format has them.
    """
    batch, length = keys.shape[:2]
    slots = first.long()[:, None] + torch.arange(length, device=keys.device)
    page = (table.gather(1, slots // PAGE_TOKENS) // form.page_bytes).flatten()
    token = (slots % PAGE_TOKENS).flatten()
    key_codes, value_codes, key_parameters, value_parameters = form.split(pages)
    sides = (
        (keys, key_codes, key_parameters, form.key_bits, clips[0]),
        (values, value_codes, value_parameters, form.value_bits, clips[1]),
    )
    for x, held, parameters, bits, clip_ratio in sides:
        codes, scale, lowest = reference.quantize_asymmetric(x.flatten(0, 1), bits, clip_ratio)
        held[page, :, token] = pack_codes(codes, bits)
        parameters[page, :, token] = torch.cat((scale, lowest), dim=-1)
    if form.has_positions:
        assert positions is not None
        form.positions(pages)[page, token] = positions.expand(batch, length).flatten().to(torch.int32)


def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """RoPE as models apply it, in the dtype of x: `[batch, length, heads, head_dim]`, angles `[batch or 1, length, n]`.

    `style` is that of `Rope`; channels beyond the angles' are left as they are.
    """
    if style == "half-once":
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    elif style == "interleaved-from-halves":
        cos, sin = (part.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for part in (cos, sin))
    turned, still = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    if style.startswith("interleaved"):
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[:, :, None] + other * sin[:, :, None], still), dim=-1)


def read(
    pages: Tensor,
    table: Tensor,
    start: int,
    stop: int,
    form: PageFormat,
    dtype: torch.dtype,
    heads: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values in slots `start` to `stop` of every sequence, `[batch, heads, stop - start, head_dim]`.

    `heads` is the first key/value head and the one after the last; all of them without.
    """
    page, token = _places(table, start, stop, form)
    # What is not asked for is not gathered.
    held_heads = [part[:, slice(*(heads or (0, form.kv_heads)))] for part in form.split(pages)]
    key_codes, value_codes, key_parameters, value_parameters = held_heads
    sides = ((key_codes, key_parameters, form.key_bits), (value_codes, value_parameters, form.value_bits))
    out = []
    for held, parameters, bits in sides:
        codes = unpack_codes(held[page, :, token], bits, form.head_dim)
        scale, lowest = parameters[page, :, token].split(1, dim=-1)
        out.append(reference.dequantize_asymmetric(codes, scale, lowest, dtype).transpose(1, 2))
    return out[0], out[1]


def read_positions(pages: Tensor, table: Tensor, start: int, stop: int, form: PageFormat) -> Tensor:
    """The positions of the tokens in slots `start` to `stop`, `[batch, stop - start]`."""
    page, token = _places(table, start, stop, form)
    return form.positions(pages)[page, token].long()


def _places(table: Tensor, start: int, stop: int, form: PageFormat) -> tuple[Tensor, Tensor]:
    """Page and token `[batch, stop - start]` of slots."""
    slots = torch.arange(start, stop, device=table.device)
    page = table[:, slots // PAGE_TOKENS] // form.page_bytes
    return page, (slots % PAGE_TOKENS).expand_as(page)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last tokens `[batch, queries, heads, head_dim]` of sequences over what `read` gives from slot 0.

    Query i of a sequence of `lengths` `[batch]` tokens is token `length - queries + i`, and sees itself and what came
    before, of which `window` (if any) counts the last, and of these what `mask` bool `[batch, 1 or heads, queries, n]`
    allows. A query that may see nothing gives zeros. Computed in `compute_dtype`.
    """
    compute = reference.compute_dtype(query.dtype)
    heads, slots = query.shape[2], torch.arange(keys.shape[2], device=query.device)
    keys, values = (x.to(compute).repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
    own = lengths.long()[:, None] - query.shape[1] + torch.arange(query.shape[1], device=query.device)
    seen = slots <= own[..., None]
    if window is not None:
        seen = seen & (slots > own[..., None] - window)
    seen = seen[:, None] if mask is None else seen[:, None] & mask
    scores = query.transpose(1, 2).to(compute) @ keys.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    most = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(compute).min)
    weights = torch.exp(scores - most)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(compute).view(1, -1, 1, 1) - most)
    # What is not seen may be memory that was never written.
    values = values.masked_fill(~seen.any(dim=2).any(dim=1)[:, None, :, None], 0.0)
    out = weights @ values / torch.where(total == 0, torch.ones_like(total), total)
    return out.transpose(1, 2).to(query.dtype)
