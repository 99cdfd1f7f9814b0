"""For tests on the CPU of what runs on kernels: the operations are the same, by their definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rotaquant import ops
from rotaquant.runtime import kernel_path

PRODUCTS = ("int4_matmul", "int8_matmul")
ENCODERS = ("quantize_rows", "hadamard_quantize", "gated_hadamard_quantize")


@contextmanager
def on_kernels() -> Iterator[Counter[str]]:
    """Let the CPU count as a device with kernels; counts the calls of each operation."""
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def runs(x: Tensor) -> bool:
            return x.numel() > 0 and x.dtype != torch.float64

        patch.setattr(kernel_path, "kernels_run_on", runs)
        for name in (*PRODUCTS, *ENCODERS):
            patch.setattr(ops, name, _counted(name, calls))
        yield calls


def _counted(name: str, calls: Counter[str]) -> object:
    operation = getattr(ops, name)

    def run(*args: object) -> object:
        calls[name] += 1
        return operation(*args)

    return run
