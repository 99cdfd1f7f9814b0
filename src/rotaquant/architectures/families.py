"""Supported families: one function each that says where the roles are.

Each function takes the model (on the meta device will do) and returns its `Architecture`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from rotaquant.architectures.roles import Architecture, Attention, Block, Experts, Mlp, Norm, NormKind, Rope, Rows
from rotaquant.errors import RotaquantError

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


# --- experts ----------------------------------------------------------------------------------------------------


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


def mixtral(model: PreTrainedModel) -> Architecture:
    """Mistral's attention, a router and experts in every layer."""
    config = model.config
    attention = split_attention(config)
    experts = Experts(
        path="mlp.experts",
        count=config.num_local_experts,
        width=config.intermediate_size,
        stored_gate_up=("w1", "w3"),
        stored_down="w2",
    )
    return decoder_of(
        model,
        lambda index: sparse_block(index, attention, experts, "mlp.gate"),
        renamed=((r"\.block_sparse_moe\.", ".mlp."),),
    )


def qwen_moe(model: PreTrainedModel) -> Architecture:
    """Qwen3-MoE and Qwen2-MoE: dense and sparse layers; the latter's sparse layers have a shared expert too."""
    config = model.config
    attention = split_attention(config, normalised_keys=config.model_type == "qwen3_moe")
    dense = gated_mlp(config.intermediate_size)
    experts = Experts(
        path="mlp.experts",
        count=config.num_experts,
        width=config.moe_intermediate_size,
        stored_gate_up=("gate_proj", "up_proj"),
        stored_down="down_proj",
    )
    shared_width = getattr(config, "shared_expert_intermediate_size", None)
    shared = gated_mlp(shared_width, "mlp.shared_expert") if shared_width else None

    def block(index: int) -> Block:
        path = f"model.layers.{index}"
        if not hasattr(model.get_submodule(path).mlp, "experts"):
            return Block(path=path, norms=pre_norms(attention, dense.inputs), attention=attention, mlps=(dense,))
        return sparse_block(index, attention, experts, "mlp.gate", shared, "mlp.shared_expert_gate" if shared else None)

    return decoder_of(model, block)


def gpt_oss(model: PreTrainedModel) -> Architecture:
    """Attention with sinks, and experts with biases and a clamped gate."""
    config = model.config
    attention = split_attention(config, sinks=True, rope=rope(config, style="half-once"))
    experts = Experts(
        path="mlp.experts",
        count=config.num_local_experts,
        width=config.intermediate_size,
        stored_gate_up=("gate_up_proj",),
        stored_down="down_proj",
    )
    return decoder_of(model, lambda index: sparse_block(index, attention, experts, "mlp.router"))


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
