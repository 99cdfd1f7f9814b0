"""The packed key/value cache: transformers' own caches, holding rows of bytes instead of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from rotaquant.runtime.kv_codec import LayerCodec


class PackedRows:
    """What makes a stock cache hold keys and values as uint8 rows `[batch, kv_heads, length, row_bytes]`.

    Concatenation, preallocation, sliding windows, crop, beam reorder and mask sizes are the stock ones.
    """

    codecs: Sequence[LayerCodec]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store float keys (after RoPE) and values of one layer; return all stored rows of it."""
        with torch.autocast(key_states.device.type, enabled=False):
            keys, values = self.codecs[layer_idx].encode(key_states, value_states)
        stored: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)  # type: ignore[misc]
        return stored


class QuantizedCache(PackedRows, DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` of packed rows."""


class QuantizedStaticCache(PackedRows, StaticCache):  # type: ignore[misc]
    """A `StaticCache` of packed rows."""


_PACKED: dict[type, type] = {DynamicCache: QuantizedCache, StaticCache: QuantizedStaticCache}


def can_adopt(cache: Any) -> bool:
    """Whether a cache is a stock one that can hold packed rows and holds nothing yet."""
    return type(cache) in _PACKED and not any(layer.is_initialized for layer in cache.layers)


def adopt(cache: Any, codecs: Sequence[LayerCodec]) -> None:
    """Turn an empty stock cache into a packed one, in place: whoever holds it keeps holding the right one."""
    assert can_adopt(cache)
    cache.__class__ = _PACKED[type(cache)]
    cache.codecs = codecs
