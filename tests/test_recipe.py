"""Recipes: the presets say what they promise, files are read strictly."""

from pathlib import Path

import pytest

from rotaquant.errors import RotaquantError
from rotaquant.recipe import PRESETS, IntFormat, Recipe, Rotations, resolve_recipe


def test_presets_by_name() -> None:
    assert list(PRESETS) == [
        "w4a4kv4",
        "w4a4kv4-tuned",
        "w4a4kv4-rtn",
        "w4a4kv4-g128",
        "w4a4kv4-g64",
        "w4a16",
        "w4a4",
        "w6a6kv6-rtn",
        "w8a8kv8-rtn",
        "float-rotated",
        "naive-w4a4kv4",
    ]
    for name, recipe in PRESETS.items():
        assert recipe.name == name
        assert resolve_recipe(name) is recipe


def test_the_default_carries_the_clips_of_the_paper() -> None:
    recipe = PRESETS["w4a4kv4"]
    assert recipe.weights == IntFormat(bits=4, clip_ratio="search")
    assert recipe.activations == IntFormat(bits=4, clip_ratio=0.9)
    assert recipe.keys == recipe.values == IntFormat(bits=4, clip_ratio=0.95)
    assert recipe.gptq is not None and recipe.gptq.damping == 0.01 and recipe.gptq.block_size == 128


def test_tuned_differs_in_the_activation_clip_alone() -> None:
    plain, tuned = PRESETS["w4a4kv4"].model_dump(), PRESETS["w4a4kv4-tuned"].model_dump()
    assert tuned.pop("activations") == {"bits": 4, "group_size": None, "clip_ratio": "search", "clip_norm": 2.0}
    assert plain.pop("activations") == {"bits": 4, "group_size": None, "clip_ratio": 0.9, "clip_norm": 2.0}
    assert {**tuned, "name": "w4a4kv4"} == plain


@pytest.mark.parametrize("size", [64, 128])
def test_groups_hold_for_weights_and_activations_alike(size: int) -> None:
    recipe = PRESETS[f"w4a4kv4-g{size}"]
    assert recipe.weights is not None and recipe.activations is not None
    assert recipe.weights.group_size == recipe.activations.group_size == size


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_survives_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(PRESETS[name].to_yaml())
    assert resolve_recipe(path) == PRESETS[name]


def test_every_shipped_ablation_is_a_recipe() -> None:
    files = sorted((Path(__file__).parents[1] / "benchmarks" / "recipes").glob("*.yaml"))
    assert files
    for file in files:
        assert resolve_recipe(file).name


def test_a_nameless_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("weights: {bits: 3}\n")
    recipe = resolve_recipe(path)
    assert recipe.name == "mine"
    assert recipe.weights == IntFormat(bits=3)
    assert recipe.rotations == Rotations()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("weights: {bits: 9}", r"weights\.bits"),
        ("weights: {bits: 1}", r"weights\.bits"),
        ("activations: {bits: 4, clip: 0.9}", r"activations\.clip"),
        ("wieghts: {bits: 4}", "wieghts"),
        ("rotations: {head_mix: true, value_head: false}", "value_head"),
        ("keys: {bits: 4, clip_ratio: search}", "keys"),
        ("gptq: {}", "gptq"),
        ("weights: {bits: 4, group_size: 32}\nactivations: {bits: 4, group_size: 16}", "same group_size"),
        ("weights: {bits: 4, clip_norm: .inf}", r"weights\.clip_norm"),
        ("weights: {bits: 4, clip_ratio: 1.5}", r"weights\.clip_ratio"),
        ("- 1", "mapping"),
        ("weights: [", "YAML"),
    ],
)
def test_wrong_files_are_refused_by_field(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RotaquantError, match=named) as error:
        resolve_recipe(path)
    assert "bad.yaml" in str(error.value)


def test_unknown_names_and_missing_files_are_told_apart() -> None:
    with pytest.raises(RotaquantError, match=r"unknown recipe 'w4a5'; presets: w4a4kv4, "):
        resolve_recipe("w4a5")
    with pytest.raises(RotaquantError, match=r"nowhere\.yaml does not exist"):
        resolve_recipe("nowhere.yaml")


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PRESETS["w4a4"].name = "other"


def test_which_recipes_read_calibration_text() -> None:
    reads = {name for name, recipe in PRESETS.items() if recipe.needs_calibration}
    assert reads == {"w4a4kv4", "w4a4kv4-tuned", "w4a4kv4-g128", "w4a4kv4-g64", "w4a16", "w4a4"}
    assert Recipe(activations=IntFormat(bits=4, clip_ratio="search")).needs_calibration
