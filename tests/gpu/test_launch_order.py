"""Kernels are launched before their predecessors end: in chains and graphs each still sees what it should."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from rotaquant import ops
from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import rotations
from rotaquant.ops.factors import Factors, rotation_factors

pytestmark = pytest.mark.gpu

DEPTH, WIDTH = 12, 2048
Step = Callable[[Tensor, Tensor], Tensor]


@lru_cache(maxsize=1)
def _scale() -> Tensor:
    return torch.full((WIDTH, 1), 0.02, dtype=torch.bfloat16, device="cuda")


@lru_cache(maxsize=1)
def _factors() -> Factors:
    factors = rotation_factors(factor_or_fallback(WIDTH))
    assert factors is not None
    return factors.to(torch.device("cuda"), torch.bfloat16)


def w4a4(x: Tensor, weight: Tensor) -> Tensor:
    return ops.quantize_matmul(x, 4, 0.9, None, 4, weight, _scale(), None)


def w4a16(x: Tensor, weight: Tensor) -> Tensor:
    return ops.w4a16_matmul(x, weight, _scale(), None)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    codes, scale, _ = ops.rmsnorm_quantize(x, x, 1e-5, 4, 0.9)
    return ops.int4_matmul(codes, scale, weight, _scale(), None, x.dtype)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    codes, scale = rotations.silu_mul_hadamard_quantize(x, torch.sign(x), _factors(), 4, 0.9)
    return ops.int4_matmul(codes, scale, weight, _scale(), None, x.dtype)


STEPS: dict[str, Step] = {step.__name__: step for step in (w4a4, w4a16, normed, gated)}


def chain(step: Step, x: Tensor, fresh: Tensor, weight: Tensor, wait: bool) -> Tensor:
    """Each layer's input is the one before's output, and its weights are written just before."""
    for turn in range(DEPTH):
        weight.copy_(fresh[turn])
        for _ in range(3):
            x = step(x, weight)
            if wait:
                torch.cuda.synchronize()
        x = x / x.float().square().mean().sqrt().to(x.dtype)
    return x


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40, 200, 3000])
@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_chains_in_a_graph_give_what_single_calls_give(name: str, rows: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(rows)
    fresh = torch.randint(
        -(2**31), 2**31, (DEPTH, WIDTH, WIDTH // 8), generator=generator, device="cuda", dtype=torch.int32
    )
    x = torch.randn(rows, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty_like(fresh[0])
    expected = chain(STEPS[name], x, fresh, weight, wait=True)
    assert bool(expected.isfinite().all()) and bool(expected.any())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(STEPS[name], x, fresh, weight, wait=False)
    for _ in range(10):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected)
