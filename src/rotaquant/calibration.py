"""Quantize one block at a time from what its layers really see, through the runtime's own modules.

The inputs of a block are the outputs of the quantized blocks before it, with float activations and a float cache;
inside a block each site is measured with the sites before it already quantized. Sites that see nothing of one another
(the experts' inputs, then their downs) make one stage, and are measured together.

An expert is *starved* if fewer tokens reach it than a quarter of its input width: they say too little about so many
channels. Its gate and up then take the Hessian and the sample of all tokens that enter the block's experts; the input
of its down is a space of its own, so that one is rounded to nearest. Where not a single token came, the clip ratio of
an input cannot be searched and is 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rotaquant.architectures import Block
from rotaquant.observation import BlockArguments, SiteInputs, observe, record_block_inputs, run_block
from rotaquant.quantization.activation_clip import search_activation_clip
from rotaquant.quantization.gptq import gptq, output_error
from rotaquant.quantization.weights import QuantizedWeight, round_to_nearest, weight_scale
from rotaquant.recipe import Recipe
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.linear import QuantizedLinear

# Hessians that are held at a time: a stage of more is measured in several passes over the data.
HESSIAN_BYTES = 2 << 30
_UNSEARCHED_RATIO = 0.9

Site = tuple[str, ...]


@dataclass
class BlockRecord:
    """What was found while a block was quantized: searched clip ratios, output errors by linear, remarks."""

    clip_ratios: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measured_sites(block: Block, layout: ModelLayout) -> list[list[Site]]:
    """The sites of a block by stage, each without the linears that the recipe skips."""
    stages: list[list[Site]] = [
        [block.attention.inputs],
        [(block.attention.o,)],
        [mlp.inputs for mlp in block.mlps],
        [(mlp.down,) for mlp in block.mlps],
    ]
    kept = [
        [tuple(path for path in site if not layout.skips(f"{block.path}.{path}")) for site in stage] for stage in stages
    ]
    return [[site for site in stage if site] for stage in kept]


def passes(module: nn.Module, stage: list[Site]) -> Iterator[list[Site]]:
    """Split the sites of a stage so that the float32 Hessians of each part stay below `HESSIAN_BYTES`."""
    part: list[Site] = []
    held = 0
    for site in stage:
        size = hessian_bytes(module, site)
        if part and held + size > HESSIAN_BYTES:
            yield part
            part, held = [], 0
        part.append(site)
        held += size
    if part:
        yield part


def hessian_bytes(module: nn.Module, site: Site) -> int:
    """Bytes of the float32 Hessian of a site's inputs."""
    width = module.get_submodule(site[0]).in_features
    assert isinstance(width, int)
    return 4 * width**2


@torch.no_grad()
def quantize_block(
    module: nn.Module,
    block: Block,
    layout: ModelLayout,
    calibration: tuple[Tensor, BlockArguments] | None,
    on_linear: Callable[[str, float | None], None],
) -> tuple[BlockRecord, Tensor | None]:
    """Quantize every linear of a block in place, stage by stage in the order of the forward pass.

    The block's linears are float `QuantizedLinear`s, and those that the recipe skips stay so. `calibration` holds the
    block's inputs and call arguments, or is `None` for a recipe that looks at no data. Calls `on_linear` with each
    linear's path and relative output error. Returns the record and the inputs of the next block.
    """
    work = _Work(module, block, layout, calibration if layout.recipe.needs_calibration else None)
    for stage in measured_sites(block, layout):
        for part in passes(module, stage):
            inputs = work.observe(part)
            for site in part:
                work.quantize(site, inputs.pop(site, None))
                for path in site:
                    on_linear(path, work.record.errors.get(f"{block.path}.{path}"))
    work.note_starved_experts()
    # Activations are float up to here: quantizing them while calibrating was tried and brought nothing.
    outputs = run_block(module, *calibration) if calibration is not None else None
    for path, weight in work.quantized.items():
        _linear(module, path).store(weight, layout.linear(block, path))
    return work.record, outputs


class _Work:
    """One block while it is quantized."""

    def __init__(
        self, module: nn.Module, block: Block, layout: ModelLayout, calibration: tuple[Tensor, BlockArguments] | None
    ) -> None:
        self.module = module
        self.block = block
        self.layout = layout
        self.calibration = calibration
        self.record = BlockRecord()
        self.quantized: dict[str, QuantizedWeight] = {}
        experts = block.experts.mlps if block.experts is not None else ()
        self._gate_up = {mlp.inputs[0]: index for index, mlp in enumerate(experts)}
        self._down = {mlp.down: index for index, mlp in enumerate(experts)}
        self._starved: dict[str, set[int]] = {"gate/up": set(), "down": set()}
        self._unsearched: set[int] = set()

    def observe(self, sites: list[Site]) -> dict[Site, SiteInputs]:
        """What sites see, by one pass over the data; nothing for a recipe that looks at no data."""
        if self.calibration is None:
            return {}
        # Linears of one site see the same: the first of them will do.
        seen = self._observe(site[0] for site in sites)
        starved = {path for path, inputs in seen.items() if self._starves(path, inputs.tokens)}
        if any(path in self._gate_up for path in starved):
            assert self.block.experts is not None
            entering = self._observe([self.block.experts.path])[self.block.experts.path]
            seen.update({path: entering for path in starved if path in self._gate_up})
        for path in starved & self._down.keys():
            seen[path] = SiteInputs(seen[path].tokens, None, seen[path].rows)
        return {site: seen[site[0]] for site in sites}

    def _observe(self, paths: Iterable[str]) -> dict[str, SiteInputs]:
        assert self.calibration is not None
        recipe = self.layout.recipe
        wanted = {"hessian": recipe.gptq is not None, "rows": recipe.searches_activations}
        return observe(self.module, paths, self.calibration, **wanted)

    def _starves(self, path: str, tokens: int) -> bool:
        index = self._gate_up.get(path, self._down.get(path))
        if index is None or tokens >= self._needed_tokens():
            return False
        self._starved["gate/up" if path in self._gate_up else "down"].add(index)
        return True

    def _needed_tokens(self) -> int:
        width = _linear(self.module, next(iter(self._gate_up))).in_features
        return -(-width // 4)

    def quantize(self, site: Site, inputs: SiteInputs | None) -> None:
        """Choose the codes of a site's linears, and the clip ratio of its input where the recipe searches it."""
        recipe = self.layout.recipe
        linears = {path: _linear(self.module, path) for path in site}
        rows = inputs.rows if inputs is not None else None
        # Clips are searched for the output of the float weights, which the codes are about to replace.
        target = rows @ _stacked(linears).T if rows is not None else None
        if recipe.weights is not None:
            hessian = inputs.hessian if inputs is not None else None
            chosen = _quantize_site(self.block, linears, hessian, self.layout, self.record)
            for path, weight in chosen.items():
                # The rest of the block is measured with what the codes stand for; unpacking them anew for every
                # sequence would take longer than the products.
                linears[path].rotated_weight = weight.dequantize().to(linears[path].rotated_weight.dtype)
            self.quantized.update(chosen)
        if inputs is not None and recipe.searches_activations:
            ratio = _UNSEARCHED_RATIO
            if rows is not None and target is not None:
                assert recipe.activations is not None
                ratio = search_activation_clip(rows, _stacked(linears), target, recipe.activations)
            elif site[0] in self._down:
                self._unsearched.add(self._down[site[0]])
            self.record.clip_ratios.update({f"{self.block.path}.{path}": ratio for path in site})

    def note_starved_experts(self) -> None:
        """Say in the record, once for the block, which experts saw too little and what was done about it."""
        starved = self._starved["gate/up"] | self._starved["down"]
        if not starved or self.calibration is None:
            return
        done = [("gate/up", "calibrated on all tokens")]
        if self.layout.recipe.gptq is not None:
            done.append(("down", "rounded to nearest"))
        remedies = []
        for part, what in done:
            if self._starved[part] == starved:
                remedies.append(f"{'their' if len(starved) > 1 else 'its'} {part} {what}")
            elif self._starved[part]:  # the recipe skips this part of the others
                remedies.append(f"{part} of {_experts(self._starved[part])} {what}")
        if self._unsearched:
            remedies.append(f"{_experts(self._unsearched)} saw none: clip ratio {_UNSEARCHED_RATIO} before down")
        if remedies:
            total = self.calibration[0].shape[0] * self.calibration[0].shape[1]
            few = f"{_experts(starved)} saw fewer than {self._needed_tokens()} of {total} tokens"
            self.record.notes.append(f"{self.block.path}: {few}: {'; '.join(remedies)}")


def _experts(indices: set[int]) -> str:
    return f"expert{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"


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
    hessian: Tensor | None,
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


__all__ = [
    "BlockArguments",
    "BlockRecord",
    "HESSIAN_BYTES",
    "hessian_bytes",
    "measured_sites",
    "passes",
    "quantize_block",
    "record_block_inputs",
    "run_block",
]
