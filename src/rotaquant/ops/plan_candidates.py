"""Plans that `rotaquant tune` times: a list for each regime of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from rotaquant.ops.dispatch import Capability, refusal
from rotaquant.ops.product_plans import MOST_SINGLE, Plan, Problem

MOST_CANDIDATES = 24

# Cache lines of weights that the kernels for few tokens ask for ahead.
_LINES = 256


def candidates(problem: Problem, capability: Capability | None) -> tuple[Plan, ...]:
    """Plans worth timing for a problem on a device of that capability, each one that its kernel admits."""
    if problem.groups > 1:
        wanted = _grouped(problem)
    elif problem.tokens <= MOST_SINGLE:
        wanted = _single()
    elif problem.tokens <= 16:
        wanted = _few(8 if problem.tokens <= 8 else 16)
    elif problem.tokens <= 64:
        wanted = _some(32 if problem.tokens <= 32 else 64)
    else:
        wanted = _many(256 if problem.tokens > 256 else 64)
    admitted = (plan for plan in wanted if refusal(plan, problem, capability) is None)
    return tuple(dict.fromkeys(plan for plan in admitted if not _oversized(plan, problem)))[:MOST_CANDIDATES]


def _oversized(plan: Plan, problem: Problem) -> bool:
    """Whether a side of the tile is twice the problem's or more, so that most of the work is for nothing."""
    step = plan.bytes * plan.slices
    return (step >= 2 * problem.plane and step > 128) or (plan.outputs >= 2 * problem.outputs and plan.outputs > 32)


def _single() -> Iterator[Plan]:
    tiles = ((4, 2048, 4), (8, 2048, 4), (4, 4096, 4), (8, 4096, 4), (4, 8192, 8), (4, 16384, 16), (8, 1024, 2),
             (16, 1024, 4))  # fmt: skip
    for outputs, slices in ((16, 4), (16, 8), (32, 4), (32, 8)):
        yield _sliced((outputs, 16, 128), slices, 4)
    for share in (1, 2, 4):
        for outputs, size, warps in tiles:
            resident = share * max(8 // warps, 1)
            yield Plan(kernel="dot", outputs=outputs, tokens=1, bytes=size, warps=warps, stages=1, resident=resident)


def _few(tokens: int) -> Iterator[Plan]:
    for outputs in (16, 32, 64):
        for size, slices, warps in ((128, 2, 2), (128, 2, 4), (128, 4, 4), (64, 4, 4)):
            yield _sliced((outputs, tokens, size), slices, warps)
    yield Plan(kernel="sliced", outputs=32, tokens=tokens, bytes=256, warps=2, stages=3, slices=2, lines=2 * _LINES)
    for outputs in (64, 32, 128):
        for size, stages in ((128, 5), (128, 4), (64, 6)):
            yield _tile((outputs, tokens, size), 4, stages)
    yield _tile((64, tokens, 128), 2, 5)


def _some(tokens: int) -> Iterator[Plan]:
    for outputs in (64, 128, 32):
        for size, stages in ((128, 4), (128, 3), (64, 4), (64, 5)):
            yield _tile((outputs, tokens, size), 4, stages)
    for outputs in (32, 64):
        for size, slices, warps in ((128, 2, 4), (64, 4, 8)):
            yield _sliced((outputs, 32, size), slices, warps)
    for outputs in (64, 128):
        for size, stages in ((128, 4), (128, 5), (64, 4), (64, 6)):
            yield _tma((outputs, tokens, size), 4, stages)


def _many(tokens: int) -> Iterator[Plan]:
    for outputs, wide, size, warps in (
        (128, 128, 64, 4), (128, 128, 128, 4), (64, 128, 64, 4), (64, 128, 128, 4), (128, tokens, 64, 8),
        (128, tokens, 128, 8), (64, tokens, 128, 4),
    ):  # fmt: skip
        for stages in (3, 4):
            yield _tma((outputs, wide, size), warps, stages)
    for band in (4, 16):
        yield _tma((128, 128, 64), 4, 4, band)
    # On a device with a copy engine the list ends among these.
    for outputs, wide, size, warps in (
        (64, 128, 64, 4), (128, 128, 64, 8), (128, 128, 64, 4), (64, 64, 128, 4), (128, 64, 64, 4), (64, 128, 128, 4),
        (128, 128, 128, 8), (64, tokens, 64, 8),
    ):  # fmt: skip
        for stages in (4, 3):
            yield _tile((outputs, wide, size), warps, stages)


def _grouped(problem: Problem) -> Iterator[Plan]:
    size = problem.plane // problem.groups
    steps = [step for step in (128, 64, 32) if size % step == 0][:2] or [32]
    tokens = next(tile for tile in (16, 32, 64, 128) if problem.tokens <= tile or tile == 128)
    for outputs in (64, 128, 32):
        for step in steps:
            for warps in (4, 8):
                for stages in (4, 3):
                    yield _tile((outputs, tokens, step), warps, stages)


def _tile(tile: tuple[int, int, int], warps: int, stages: int) -> Plan:
    return Plan(kernel="tile", outputs=tile[0], tokens=tile[1], bytes=tile[2], warps=warps, stages=stages)


def _tma(tile: tuple[int, int, int], warps: int, stages: int, band: int = 8) -> Plan:
    return Plan(kernel="tma", outputs=tile[0], tokens=tile[1], bytes=tile[2], warps=warps, stages=stages, band=band)


def _sliced(tile: tuple[int, int, int], slices: int, warps: int) -> Plan:
    outputs, tokens, size = tile
    return Plan(
        kernel="sliced", outputs=outputs, tokens=tokens, bytes=size, warps=warps, stages=4, slices=slices, lines=_LINES
    )
