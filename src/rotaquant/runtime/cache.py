"""The packed key/value cache: transformers' `DynamicCache`, holding rows of bytes instead of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rotaquant.runtime.kv_codec import LayerCodec


class QuantizedCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` whose keys and values are uint8 rows `[batch, kv_heads, length, row_bytes]`.

    Concatenation, sliding windows, crop, beam reorder and mask sizes are the stock ones.
    """

    codecs: Sequence[LayerCodec]

    @classmethod
    def adopt(cls, cache: DynamicCache, codecs: Sequence[LayerCodec]) -> QuantizedCache:
        """Turn an empty stock cache into a packed one, in place: whoever holds it keeps holding the right one."""
        assert type(cache) is DynamicCache
        cache.__class__ = cls
        assert isinstance(cache, cls)
        cache.codecs = codecs
        return cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store float keys (after RoPE) and values of one layer; return all stored rows of it."""
        with torch.autocast(key_states.device.type, enabled=False):
            keys, values = self.codecs[layer_idx].encode(key_states, value_states)
        stored: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return stored
