"""The pieces that families are described with: attention, feed-forward parts and norms under the usual names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from rotaquant.architectures.roles import Architecture, Attention, Block, Experts, Mlp, Norm, NormKind, Rope, Rows

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


def head_dim(config: Any) -> int:
    """Channels per head: the config's own figure where it names one, else hidden size over heads."""
    named = getattr(config, "head_dim", None)
    return int(named) if named is not None else int(config.hidden_size // config.num_attention_heads)


def rope(config: Any, module: str = "model.rotary_emb", layer_type: str | None = None, **fields: Any) -> Rope:
    """Rotary positions as the config scales them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type) or parameters
    static = parameters.get("rope_type", "default") in _STATIC_ROPE
    return Rope(module=module, layer_type=layer_type, static=static, **fields)


def split_attention(config: Any, *, o: str = "o_proj", path: str = "self_attn", **fields: Any) -> Attention:
    """Attention with q, k and v apart; `fields` say what else is special."""
    return Attention(
        path=path,
        q=Rows(f"{path}.q_proj"),
        k=Rows(f"{path}.k_proj"),
        v=Rows(f"{path}.v_proj"),
        o=f"{path}.{o}",
        heads=config.num_attention_heads,
        **{
            "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": head_dim(config),
            "rope": rope(config),
            **fields,
        },
    )


def gated_mlp(width: int, path: str = "mlp") -> Mlp:
    """A feed-forward part with gate and up apart."""
    return Mlp(inputs=(f"{path}.gate_proj", f"{path}.up_proj"), down=f"{path}.down_proj", width=width)


def pre_norms(attention: Attention, readers: tuple[str, ...], kind: NormKind = "rms") -> tuple[Norm, ...]:
    """The two norms of a block in Llama's names: before attention and before the feed-forward part's `readers`."""
    return (
        Norm(path="input_layernorm", readers=attention.inputs, kind=kind),
        Norm(path="post_attention_layernorm", readers=readers, kind=kind),
    )


def decoder_of(
    model: PreTrainedModel, block: Callable[[int], Block], *, kind: NormKind = "rms", **fields: Any
) -> Architecture:
    """The whole model around its blocks, in Llama's names unless `fields` say otherwise."""
    head = model.get_output_embeddings()
    if head is None:
        raise AttributeError("no head that gives logits")
    names = {
        "decoder": "model",
        "embeddings": ("model.embed_tokens",),
        "final_norm": "model.norm",
        "head": next(name for name, module in model.named_modules() if module is head),
        **fields,
    }
    names["final_norm"] = Norm(path=names["final_norm"], readers=(names["head"],), kind=kind)
    config = model.config
    return Architecture(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        blocks=tuple(block(index) for index in range(config.num_hidden_layers)),
        **names,
    )


def sparse_block(
    index: int, attention: Attention, experts: Experts, router: str, shared: Mlp | None = None, gate: str | None = None
) -> Block:
    """A pre-norm block whose feed-forward part is a router, experts and perhaps an expert shared by all tokens."""
    mlps = (*experts.mlps, *((shared,) if shared else ()))
    routers = (router, *((gate,) if gate else ()))
    readers = (*routers, *(path for mlp in mlps for path in mlp.inputs))
    return Block(
        path=f"model.layers.{index}",
        norms=pre_norms(attention, readers),
        attention=attention,
        mlps=mlps,
        routers=routers,
        experts=experts,
    )
