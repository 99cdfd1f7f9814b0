"""Attention over stored keys and values: every query, in prefill as in decoding, sees what the cache holds."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rotaquant.architectures import Architecture, Block
from rotaquant.errors import RotaquantError
from rotaquant.runtime.cache import QuantizedCache
from rotaquant.runtime.kv_codec import LayerCodec, RowCodec
from rotaquant.runtime.layout import ModelLayout

logger = logging.getLogger(__name__)

ATTENTION_NAME = "rotaquant"


def quantized_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of `query` `[batch, heads, length, head_dim]` over keys and values as the cache stores them.

    Keys and values are rows of a `QuantizedCache`, or float (no cache, or a cache of another kind), which pass
    through the same codec: both give the same numbers.
    """
    codec = module.kv_codec
    assert isinstance(codec, LayerCodec)
    with torch.autocast(query.device.type, enabled=False):
        if key.dtype != torch.uint8:
            key, value = codec.encode(key, value)
        keys, values = codec.decode(key, value, query.dtype)
        output, _ = sdpa_attention_forward(module, codec.rotate(query), keys, values, attention_mask, **kwargs)
    return output, None


def register_attention() -> None:
    """Make the attention known to transformers, with the mask that it needs: without one padding is ignored."""
    AttentionInterface.register(ATTENTION_NAME, quantized_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def install_attention(model: PreTrainedModel, architecture: Architecture, layout: ModelLayout) -> None:
    """Let the model attend over, and by default create, quantized caches; a float recipe leaves it as it is."""
    recipe, rotation = layout.recipe, layout.rotation
    if recipe.keys is None and recipe.values is None and rotation.query_key is None:
        return
    codecs = []
    for block in architecture.blocks:
        codec = block_codec(block, layout)
        attention: Any = model.get_submodule(f"{block.path}.{block.attention.path}")
        attention.kv_codec = codec
        codecs.append(codec)
    model.set_attn_implementation(ATTENTION_NAME)
    decoder = model.get_submodule(architecture.decoder)
    decoder.register_forward_pre_hook(_CacheSupply(decoder, codecs), with_kwargs=True)


def block_codec(block: Block, layout: ModelLayout) -> LayerCodec:
    """How a block's keys and values are stored."""
    head_dim = block.attention.head_dim
    recipe = layout.recipe
    keys, values = RowCodec(head_dim, recipe.keys), RowCodec(head_dim, recipe.values)
    return LayerCodec(keys, values, layout.rotation.query_key)


@contextmanager
def use_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the context the model's attention modules, which have their `kv_codec`, use it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _CacheSupply:
    """A forward pre-hook of the decoder: sees to it that the cache in use is a packed one."""

    def __init__(self, decoder: nn.Module, codecs: Sequence[LayerCodec]) -> None:
        parameters = inspect.signature(decoder.forward).parameters
        # transformers renamed the argument; both names occur within the versions we support.
        self.name = "cache" if "cache" in parameters else "past_key_values"
        self.codecs = codecs

    def __call__(
        self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if decoder.config._attn_implementation != ATTENTION_NAME:
            raise RotaquantError(
                f"attention {decoder.config._attn_implementation!r} does not know quantized keys and values: "
                f"call model.set_attn_implementation({ATTENTION_NAME!r})"
            )
        given = [key for key in ("cache", "past_key_values") if kwargs.get(key) is not None]
        cache = kwargs[given[0]] if given else None
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if not (decoder.config.use_cache if use_cache is None else use_cache):
                return None
            cache = DynamicCache(config=decoder.config)
            kwargs[self.name] = cache
        if type(cache) is DynamicCache and cache.get_seq_length() == 0:
            QuantizedCache.adopt(cache, self.codecs)
        elif not isinstance(cache, QuantizedCache):
            _warn_once(
                f"{type(cache).__name__} keeps keys and values in float and has them quantized anew at every step: "
                "right, but slow and large. Pass no cache, or an empty DynamicCache, to store them packed."
            )
        return args, kwargs


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
