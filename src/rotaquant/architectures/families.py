"""Supported families: one function each that says where the roles are.

Each function takes the model (on the meta device will do) and returns its `Architecture`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from rotaquant.architectures.roles import Architecture, Attention, Block, Mlp, Norm


def head_dim(config: Any) -> int:
    """Channels per head: the config's own figure where it names one, else hidden size over heads."""
    named = getattr(config, "head_dim", None)
    return int(named) if named is not None else int(config.hidden_size // config.num_attention_heads)


def llama_layout(model: PreTrainedModel) -> Architecture:
    """Pre-norm blocks with separate q, k, v, gate and up projections, as Llama introduced them.

    Mistral adds a sliding window, Qwen2 biases on q, k and v, Qwen3 norms on q and k after the projection:
    none of them moves a role.
    """
    config = model.config
    attention = Attention(
        path="self_attn",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        o="self_attn.o_proj",
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
    )
    mlp = Mlp(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj", width=config.intermediate_size)
    norms = (
        Norm(path="input_layernorm", readers=(attention.q, attention.k, attention.v)),
        Norm(path="post_attention_layernorm", readers=(mlp.gate, mlp.up)),
    )
    return Architecture(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        decoder="model",
        embedding="model.embed_tokens",
        blocks=tuple(
            Block(path=f"model.layers.{index}", norms=norms, attention=attention, mlp=mlp)
            for index in range(config.num_hidden_layers)
        ),
        final_norm="model.norm",
        head="lm_head",
    )


FAMILIES: dict[str, Callable[[PreTrainedModel], Architecture]] = {
    "llama": llama_layout,
    "mistral": llama_layout,
    "qwen2": llama_layout,
    "qwen3": llama_layout,
}
