"""Which orthogonal transform each rotation site of a model takes. Stored in the checkpoint, never recomputed at load.

Legend: V the rotation of one head's values, M the mix of heads, K the order of the flat Hadamard over all heads.
"""

from __future__ import annotations

import random

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rotaquant.architectures import Architecture
from rotaquant.hadamard import Factorisation, factor_or_fallback, is_buildable, transform_matrix
from rotaquant.recipe import Rotations


class HeadMix(BaseModel):
    """The online mix of heads at equal channel that completes V to one flat Hadamard over heads x head_dim.

    V is A (x) S with A of order `split`; the flat one is H_K (x) S with K = heads * split. What is left to do online
    is M = (I (x) A)ᵀ H_K, a K x K matrix. With `split` 1 it is a Hadamard matrix over the heads themselves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int
    split: int
    flat: Factorisation
    value_part: Factorisation

    def matrix(self) -> Tensor:
        """M, float64 `[heads*split, heads*split]`, orthonormal."""
        per_head = torch.block_diag(*[transform_matrix(self.value_part)] * self.heads)
        return per_head.T @ transform_matrix(self.flat)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.heads} heads mixed by a {self.flat.size}x{self.flat.size} matrix ({self.flat.describe()})"


class RotationPlan(BaseModel):
    """The transform of every site; `None` where a site is not rotated. `seed` draws the residual's random signs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    residual: Factorisation | None = None
    value_head: Factorisation | None = None
    head_mix: HeadMix | None = None
    query_key: Factorisation | None = None
    down_input: Factorisation | None = None

    def describe(self) -> dict[str, str]:
        """Site name -> factorisation, for people; sites that are not rotated are left out."""
        sites = {name: getattr(self, name) for name in type(self).model_fields if name != "seed"}
        return {name: site.describe() for name, site in sites.items() if site is not None}


def plan_rotations(architecture: Architecture, rotations: Rotations, seed: int) -> RotationPlan:
    """Choose the transform of every site that `rotations` asks for, from the model's widths."""
    attention, mlp = architecture.blocks[0].attention, architecture.blocks[0].mlp
    per_head = factor_or_fallback(attention.head_dim, seed)
    return RotationPlan(
        seed=seed,
        residual=factor_or_fallback(architecture.hidden_size, seed) if rotations.residual else None,
        value_head=per_head if rotations.value_head else None,
        head_mix=plan_head_mix(attention.heads, per_head) if rotations.head_mix else None,
        query_key=per_head if rotations.query_key else None,
        down_input=factor_or_fallback(mlp.width, seed) if rotations.down_input else None,
    )


def plan_head_mix(heads: int, per_head: Factorisation) -> HeadMix | None:
    """The smallest mix that makes values and heads one flat Hadamard, or `None` where there is none to make.

    A full-width Hadamard on top of V instead would square V's Sylvester part away and leave outliers worse.
    """
    if heads == 1 or per_head.blocks != 1:
        return None
    whole = Factorisation(size=1, blocks=1, order=1, exponent=0, construction="sylvester")
    parts = (
        per_head.model_copy(update={"size": per_head.order << taken, "exponent": taken})
        for taken in range(per_head.exponent + 1)
    )
    for value_part in (whole, *parts):
        split = value_part.size
        if is_buildable(heads * split):
            flat = factor_or_fallback(heads * split)
            return HeadMix(heads=heads, split=split, flat=flat, value_part=value_part)
    return None


def residual_signs(plan: RotationPlan) -> Tensor:
    """The random signs s of the residual rotation Q = diag(s) H: float64 `[hidden]`, the same for the same seed."""
    assert plan.residual is not None
    # Python promises this stream across versions and machines; torch does not promise its own.
    stream = random.Random(plan.seed)
    return torch.tensor([float(1 - 2 * stream.getrandbits(1)) for _ in range(plan.residual.size)], dtype=torch.float64)
