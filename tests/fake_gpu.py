"""A CUDA device that is not there: what torch tells of one, for code that chooses by it and runs no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rotaquant.ops import device_features, library, tuned_plans


def _forget() -> None:
    for module in (device_features, library, tuned_plans):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def fake_gpu(capability: tuple[int, int], name: str = "NVIDIA Test 9") -> Iterator[torch.device]:
    """Within it torch sees one device of that capability, with 132 multiprocessors and 80 GB."""
    properties = SimpleNamespace(name=name, total_memory=80_000_000_000, multi_processor_count=132, L2_cache_size=1)
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        yield torch.device("cuda", 0)
    _forget()
