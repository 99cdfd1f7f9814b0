"""Quantize one block at a time from what its layers really see, through the runtime's own modules.

The inputs of a block are the outputs of the quantized blocks before it, with float activations and a float cache;
inside a block each site is measured with the sites before it already quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, Block
from rotaquant.quantization.activation_clip import search_activation_clip
from rotaquant.quantization.gptq import gptq, output_error
from rotaquant.quantization.weights import QuantizedWeight, round_to_nearest, weight_scale
from rotaquant.recipe import Recipe
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.linear import QuantizedLinear

# Inputs kept for the search of activation clips: enough that more changed no ratio, little enough to be quick.
_SAMPLED_ROWS = 4096

BlockArguments = dict[str, Any]


@dataclass
class BlockRecord:
    """What was found while a block was quantized: searched clip ratios, output errors by linear, remarks."""

    clip_ratios: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# --- running blocks apart from their model ----------------------------------------------------------------------


@torch.no_grad()
def record_block_inputs(
    model: PreTrainedModel, architecture: Architecture, sequences: Tensor
) -> tuple[Tensor, list[BlockArguments]]:
    """Embed token ids `[n, length]` and learn with which arguments the model calls each block.

    Only the embedding needs weights: the blocks are replaced for the time by recorders that pass their input on.
    Returns hidden states `[n, length, hidden]` and one dict of keyword arguments per block, for single sequences.
    """
    arguments: list[BlockArguments] = [{} for _ in architecture.blocks]
    final_norm = model.get_submodule(architecture.final_norm)
    decoder = model.get_submodule(architecture.decoder)

    def recorder(index: int) -> Callable[..., Tensor]:
        def record(hidden: Tensor, **kwargs: Any) -> Tensor:
            arguments[index] = kwargs
            return hidden

        return record

    stand_ins: dict[nn.Module, Callable[..., Tensor]] = {final_norm: lambda hidden: hidden}
    for index, block in enumerate(architecture.blocks):
        stand_ins[model.get_submodule(block.path)] = recorder(index)
    for module, stand_in in stand_ins.items():
        module.forward = stand_in
    try:
        hidden = [decoder(input_ids=row[None], use_cache=False).last_hidden_state for row in sequences]
    finally:
        for module in stand_ins:
            del module.forward
    return torch.cat(hidden), arguments


@torch.no_grad()
def run_block(module: nn.Module, hidden: Tensor, arguments: BlockArguments) -> Tensor:
    """Hidden states `[n, length, hidden]` through one block, a sequence at a time."""
    outputs = []
    for row in hidden:
        output = module(row[None], **arguments)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    return torch.cat(outputs)


class _Reached(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass at the site that was to be observed."""


@contextmanager
def _stop_at(linear: QuantizedLinear, observe: Callable[[Tensor], None]) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        observe(linear.rotate_input(args[0]).flatten(0, -2))
        raise _Reached

    handle = linear.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class SiteInputs:
    """What a site sees: its Hessian XᵀX / rows, float32 `[in, in]`, and some of its rows, float32 `[rows, in]`."""

    hessian: Tensor | None
    rows: Tensor


@torch.no_grad()
def observe_site(
    module: nn.Module, linear: QuantizedLinear, hidden: Tensor, arguments: BlockArguments, *, hessian: bool
) -> SiteInputs:
    """Run `hidden` through a block up to `linear` and collect what the linear sees after its online rotation."""
    stride = max(1, hidden.shape[0] * hidden.shape[1] // _SAMPLED_ROWS)
    sampled: list[Tensor] = []
    width = linear.in_features
    total = torch.zeros(width, width, device=hidden.device) if hessian else None
    seen = 0

    def observe(x: Tensor) -> None:
        nonlocal seen
        x = x.float()
        # One phase over all sequences: the same positions of every sequence would be a poor sample.
        sampled.append(x[(-seen) % stride :: stride].clone())
        if total is not None:
            total.addmm_(x.T, x)
        seen += x.shape[0]

    with _stop_at(linear, observe):
        for row in hidden:
            try:
                module(row[None], **arguments)
            except _Reached:
                continue
    return SiteInputs(total / seen if total is not None else None, torch.cat(sampled))


# --- quantizing a block -----------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_block(
    module: nn.Module,
    block: Block,
    layout: ModelLayout,
    calibration: tuple[Tensor, BlockArguments] | None,
    on_linear: Callable[[str, float | None], None],
) -> tuple[BlockRecord, Tensor | None]:
    """Quantize every linear of a block in place, site by site in the order of the forward pass.

    The block's linears are float `QuantizedLinear`s. `calibration` holds the block's inputs and call arguments, or is
    `None` for a recipe that looks at no data. Calls `on_linear` with each linear's path and relative output error.
    Returns the record and the inputs of the next block.
    """
    record = BlockRecord()
    recipe = layout.recipe
    quantized: dict[str, QuantizedWeight] = {}
    searches = recipe.searches_activations
    for site in block.sites:
        linears = {path: _linear(module, path) for path in site}
        inputs = None
        if calibration is not None and (searches or recipe.gptq is not None):
            first = next(iter(linears.values()))
            inputs = observe_site(module, first, *calibration, hessian=recipe.gptq is not None)
        # Clips are searched for the output of the float weights, which the codes are about to replace.
        target = inputs.rows @ _stacked(linears).T if searches and inputs is not None else None
        if recipe.weights is not None:
            chosen = _quantize_site(block, linears, inputs, layout, record)
            for path, weight in chosen.items():
                # The rest of the block is measured with what the codes stand for; unpacking them anew for every
                # sequence would take longer than the products.
                linears[path].rotated_weight = weight.dequantize().to(linears[path].rotated_weight.dtype)
            quantized.update(chosen)
        if inputs is not None and target is not None:
            assert recipe.activations is not None
            ratio = search_activation_clip(inputs.rows, _stacked(linears), target, recipe.activations)
            record.clip_ratios.update({f"{block.path}.{path}": ratio for path in site})
        for path in site:
            on_linear(path, record.errors.get(f"{block.path}.{path}"))
    # Activations are float up to here: quantizing them while calibrating was tried and brought nothing.
    outputs = run_block(module, *calibration) if calibration is not None else None
    for path, weight in quantized.items():
        _linear(module, path).store(weight, layout.linear(block, path))
    return record, outputs


def _linear(module: nn.Module, path: str) -> QuantizedLinear:
    linear = module.get_submodule(path)
    assert isinstance(linear, QuantizedLinear)
    return linear


def _stacked(linears: dict[str, QuantizedLinear]) -> Tensor:
    """The weights of the linears of one site as one, float32 `[sum of out, in]`."""
    return torch.cat([linear.float_weight(torch.float32) for linear in linears.values()])


def _quantize_site(
    block: Block,
    linears: dict[str, QuantizedLinear],
    inputs: SiteInputs | None,
    layout: ModelLayout,
    record: BlockRecord,
) -> dict[str, QuantizedWeight]:
    """The quantized weights of the linears of one site; GPTQ's where its output error is the smaller one."""
    recipe = layout.recipe
    assert recipe.weights is not None
    # Linears of one site share their Hessian: stacked, the columns are walked once.
    stacked = _stacked(linears)
    scale = weight_scale(stacked, recipe.weights, layout.torch_scale_dtype())
    rounded = round_to_nearest(stacked, recipe.weights, scale)
    hessian = inputs.hessian if inputs is not None else None
    improved = _gptq_or_note(block, linears, stacked, scale, hessian, recipe, record)
    start = 0
    quantized = {}
    for path, linear in linears.items():
        rows = slice(start, start + linear.out_features)
        start += linear.out_features
        weight = stacked[rows]
        chosen = QuantizedWeight(rounded.codes[rows], scale[rows])
        name = f"{block.path}.{path}"
        if hessian is not None:
            error = output_error(weight, chosen, hessian)
            if improved is not None:
                candidate = QuantizedWeight(improved.codes[rows], scale[rows])
                candidate_error = output_error(weight, candidate, hessian)
                if candidate_error <= error:
                    chosen, error = candidate, candidate_error
                else:
                    record.notes.append(f"{name}: round-to-nearest kept, GPTQ's output error was larger")
            record.errors[name] = error
        quantized[path] = chosen
    return quantized


def _gptq_or_note(
    block: Block,
    linears: dict[str, QuantizedLinear],
    stacked: Tensor,
    scale: Tensor,
    hessian: Tensor | None,
    recipe: Recipe,
    record: BlockRecord,
) -> QuantizedWeight | None:
    if recipe.gptq is None or hessian is None:
        return None
    assert recipe.weights is not None
    quantized = gptq(stacked, hessian, recipe.weights, scale, recipe.gptq)
    if quantized is None:
        names = ", ".join(f"{block.path}.{path}" for path in linears)
        record.notes.append(f"{names}: the Hessian could not be factored at any damping, rounded to nearest instead")
    return quantized
