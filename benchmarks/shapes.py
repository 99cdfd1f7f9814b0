"""The shapes that are measured: those of named models, taken from their configurations, never typed by hand.

A linear of `outputs` x `inputs` has its weight stored `[outputs, inputs]` and maps `[m, inputs]` to `[m, outputs]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen2Config

from rotaquant.hadamard import Factorisation, factor_or_fallback
from rotaquant.rotation.plan import HeadMix, plan_head_mix

# As published with the models; only what decides shapes.
CONFIGS: dict[str, Any] = {
    "Llama-2-7B": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
    ),
    "Llama-3-8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Llama-2-70B": LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Qwen2.5-32B": Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
}


@dataclass(frozen=True)
class Linear:
    """One product of a block; q, k and v are one, and so are gate and up."""

    model: str
    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Block:
    """The widths of a model's block, and the online transforms of its inputs."""

    model: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products of the block in the order in which they run."""
        attended = self.heads * self.head_dim
        return (
            Linear(self.model, "qkv", attended + 2 * self.kv_heads * self.head_dim, self.hidden),
            Linear(self.model, "o", self.hidden, attended),
            Linear(self.model, "gate_up", 2 * self.intermediate, self.hidden),
            Linear(self.model, "down", self.hidden, self.intermediate),
        )

    @property
    def down_transform(self) -> Factorisation:
        """The transform of the down projection's input."""
        return factor_or_fallback(self.intermediate)

    @property
    def head_mix(self) -> HeadMix:
        """The mix of heads before the output projection."""
        mix = plan_head_mix(self.heads, factor_or_fallback(self.head_dim))
        assert mix is not None
        return mix


def block(model: str) -> Block:
    """The block of a named model."""
    config = CONFIGS[model]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Block(
        model=model,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )
