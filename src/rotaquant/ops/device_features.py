"""What a device can do, for kernels that choose their path by it."""

from __future__ import annotations

import sys
from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; `None` for any other, whose kernels run in Triton's interpreter."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def inline_assembly(device: torch.device) -> bool:
    """Whether PTX can be written into a kernel for `device`."""
    return capability(device) is not None


def tensor_copy_engine(device: torch.device) -> bool:
    """Whether the device copies whole tiles by descriptor (TMA: compute capability 9.0 and later)."""
    found = capability(device)
    return found is not None and found >= (9, 0)


def programmatic_launch(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor ends and wait within (compute capability 9.0 and later)."""
    return tensor_copy_engine(device)


@lru_cache(maxsize=64)
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; one in the interpreter."""
    if device.type != "cuda":
        return 1
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


_KIB = 1024
# By the CUDA programming guide; what it does not know yet has at least as much as the least of these.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99


def shared_memory_of(found: tuple[int, int]) -> int:
    """Bytes of shared memory that one program may have on devices of a compute capability."""
    return _SHARED_KIB.get(found, _LEAST_SHARED_KIB) * _KIB


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; more than any takes in the interpreter."""
    found = capability(device)
    return sys.maxsize if found is None else shared_memory_of(found)
