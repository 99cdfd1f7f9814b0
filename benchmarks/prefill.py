"""The online transforms as a model's block runs them, and what they add to the time of a whole block's prefill."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import timing
from rotaquant import ops
from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import Factors, mix_factors, packing, reference, rotation_factors
from shapes import Block
from timing import Row

DTYPE = torch.bfloat16
BITS, CLIP_RATIO = 4, 0.9

_ROUNDS = 3

Quantized = tuple[Tensor, Tensor]


def quantize(x: Tensor) -> Quantized:
    """Plain quantization, as before a product with 4-bit weights."""
    return ops.quantize_rows(x, BITS, CLIP_RATIO, None, True)


def placed(factors: Factors | None) -> Factors:
    """Matrices on the device; raises where the kernels cannot apply a transform."""
    if factors is None:
        raise ValueError("the kernels do not apply this transform")
    return factors.to(timing.device(), DTYPE)


def silu_mul(x: Tensor) -> Tensor:
    """The gated activation of `[m, 2n]`: SiLU of the first half times the second."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def gate_rotate_quantize(x: Tensor, f: Factors) -> Quantized:
    """`[m, 2n]`, gate and up side by side, to codes before the down projection."""
    gate, up = x.chunk(2, -1)
    return ops.silu_mul_hadamard_quantize(gate, up, f, BITS, CLIP_RATIO)


def rotate_quantize(x: Tensor, f: Factors) -> Quantized:
    """Rotate and quantize in one kernel."""
    return ops.hadamard_quantize(x, f, BITS, CLIP_RATIO)


def head_mix_factors(block: Block) -> Factors:
    """The mix of heads before the output projection, for the kernels."""
    mix = block.head_mix
    return placed(mix_factors(mix.matrix(), mix.shards, block.heads * block.head_dim))


@lru_cache(maxsize=1)
def _compiled_silu_mul() -> Callable[[Tensor], Tensor]:
    return torch.compile(silu_mul, dynamic=False) if timing.device().type == "cuda" else silu_mul


def attention(qkv: Tensor, block: Block) -> Tensor:
    """Causal attention of one sequence, `[m, (heads + 2 kv_heads) * head_dim]` -> `[m, heads * head_dim]`."""
    sizes = [block.heads * block.head_dim, block.kv_heads * block.head_dim, block.kv_heads * block.head_dim]
    q, k, v = (part.unflatten(-1, (-1, block.head_dim)).transpose(0, 1)[None] for part in qkv.split(sizes, -1))
    grouped = block.kv_heads != block.heads
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if qkv.is_cuda else SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out[0].transpose(0, 1).reshape(len(qkv), -1)


def _weights(block: Block) -> dict[str, tuple[Tensor, Tensor]]:
    stored = {}
    for linear in block.linears:
        weight = torch.randn(linear.outputs, linear.inputs, device=timing.device(), dtype=DTYPE) * 0.02
        codes, scale = reference.quantize_rows(weight, BITS, 1.0)
        stored[linear.name] = (packing.pack_weight(codes, BITS), scale.to(DTYPE))
    return stored


def prefill(block: Block, weights: dict[str, tuple[Tensor, Tensor]], rotated: bool) -> Callable[[Tensor], Tensor]:
    """A block's products and attention, its inputs quantized plainly or by the online transforms."""
    activation = _compiled_silu_mul()
    before_o: Callable[[Tensor], Quantized] = quantize
    before_down: Callable[[Tensor], Quantized] = lambda x: quantize(activation(x))  # noqa: E731
    if rotated:
        before_o = partial(rotate_quantize, f=head_mix_factors(block))
        before_down = partial(gate_rotate_quantize, f=placed(rotation_factors(block.down_transform)))

    def product(name: str, quantized: Quantized) -> Tensor:
        return ops.int4_matmul(*quantized, *weights[name], None, DTYPE)

    def run(x: Tensor) -> Tensor:
        attended = attention(product("qkv", quantize(x)), block)
        hidden = product("o", before_o(attended))
        return product("down", before_down(product("gate_up", quantize(hidden))))

    return run


def block_work(block: Block, m: int, bandwidth: float) -> Row:
    """The figures of a block's prefill of `m` tokens."""
    torch.manual_seed(m)
    inputs = [torch.randn(m, block.hidden, device=timing.device(), dtype=DTYPE) for _ in range(8)]
    weights = _weights(block)
    runs = {name: prefill(block, weights, name == "rotated") for name in ("plain", "rotated")}
    for name, run in runs.items():
        if not bool(run(inputs[0]).isfinite().all()):
            raise ValueError(f"the {name} block gives values that are not finite")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):  # in turns, so that a drift of the clock meets both
        for name, run in runs.items():
            times[name].append(timing.measure([partial(run, x) for x in inputs])[0].us)
    beyond = [rotated - plain for plain, rotated in zip(times["plain"], times["rotated"], strict=True)]
    us = {name: statistics.median(values) for name, values in times.items()}
    parts = _parts(block, m)
    # Against one kernel that would gate and quantize as fast as a copy: no such kernel was used for `plain`.
    floor = m * (5 * block.intermediate + 4) / bandwidth
    strict = parts["head_mix_quantize_us"] - parts["quantize_rows_us"] + parts["silu_mul_hadamard_quantize_us"] - floor
    return {
        "us": us["rotated"],
        "plain_us": us["plain"],
        "beyond_plain_us": [round(value, 3) for value in beyond],
        "online_fraction": round(statistics.median(beyond) / us["plain"], 5),
        "online_fraction_beyond_floor": round(strict / us["plain"], 5),
        "query_key_fraction": round(parts["query_key_us"] / us["plain"], 5),
        "parts": parts,
    }


def _parts(block: Block, m: int) -> dict[str, float]:
    """The times of a block's parts alone."""
    heads = block.heads + block.kv_heads
    mix, down = head_mix_factors(block), placed(rotation_factors(block.down_transform))
    query_key = placed(rotation_factors(factor_or_fallback(block.head_dim)))
    activation = _compiled_silu_mul()
    widths: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
        "attention_us": (partial(attention, block=block), m, (heads + block.kv_heads) * block.head_dim),
        "quantize_rows_us": (quantize, m, block.heads * block.head_dim),
        "head_mix_quantize_us": (partial(rotate_quantize, f=mix), m, block.heads * block.head_dim),
        "silu_mul_then_quantize_us": (lambda x: quantize(activation(x)), m, 2 * block.intermediate),
        "silu_mul_hadamard_quantize_us": (partial(gate_rotate_quantize, f=down), m, 2 * block.intermediate),
        "query_key_us": (partial(ops.hadamard, factors=query_key), m * heads, block.head_dim),
    }
    figures = {}
    for name, (run, rows, columns) in widths.items():
        inputs = [torch.randn(rows, columns, device=timing.device(), dtype=DTYPE) for _ in range(8)]
        figures[name] = timing.measure([partial(run, x) for x in inputs])[0].us
    return figures
