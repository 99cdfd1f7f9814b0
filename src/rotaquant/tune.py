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

DEFAULT_ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 2048, 16384)
MOST_ROWS = 65536
_DEFAULT_RECIPE = "w4a4kv4"


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
    bench: Bench | None = None,
    on_result: Callable[[ShapeOutcome, int], None] | None = None,
) -> TuningReport:
    """Find the fastest plans for the products of a model, float or quantized; its weights are not read.

    `rows` are numbers of tokens; after `limit` seconds no more is begun. Plans are kept after each problem, those that
    have none yet come first. `bench` replaces the device and its clock. `on_result` gets each result, and how many
    problems are left. Raises `RotaquantError` without a CUDA device or Triton, and for a model without such products.
    """
    require_rows(rows)
    if limit is not None and not limit > 0:
        raise RotaquantError(f"--limit {limit:g}: give a number of seconds above 0")
    chosen = bench or open_bench(device)
    deadline = math.inf if limit is None else chosen.now() + limit
    problems = {shape.problem(tokens): shape for shape in model_shapes(model) for tokens in sorted(rows)}
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


def open_bench(device: str | torch.device) -> Bench:
    """The CUDA device `device` and its clock; raises `RotaquantError` where products run on no kernels."""
    if str(device) != "auto" and not str(device).startswith("cuda"):
        raise RotaquantError(f"device {str(device)!r} has no kernels to tune; use --device cuda")
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


def model_shapes(model: str | Path) -> tuple[LinearShape, ...]:
    """The products of codes that a model computes, each shape once: single linears, and those that share an input.

    Those of a float model are by the default recipe. Raises `RotaquantError` where there are none.
    """
    if is_quantized_folder(model):
        folder = Path(model)
        source, layout = _source_of_quantized(folder), quantized_config(folder).layout
        layout_of: Callable[[Block, str], LinearLayout] = layout.linear
    else:
        source, default = open_source(model, weights=False), resolve_recipe(_DEFAULT_RECIPE)
        standard = LinearLayout(weights=default.weights, activations=default.activations)

        def layout_of(block: Block, path: str) -> LinearLayout:
            return standard

    skeleton, architecture = source.skeleton()
    shapes: dict[tuple[int, int, bool, int], LinearShape] = {}
    for block in architecture.blocks:
        for site in block.sites:
            single = [
                shape
                for path in site
                for shape in _linear_shape(skeleton.get_submodule(f"{block.path}.{path}"), path, layout_of(block, path))
            ]
            for shape in (*single, *_side_by_side(single)):
                shapes.setdefault((shape.outputs, shape.inputs, shape.packed, shape.groups), shape)
    if not shapes:
        raise RotaquantError(f"{model} has no products of quantized weights and activations: there is nothing to tune")
    return tuple(shapes.values())


def _linear_shape(linear: nn.Module, path: str, layout: LinearLayout) -> Iterator[LinearShape]:
    """The shape of a linear whose product runs on a kernel; nothing for any other."""
    assert isinstance(linear.weight, Tensor)
    outputs, inputs = linear.weight.shape
    weights, activations = layout.weights, layout.activations
    if weights is not None and activations is not None and has_product(layout, inputs):
        sizes = {fmt.group_size for fmt in (weights, activations) if fmt.group_size}
        groups = inputs // min(sizes, default=inputs)
        yield LinearShape((_kind(path),), outputs, inputs, kernel_bits(weights) == 4, groups)


def _side_by_side(shapes: list[LinearShape]) -> Iterator[LinearShape]:
    """Linears of one input as one product."""
    if len(shapes) > 1 and len({(shape.inputs, shape.packed, shape.groups) for shape in shapes}) == 1:
        first = shapes[0]
        names = tuple(name for shape in shapes for name in shape.linears)
        yield LinearShape(names, sum(shape.outputs for shape in shapes), first.inputs, first.packed, first.groups)


def _kind(path: str) -> str:
    """The last name of a path that is no number: experts are numbered."""
    return next(part for part in reversed(path.split(".")) if not part.isdecimal())


def _source_of_quantized(folder: Path) -> Source:
    """A source without weights for the float form of a quantized model."""
    quantized_config(folder)
    config = read_config(folder)
    del config.quantization_config

    def load(tensor: str, _: int | None = None) -> Tensor:
        raise RotaquantError(f"tensor {tensor} of {folder} is not at hand")

    return Source(str(folder), config, torch.float16, load, folder)
