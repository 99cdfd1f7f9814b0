"""Which kernel multiplies a problem and in which tiles: a small table by device and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rotaquant.ops.device_features import multiprocessors, tensor_copy_engine

Kernel = Literal["tma", "tile", "sliced", "dot"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A product: `plane` bytes of weights an output and as many codes in each plane of a token."""

    tokens: int
    outputs: int
    plane: int
    packed: bool
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel and its tiles: outputs × tokens, `bytes` of a row of weights a step; `slices` steps side by side.

    `band` is how many tiles of outputs are worked on together, `lines` how many cache lines of weights are asked for
    before the activations are there.
    """

    kernel: Kernel
    outputs: int
    tokens: int
    bytes: int
    warps: int
    stages: int
    band: int = 8
    slices: int = 1
    lines: int = 0

    def tiles(self, problem: Problem) -> int:
        """The number of programs."""
        return -(-problem.outputs // self.outputs) * -(-problem.tokens // self.tokens)


_MANY = Plan(kernel="tma", outputs=128, tokens=128, bytes=64, warps=4, stages=4)
_SINGLE = Plan(kernel="dot", outputs=16, tokens=1, bytes=512, warps=4, stages=3, lines=256)
_FEW_NARROW = Plan(kernel="sliced", outputs=32, tokens=16, bytes=128, warps=4, stages=4, slices=4, lines=256)
_FEW_WIDE = Plan(kernel="tile", outputs=64, tokens=16, bytes=128, warps=4, stages=5)


def choose(problem: Problem, device: torch.device, out_bytes: int) -> Plan:
    """The plan for a problem on `device`, whose outputs take `out_bytes` each."""
    if problem.groups > 1:
        return _grouped(problem)
    if problem.tokens <= 2:
        return _SINGLE
    if problem.tokens <= 16:
        # A layer with fewer tiles than two a multiprocessor leaves most of them idle unless K is sliced.
        narrow = problem.outputs < 128 * multiprocessors(device)
        return _FEW_NARROW if narrow else _FEW_WIDE
    if problem.tokens > 64 and _copies_by_descriptor(problem, device, out_bytes):
        return _MANY
    tokens = next(size for size in (32, 64, 128) if problem.tokens <= size or size == 128)
    return Plan(kernel="tile", outputs=64, tokens=tokens, bytes=128 if tokens < 128 else 64, warps=4, stages=4)


def _copies_by_descriptor(problem: Problem, device: torch.device, out_bytes: int) -> bool:
    # The copy engine wants rows of whole 16 bytes.
    aligned = problem.plane % 16 == 0 and problem.outputs * out_bytes % 16 == 0
    return aligned and tensor_copy_engine(device)


def _grouped(problem: Problem) -> Plan:
    size = problem.plane // problem.groups
    step = next((step for step in (128, 64, 32) if size % step == 0), 32)
    tokens = next(tile for tile in (16, 32, 64, 128) if problem.tokens <= tile or tile == 128)
    return Plan(kernel="tile", outputs=64, tokens=tokens, bytes=step, warps=8 if tokens == 128 else 4, stages=4)
