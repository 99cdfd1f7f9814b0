"""Prove that folding and rotating changed nothing: the same probe through both forms, in float64, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rotaquant.errors import RotaquantError

# Float64 leaves about 1e-13; anything near this bound is a mistake in the algebra, not rounding.
TOLERANCE = 1e-7


class KeepFloat64(TorchFunctionMode):
    """Turn requests to compute float64 tensors in float32 (norms, softmax) into float64, and leave all else alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Run transformers' modules in float64 throughout, without gradients."""
    with torch.no_grad(), KeepFloat64():
        yield


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; NaN anywhere gives infinity."""
    error = ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()
    return error if error == error else float("inf")


def require_unchanged(actual: Tensor, expected: Tensor, where: str) -> None:
    """Raise `RotaquantError` naming `where` unless both agree to `TOLERANCE`."""
    error = relative_error(actual, expected)
    if error > TOLERANCE:
        raise RotaquantError(
            f"the rotated model differs from the original at {where}: relative error {error:.2e}, allowed "
            f"{TOLERANCE:.0e}; nothing was quantized. This model does not have the structure its model_type promises"
        )
