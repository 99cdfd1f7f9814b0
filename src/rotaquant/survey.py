"""What a float model is made of, and what a recipe would make of it: found out from its config, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture
from rotaquant.checkpoint.configs import require_tied_if_kept
from rotaquant.checkpoint.sources import Source, open_source
from rotaquant.preflight import expected_output_bytes, note_of_untied_head, weight_bytes
from rotaquant.recipe import Recipe, resolve_recipe
from rotaquant.rotation.fuse import has_separable_value_bias
from rotaquant.rotation.plan import RotationPlan, plan_rotations
from rotaquant.runtime import ModelLayout
from rotaquant.runtime.layout import linear_paths, require_applicable

Form = Literal["exact", "blocks", "dense"]
BiasPlace = Literal["none", "apart", "inside", "mixed"]


@dataclass(frozen=True)
class Site:
    """A rotation site: its width (heads for `head_mix`), the transform in words, and which kind that is.

    "exact" is one Hadamard matrix, "blocks" several along the diagonal, "dense" a random orthogonal matrix.
    """

    name: str
    width: int
    transform: str
    form: Form


@dataclass(frozen=True, kw_only=True)
class ModelSurvey:
    """What `rotaquant inspect` tells of a float model; sizes in bytes, `expected_bytes` those of the tensors written.

    `experts` counts those of each of `sparse_layers`. A bias is "apart" from the cache or "inside" it ("mixed" where
    layers differ). `skipped` lists the linears that the recipe's `skip` leaves in float, out of `linears`;
    `bits_per_weight` is that of the others, scales included, and `None` where none is quantized.
    """

    model: str
    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    down_widths: tuple[int, ...]
    experts: int
    sparse_layers: int
    tied_embeddings: bool
    parameters: int
    dtype: str
    original_bytes: int
    recipe: Recipe
    sites: tuple[Site, ...]
    key_bias: BiasPlace
    value_bias: BiasPlace
    linears: int
    skipped: tuple[str, ...]
    bits_per_weight: float | None
    expected_bytes: int
    notes: tuple[str, ...]


def survey(
    model: str | Path | PreTrainedModel, recipe: str | Path | Recipe = "w4a4kv4", *, text_only: bool = False
) -> ModelSurvey:
    """Describe a float model and what `recipe` would make of it; no weights are loaded, and none downloaded.

    Raises `RotaquantError` as `quantize` does: for a model that is unknown, quantized, or not fit for the recipe.
    """
    chosen = resolve_recipe(recipe)
    source = open_source(model, text_only=text_only, weights=False)
    skeleton, architecture = source.skeleton()
    require_applicable(architecture, chosen)
    tied = source.tied
    require_tied_if_kept(tied, chosen, source.name)
    dtype = str(source.dtype).removeprefix("torch.")
    layout = ModelLayout(recipe=chosen, rotation=plan_rotations(architecture, chosen, seed=0), scale_dtype=dtype)
    attention = architecture.attention
    experts = [block.experts.count for block in architecture.blocks if block.experts is not None]
    head = skeleton.get_submodule(architecture.head).weight
    assert isinstance(head, Tensor)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters()) - (head.numel() if tied else 0)
    weights, packed, scales = _quantized_sizes(skeleton, architecture, layout)
    paths = linear_paths(architecture)
    return ModelSurvey(
        model=source.name,
        model_type=architecture.model_type,
        layers=len(architecture.blocks),
        hidden_size=architecture.hidden_size,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        down_widths=architecture.down_widths,
        experts=max(experts, default=0),
        sparse_layers=len(experts),
        tied_embeddings=tied,
        parameters=parameters,
        dtype=dtype,
        original_bytes=parameters * source.dtype.itemsize,
        recipe=chosen,
        sites=_sites(layout.rotation),
        key_bias=_key_bias(skeleton, architecture, layout),
        value_bias=_value_bias(skeleton, architecture, layout),
        linears=len(paths),
        skipped=tuple(path for path in paths if layout.skips(path)),
        bits_per_weight=(packed + scales) * 8 / weights if weights else None,
        expected_bytes=expected_output_bytes(skeleton, architecture, layout),
        notes=_notes(source, layout, note_of_untied_head(skeleton, architecture, layout, tied=tied)),
    )


# --- what the recipe makes of it --------------------------------------------------------------------------------


def _quantized_sizes(
    skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout
) -> tuple[int, int, int]:
    """Weights of the linears that are quantized, and the bytes of their codes and of their scales."""
    weights = packed = scales = 0
    for block in architecture.blocks:
        for path in block.linears:
            if layout.linear(block, path).weights is not None:
                weight = skeleton.get_submodule(f"{block.path}.{path}").weight
                assert isinstance(weight, Tensor)
                weights += weight.numel()
                codes, steps = weight_bytes(skeleton, block, path, layout)
                packed, scales = packed + codes, scales + steps
    return weights, packed, scales


def _sites(plan: RotationPlan) -> tuple[Site, ...]:
    def form(exact: bool, text: str) -> Form:
        if exact:
            return "exact"
        return "dense" if "dense" in text else "blocks"

    return tuple(Site(name, width, text, form(exact, text)) for name, (width, exact, text) in plan.summary().items())


def _key_bias(skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout) -> BiasPlace:
    apart = [
        layout.key_bias_apart and block.attention.separable_key_bias
        for block in architecture.blocks
        if _has_bias(skeleton, f"{block.path}.{block.attention.k.path}")
    ]
    return _place(apart)


def _value_bias(skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout) -> BiasPlace:
    apart = [
        layout.value_bias_apart and has_separable_value_bias(skeleton.get_submodule(block.path), block.attention)
        for block in architecture.blocks
        if _has_bias(skeleton, f"{block.path}.{block.attention.v.path}")
    ]
    return _place(apart)


def _has_bias(skeleton: PreTrainedModel, path: str) -> bool:
    return getattr(skeleton.get_submodule(path), "bias", None) is not None


def _place(apart: list[bool]) -> BiasPlace:
    if not apart:
        return "none"
    if all(apart):
        return "apart"
    return "mixed" if any(apart) else "inside"


def _notes(source: Source, layout: ModelLayout, of_head: str | None) -> tuple[str, ...]:
    notes = [] if of_head is None else [of_head]
    if not source.files and not isinstance(source.config.dtype, torch.dtype):
        notes.append("the config names no dtype: sizes are those in float32")
    if layout.recipe.rotations.head_mix and layout.rotation.head_mix is None:
        notes.append(
            "head_mix: no mix makes values and heads one flat Hadamard matrix; values are rotated head by head"
        )
    return tuple(notes)
