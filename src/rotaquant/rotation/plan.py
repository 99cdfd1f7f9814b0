"""Which orthogonal transform each rotation site of a model takes. Stored in the checkpoint, never recomputed at load.

Legend: V the rotation of one head's values, M the mix of heads, K the order of the flat Hadamard over all heads.
"""

from __future__ import annotations

import random

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rotaquant.architectures import Architecture
from rotaquant.errors import RotaquantError
from rotaquant.hadamard import Factorisation, factor_or_fallback, is_buildable, transform_matrix
from rotaquant.recipe import Recipe


class HeadMix(BaseModel):
    """The online mix of heads at equal channel that completes V to one flat Hadamard over heads x head_dim.

    V is A (x) S with A of order `split`; the flat one is H_K (x) S with K = heads * split. What is left to do online
    is M = (I (x) A)ᵀ H_K, a K x K matrix. With `split` 1 it is a Hadamard matrix over the heads themselves. With
    `shards` the heads are mixed within each shard of heads/shards alone, and K counts the heads of one shard.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int
    split: int
    flat: Factorisation
    value_part: Factorisation
    shards: int = 1

    def matrix(self) -> Tensor:
        """M of one shard, float64 `[heads/shards*split, heads/shards*split]`, orthonormal."""
        per_head = torch.block_diag(*[transform_matrix(self.value_part)] * (self.heads // self.shards))
        return per_head.T @ transform_matrix(self.flat)

    def describe(self) -> str:
        """One line for people."""
        each = f" within each of {self.shards} shards" if self.shards > 1 else ""
        return f"{self.heads} heads mixed{each} by a {self.flat.size}x{self.flat.size} matrix ({self.flat.describe()})"


class RotationPlan(BaseModel):
    """The transform of every site; `None` where a site is not rotated. `seed` draws the residual's random signs.

    `down_input` has one transform for each width that occurs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    residual: Factorisation | None = None
    value_head: Factorisation | None = None
    head_mix: HeadMix | None = None
    query_key: Factorisation | None = None
    down_input: tuple[Factorisation, ...] = ()

    def down(self, width: int) -> Factorisation | None:
        """The transform of a down projection's input of `width`."""
        return next((transform for transform in self.down_input if transform.size == width), None)

    def describe(self) -> dict[str, str]:
        """Site name -> factorisation, for people; sites that are not rotated are left out."""
        return {name: text for name, (_, _, text) in self.summary().items()}

    def summary(self) -> dict[str, tuple[int, bool, str]]:
        """Site name -> width, whether it is one exact Hadamard matrix, factorisation; unrotated sites are left out."""
        sites: dict[str, tuple[int, bool, str]] = {}
        for name in ("residual", "value_head", "query_key"):
            transform: Factorisation | None = getattr(self, name)
            if transform is not None:
                sites[name] = (transform.size, transform.exact_hadamard, transform.describe())
        mix = self.head_mix
        if mix is not None:
            exact = mix.shards == 1 and mix.flat.exact_hadamard
            sites["head_mix"] = (mix.heads, exact, mix.describe())
        for transform in self.down_input:
            name = "down_input" if len(self.down_input) == 1 else f"down_input {transform.size}"
            sites[name] = (transform.size, transform.exact_hadamard, transform.describe())
        return sites


def plan_rotations(architecture: Architecture, recipe: Recipe, seed: int) -> RotationPlan:
    """Choose the transform of every site that `recipe` asks for, from the model's widths.

    Raises `RotaquantError` where heads or widths cannot be divided among `recipe.tensor_parallel` shards.
    """
    attention, rotations, shards = architecture.attention, recipe.rotations, recipe.tensor_parallel
    _require_shards(architecture, shards)
    per_head = factor_or_fallback(attention.head_dim, seed)
    widths = architecture.down_widths if rotations.down_input else ()
    return RotationPlan(
        seed=seed,
        residual=factor_or_fallback(architecture.hidden_size, seed) if rotations.residual else None,
        value_head=per_head if rotations.value_head else None,
        head_mix=plan_head_mix(attention.heads, per_head, shards) if rotations.head_mix else None,
        query_key=per_head if rotations.query_key else None,
        down_input=tuple(_sharded(width, shards, seed) for width in widths),
    )


def _sharded(width: int, shards: int, seed: int) -> Factorisation:
    """One transform for each of `shards` equal parts of a width."""
    part = factor_or_fallback(width // shards, seed)
    return part.model_copy(update={"size": width, "blocks": part.blocks * shards})


def _require_shards(architecture: Architecture, shards: int) -> None:
    counts = {"heads of keys and values": architecture.attention.kv_heads}
    counts |= {f"down input width {width}": width for width in architecture.down_widths}
    unfit = [
        f"{count} {name}" if name.startswith("heads") else name for name, count in counts.items() if count % shards
    ]
    if unfit:
        fitting = [n for n in range(2, 65) if not any(count % n for count in counts.values())]
        choice = f"numbers that fit: {', '.join(map(str, fitting))}" if fitting else "no number above 1 fits"
        raise RotaquantError(f"tensor_parallel: {shards} shards do not divide {' and '.join(unfit)}; {choice}")


def plan_head_mix(heads: int, per_head: Factorisation, shards: int = 1) -> HeadMix | None:
    """The smallest mix that makes values and heads one flat Hadamard, or `None` where there is none to make.

    A full-width Hadamard on top of V instead would square V's Sylvester part away and leave outliers worse.
    """
    local = heads // shards
    if local == 1 or per_head.blocks != 1:
        return None
    whole = Factorisation(size=1, blocks=1, order=1, exponent=0, construction="sylvester")
    parts = (
        per_head.model_copy(update={"size": per_head.order << taken, "exponent": taken})
        for taken in range(per_head.exponent + 1)
    )
    for value_part in (whole, *parts):
        split = value_part.size
        if is_buildable(local * split):
            flat = factor_or_fallback(local * split)
            return HeadMix(heads=heads, split=split, flat=flat, value_part=value_part, shards=shards)
    return None


def residual_signs(plan: RotationPlan) -> Tensor:
    """The random signs s of the residual rotation Q = diag(s) H: float64 `[hidden]`, the same for the same seed."""
    assert plan.residual is not None
    # Python promises this stream across versions and machines; torch does not promise its own.
    stream = random.Random(plan.seed)
    return torch.tensor([float(1 - 2 * stream.getrandbits(1)) for _ in range(plan.residual.size)], dtype=torch.float64)
