"""What to do: number formats, rotation sites, GPTQ settings, and the named presets.

A recipe is data alone. It is written whole into every checkpoint, so nothing has to be repeated at load time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rotaquant.errors import RotaquantError


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IntFormat(_Frozen):
    """A grid of 2**bits integers over a row, or over groups of `group_size` columns of it.

    `clip_ratio` shrinks the range that the grid covers; "search" finds the ratio of least error on the data: for
    weights per row (or group) by sum(|error|**clip_norm), for activations per site by the layer's output.
    """

    bits: int = Field(ge=2, le=8)
    group_size: int | None = Field(default=None, ge=1)
    clip_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["search"] = 1.0
    clip_norm: float = Field(default=2.0, gt=0.0, le=16.0)


class Rotations(_Frozen):
    """The rotation sites in use. Each is one object: its online and its fused half cannot be asked for apart."""

    residual: bool = True
    value_head: bool = True
    head_mix: bool = True
    query_key: bool = True
    down_input: bool = True

    @model_validator(mode="after")
    def _head_mix_completes_value_head(self) -> Rotations:
        if self.head_mix and not self.value_head:
            raise ValueError("head_mix completes value_head to a flat Hadamard: enable value_head too")
        return self


NO_ROTATIONS = Rotations(residual=False, value_head=False, head_mix=False, query_key=False, down_input=False)


class Gptq(_Frozen):
    """Settings of GPTQ (arXiv 2210.17323): damping as a share of the mean Hessian diagonal, columns per block."""

    damping: float = Field(default=0.01, gt=0.0, lt=1.0)
    block_size: int = Field(default=128, ge=1)
    activation_order: bool = False


class Recipe(_Frozen):
    """How a model is rotated and quantized. `None` leaves the part in the model's own dtype.

    Weights and activations use symmetric grids, keys and values asymmetric ones. `gptq=None` rounds weights to
    nearest. Linears whose path in the model matches a pattern of `skip` (shell wildcards) are rotated but stay float.
    `cache_bias` says whether the biases of keys and values are kept out of a quantized cache and added exactly, or
    stored in it. `tied_embeddings` gives a tied head its own weight, or keeps it tied: then the stream is rotated
    online where it leaves the embedding and where it enters the final norm. `tensor_parallel` is the number of shards
    within which the online rotations stay.
    """

    name: str = "custom"
    rotations: Rotations = Rotations()
    weights: IntFormat | None = None
    gptq: Gptq | None = None
    activations: IntFormat | None = None
    keys: IntFormat | None = None
    values: IntFormat | None = None
    skip: tuple[str, ...] = ()
    cache_bias: Literal["apart", "inside"] = "apart"
    tied_embeddings: Literal["untie", "keep"] = "untie"
    tensor_parallel: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.gptq is not None and self.weights is None:
            raise ValueError("gptq quantizes weights: give `weights` a format, or leave `gptq` out")
        sizes = {fmt.group_size for fmt in (self.weights, self.activations) if fmt and fmt.group_size}
        if len(sizes) > 1:
            raise ValueError(
                "weights and activations with groups need the same group_size: their products are summed by it"
            )
        for part in ("keys", "values"):
            fmt: IntFormat | None = getattr(self, part)
            if fmt is not None and fmt.clip_ratio == "search":
                raise ValueError(f"{part}: clip_ratio must be a number; only weights and activations are searched")
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether quantizing by this recipe reads calibration text."""
        return self.gptq is not None or self.searches_activations

    @property
    def searches_activations(self) -> bool:
        """Whether the clip ratios of activations are searched on calibration text."""
        return self.activations is not None and self.activations.clip_ratio == "search"

    def to_yaml(self) -> str:
        """The recipe as a YAML document that `resolve_recipe` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _w4a4(name: str, *, group_size: int | None = None, gptq: bool = True, tuned: bool = False) -> Recipe:
    cache = IntFormat(bits=4, clip_ratio=0.95)
    return Recipe(
        name=name,
        weights=IntFormat(bits=4, group_size=group_size, clip_ratio="search"),
        gptq=Gptq() if gptq else None,
        activations=IntFormat(bits=4, group_size=group_size, clip_ratio="search" if tuned else 0.9),
        keys=cache,
        values=cache,
    )


def _rtn(name: str, bits: int) -> Recipe:
    whole = IntFormat(bits=bits)
    weights = IntFormat(bits=bits, clip_ratio="search")
    return Recipe(name=name, weights=weights, activations=whole, keys=whole, values=whole)


_WEIGHTS_4 = IntFormat(bits=4, clip_ratio="search")
_NAIVE_4 = IntFormat(bits=4)
# Rotating queries and keys serves a quantized key cache alone.
_FLOAT_CACHE = Rotations(query_key=False)

PRESETS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _w4a4("w4a4kv4"),
        _w4a4("w4a4kv4-tuned", tuned=True),
        _w4a4("w4a4kv4-rtn", gptq=False),
        _w4a4("w4a4kv4-g128", group_size=128),
        _w4a4("w4a4kv4-g64", group_size=64),
        Recipe(name="w4a16", rotations=_FLOAT_CACHE, weights=_WEIGHTS_4, gptq=Gptq()),
        Recipe(
            name="w4a4",
            rotations=_FLOAT_CACHE,
            weights=_WEIGHTS_4,
            gptq=Gptq(),
            activations=IntFormat(bits=4, clip_ratio=0.9),
        ),
        _rtn("w6a6kv6-rtn", 6),
        _rtn("w8a8kv8-rtn", 8),
        Recipe(name="float-rotated"),
        Recipe(
            name="naive-w4a4kv4",
            rotations=NO_ROTATIONS,
            weights=_NAIVE_4,
            activations=_NAIVE_4,
            keys=_NAIVE_4,
            values=_NAIVE_4,
            cache_bias="inside",
        ),
    )
}


def resolve_recipe(recipe: str | Path | Recipe) -> Recipe:
    """The recipe of a preset name, a YAML file, or itself.

    Raises `RotaquantError` that names the unknown preset, the missing file, or the wrong field.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe) in PRESETS:
        return PRESETS[str(recipe)]
    path = Path(recipe)
    if path.suffix not in {".yaml", ".yml"}:
        raise RotaquantError(f"unknown recipe {str(recipe)!r}; presets: {', '.join(PRESETS)}; or a .yaml file")
    if not path.is_file():
        raise RotaquantError(f"recipe file {path} does not exist")
    return _read_recipe(path)


def _read_recipe(path: Path) -> Recipe:
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RotaquantError(f"recipe file {path} cannot be read as YAML: {error}") from error
    if not isinstance(fields, dict):
        raise RotaquantError(f"recipe file {path} must hold a mapping of fields: {', '.join(Recipe.model_fields)}")
    return parse_recipe({"name": path.stem, **fields}, where=f"recipe file {path}")


def parse_recipe(fields: dict[str, object], where: str) -> Recipe:
    """The recipe of a mapping; `where` names its origin in the error that lists every wrong field."""
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'recipe'}: {fault['msg']}" for fault in error.errors()
        )
        raise RotaquantError(f"{where} is not a recipe: {faults}") from error
