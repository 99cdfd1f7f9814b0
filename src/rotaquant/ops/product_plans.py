"""Which kernel multiplies a problem and in which tiles: a small table by device and shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from rotaquant.ops.device_features import multiprocessors, shared_memory, tensor_copy_engine

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
    before the activations are there. `resident` programs a multiprocessor take tile after tile; 0: a program each.
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
    resident: int = 0

    def tiles(self, problem: Problem) -> int:
        """The number of programs."""
        return -(-problem.outputs // self.outputs) * -(-problem.tokens // self.tokens)


# Measured on an H200. "Wide" and "narrow" count tiles of 64 outputs against multiprocessors.
_EIGHT_NARROW = Plan(kernel="sliced", outputs=32, tokens=8, bytes=256, warps=2, stages=3, slices=2, lines=512)
_EIGHT_MEDIUM = Plan(kernel="tile", outputs=64, tokens=8, bytes=128, warps=2, stages=5)
_EIGHT_WIDE = Plan(kernel="tile", outputs=64, tokens=8, bytes=128, warps=4, stages=4)
_FEW_NARROW = Plan(kernel="sliced", outputs=32, tokens=16, bytes=128, warps=2, stages=4, slices=2, lines=512)
_FEW_NARROW_LONG = Plan(kernel="sliced", outputs=32, tokens=16, bytes=128, warps=4, stages=4, slices=4, lines=256)
_FEW_MEDIUM = Plan(kernel="tile", outputs=64, tokens=16, bytes=128, warps=2, stages=5)
_FEW_WIDE = Plan(kernel="tile", outputs=64, tokens=16, bytes=128, warps=4, stages=5)
_SOME_NARROW = Plan(kernel="tile", outputs=64, tokens=64, bytes=128, warps=4, stages=4)
_SOME_WIDE = Plan(kernel="tma", outputs=128, tokens=64, bytes=128, warps=4, stages=4)
_MORE_NARROW = Plan(kernel="tma", outputs=64, tokens=64, bytes=128, warps=4, stages=5)
_MORE_MEDIUM = Plan(kernel="tma", outputs=64, tokens=256, bytes=128, warps=4, stages=3)
_MORE_WIDE = Plan(kernel="tma", outputs=128, tokens=64, bytes=64, warps=4, stages=5)
_MANY = Plan(kernel="tma", outputs=128, tokens=128, bytes=64, warps=4, stages=4, band=16)
_MANY_WIDE = Plan(kernel="tma", outputs=128, tokens=256, bytes=128, warps=8, stages=3)

_LARGEST = 1 << 29  # outputs of a product from which tiles of 256 tokens pay
MOST_SINGLE = 2  # tokens that a kernel for one of them takes one after another
_LONGEST_STEP = 16384  # bytes of a row of weights that a single token's kernel holds at once
_LONGEST_QUANTIZED = 4096  # ... up to which it quantizes the token itself
_LARGE_TILE = 225 * 1024  # bytes of shared memory that the largest tile of 256 tokens takes
_SHORT = 2048  # bytes of a row of weights up to which 8 tokens of a medium layer take no slices of K
_LONG = 12288  # bytes of a row of weights from which splitting K in four pays


def choose(problem: Problem, device: torch.device, out_bytes: int) -> Plan:
    """The standard plan for a problem on `device`, whose outputs take `out_bytes` each."""
    if problem.groups > 1:
        return _grouped(problem)
    wide = problem.outputs >= 64 * 2 * multiprocessors(device)
    roomy = shared_memory(device) >= _LARGE_TILE
    if problem.tokens <= MOST_SINGLE:
        return _single(problem.plane)
    if problem.tokens <= 16:
        return _few(problem, wide, problem.outputs >= 62 * multiprocessors(device))
    if _copies_by_descriptor(problem, device, out_bytes):
        if problem.tokens <= 64:
            return _SOME_WIDE if wide else _SOME_NARROW
        if problem.tokens <= 512:
            return _more(problem, multiprocessors(device), roomy)
        # The larger tile reads less and fills a device worse: it wins on the very largest products alone.
        return _MANY_WIDE if roomy and problem.outputs * problem.tokens >= _LARGEST else _MANY
    tokens = next(size for size in (32, 64, 128) if problem.tokens <= size or size == 128)
    return Plan(kernel="tile", outputs=64, tokens=tokens, bytes=128 if tokens < 128 else 64, warps=4, stages=4)


def _few(problem: Problem, wide: bool, medium: bool) -> Plan:
    if problem.tokens <= 8:
        if wide:
            return _EIGHT_WIDE
        return _EIGHT_MEDIUM if medium and problem.plane <= _SHORT else _EIGHT_NARROW
    if wide:
        return _FEW_WIDE
    if problem.plane >= _LONG:
        return _FEW_NARROW_LONG
    return _FEW_MEDIUM if medium else _FEW_NARROW


def _more(problem: Problem, multiprocessors: int, roomy: bool) -> Plan:
    if problem.outputs >= 72 * multiprocessors:
        return _MORE_WIDE
    # Half a tile of tokens is too much to compute for nothing.
    medium = roomy and problem.outputs >= 36 * multiprocessors and problem.tokens > 128
    return _MORE_MEDIUM if medium else _MORE_NARROW


def _single(plane: int) -> Plan:
    """Whole rows at once, for each one or two loads of 16 bytes a thread."""
    row = 1 << (plane - 1).bit_length()
    warps = min(row // 1024, 16) if row > 4096 else min(max(row // 512, 1), 4)
    return Plan(kernel="dot", outputs=4, tokens=1, bytes=min(row, _LONGEST_STEP), warps=warps, stages=1,
                resident=max(32 // warps, 2))  # fmt: skip


def choose_quantizing(problem: Problem, device: torch.device) -> Plan | None:
    """The plan of a single token that the kernel for it quantizes too; `None` where to do so apart is the faster."""
    if problem.tokens > MOST_SINGLE or problem.groups > 1 or problem.plane > _LONGEST_QUANTIZED:
        return None
    plan = _single(problem.plane)
    if problem.outputs < 48 * multiprocessors(device):
        return replace(plan, resident=4)
    # Each program quantizes for itself: the fewer of them, the less of that.
    return replace(plan, outputs=8, resident=3 if problem.outputs < 128 * multiprocessors(device) else 6)


def _copies_by_descriptor(problem: Problem, device: torch.device, out_bytes: int) -> bool:
    # The copy engine wants rows of whole 16 bytes.
    aligned = problem.plane % 16 == 0 and problem.outputs * out_bytes % 16 == 0
    return aligned and tensor_copy_engine(device)


def _grouped(problem: Problem) -> Plan:
    size = problem.plane // problem.groups
    step = next((step for step in (128, 64, 32) if size % step == 0), 32)
    tokens = next(tile for tile in (16, 32, 64, 128) if problem.tokens <= tile or tile == 128)
    return Plan(kernel="tile", outputs=64, tokens=tokens, bytes=step, warps=8 if tokens == 128 else 4, stages=4)
