"""How fast: each operation's definition in plain PyTorch (`reference`), its kernels, and how codes lie in memory."""

from rotaquant.ops.cache import Scores, Turn, arrivals_for, cache_append, cache_attention
from rotaquant.ops.cache_layout import PageFormat
from rotaquant.ops.factors import Factors, mix_factors, rotation_factors
from rotaquant.ops.library import (
    int4_matmul,
    int8_matmul,
    quantize_matmul,
    quantize_rows,
    rmsnorm_quantize,
    w4a16_matmul,
)
from rotaquant.ops.rotations import (
    gated_hadamard_quantize,
    gelu_mul_hadamard_quantize,
    hadamard,
    hadamard_quantize,
    head_mix,
    silu_mul_hadamard_quantize,
)

__all__ = [
    "Factors",
    "PageFormat",
    "Scores",
    "Turn",
    "arrivals_for",
    "cache_append",
    "cache_attention",
    "gated_hadamard_quantize",
    "gelu_mul_hadamard_quantize",
    "hadamard",
    "hadamard_quantize",
    "head_mix",
    "int4_matmul",
    "int8_matmul",
    "mix_factors",
    "quantize_matmul",
    "quantize_rows",
    "rmsnorm_quantize",
    "rotation_factors",
    "silu_mul_hadamard_quantize",
    "w4a16_matmul",
]
