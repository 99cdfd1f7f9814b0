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
from rotaquant.runtime.cache import PackedCache, adopt, can_adopt, take_over
from rotaquant.runtime.growing_layer import GrowingLayer
from rotaquant.runtime.key_bias import RotaryPositions, note_positions
from rotaquant.runtime.kv_codec import LayerCodec, RowCodec
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.packed_layer import NewTokens, PackedLayer
from rotaquant.runtime.page_group import PageGroup
from rotaquant.runtime.paged_attention import Bias, Call, attend, attend_apart
from rotaquant.runtime.structure import key_bias

logger = logging.getLogger(__name__)

ATTENTION_NAME = "rotaquant"


def quantized_attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of `query` `[batch, heads, length, head_dim]` over keys and values as the cache stores them.

    `key` and `value` are what a packed cache's `update` gave: tokens on their way into its pages, or rows. Or they are
    float (no cache, or a cache of another kind), and are stored for the time of the call: both give the same numbers.
    """
    codec = module.kv_codec
    assert isinstance(codec, LayerCodec)
    with torch.autocast(query.device.type, enabled=False):
        if isinstance(key, NewTokens):
            return attend(query, key, _call(module, query, key, attention_mask, **kwargs)), None
        if key.dtype != torch.uint8 and codec.is_paged:
            return _attend_once(module, query, (key, value), attention_mask, **kwargs), None
        if key.dtype != torch.uint8:
            key, value = codec.encode(key, value)
        keys, values = codec.decode(key, value, query.dtype)
        keys = _with_bias(module, codec, key, keys)
        return _attend_to_rows(module, codec.rotate(query), (keys, values), attention_mask, **kwargs), None


def _call(module: nn.Module, query: Tensor, tokens: NewTokens, mask: Tensor | None, **kwargs: Any) -> Call:
    softcap, sinks, given = kwargs.get("softcap"), kwargs.get("s_aux"), kwargs.get("is_causal")
    says = [getattr(module, "is_causal", True), getattr(getattr(module, "config", None), "is_causal", True), given]
    is_causal = given is not False
    if softcap is None and sinks is None and given is None:
        # Of eager attention, the only stock one for the others, what a module says of itself does not count.
        is_causal = getattr(module, "is_causal", True)
    return Call(
        scaling=kwargs.get("scaling") or query.shape[-1] ** -0.5,
        softcap=softcap,
        sinks=sinks,
        mask=mask,
        is_causal=is_causal,
        may_look_ahead=any(said is False for said in says),
        bias=_bias(module, tokens.layer, changes_nothing=softcap is None and sinks is None),
    )


def _attend_once(
    module: nn.Module, query: Tensor, states: tuple[Tensor, Tensor], mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Attention over float keys and values, which are stored in pages for its time alone."""
    codec: Any = module.kv_codec
    keys, values = states
    if mask is None and 1 < query.shape[2] < keys.shape[2]:
        # The first tokens of a preallocated cache, whose other slots are not there yet.
        keys, values = keys[:, :, : query.shape[2]], values[:, :, : query.shape[2]]
    tokens, _ = GrowingLayer(codec, PageGroup()).update(keys, values)
    call = _call(module, query, tokens, mask, **kwargs)
    return (attend if query.shape[2] == keys.shape[2] else attend_apart)(query, tokens, call)


def _bias(module: nn.Module, layer: PackedLayer, changes_nothing: bool) -> Bias | None:
    """What a layer's stored keys lack, if a bias is kept out of them and counts.

    Where no position turns it, it adds one number to all scores of a query, which alone `changes_nothing`.
    """
    bias = key_bias(module)
    rotary = module.rotary_positions if bias is not None else None
    if bias is None or (rotary is None and changes_nothing):
        return None

    def added(heads: tuple[int, int], start: int, stop: int) -> Tensor:
        by_head = bias.view(layer.form.kv_heads, -1)[slice(*heads)].to(reference.compute_dtype(layer.dtype))
        if rotary is None:
            return by_head[None, :, None]
        assert isinstance(rotary, RotaryPositions)
        return rotary.rotate(by_head, layer.positions(start, stop))

    return added


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


def _attend_to_rows(
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
            adopt(cache, self.codecs, decoder.config.max_position_embeddings)
        elif isinstance(cache, PackedCache):
            take_over(cache, self.codecs)
        else:
            _warn_once(
                f"{type(cache).__name__} keeps keys and values in float and has them quantized anew at every step: "
                "right, but slow and large. Pass no cache, or an empty DynamicCache or StaticCache, to pack them."
            )
        return args, kwargs


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
