"""For tests on the CPU of what runs on kernels: the operations are the same, by their definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from torch import Tensor, nn

from rotaquant import ops
from rotaquant.runtime import kernel_path
from rotaquant.runtime.shared_input import share_inputs

PRODUCTS = ("int4_matmul", "int8_matmul")
AnyModule = TypeVar("AnyModule", bound=nn.Module)
ENCODERS = ("quantize_rows", "hadamard_quantize", "gated_hadamard_quantize")


@contextmanager
def on_kernels() -> Iterator[Counter[str]]:
    """Let the CPU count as a device with kernels; counts the calls of each operation."""
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_path, "device_has_kernels", lambda device: device.type != "meta")
        for name in (*PRODUCTS, *ENCODERS):
            patch.setattr(ops, name, _counted(name, calls))
        patch.setattr(ops, "quantize_matmul", _both_counted(calls))
        yield calls


def laid_out(module: AnyModule) -> AnyModule:
    """A module that was loaded before the CPU counted so, as it is when it has come to a device with kernels."""
    return module.to("cpu")


class Owner(nn.ModuleList):
    """Calls its linears as an attention or a feed-forward part does."""

    def forward(
        self, x: Tensor, order: Sequence[int] | None = None, between: Callable[[], object] = int
    ) -> list[Tensor]:
        """The outputs of the linears of `order`, by default each once; `between` runs after each."""
        outputs = []
        for index in range(len(self)) if order is None else order:
            outputs.append(self[index](x))
            between()
        return outputs


def owner_of(*linears: nn.Module) -> Owner:
    """An owner whose linears share its input."""
    owner = Owner(linears)
    share_inputs(owner, [str(index) for index in range(len(linears))])
    return owner


def _counted(name: str, calls: Counter[str]) -> object:
    operation = getattr(ops, name)

    def run(*args: object) -> object:
        calls[name] += 1
        return operation(*args)

    return run


def _both_counted(calls: Counter[str]) -> object:
    """`ops.quantize_matmul`, counted as the two operations that it is in one."""
    operation = ops.quantize_matmul

    def run(*args: Any) -> object:
        calls.update(("quantize_rows", f"int{args[4]}_matmul"))
        return operation(*args)

    return run
