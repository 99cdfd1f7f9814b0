"""Tune the products of a model on this machine: its shapes, the fastest plan of each, a file that keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rotaquant.architectures import Block
from rotaquant.checkpoint import Source, is_quantized_folder, open_source
from rotaquant.checkpoint.configs import read_config
from rotaquant.checkpoint.folder import quantized_config
from rotaquant.errors import RotaquantError
from rotaquant.ops import packing, tuned_plans
from rotaquant.ops.library import triton_missing
from rotaquant.ops.product_plans import Problem
from rotaquant.ops.tuning import Bench, Outcome, time_on_device, tune_problem
from rotaquant.recipe import resolve_recipe
from rotaquant.runtime import resolve_device
from rotaquant.runtime.kernel_path import has_product, kernel_bits
from rotaquant.runtime.layout import LinearLayout
from rotaquant.runtime.linear import QuantizedLinear
from rotaquant.runtime.shared_input import SharedInput, share_inputs

DEFAULT_ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 2048, 16384)
MOST_ROWS = 65536
_DEFAULT_RECIPE = "w4a4kv4"

LayoutOf = Callable[[Block, str], LinearLayout]


@dataclass(frozen=True)
class LinearShape:
    """A product that a model computes: `[outputs, inputs]`, and the linears that it is of (several: side by side)."""

    linears: tuple[str, ...]
    outputs: int
    inputs: int
    packed: bool
    groups: int

    def problem(self, tokens: int) -> Problem:
        """The product for so many tokens."""
        plane = packing.plane_columns(self.inputs, self.packed)
        return Problem(tokens=tokens, outputs=self.outputs, plane=plane, packed=self.packed, groups=self.groups)


@dataclass(frozen=True)
class ShapeOutcome:
    """What tuning a shape for a number of tokens found."""

    shape: LinearShape
    outcome: Outcome


@dataclass(frozen=True)
class TuningReport:
    """What `rotaquant tune` did: results in the order they were found, and how many problems time did not suffice for.

    `file` holds the plans.
    """

    model: str
    device: str
    file: Path
    results: tuple[ShapeOutcome, ...]
    unfinished: int


def tune(
    model: str | Path,
    *,
    rows: Sequence[int] = DEFAULT_ROWS,
    limit: float | None = None,
    device: str | torch.device = "cuda",
    text_only: bool = False,
    bench: Bench | None = None,
    on_result: Callable[[ShapeOutcome, int], None] | None = None,
) -> TuningReport:
    """Find the fastest plans for the products of a model, float or quantized; its weights are not read.

    `rows` are numbers of tokens; after `limit` seconds no more is begun. Plans are kept after each problem, those that
    have none yet come first. `text_only` takes the text part of a float model that has others. `bench` replaces the
    device and its clock. `on_result` gets each result, and how many problems are left. Raises `RotaquantError` for a
    model that cannot be read or has no such products, and then without a CUDA device or Triton.
    """
    require_rows(rows)
    if limit is not None and not limit > 0:
        raise RotaquantError(f"--limit {limit:g}: give a number of seconds above 0")
    _require_kernels_on(device)
    # A wrong model is told everywhere, also where there is no GPU to tune it on.
    shapes = model_shapes(model, text_only=text_only)
    chosen = bench or open_bench(device)
    deadline = math.inf if limit is None else chosen.now() + limit
    problems = {shape.problem(tokens): shape for shape in shapes for tokens in sorted(rows)}
    results: list[ShapeOutcome] = []
    # Triton compiles for, and launches on, the current device.
    with torch.cuda.device(chosen.device) if chosen.device.type == "cuda" else nullcontext():
        for problem in _untuned_first(problems, chosen):
            outcome = tune_problem(problem, chosen, deadline)
            if outcome is None:
                break
            results.append(ShapeOutcome(problems[problem], outcome))
            tuned = outcome.tuned()
            if tuned is not None:
                tuned_plans.store(chosen.kind, [tuned])
            if on_result is not None:
                on_result(results[-1], len(problems) - len(results))
    unfinished = len(problems) - len(results)
    return TuningReport(str(model), chosen.kind.name, chosen.kind.file, tuple(results), unfinished)


def _untuned_first(problems: dict[Problem, LinearShape], bench: Bench) -> list[Problem]:
    try:
        known = {entry.problem for entry in tuned_plans.read(bench.kind)}
    except RotaquantError:  # told when the file is replaced
        known = set()
    return sorted(problems, key=lambda problem: problem in known)


def parse_rows(text: str) -> tuple[int, ...]:
    """Numbers of tokens from `1,16,64`; raises `RotaquantError` that names what is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    unfit = [part for part in parts if not part.isdecimal()]
    if unfit:
        raise RotaquantError(
            f"--rows: {unfit[0]!r} is no number of tokens; give numbers with commas between: 1,16,2048"
        )
    rows = tuple(sorted({int(part) for part in parts}))
    require_rows(rows)
    return rows


def require_rows(rows: Sequence[int]) -> None:
    """Raise `RotaquantError` unless there are numbers of tokens, each of them possible."""
    if not rows:
        raise RotaquantError("--rows names no number of tokens; give some, such as 1,16,2048")
    for count in rows:
        if not 1 <= count <= MOST_ROWS:
            raise RotaquantError(f"--rows: {count} is not between 1 and {MOST_ROWS} tokens")


def _require_kernels_on(device: str | torch.device) -> None:
    if str(device) != "auto" and not str(device).startswith("cuda"):
        raise RotaquantError(f"device {str(device)!r} has no kernels to tune; use --device cuda")


def open_bench(device: str | torch.device) -> Bench:
    """The CUDA device `device` and its clock; raises `RotaquantError` where products run on no kernels."""
    _require_kernels_on(device)
    if not torch.cuda.is_available():
        raise RotaquantError(
            "torch sees no CUDA device, and only there are kernels to tune: run this where the model is to run "
            "(`rotaquant doctor` tells what is there)"
        )
    resolved = resolve_device(device)
    if resolved.index is not None and resolved.index >= torch.cuda.device_count():
        raise RotaquantError(f"there is no device {resolved}: torch sees {torch.cuda.device_count()}, from cuda:0 on")
    missing = triton_missing()
    if missing is not None:
        raise RotaquantError(f"there are no kernels to tune: {missing}")
    kind = tuned_plans.device_kind(resolved)
    if kind is None:
        raise RotaquantError("only NVIDIA devices can be tuned; the standard plans are used here")
    return Bench(device=resolved, kind=kind, timer=time_on_device)


# --- the shapes of a model -------------------------------------------------------------------------------------


def model_shapes(model: str | Path, *, text_only: bool = False) -> tuple[LinearShape, ...]:
    """The products of codes that a model computes, each shape once: single linears, and those that share an input.

    Those of a float model are by the default recipe. Raises `RotaquantError` where there are none.
    """
    if is_quantized_folder(model):
        source, layout_of = _quantized(Path(model))
    else:
        source, layout_of = _float_by_default(model, text_only)
    skeleton, architecture = source.skeleton()
    shapes: dict[tuple[int, int, bool, int], LinearShape] = {}
    for block in architecture.blocks:
        module = skeleton.get_submodule(block.path)
        for site in block.sites:
            layouts = {path: layout_of(block, path) for path in site}
            for shape in _site_shapes(module, layouts):
                shapes.setdefault((shape.outputs, shape.inputs, shape.packed, shape.groups), shape)
    if not shapes:
        raise RotaquantError(
            f"{model} has no products of quantized weights and activations: there is nothing to tune; give a model "
            "quantized by a recipe with both, such as w4a4kv4"
        )
    return tuple(shapes.values())


def _site_shapes(block: nn.Module, layouts: dict[str, LinearLayout]) -> Iterator[LinearShape]:
    """The products of linears that read one input: of each alone, and of those that the runtime computes as one."""
    quantized: dict[str, QuantizedLinear] = {}
    for path, layout in layouts.items():
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        quantized[path] = QuantizedLinear.empty_like(linear, layout, torch.float16)
        block.set_submodule(path, quantized[path])
    # The runtime itself says which of them are alike: what is tuned must be what will run.
    share_inputs(block, tuple(layouts))
    together: dict[SharedInput, list[str]] = {}
    for path, made in quantized.items():
        yield from _shape_of([(path, made)])
        if made.shared_input is not None:
            together.setdefault(made.shared_input, []).append(path)
    for paths in together.values():
        yield from _shape_of([(path, quantized[path]) for path in paths])


def _shape_of(members: list[tuple[str, QuantizedLinear]]) -> Iterator[LinearShape]:
    """The shape of one product of alike linears; nothing where it runs on no kernel for codes."""
    _, first = members[0]
    weights, activations, inputs = first.layout.weights, first.layout.activations, first.in_features
    if weights is not None and activations is not None and has_product(first.layout, inputs):
        sizes = {fmt.group_size for fmt in (weights, activations) if fmt.group_size}
        groups = inputs // min(sizes, default=inputs)
        names = tuple(_kind(path) for path, _ in members)
        outputs = sum(linear.out_features for _, linear in members)
        yield LinearShape(names, outputs, inputs, kernel_bits(weights) == 4, groups)


def _kind(path: str) -> str:
    """The last name of a path that is no number: experts are numbered."""
    return next(part for part in reversed(path.split(".")) if not part.isdecimal())


def _float_by_default(model: str | Path, text_only: bool) -> tuple[Source, LayoutOf]:
    """A float model without its weights, and what the default recipe makes of each linear."""
    recipe = resolve_recipe(_DEFAULT_RECIPE)
    layout = LinearLayout(weights=recipe.weights, activations=recipe.activations)
    return open_source(model, text_only=text_only, weights=False), lambda block, path: layout


def _quantized(folder: Path) -> tuple[Source, LayoutOf]:
    """The float form of a quantized model, without weights, and what each of its linears is."""
    layout = quantized_config(folder).layout
    config = read_config(folder)
    del config.quantization_config

    def load(tensor: str, _: int | None = None) -> Tensor:
        raise RotaquantError(f"tensor {tensor} of {folder} is not at hand")

    return Source(str(folder), config, torch.float16, load, folder), layout.linear
