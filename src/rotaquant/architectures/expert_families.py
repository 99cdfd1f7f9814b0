"""Families with experts: one function each, as in `families`, which lists them."""

from __future__ import annotations

from transformers import PreTrainedModel

from rotaquant.architectures.pieces import decoder_of, gated_mlp, pre_norms, rope, sparse_block, split_attention
from rotaquant.architectures.roles import Architecture, Block, Experts


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
