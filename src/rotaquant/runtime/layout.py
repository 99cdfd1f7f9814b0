"""What every part of a quantized model is made of: the one description that quantizing, saving and loading share."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        activations = self.recipe.activations
        if activations is not None and self.recipe.searches_activations:
            # During calibration the ratio is not known yet, and activations are float.
            ratio = self.clip_ratios.get(f"{block.path}.{path}")
            activations = activations.model_copy(update={"clip_ratio": ratio}) if ratio is not None else None
        return LinearLayout(weights=self.recipe.weights, activations=activations, transform=self.transform(block, path))

    def transform(self, block: Block, path: str) -> Factorisation | HeadMix | None:
        """The rotation that the input of the linear at `path` takes online."""
        if path == block.attention.o:
            return self.rotation.head_mix
        if path == block.mlp.down:
            return self.rotation.down_input
        return None

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
    require_fitting_groups(architecture, layout.recipe)
    attention, mlp = architecture.blocks[0].attention, architecture.blocks[0].mlp
    widths = {
        "residual": architecture.hidden_size,
        "value_head": attention.head_dim,
        "query_key": attention.head_dim,
        "down_input": mlp.width,
    }
    rotation, asked = layout.rotation, layout.recipe.rotations
    for site, width in widths.items():
        transform = getattr(rotation, site)
        if (transform is not None) != getattr(asked, site) or (transform is not None and transform.size != width):
            raise RotaquantError(
                f"quantization_config is damaged: rotation {site!r} contradicts its recipe or the model"
            )
    if layout.recipe.searches_activations:
        for block in architecture.blocks:
            for path in block.linears:
                ratio = layout.clip_ratios.get(f"{block.path}.{path}")
                if ratio is None or not 0 < ratio <= 1:
                    raise RotaquantError(
                        f"quantization_config is damaged: clip_ratios has {ratio} for {block.path}.{path}, whose input "
                        "would run in float or out of range"
                    )
    # Where heads cannot be mixed there is no mix, though the recipe asks for one.
    possible = plan_head_mix(attention.heads, rotation.value_head) if asked.head_mix and rotation.value_head else None
    mix = rotation.head_mix
    if (mix is not None) != (possible is not None) or (mix is not None and mix.heads != attention.heads):
        raise RotaquantError("quantization_config is damaged: rotation 'head_mix' contradicts its recipe or the model")


def require_fitting_groups(architecture: Architecture, recipe: Recipe) -> None:
    """Raise `RotaquantError` unless every group size divides the widths that it splits."""
    block = architecture.blocks[0]
    attention = block.attention
    widths = {
        "hidden": architecture.hidden_size,
        "attention output": attention.heads * attention.head_dim,
        "down input": block.mlp.width,
    }
    for part in ("weights", "activations"):
        _require_divisor(part, getattr(recipe, part), widths)
    for part in ("keys", "values"):
        _require_divisor(part, getattr(recipe, part), {"head_dim": attention.head_dim})


def _require_divisor(part: str, fmt: IntFormat | None, widths: dict[str, int]) -> None:
    if fmt is None or fmt.group_size is None:
        return
    unfit = {name: width for name, width in widths.items() if width % fmt.group_size}
    if unfit:
        fitting = [size for size in (16, 32, 64, 96, 128, 256) if not any(w % size for w in widths.values())]
        names = ", ".join(f"{name} {width}" for name, width in unfit.items())
        choice = f"group sizes that fit: {', '.join(map(str, fitting))}" if fitting else "no usual one fits"
        raise RotaquantError(
            f"{part}: group_size {fmt.group_size} does not divide {names}; {choice}; leave it out for whole rows"
        )
