"""Supported families: one function each that says where the roles are, and the table that names them by model type.

Each function takes the model (on the meta device will do) and returns its `Architecture`. Those of models with experts
are in `expert_families`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from rotaquant.architectures.expert_families import gpt_oss, mixtral, qwen_moe
from rotaquant.architectures.pieces import decoder_of, gated_mlp, head_dim, pre_norms, rope, split_attention
from rotaquant.architectures.roles import Architecture, Attention, Block, Mlp, Norm, NormKind, Rope, Rows
from rotaquant.errors import RotaquantError

# --- a norm before each part ------------------------------------------------------------------------------------


def llama(model: PreTrainedModel, kind: NormKind = "rms", **attention_fields: Any) -> Architecture:
    """Pre-norm blocks with separate q, k, v, gate and up projections, as Llama introduced them.

    Mistral adds a sliding window, Qwen2 biases on q, k and v, Granite multipliers: none of them moves a role.
    """
    attention = split_attention(model.config, **attention_fields)
    mlp = gated_mlp(model.config.intermediate_size)

    def block(index: int) -> Block:
        norms = pre_norms(attention, mlp.inputs, kind)
        return Block(path=f"model.layers.{index}", norms=norms, attention=attention, mlps=(mlp,))

    return decoder_of(model, block, kind=kind)


def qwen3(model: PreTrainedModel) -> Architecture:
    """Llama's blocks with norms on q and k after the projection, per head."""
    return llama(model, normalised_keys=True)


def gemma(model: PreTrainedModel) -> Architecture:
    """Llama's blocks, gains of 1 + w and scaled embeddings."""
    return llama(model, kind="rms-plus-one")


def smollm3(model: PreTrainedModel) -> Architecture:
    """Llama's blocks, some layers without rotary positions."""
    architecture = llama(model)
    blocks = tuple(
        block if rotary else replace(block, attention=replace(block.attention, rope=None))
        # The list may go on beyond the layers, and what it holds there means nothing.
        for block, rotary in zip(architecture.blocks, model.config.no_rope_layers, strict=False)
    )
    return replace(architecture, blocks=blocks)


def phi3(model: PreTrainedModel) -> Architecture:
    """Phi-3 and Phi-4: Llama's blocks with one qkv and one gate_up projection, positions on part of a head."""
    config = model.config
    width = head_dim(config)
    first_key = config.num_attention_heads * width
    first_value = first_key + config.num_key_value_heads * width
    fused = "self_attn.qkv_proj"
    attention = replace(
        split_attention(config),
        q=Rows(fused, 0, first_key),
        k=Rows(fused, first_key, first_value),
        v=Rows(fused, first_value),
    )
    mlp = Mlp(inputs=("mlp.gate_up_proj",), down="mlp.down_proj", width=config.intermediate_size)

    def block(index: int) -> Block:
        norms = pre_norms(attention, mlp.inputs)
        return Block(path=f"model.layers.{index}", norms=norms, attention=attention, mlps=(mlp,))

    return decoder_of(model, block)


# --- norms after the parts --------------------------------------------------------------------------------------


def gemma2(model: PreTrainedModel) -> Architecture:
    """Gemma-2: a norm with gain 1 + w before and after each part; softcapped scores."""
    return _gemma_with_post_norms(model, lambda layer_type: rope(model.config), normalised_keys=False)


def gemma3_text(model: PreTrainedModel) -> Architecture:
    """Gemma-3 text: Gemma-2's norms, norms on q and k, and positions that differ by layer type."""
    return _gemma_with_post_norms(
        model, lambda layer_type: rope(model.config, layer_type=layer_type), normalised_keys=True
    )


def _gemma_with_post_norms(
    model: PreTrainedModel, rope_of: Callable[[str], Rope], *, normalised_keys: bool
) -> Architecture:
    config = model.config
    mlp = gated_mlp(config.intermediate_size)

    def block(index: int) -> Block:
        attention = split_attention(
            config,
            rope=rope_of(config.layer_types[index]),
            normalised_keys=normalised_keys,
            softcap=config.attn_logit_softcapping is not None,
        )
        norms = (
            Norm(path="input_layernorm", readers=attention.inputs, kind="rms-plus-one"),
            Norm(path="pre_feedforward_layernorm", readers=mlp.inputs, kind="rms-plus-one"),
        )
        post_norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        return Block(path=f"model.layers.{index}", norms=norms, post_norms=post_norms, attention=attention, mlps=(mlp,))

    return decoder_of(model, block, kind="rms-plus-one")


def glm4(model: PreTrainedModel) -> Architecture:
    """GLM-4-0414: norms before and after each part, one gate_up projection, interleaved positions on part of a head."""
    config = model.config
    attention = split_attention(config, rope=rope(config, style="interleaved-from-halves"))
    mlp = Mlp(inputs=("mlp.gate_up_proj",), down="mlp.down_proj", width=config.intermediate_size)
    norms = pre_norms(attention, mlp.inputs)
    post_norms = ("post_self_attn_layernorm", "post_mlp_layernorm")

    def block(index: int) -> Block:
        return Block(path=f"model.layers.{index}", norms=norms, post_norms=post_norms, attention=attention, mlps=(mlp,))

    return decoder_of(model, block)


def olmo2(model: PreTrainedModel) -> Architecture:
    """OLMo-2 and OLMo-3: no norm before the parts, one after each; q and k normalised over their full width."""
    attention = split_attention(model.config, normalised_keys=True)
    mlp = gated_mlp(model.config.intermediate_size)
    post_norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def block(index: int) -> Block:
        return Block(path=f"model.layers.{index}", norms=(), post_norms=post_norms, attention=attention, mlps=(mlp,))

    return decoder_of(model, block)


# --- LayerNorm --------------------------------------------------------------------------------------------------


def opt(model: PreTrainedModel) -> Architecture:
    """OPT: LayerNorm before each part, biases everywhere, learned positions, no gate."""
    config = model.config
    if not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size:
        raise RotaquantError(
            "this OPT model (opt-350m's layout) has its norms after the residual sum, or projects its embeddings: "
            "its residual stream cannot be rotated"
        )
    if config._remove_final_layer_norm or not config.layer_norm_elementwise_affine:
        raise RotaquantError("this OPT model has no final norm, or norms without gain: that layout is not supported")
    width = config.hidden_size // config.num_attention_heads  # as OPT reckons, whatever else the config may name
    attention = split_attention(config, o="out_proj", rope=None, head_dim=width, kv_heads=config.num_attention_heads)
    mlp = Mlp(inputs=("fc1",), down="fc2", width=config.ffn_dim)
    norms = (
        Norm(path="self_attn_layer_norm", readers=attention.inputs, kind="layer"),
        Norm(path="final_layer_norm", readers=mlp.inputs, kind="layer"),
    )
    return decoder_of(
        model,
        lambda index: Block(path=f"model.decoder.layers.{index}", norms=norms, attention=attention, mlps=(mlp,)),
        kind="layer",
        decoder="model.decoder",
        embeddings=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        final_norm="model.decoder.final_layer_norm",
        renamed=((r"^decoder\.", "model.decoder."),),
    )


def cohere(model: PreTrainedModel) -> Architecture:
    """Cohere: one LayerNorm without shift that attention and feed-forward part both read, interleaved positions."""
    config = model.config
    attention = split_attention(
        config, rope=rope(config, style="interleaved"), normalised_keys=getattr(config, "use_qk_norm", False)
    )
    mlp = gated_mlp(config.intermediate_size)
    norm = Norm(path="input_layernorm", readers=(*attention.inputs, *mlp.inputs), kind="layer")
    return decoder_of(
        model,
        lambda index: Block(path=f"model.layers.{index}", norms=(norm,), attention=attention, mlps=(mlp,)),
        kind="layer",
    )


def gpt_neox(model: PreTrainedModel) -> Architecture:
    """GPT-NeoX and Pythia: q, k and v in turn for every head, no gate, parallel or sequential parts."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    fused = "attention.query_key_value"
    q, k, v = (Rows(fused, part * width, (part + 1) * width, groups=config.num_attention_heads) for part in range(3))
    attention = Attention(
        path="attention",
        q=q,
        k=k,
        v=v,
        o="attention.dense",
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=width,
        rope=rope(config, "gpt_neox.rotary_emb"),
    )
    mlp = Mlp(inputs=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h", width=config.intermediate_size)
    return decoder_of(
        model,
        lambda index: Block(
            path=f"gpt_neox.layers.{index}",
            norms=pre_norms(attention, mlp.inputs, kind="layer"),
            attention=attention,
            mlps=(mlp,),
        ),
        kind="layer",
        decoder="gpt_neox",
        embeddings=("gpt_neox.embed_in",),
        final_norm="gpt_neox.final_layer_norm",
        renamed=((r"^embed_out\.", "lm_head."),),
    )


def starcoder2(model: PreTrainedModel) -> Architecture:
    """StarCoder2: Llama's attention and names with biases everywhere, LayerNorm before each part, no gate."""
    config = model.config
    attention = split_attention(config)
    mlp = Mlp(inputs=("mlp.c_fc",), down="mlp.c_proj", width=config.intermediate_size)
    norms = pre_norms(attention, mlp.inputs, kind="layer")
    return decoder_of(
        model,
        lambda index: Block(path=f"model.layers.{index}", norms=norms, attention=attention, mlps=(mlp,)),
        kind="layer",
    )


FAMILIES: dict[str, Callable[[PreTrainedModel], Architecture]] = {
    "cohere": cohere,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "glm4": glm4,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "granite": llama,
    "llama": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "opt": opt,
    "phi3": phi3,
    "qwen2": llama,
    "qwen2_moe": qwen_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen_moe,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
}
