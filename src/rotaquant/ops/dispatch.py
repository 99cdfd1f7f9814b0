"""Which paths a compute capability has, and which plans its kernels admit: pure functions, no device is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rotaquant.ops.device_features import shared_memory_of
from rotaquant.ops.product_plans import Kernel, Plan, Problem

Capability = tuple[int, int]

CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
OLDEST: Capability = (8, 0)
MEASURED: frozenset[Capability] = frozenset({(9, 0)})

# The kernels write half precision; a wider output has tiles that were not tried.
OUT_BYTES = 2

_COPY_BYTES = 16
_COPY_BOX = 256
_SMALLEST_DOT = (16, 8, 32)
_MOST_TOKENS: dict[Kernel, int] = {"dot": 16, "sliced": 64}


def has_copy_engine(capability: Capability | None) -> bool:
    """Whether whole tiles are copied by descriptor (TMA)."""
    return capability is not None and capability >= (9, 0)


def launches_early(capability: Capability | None) -> bool:
    """Whether a kernel may start before its predecessor ends (programmatic dependent launch)."""
    return capability is not None and capability >= (9, 0)


def matrix_instruction(capability: Capability) -> Literal["mma.sync", "wgmma"]:
    """What Triton makes of an int8 product of tiles; later devices have newer units, but not for int8 there."""
    return "wgmma" if capability[0] == 9 else "mma.sync"


def architecture_name(capability: Capability) -> str:
    """`sm_90` for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


@dataclass(frozen=True, kw_only=True)
class Paths:
    """What a compute capability offers to the kernels, and whether they were measured on it.

    `shared_memory` is what one program may have, in bytes.
    """

    capability: Capability
    copy_engine: bool
    early_launch: bool
    matrix_instruction: str
    shared_memory: int
    kernels: tuple[Kernel, ...]
    measured: bool


def paths(capability: Capability) -> Paths:
    """The paths of a device of that capability, whether or not one is here."""
    few = Problem(tokens=1, outputs=4096, plane=2048, packed=True)
    kernels: tuple[Kernel, ...] = ("tma", "tile", "sliced", "dot")
    return Paths(
        capability=capability,
        copy_engine=has_copy_engine(capability),
        early_launch=launches_early(capability),
        matrix_instruction=matrix_instruction(capability),
        shared_memory=shared_memory_of(capability),
        kernels=tuple(kernel for kernel in kernels if _refused_by_kernel(kernel, few, capability) is None),
        measured=capability in MEASURED,
    )


def has_kernel(operation: str) -> bool:
    """Whether the operation `rotaquant::<operation>` is registered with a kernel for CUDA devices."""
    name = f"rotaquant::{operation}"
    registered = torch._C._dispatch_has_kernel(name)
    return registered and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def refusal(plan: Plan, problem: Problem, capability: Capability | None) -> str | None:
    """Why a problem (its output in half precision) cannot be multiplied by `plan`, or `None` where it can."""
    unsound = _unsound(plan)
    return unsound or _refused_by_kernel(plan.kernel, problem, capability)


def _refused_by_kernel(kernel: Kernel, problem: Problem, capability: Capability | None) -> str | None:
    if kernel != "tile" and problem.groups > 1:
        return f"the {kernel} kernel knows no scales per group"
    if problem.tokens > _MOST_TOKENS.get(kernel, problem.tokens):
        return f"the {kernel} kernel is for {_MOST_TOKENS[kernel]} tokens or fewer"
    if kernel == "tma":
        if not has_copy_engine(capability):
            return "the device has no tensor copy engine"
        if problem.plane % _COPY_BYTES or problem.outputs * OUT_BYTES % _COPY_BYTES:
            return "the copy engine wants rows of whole 16 bytes"
    return None


def _unsound(plan: Plan) -> str | None:
    sizes = {"outputs": plan.outputs, "bytes": plan.bytes, "warps": plan.warps, "slices": plan.slices}
    sizes |= {"tokens": plan.tokens, "lines": plan.lines or 1}
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            return f"{name} {size} is no power of two"
    if plan.warps > 32 or not 1 <= plan.stages <= 16 or plan.band < 1 or not 0 <= plan.resident <= 32:
        return "warps, stages, band or resident are out of range"
    if plan.kernel == "dot":
        return None if plan.bytes >= 4 else "the dot kernel multiplies words of 4 bytes"
    if plan.kernel not in {"tma", "tile", "sliced"}:
        return f"there is no kernel {plan.kernel}"
    tile = (plan.outputs, plan.tokens, plan.bytes)
    if any(size < least for size, least in zip(tile, _SMALLEST_DOT, strict=True)):
        return "the tile is smaller than a matrix instruction's"
    if plan.kernel == "tma" and max(tile) > _COPY_BOX:
        return f"the copy engine copies no more than {_COPY_BOX} along a side"
    return None
