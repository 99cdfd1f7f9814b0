"""How programs share the attention over a packed cache: plans, which of them is taken, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rotaquant.ops.cache_layout import PageFormat
from rotaquant.ops.device_features import multiprocessors, shared_memory


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """Warps of a program, tokens that each takes at a time, stages of its loop, and programs that share a sequence."""

    warps: int
    keys: int
    stages: int
    splits: int
    registers: int | None = None


def elements_of(head_dim: int) -> int:
    """Elements of four channels that hold a head, padded to a power of two that matrix units take."""
    return max(16, 1 << (head_dim // 4 - 1).bit_length())


def kernel_bits(bits: int) -> int:
    """The bits of codes as they lie in a page."""
    return bits if bits <= 4 else 8


def choose(pairs: int, tokens: int, device: torch.device) -> AttentionPlan:
    """The plan for so many blocks of rows, each over no more than `tokens`; measured on an H200.

    Programs should fill the device and be few enough to leave little to add up. A single warp waits for no other, which
    wins where there are many programs; where there are few, warps that share one leave less to add up.
    """
    count = multiprocessors(device)
    if pairs * 8 >= count * 31:
        if tokens >= 2048 and (tokens >= 4096 or pairs < 8 * count):
            return AttentionPlan(warps=4, keys=64, stages=4, splits=1)
        return AttentionPlan(warps=2 if pairs < 8 * count else 1, keys=64, stages=4, splits=1)
    if pairs * 4 >= count * 3:
        return _shared(1, 64, 5, 8 * count // pairs, tokens)
    units = -(-tokens // (4 * 32))
    return _shared(4, 32, 5, min(2 * count // pairs, max(16, units // 4)), tokens)


def shared_bytes(plan: AttentionPlan, form: PageFormat) -> int:
    """Shared memory that a program takes: codes and scales that are on their way."""
    padded = 4 * elements_of(form.head_dim)
    bits = sum(2 * bits if bits == 3 else bits for bits in map(kernel_bits, (form.key_bits, form.value_bits)))
    return plan.warps * plan.keys * (padded * bits // 8 + 8) * max(1, plan.stages - 3) + 2048


def fitted(plan: AttentionPlan, form: PageFormat, device: torch.device) -> AttentionPlan:
    """The plan with fewer tokens on their way where there is no room for so many."""
    room = shared_memory(device)
    while shared_bytes(plan, form) > room and (plan.stages > 4 or plan.keys > 16):
        plan = replace(plan, stages=4) if plan.stages > 4 else replace(plan, keys=plan.keys // 2)
    return plan


def _shared(warps: int, keys: int, stages: int, splits: int, tokens: int) -> AttentionPlan:
    splits = max(1, min(splits, -(-tokens // (warps * keys))))
    return AttentionPlan(warps=warps, keys=keys, stages=stages, splits=splits)
