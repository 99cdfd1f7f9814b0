"""Attention over pages: a few queries by one kernel, many over keys and values that are read a piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rotaquant.ops import reference
from rotaquant.ops.cache import MOST_QUERIES, Scores, cache_attention
from rotaquant.runtime.packed_layer import NewTokens, PackedLayer

# What attention makes for the time of a piece: keys and values read from pages, masks, scores written out.
PIECE_BYTES = 1 << 28

# From (first head, last head + 1, start, stop) to what has to be added to stored keys there, `[batch, heads, slots,
# head_dim]` in the frame of queries and keys before their rotation.
Bias = Callable[[tuple[int, int], int, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Call:
    """How one call attends: as `Scores` says, but for `mask`, boolean or added to scores, from its own first slot on.

    Without a mask a query sees its own token and those before it, all of them where it is not `is_causal`.
    `may_look_ahead`: a mask may show a query what comes after it.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = True
    may_look_ahead: bool = False
    bias: Bias | None = None


def attend(query: Tensor, tokens: NewTokens, call: Call) -> Tensor:
    """Store new tokens and let their queries `[batch, heads, length, head_dim]` attend: `[batch, length, heads, …]`."""
    layer = tokens.layer
    layer.take(tokens)
    outputs = []
    for begin, end in layer.stretches(tokens.count, is_causal=not call.may_look_ahead):
        turned = layer.append(tokens, begin, end, query[:, :, begin:end].transpose(1, 2))
        mask = None if call.mask is None else call.mask[:, :, begin:end]
        outputs.append(_attend(turned, layer, mask, tokens.mask_first, call))
        layer.release()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend_apart(query: Tensor, tokens: NewTokens, call: Call) -> Tensor:
    """The same of queries that are fewer than the tokens: those of the last."""
    layer = tokens.layer
    layer.flush()
    turned = layer.codec.rotate(query).transpose(1, 2)
    return _attend(turned, layer, call.mask, tokens.mask_first, call)


def _attend(query: Tensor, layer: PackedLayer, mask: Tensor | None, mask_first: int, call: Call) -> Tensor:
    queries = query.shape[1]
    has_bits = mask is None or mask.dtype == torch.bool
    is_plain = queries == 1 or (call.is_causal and not call.may_look_ahead)
    if queries > MOST_QUERIES or not has_bits or not is_plain or call.bias is not None:
        return _read_and_attend(query.transpose(1, 2), layer, mask, mask_first, call)
    place, arrivals = layer.place, layer.arrivals(query.shape[2])
    assert place is not None
    scores = Scores(
        scaling=call.scaling, window=layer.window, softcap=call.softcap, sinks=call.sinks, mask=mask,
        mask_first=mask_first,
    )  # fmt: skip
    return cache_attention(query, place.pages, place.table, place.lengths, arrivals, layer.form, place.longest, scores)


# --- many queries ------------------------------------------------------------------------------------------------


def _read_and_attend(query: Tensor, layer: PackedLayer, mask: Tensor | None, mask_first: int, call: Call) -> Tensor:
    """Attention over keys and values as they are read, a few heads at a time: `[batch, length, heads, head_dim]`."""
    queries, heads, kv_heads = query.shape[2], query.shape[1], layer.form.kv_heads
    stop = layer.length
    start = 0 if layer.window is None else max(0, stop - queries - layer.window + 1)
    if mask is not None:
        mask = mask[..., max(0, start - mask_first) : stop - mask_first]
        start = max(start, mask_first)
    elif layer.window is not None and layer.window < stop - start:
        mask = _band(stop - start - queries, stop - start, stop - start, layer.window, query.device)
    group = heads // kv_heads
    bytes_a_head = 2 * query.shape[0] * (stop - start) * layer.form.head_dim * query.dtype.itemsize
    step = min(kv_heads, max(1, PIECE_BYTES // max(1, bytes_a_head)))
    out = query.new_empty(query.shape[0], queries, heads, query.shape[3])
    for first in range(0, kv_heads, step):
        last = min(first + step, kv_heads)
        keys, values = layer.read(start, stop, (first, last), query.dtype)
        if call.bias is not None:
            keys += layer.codec.rotate(call.bias((first, last), start, stop)).to(keys.dtype)
        theirs = slice(first * group, last * group)
        part = mask[:, theirs] if mask is not None and mask.shape[1] == heads else mask
        sinks = None if call.sinks is None else call.sinks[theirs]
        if call.softcap is not None or sinks is not None:
            attended = _by_definition(query[:, theirs], keys, values, part, sinks, call)
        else:
            attended = _by_sdpa(query[:, theirs], keys, values, part, call)
        out[:, :, theirs] = attended.transpose(1, 2)
    return out


def _band(begin: int, end: int, slots: int, window: int | None, device: torch.device) -> Tensor:
    """Whether tokens `begin` to `end` of `slots` see the slots: bool `[1, 1, end - begin, slots]`."""
    own, slot = torch.arange(begin, end, device=device)[:, None], torch.arange(slots, device=device)
    seen = slot <= own
    if window is not None:
        seen &= slot > own - window
    return seen[None, None]


def _by_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: Call) -> Tensor:
    """`[batch, heads, m, d]` over `[batch, kv_heads, n, d]` by PyTorch's attention."""
    queries, slots = query.shape[2], keys.shape[2]
    is_causal = mask is None and queries > 1 and call.is_causal
    options: dict[str, Any] = {"scale": call.scaling, "enable_gqa": query.shape[1] != keys.shape[1]}
    if mask is None and (not is_causal or queries == slots):
        return sdpa(query, keys, values, is_causal=is_causal, **options)
    if mask is None and query.is_cuda:
        return sdpa(query, keys, values, causal_lower_right(queries, slots), **options)
    out = torch.empty_like(query)
    step = max(1, PIECE_BYTES // slots)
    for begin in range(0, queries, step):
        part = slice(begin, min(begin + step, queries))
        seen = _seen(part, queries, slots, mask, query.device)
        out[:, :, part] = _by_sdpa_with_mask(query[:, :, part], keys, values, seen, options)
    return out


def _seen(part: slice, queries: int, slots: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """The mask of a part of the queries; without one they are the last tokens, and see what came before."""
    if mask is not None:
        return mask[:, :, part]
    return _band(slots - queries + part.start, slots - queries + part.stop, slots, None, device)


def _by_sdpa_with_mask(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    if not query.is_cuda or not options["enable_gqa"]:
        return sdpa(query, keys, values, mask, **options)
    # On a GPU attention with a mask wants a key head for each query head: one that is repeated without a copy.
    group = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for head in range(keys.shape[1]):
        theirs = slice(head * group, (head + 1) * group)
        key, value = (x[:, head : head + 1].expand(-1, group, -1, -1) for x in (keys, values))
        own = mask[:, theirs] if mask.shape[1] > 1 else mask
        out[:, theirs] = sdpa(query[:, theirs], key, value, own, scale=options["scale"])
    return out


def _by_definition(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None, call: Call
) -> Tensor:
    """What PyTorch's attention does not know, softcaps and sinks: scores written out for a few queries at a time."""
    queries, slots = query.shape[2], keys.shape[2]
    # Scores, their exponentials and weights, in float32.
    step = max(1, PIECE_BYTES // (12 * query.shape[0] * query.shape[1] * slots))
    out = torch.empty_like(query)
    for begin in range(0, queries, step):
        part = slice(begin, min(begin + step, queries))
        is_open = mask is None and (queries == 1 or not call.is_causal)
        seen = None if is_open else _seen(part, queries, slots, mask, query.device)
        out[:, :, part] = reference.attention(
            query[:, :, part], keys, values, seen, scaling=call.scaling, softcap=call.softcap, sinks=sinks
        )
    return out
