"""The packed key/value cache: transformers' own caches, with layers that hold keys and values in 2 to 8 bits.

Layers whose format pages can hold have pages (see `packed_layer`). The others keep the stock layers, which are given
rows of bytes instead of floats (see `kv_codec`): concatenation, preallocation, windows, crop and reorder are stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from rotaquant.errors import RotaquantError
from rotaquant.runtime.fixed_layer import FixedLayer
from rotaquant.runtime.growing_layer import GrowingLayer
from rotaquant.runtime.kv_codec import LayerCodec
from rotaquant.runtime.packed_layer import PackedLayer
from rotaquant.runtime.page_group import PageGroup


class PackedCache:
    """What makes a stock cache hold keys and values as their codecs say."""

    codecs: Sequence[LayerCodec]
    layers: list[CacheLayerMixin]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Give keys (after RoPE) and values of one layer to the cache; returns what attention takes in their place."""
        if not isinstance(self.layers[layer_idx], PackedLayer):
            with torch.autocast(key_states.device.type, enabled=False):
                key_states, value_states = self.codecs[layer_idx].encode(key_states, value_states)
        stored: tuple[Any, Any] = super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]
        return stored

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence."""
        self.flush()
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i be what sequence `beam_idx[i]` was."""
        self.flush()
        super().reorder_cache(self._once(beam_idx))  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every sequence be followed by `repeats` - 1 more of its kind."""
        self.flush()
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of the indices, in that order."""
        self.flush()
        super().batch_select_indices(self._once(indices))  # type: ignore[misc]

    def flush(self) -> None:
        """Store what was given to the cache without attention; layers that share books must not be a step apart."""
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.flush()

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        sizes = (
            layer.nbytes if isinstance(layer, PackedLayer) else layer.keys.nbytes + layer.values.nbytes
            for layer in self.layers
            if layer.is_initialized
        )
        return sum(sizes)

    def _once(self, indices: Tensor) -> Tensor:
        """Indices on the host: paged layers go by numbers, for which each would wait for the device."""
        return indices.cpu() if all(isinstance(layer, PackedLayer) for layer in self.layers) else indices


class QuantizedCache(PackedCache, DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` whose layers are packed."""


class QuantizedStaticCache(PackedCache, StaticCache):  # type: ignore[misc]
    """A `StaticCache` whose layers are packed."""


_PACKED: dict[type, type] = {DynamicCache: QuantizedCache, StaticCache: QuantizedStaticCache}
_KNOWN_LAYERS = DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer


def can_adopt(cache: Any) -> bool:
    """Whether a cache is a stock one that can be packed and holds nothing yet."""
    if type(cache) not in _PACKED:
        return False
    return all(type(layer) in _KNOWN_LAYERS and not layer.is_initialized for layer in cache.layers)


def adopt(cache: Any, codecs: Sequence[LayerCodec], most_positions: int) -> None:
    """Turn an empty stock cache into a packed one, in place: whoever holds it keeps holding the right one.

    `most_positions` bounds a text where the cache itself does not: static layers with windows take any.
    """
    assert can_adopt(cache)
    layers = cache.layers
    if cache.layer_class_to_replicate is not None:
        # A cache that knows no configuration would make them one by one.
        layers = [cache.layer_class_to_replicate() for _ in codecs]
        cache.layer_class_to_replicate = None
    lengths = [layer.max_cache_len for layer in layers if type(layer) is StaticLayer]
    longest = max(lengths) if lengths else most_positions
    group = PageGroup()
    cache.layers = [
        _packed(layer, codec, group, longest) if codec.is_paged else layer
        for layer, codec in zip(layers, codecs, strict=True)
    ]
    cache.__class__ = _PACKED[type(cache)]
    cache.codecs = codecs


def _packed(layer: Any, codec: LayerCodec, group: PageGroup, longest: int) -> PackedLayer:
    """The packed layer that takes the place of an empty stock one."""
    if isinstance(layer, StaticSlidingWindowLayer):
        # It keeps the smaller of window and length.
        return FixedLayer(codec, longest, window=layer.max_cache_len)
    if isinstance(layer, StaticLayer):
        return FixedLayer(codec, layer.max_cache_len)
    if isinstance(layer, DynamicSlidingWindowLayer):
        return GrowingLayer(codec, PageGroup(), layer.sliding_window)
    return GrowingLayer(codec, group)


def take_over(cache: PackedCache, codecs: Sequence[LayerCodec]) -> None:
    """Let a packed cache that was copied, or filled by another load of the model, go on with these codecs."""
    if cache.codecs is codecs:
        return
    if list(cache.codecs) != list(codecs):
        raise RotaquantError(
            "the cache was filled by a model that stores keys and values in another format: pass no cache, or an "
            "empty DynamicCache or StaticCache"
        )
    cache.codecs = codecs
    for layer, codec in zip(cache.layers, codecs, strict=True):
        if isinstance(layer, PackedLayer):
            layer.codec = codec
