"""Rotation plans: heads of every count, and why the mix is flat."""

import pytest
import torch

from rotaquant.architectures import describe
from rotaquant.hadamard import factor_or_fallback, transform_matrix
from rotaquant.recipe import Rotations
from rotaquant.rotation.fuse import mix_heads, rotate
from rotaquant.rotation.plan import RotationPlan, plan_head_mix, plan_rotations, residual_signs
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("heads", "head_dim", "mixed"),
    [(9, 64, 36), (14, 64, 28), (15, 64, 60), (71, 64, 284), (32, 128, 32), (24, 128, 24), (20, 80, 20), (25, 64, 100)],
)
def test_values_and_mix_make_one_flat_hadamard(heads: int, head_dim: int, mixed: int) -> None:
    per_head = factor_or_fallback(head_dim)
    mix = plan_head_mix(heads, per_head)
    assert mix is not None
    assert mix.matrix().shape == (mixed, mixed)
    if heads * head_dim > 2048:
        identity = mix.matrix() @ mix.matrix().T
        torch.testing.assert_close(identity, torch.eye(mixed, dtype=torch.float64))
        return
    x = torch.eye(heads * head_dim, dtype=torch.float64)
    flat = mix_heads(rotate(x.unflatten(-1, (heads, head_dim)), per_head).flatten(-2), mix)
    # Every entry has the same magnitude: no outlier stays concentrated.
    torch.testing.assert_close(flat.abs(), torch.full_like(flat, (heads * head_dim) ** -0.5))


def test_the_flat_mix_spreads_outliers_better_than_values_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.distributions.StudentT(2.5).sample((256, 9, 64)).double()
    del generator
    per_head = factor_or_fallback(64)
    alone = rotate(x, per_head).flatten(-2)
    mix = plan_head_mix(9, per_head)
    assert mix is not None
    mixed = mix_heads(alone, mix)

    def peak(y: torch.Tensor) -> float:
        return (y.abs().amax(-1) / y.pow(2).mean(-1).sqrt()).mean().item()

    assert peak(mixed) < peak(alone) < peak(x.flatten(-2))


def test_seeds_draw_the_signs_and_nothing_else() -> None:
    architecture = describe(tiny_model("llama"))
    plans = [plan_rotations(architecture, Rotations(), seed) for seed in (0, 0, 1)]
    signs = [residual_signs(plan) for plan in plans]
    assert torch.equal(signs[0], signs[1])
    assert not torch.equal(signs[0], signs[2])
    assert set(signs[0].unique().tolist()) == {-1.0, 1.0}


def test_a_plan_survives_json() -> None:
    plan = plan_rotations(describe(tiny_model("llama-9-heads")), Rotations(), seed=3)
    again = RotationPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert plan.head_mix is not None and again.head_mix is not None
    assert torch.equal(again.head_mix.matrix(), plan.head_mix.matrix())


def test_sites_that_are_not_asked_for_are_absent() -> None:
    rotations = Rotations(residual=True, value_head=False, head_mix=False, query_key=False, down_input=False)
    plan = plan_rotations(describe(tiny_model("llama")), rotations, seed=0)
    assert set(plan.describe()) == {"residual"}


def test_the_dense_matrix_of_a_block_form_is_orthogonal() -> None:
    matrix = transform_matrix(factor_or_fallback(107 * 32))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(107 * 32, dtype=torch.float64))
