"""Rotation plans: what a recipe asks for, heads of every count, and why the mix is flat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotaquant.architectures import describe
from rotaquant.errors import RotaquantError
from rotaquant.hadamard import factor_or_fallback, transform_matrix
from rotaquant.recipe import NO_ROTATIONS, Recipe, Rotations
from rotaquant.rotation.fuse import mix_heads, rotate
from rotaquant.rotation.plan import RotationPlan, plan_head_mix, plan_rotations, residual_signs
from tests.tiny_models import tiny_model


def plan_of(name: str, recipe: Recipe | None = None, seed: int = 0) -> RotationPlan:
    return plan_rotations(describe(tiny_model(name)), recipe or Recipe(), seed)


# --- the mix of heads -------------------------------------------------------------------------------------------


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
    x = torch.distributions.StudentT(2.5).sample((256, 9, 64)).double()
    per_head = factor_or_fallback(64)
    alone = rotate(x, per_head).flatten(-2)
    mix = plan_head_mix(9, per_head)
    assert mix is not None
    mixed = mix_heads(alone, mix)

    def peak(y: Tensor) -> float:
        return (y.abs().amax(-1) / y.pow(2).mean(-1).sqrt()).mean().item()

    assert peak(mixed) < peak(alone) < peak(x.flatten(-2))


# --- what the recipe asks for -----------------------------------------------------------------------------------


def test_seeds_draw_the_signs_and_nothing_else() -> None:
    plans = [plan_of("llama", seed=seed) for seed in (0, 0, 1)]
    signs = [residual_signs(plan) for plan in plans]
    assert torch.equal(signs[0], signs[1])
    assert not torch.equal(signs[0], signs[2])
    assert set(signs[0].unique().tolist()) == {-1.0, 1.0}
    assert plans[2].model_copy(update={"seed": 0}) == plans[0]


def test_a_plan_survives_json() -> None:
    plan = plan_of("llama-9-heads", seed=3)
    again = RotationPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert plan.head_mix is not None and again.head_mix is not None
    assert torch.equal(again.head_mix.matrix(), plan.head_mix.matrix())


@pytest.mark.parametrize("site", ["residual", "value_head", "query_key", "down_input"])
def test_only_the_sites_that_are_asked_for_are_there(site: str) -> None:
    rotations = NO_ROTATIONS.model_copy(update={site: True})
    assert set(plan_of("llama", Recipe(rotations=rotations)).describe()) == {site}
    rest = Rotations(**{site: False, "head_mix": False})
    names = {"residual", "value_head", "query_key", "down_input"}
    assert set(plan_of("llama", Recipe(rotations=rest)).describe()) == names - {site}


def test_a_plan_tells_widths_and_what_is_exact() -> None:
    assert plan_of("llama-9-heads").summary() == {
        "residual": (144, True, "36·2^2 (paley-2)"),
        "value_head": (16, True, "2^4"),
        "query_key": (16, True, "2^4"),
        "head_mix": (9, True, "9 heads mixed by a 36x36 matrix (36 (paley-2))"),
        "down_input": (192, True, "12·2^4 (paley-1)"),
    }
    blocks = plan_of("llama-block-hadamard").summary()["down_input"]
    assert blocks == (107 * 32, False, "107 blocks of 2^5")
    dense = plan_of("llama-no-hadamard").summary()["down_input"]
    assert dense == (214, False, "dense 214")


def test_every_width_of_down_has_its_transform() -> None:
    plan = plan_of("qwen2-moe-shared")
    assert [transform.size for transform in plan.down_input] == [48, 80]
    assert plan.down(48) == factor_or_fallback(48) and plan.down(80) == factor_or_fallback(80)
    assert plan.down(96) is None
    assert {"down_input 48", "down_input 80"} <= set(plan.describe())


# --- shards -----------------------------------------------------------------------------------------------------


def test_shards_stay_apart_in_the_plan() -> None:
    plan = plan_of("llama-multi-head", Recipe(tensor_parallel=2))
    assert plan.head_mix is not None and plan.head_mix.shards == 2
    assert plan.head_mix.matrix().shape == (2, 2)
    sites = plan.summary()
    assert sites["head_mix"][:2] == (4, False) and "within each of 2 shards" in sites["head_mix"][2]
    assert sites["down_input"] == (344, False, "2 blocks of 172 (williamson)")
    # What is fused crosses no shard at run time.
    alone = plan_of("llama-multi-head")
    assert (plan.residual, plan.value_head, plan.query_key) == (alone.residual, alone.value_head, alone.query_key)


@pytest.mark.parametrize(
    ("name", "shards", "message"),
    [
        ("llama", 4, "4 shards do not divide 2 heads of keys and values; numbers that fit: 2"),
        ("llama", 5, "5 shards do not divide 2 heads of keys and values and down input width 96; numbers that fit: 2"),
        ("llama-multi-head", 3, "3 shards do not divide 4 heads .* and down input width 344; numbers that fit: 2, 4"),
        (
            "qwen3-moe-dense-first",
            16,
            "16 shards do not divide 2 heads .* and down input width 40; numbers that fit: 2",
        ),
        ("phi3-odd-heads", 2, "2 shards do not divide 1 heads of keys and values; no number above 1 fits"),
    ],
)
def test_shards_that_do_not_divide_are_refused_with_those_that_do(name: str, shards: int, message: str) -> None:
    with pytest.raises(RotaquantError, match=f"^tensor_parallel: {message}$"):
        plan_of(name, Recipe(tensor_parallel=shards))
    fitting = [int(number) for number in message.partition("fit: ")[2].split(", ") if number]
    for number in fitting:
        assert plan_of(name, Recipe(tensor_parallel=number)).down_input


def test_the_dense_matrix_of_a_block_form_is_orthogonal() -> None:
    matrix = transform_matrix(factor_or_fallback(520))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(520, dtype=torch.float64))
