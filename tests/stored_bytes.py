"""What layers of packed caches hold, as bytes, to compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotaquant.ops.cache_layout import PAGE_TOKENS
from rotaquant.runtime.packed_layer import PackedLayer


def stored_bytes(layer: Any) -> list[Tensor]:
    """Codes and parameters of keys and of values, and positions if any, `[batch, slots, …]`; of a row, its bytes."""
    if not isinstance(layer, PackedLayer):
        assert layer.keys.dtype == layer.values.dtype == torch.uint8
        return [layer.keys, layer.values]
    layer.flush()
    place, form = layer._locate(), layer.form
    slots = torch.arange(layer.first_slot, layer.length)
    page, token = place.table[:, slots // PAGE_TOKENS] // form.page_bytes, slots % PAGE_TOKENS
    key_codes, value_codes, *parameters = form.split(place.pages)
    parts = [key_codes, value_codes, *(part.view(torch.uint8) for part in parameters)]
    stored = [part[page, :, token.expand_as(page)] for part in parts]
    return [*stored, form.positions(place.pages)[page, token]] if form.has_positions else stored


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two layers hold the same."""
    pairs = zip(stored_bytes(one), stored_bytes(other), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
