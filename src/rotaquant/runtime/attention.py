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
from rotaquant.ops import reference
from rotaquant.recipe import IntFormat
from rotaquant.runtime.cache import PackedRows, adopt, can_adopt
from rotaquant.runtime.key_bias import RotaryPositions, note_positions
from rotaquant.runtime.kv_codec import LayerCodec, RowCodec
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.structure import key_bias

logger = logging.getLogger(__name__)

ATTENTION_NAME = "rotaquant"


def quantized_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of `query` `[batch, heads, length, head_dim]` over keys and values as the cache stores them.

    Keys and values are rows of a packed cache, or float (no cache, or a cache of another kind), which pass
    through the same codec: both give the same numbers. A bias that is kept out of the keys is added here.
    """
    codec = module.kv_codec
    assert isinstance(codec, LayerCodec)
    with torch.autocast(query.device.type, enabled=False):
        if key.dtype != torch.uint8:
            key, value = codec.encode(key, value)
        keys, values = codec.decode(key, value, query.dtype)
        keys = _with_bias(module, codec, key, keys)
        output = _attend(module, codec.rotate(query), (keys, values), attention_mask, **kwargs)
    return output, None


def _with_bias(module: nn.Module, codec: LayerCodec, rows: Tensor, keys: Tensor) -> Tensor:
    bias = key_bias(module)
    if bias is None:
        return keys
    by_head = bias.view(keys.shape[1], -1).to(reference.compute_dtype(keys.dtype))
    rotary = module.rotary_positions
    if rotary is None:
        shared = by_head[None, :, None]
    else:
        assert isinstance(rotary, RotaryPositions)
        shared = rotary.rotate(by_head, codec.stored_positions(rows))
    return keys + codec.rotate(shared).to(keys.dtype)


def _attend(
    module: nn.Module, query: Tensor, stored: tuple[Tensor, Tensor], mask: Tensor | None, **kwargs: Any
) -> Tensor:
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    if softcap is None and sinks is None:
        output: Tensor = sdpa_attention_forward(module, query, *stored, mask, **kwargs)[0]
        return output
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if mask is None and query.shape[2] > 1 and kwargs.get("is_causal") is not False:
        # No mask means the first tokens of an empty cache, of which a static one has slots beyond them. What a module
        # says of itself (`is_causal`) does not count: eager attention, the only stock one here, goes by the mask alone.
        mask = torch.ones(query.shape[2], stored[0].shape[2], dtype=torch.bool, device=query.device).tril()
    return reference.attention(query, *stored, mask, scaling=scaling, softcap=softcap, sinks=sinks).transpose(1, 2)


def register_attention() -> None:
    """Make the attention known to transformers, with the mask that it needs: without one padding is ignored."""
    AttentionInterface.register(ATTENTION_NAME, quantized_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def install_attention(model: PreTrainedModel, architecture: Architecture, layout: ModelLayout) -> None:
    """Let the model attend over, and by default create, quantized caches; a float recipe leaves it as it is."""
    recipe, rotation = layout.recipe, layout.rotation
    if recipe.keys is None and recipe.values is None and rotation.query_key is None:
        keep_softcap(model, architecture)
        return
    codecs = [
        attach_codec(model, model.get_submodule(block.path), block, layout, recipe.keys, recipe.values)
        for block in architecture.blocks
    ]
    model.set_attn_implementation(ATTENTION_NAME)
    decoder = model.get_submodule(architecture.decoder)
    decoder.register_forward_pre_hook(_CacheSupply(decoder, codecs), with_kwargs=True)


def attach_codec(
    model: nn.Module,
    module: nn.Module,
    block: Block,
    layout: ModelLayout,
    keys: IntFormat | None,
    values: IntFormat | None,
) -> LayerCodec:
    """Tell the attention of `module`, a block of `model`, how to store keys and values, and where bias belongs."""
    roles = block.attention
    attention: Any = module.get_submodule(roles.path)
    codec = LayerCodec(RowCodec(roles.head_dim, keys), RowCodec(roles.head_dim, values), layout.rotation.query_key)
    if key_bias(attention) is not None:
        attention.rotary_positions = None
        if roles.rope is not None:
            attention.rotary_positions = RotaryPositions(model.get_submodule(roles.rope.module), roles.rope)
            codec.stores_positions = True
            attention.register_forward_pre_hook(note_positions, with_kwargs=True)
    attention.kv_codec = codec
    return codec


def keep_softcap(model: PreTrainedModel, architecture: Architecture) -> None:
    """Let a float model with softcapped scores attend eagerly: SDPA drops the cap in silence.

    Not every version of transformers that we support forbids SDPA to such models.
    """
    if model.config._attn_implementation == "sdpa" and any(block.attention.softcap for block in architecture.blocks):
        model.set_attn_implementation("eager")


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
        self.parameters = tuple(inspect.signature(decoder.forward).parameters)
        # transformers renamed the argument; both names occur within the versions we support.
        self.name = "cache" if "cache" in self.parameters else "past_key_values"
        self.codecs = codecs

    def __call__(
        self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if decoder.config._attn_implementation != ATTENTION_NAME:
            raise RotaquantError(
                f"attention {decoder.config._attn_implementation!r} does not know quantized keys and values: "
                f"call model.set_attn_implementation({ATTENTION_NAME!r})"
            )
        if len(args) > self.parameters.index(self.name):
            kwargs.update(zip(self.parameters, args, strict=False))
            args = ()
        given = [key for key in ("cache", "past_key_values") if kwargs.get(key) is not None]
        cache = kwargs[given[0]] if given else None
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if not (decoder.config.use_cache if use_cache is None else use_cache):
                return None
            cache = DynamicCache(config=decoder.config)
            kwargs[self.name] = cache
        if can_adopt(cache):
            adopt(cache, self.codecs)
        elif isinstance(cache, PackedRows):
            self._take_over(cache)
        else:
            _warn_once(
                f"{type(cache).__name__} keeps keys and values in float and has them quantized anew at every step: "
                "right, but slow and large. Pass no cache, or an empty DynamicCache or StaticCache, to pack them."
            )
        return args, kwargs

    def _take_over(self, cache: PackedRows) -> None:
        """Let a packed cache that was copied, or filled by another load of the model, go on in this model."""
        if cache.codecs is self.codecs:
            return
        if list(cache.codecs) != list(self.codecs):
            raise RotaquantError(
                "the cache was filled by a model that stores keys and values in another format: pass no cache, or an "
                "empty DynamicCache or StaticCache"
            )
        cache.codecs = self.codecs


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
