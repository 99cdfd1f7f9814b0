"""Run single blocks apart from their model, and collect what the linears in them really see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture
from rotaquant.runtime.linear import QuantizedLinear

# Inputs kept for the search of activation clips: enough that more changed no ratio, little enough to be quick.
_SAMPLED_ROWS = 4096

BlockArguments = dict[str, Any]


# --- running blocks ---------------------------------------------------------------------------------------------


@torch.no_grad()
def record_block_inputs(
    model: PreTrainedModel, architecture: Architecture, sequences: Tensor
) -> tuple[Tensor, list[BlockArguments]]:
    """Embed token ids `[n, length]` and learn with which arguments the model calls each block.

    Only the embeddings need weights: the blocks are replaced for the time by recorders that pass their input on.
    Returns hidden states `[n, length, hidden]` and one dict of keyword arguments per block, for single sequences.
    """
    arguments: list[BlockArguments] = [{} for _ in architecture.blocks]
    inputs: list[Tensor] = []
    decoder = model.get_submodule(architecture.decoder)

    def recorder(index: int) -> Callable[..., Tensor]:
        def record(hidden: Tensor, **kwargs: Any) -> Tensor:
            if index == 0:
                inputs.append(hidden)
            arguments[index] = kwargs
            return hidden

        return record

    stand_ins: dict[nn.Module, Callable[..., Tensor]] = {
        model.get_submodule(architecture.final_norm.path): lambda hidden: hidden
    }
    for index, block in enumerate(architecture.blocks):
        stand_ins[model.get_submodule(block.path)] = recorder(index)
    for module, stand_in in stand_ins.items():
        module.forward = stand_in
    try:
        for row in sequences:
            decoder(input_ids=row[None], use_cache=False)
    finally:
        for module in stand_ins:
            del module.forward
    return torch.cat(inputs), arguments


@torch.no_grad()
def run_block(module: nn.Module, hidden: Tensor, arguments: BlockArguments) -> Tensor:
    """Hidden states `[n, length, hidden]` through one block, a sequence at a time."""
    outputs = []
    for row in hidden:
        output = module(row[None], **arguments)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    return torch.cat(outputs)


# --- observing them ---------------------------------------------------------------------------------------------


class _Reached(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass at the module that was to be observed."""


@dataclass(frozen=True)
class SiteInputs:
    """What a site sees: how many tokens, their Hessian XᵀX / tokens `[in, in]`, and some of them, `[rows, in]`.

    Both are float32, and `None` where they were not asked for or no token came.
    """

    tokens: int
    hessian: Tensor | None = None
    rows: Tensor | None = None


class _Observer:
    """Collects the inputs of one module, batch by batch."""

    def __init__(self, stride: int | None, *, hessian: bool) -> None:
        self._stride = stride
        self._wants_hessian = hessian
        self._total: Tensor | None = None
        self._sampled: list[Tensor] = []
        self._seen = 0

    def see(self, x: Tensor) -> None:
        """Take account of inputs `[tokens, in]`."""
        x = x.float()
        if self._stride is not None:
            # One phase over all sequences: the same positions of every sequence would be a poor sample.
            self._sampled.append(x[(-self._seen) % self._stride :: self._stride].clone())
        if self._wants_hessian:
            if self._total is None:
                self._total = torch.zeros(x.shape[-1], x.shape[-1], device=x.device)
            self._total.addmm_(x.T, x)
        self._seen += x.shape[0]

    def inputs(self) -> SiteInputs:
        """What was collected."""
        hessian = None if self._total is None else self._total.div_(self._seen)
        return SiteInputs(self._seen, hessian, torch.cat(self._sampled) if self._sampled else None)


@contextmanager
def _observing(module: nn.Module, see: Callable[[Tensor], None], *, stop: bool) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = module.rotate_input(args[0]) if isinstance(module, QuantizedLinear) else args[0]
        see(x.flatten(0, -2))
        if stop:
            raise _Reached

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def observe(
    module: nn.Module, paths: Iterable[str], calibration: tuple[Tensor, BlockArguments], *, hessian: bool, rows: bool
) -> dict[str, SiteInputs]:
    """Run hidden states through a block once, and collect what its modules at `paths` see.

    Inputs count as they are after a linear's online rotation. A single module ends the run where it is reached.
    """
    hidden, arguments = calibration
    stride = max(1, hidden.shape[0] * hidden.shape[1] // _SAMPLED_ROWS) if rows else None
    observers = {path: _Observer(stride, hessian=hessian) for path in paths}
    with ExitStack() as hooks:
        for path, observer in observers.items():
            observed = module.get_submodule(path)
            hooks.enter_context(_observing(observed, observer.see, stop=len(observers) == 1))
        for row in hidden:
            with suppress(_Reached):
                module(row[None], **arguments)
    return {path: observer.inputs() for path, observer in observers.items()}
