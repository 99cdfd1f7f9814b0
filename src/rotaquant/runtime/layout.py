"""What every part of a quantized model is made of: the one description that quantizing, saving and loading share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from rotaquant.architectures import Architecture, Block
from rotaquant.errors import RotaquantError
from rotaquant.hadamard import Factorisation
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.rotation.plan import HeadMix, RotationPlan, plan_head_mix


@dataclass(frozen=True, kw_only=True)
class LinearLayout:
    """One linear: the formats of its weight and input (`None`: float) and the rotation its input takes online."""

    weights: IntFormat | None = None
    activations: IntFormat | None = None
    transform: Factorisation | HeadMix | None = None


class ModelLayout(BaseModel):
    """All that is needed to run a model besides its tensors: recipe, rotation plan, searched clip ratios.

    `scale_dtype` is the dtype in which weight scales are stored; `clip_ratios` maps the path of a linear to the
    clip ratio of its input where the recipe says "search".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Recipe
    rotation: RotationPlan
    scale_dtype: str
    clip_ratios: dict[str, float] = Field(default_factory=dict)

    def linear(self, block: Block, path: str) -> LinearLayout:
        """The layout of the linear at `path` of `block`."""
        full = f"{block.path}.{path}"
        transform = self.transform(block, path)
        if self.skips(full):
            return LinearLayout(transform=transform)
        activations = self.recipe.activations
        if activations is not None and self.recipe.searches_activations:
            # During calibration the ratio is not known yet, and activations are float.
            ratio = self.clip_ratios.get(full)
            activations = activations.model_copy(update={"clip_ratio": ratio}) if ratio is not None else None
        return LinearLayout(weights=self.recipe.weights, activations=activations, transform=transform)

    def skips(self, full_path: str) -> bool:
        """Whether the recipe leaves the linear at `full_path` of the model in float."""
        return any(fnmatchcase(full_path, pattern) for pattern in self.recipe.skip)

    def transform(self, block: Block, path: str) -> Factorisation | HeadMix | None:
        """The rotation that the input of the linear at `path` takes online."""
        if path == block.attention.o:
            return self.rotation.head_mix
        for mlp in block.mlps:
            if path == mlp.down:
                return self.rotation.down(mlp.width)
        return None

    @property
    def key_bias_apart(self) -> bool:
        """Whether biases of keys stay out of the cache where they can be separated."""
        return self.recipe.keys is not None and self.recipe.cache_bias == "apart"

    @property
    def value_bias_apart(self) -> bool:
        """Whether biases of values stay out of the cache where they can be separated."""
        return self.recipe.values is not None and self.recipe.cache_bias == "apart"

    @property
    def keeps_tied(self) -> bool:
        """Whether head and embedding stay one weight, unrotated."""
        return self.recipe.tied_embeddings == "keep"

    def torch_scale_dtype(self) -> torch.dtype:
        """`scale_dtype` as torch names it."""
        dtype: Any = getattr(torch, self.scale_dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise RotaquantError(f"scale_dtype {self.scale_dtype!r} is no floating-point type")
        return dtype


def float_layout(layout: LinearLayout) -> LinearLayout:
    """The same linear before it is quantized: float weight and input, the same rotation."""
    return replace(layout, weights=None, activations=None)


def require_consistent(architecture: Architecture, layout: ModelLayout) -> None:
    """Raise `RotaquantError` where the parts of a stored layout contradict each other or the model."""
    require_applicable(architecture, layout.recipe)
    rotation, asked = layout.rotation, layout.recipe.rotations
    attention = architecture.attention
    widths = {
        "residual": architecture.hidden_size,
        "value_head": attention.head_dim,
        "query_key": attention.head_dim,
    }
    for site, width in widths.items():
        transform = getattr(rotation, site)
        _require_site(site, (transform is not None) == getattr(asked, site))
        _require_site(site, transform is None or transform.size == width)
    downs = tuple(transform.size for transform in rotation.down_input)
    _require_site("down_input", downs == (architecture.down_widths if asked.down_input else ()))
    if layout.recipe.searches_activations:
        _require_ratios(architecture, layout)
    # Where heads cannot be mixed there is no mix, though the recipe asks for one.
    mix, shards = rotation.head_mix, layout.recipe.tensor_parallel
    value_head = rotation.value_head if asked.head_mix else None
    possible = plan_head_mix(attention.heads, value_head, shards) if value_head else None
    _require_site("head_mix", (mix is not None) == (possible is not None))
    _require_site("head_mix", mix is None or (mix.heads, mix.shards) == (attention.heads, shards))
    _require_site("down_input", all(transform.blocks % shards == 0 for transform in rotation.down_input))


def _require_site(site: str, sound: bool) -> None:
    if not sound:
        raise RotaquantError(f"quantization_config is damaged: rotation {site!r} contradicts its recipe or the model")


def _require_ratios(architecture: Architecture, layout: ModelLayout) -> None:
    for full in linear_paths(architecture):
        ratio = layout.clip_ratios.get(full)
        if not layout.skips(full) and (ratio is None or not 0 < ratio <= 1):
            raise RotaquantError(
                f"quantization_config is damaged: clip_ratios has {ratio} for {full}, whose input would run in float "
                "or out of range"
            )


def linear_paths(architecture: Architecture) -> list[str]:
    """The full path of every linear of the blocks, in the order of the forward pass."""
    return [f"{block.path}.{path}" for block in architecture.blocks for path in block.linears]


def require_applicable(architecture: Architecture, recipe: Recipe) -> None:
    """Raise `RotaquantError` where a recipe does not fit a model: group sizes, patterns of `skip`."""
    _require_fitting_groups(architecture, recipe)
    paths = linear_paths(architecture)
    for pattern in recipe.skip:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise RotaquantError(
                f"skip: {pattern!r} matches none of the {len(paths)} linears that are quantized, such as "
                f"{paths[0]} or {paths[-1]} (* stands for any characters)"
            )


def _require_fitting_groups(architecture: Architecture, recipe: Recipe) -> None:
    attention = architecture.attention
    shards = recipe.tensor_parallel
    each = " of a shard" if shards > 1 else ""
    widths = [
        ("hidden", architecture.hidden_size),
        (f"attention output{each}", attention.heads * attention.head_dim // shards),
        *((f"down input{each}", width // shards) for width in architecture.down_widths),
    ]
    for part in ("weights", "activations"):
        _require_divisor(part, getattr(recipe, part), widths)
    for part in ("keys", "values"):
        _require_divisor(part, getattr(recipe, part), [("head_dim", attention.head_dim)])


def _require_divisor(part: str, fmt: IntFormat | None, widths: list[tuple[str, int]]) -> None:
    if fmt is None or fmt.group_size is None:
        return
    unfit = [(name, width) for name, width in widths if width % fmt.group_size]
    if unfit:
        fitting = [size for size in (16, 32, 64, 96, 128, 256) if not any(w % size for _, w in widths)]
        names = ", ".join(f"{name} {width}" for name, width in unfit)
        choice = f"group sizes that fit: {', '.join(map(str, fitting))}" if fitting else "no usual one fits"
        raise RotaquantError(
            f"{part}: group_size {fmt.group_size} does not divide {names}; {choice}; leave it out for whole rows"
        )
