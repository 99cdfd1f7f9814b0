"""What `inspect` says of a float model: right against the model itself and against what quantizing makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import PreTrainedModel

import rotaquant
from rotaquant import RotaquantError
from rotaquant.checkpoint import inspect_folder, sources
from rotaquant.recipe import PRESETS, IntFormat, Recipe, Rotations
from rotaquant.survey import survey
from tests.tiny_models import save_tiny, tiny_model

RTN = PRESETS["w4a4kv4-rtn"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("survey") / "tiny", "llama-9-heads", torch.bfloat16)


class Hub:
    """A hub that has `some/model`, with the files of `folder`; `asked` lists what was fetched from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []

    def download(self, model: str, *, allow_patterns: list[str], **_: Any) -> str:
        """What `snapshot_download` does."""
        self.asked.extend((model, pattern) for pattern in allow_patterns)
        if model != "some/model":
            raise LocalEntryNotFoundError("nothing of that name")
        return str(self.folder)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "hub").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "hub")
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(sources, "snapshot_download", made.download)
    return made


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sizes(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- the model --------------------------------------------------------------------------------------------------


def test_a_folder_is_described_without_its_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "safe_open", lambda *_, **__: pytest.fail("a tensor was read"))
    found = survey(folder)
    assert found.model == str(folder) and found.model_type == "llama" and found.dtype == "bfloat16"
    assert (found.layers, found.hidden_size, found.down_widths) == (2, 144, (192,))
    assert (found.heads, found.kv_heads, found.head_dim) == (9, 3, 16)
    assert (found.experts, found.sparse_layers, found.tied_embeddings) == (0, 0, False)
    assert found.parameters == sizes(tiny_model("llama-9-heads"))
    assert found.original_bytes == 2 * found.parameters
    assert found.linears == 14 and found.skipped == () and found.notes == ()
    assert found.recipe == PRESETS["w4a4kv4"]


def test_a_model_on_the_hub_is_described_by_its_config_alone(folder: Path, hub: Hub) -> None:
    found, local = survey("some/model", "w4a16"), survey(folder, "w4a16")
    assert hub.asked == [("some/model", "config.json")]
    assert found.model == "some/model"
    assert {**vars(found), "model": ""} == {**vars(local), "model": ""}


def test_what_an_untied_head_costs_is_said_where_it_is_much(tmp_path: Path) -> None:
    untied = survey(tiny_model("gemma"))
    (note,) = untied.notes
    kept = survey(tiny_model("gemma"), PRESETS["w4a4kv4"].model_copy(update={"tied_embeddings": "keep"}))
    assert kept.notes == ()
    saved = untied.expected_bytes - kept.expected_bytes
    assert note.startswith(f"the head's own weight is {saved / untied.expected_bytes:.0%} of what is written")
    report = rotaquant.quantize(tiny_model("gemma"), "w4a4kv4-rtn", output=tmp_path / "out")
    assert report.notes == (note,)
    assert survey(tiny_model("llama")).notes == ()


def test_a_config_without_a_dtype_is_said_to_have_none(hub: Hub, folder: Path, tmp_path: Path) -> None:
    edit_config(hub.folder, dtype=None)
    found = survey("some/model")
    assert found.dtype == "float32" and found.original_bytes == 4 * found.parameters
    assert found.notes == ("the config names no dtype: sizes are those in float32",)
    # Where the weights are at hand, they tell.
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    edit_config(whole, dtype=None)
    assert (survey(whole).dtype, survey(whole).notes) == ("bfloat16", ())


@pytest.mark.slow  # all words of its vocabulary are read, twice
def test_a_gguf_file_is_described(smollm2_gguf: Path) -> None:
    found = survey(smollm2_gguf)
    assert (found.layers, found.hidden_size, found.heads, found.kv_heads, found.head_dim) == (30, 576, 9, 3, 64)
    assert found.parameters == 134_515_008 and found.tied_embeddings
    assert [(site.name, site.width, site.form) for site in found.sites] == [
        ("residual", 576, "exact"),
        ("value_head", 64, "exact"),
        ("query_key", 64, "exact"),
        ("head_mix", 9, "exact"),
        ("down_input", 1536, "exact"),
    ]


def test_tied_embeddings_count_once() -> None:
    model = tiny_model("llama-tied")
    found = survey(model)
    assert found.tied_embeddings and found.parameters == sizes(model)


def test_experts_are_counted() -> None:
    found = survey(tiny_model("qwen3-moe-dense-first"))
    assert (found.experts, found.sparse_layers, found.down_widths) == (6, 1, (40, 96))
    assert found.linears == (4 + 3) + (4 + 2 * 6)
    assert found.parameters == sizes(tiny_model("qwen3-moe-dense-first"))


# --- what the recipe makes of it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", RTN),
        ("llama", PRESETS["float-rotated"]),
        ("llama-tied", RTN),
        ("llama-tied", RTN.model_copy(update={"tied_embeddings": "keep"})),
        ("llama-9-heads", RTN.model_copy(update={"skip": ("*down_proj", "*.0.*.q_proj")})),
        ("llama-multi-head", RTN.model_copy(update={"tensor_parallel": 2})),
        ("llama", Recipe(weights=IntFormat(bits=3, group_size=32), activations=IntFormat(bits=8))),
        ("qwen3-moe-dense-first", RTN),
    ],
)
def test_it_foretells_what_quantizing_makes(name: str, recipe: Recipe, tmp_path: Path) -> None:
    found = survey(tiny_model(name), recipe)
    rotaquant.quantize(tiny_model(name), recipe, output=tmp_path / "out")
    made = inspect_folder(tmp_path / "out")
    quantized = 0 if recipe.weights is None else found.linears - len(found.skipped)
    # Each packed weight comes with its shape, two integers of 8 bytes.
    assert made.total_bytes == found.expected_bytes + 16 * quantized
    assert made.original_bytes == found.original_bytes
    assert made.sites == {site.name: site.transform for site in found.sites}
    skipped = sum(row.weights for row in made.rows if row.name.endswith("(skipped)"))
    weights = dict(tiny_model(name).named_parameters())
    assert skipped == sum(weights[f"{path}.weight"].numel() for path in found.skipped)
    if quantized:
        assert found.bits_per_weight == pytest.approx(made.quantized_bits_per_weight, rel=0.03)
    else:
        assert found.bits_per_weight is None


def test_skipped_linears_are_listed() -> None:
    found = survey(tiny_model("llama"), Recipe(weights=IntFormat(bits=4), skip=("*.1.*.up_proj", "*o_proj")))
    assert found.skipped == (
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.up_proj",
    )


@pytest.mark.parametrize(
    ("name", "site", "width", "form", "words"),
    [
        ("llama-no-hadamard", "residual", 60, "exact", "60 (paley-1)"),
        ("llama-no-hadamard", "down_input", 214, "dense", "dense 214"),
        ("llama-block-hadamard", "down_input", 3424, "blocks", "107 blocks of 2^5"),
        ("llama-dense-heads", "value_head", 6, "dense", "dense 6"),
        ("llama-14-heads", "head_mix", 14, "exact", "28x28 matrix (28 (paley-1))"),
        ("qwen2-moe-shared", "down_input 80", 80, "exact", "20·2^2 (paley-1)"),
    ],
)
def test_every_site_says_whether_it_is_one_hadamard_matrix(
    name: str, site: str, width: int, form: str, words: str
) -> None:
    found = {each.name: each for each in survey(tiny_model(name)).sites}[site]
    assert (found.width, found.form) == (width, form) and words in found.transform


def test_shards_make_blocks() -> None:
    sites = {each.name: each for each in survey(tiny_model("llama"), Recipe(tensor_parallel=2)).sites}
    assert sites["down_input"].form == sites["head_mix"].form == "blocks"
    assert sites["residual"].form == "exact"


def test_sites_that_are_not_asked_for_are_absent() -> None:
    found = survey(tiny_model("llama"), "naive-w4a4kv4")
    assert found.sites == () and found.notes == ()


def test_heads_that_cannot_be_mixed_are_told_of() -> None:
    note = "head_mix: no mix makes values and heads one flat Hadamard matrix; values are rotated head by head"
    assert survey(tiny_model("llama"), Recipe(tensor_parallel=2)).notes == ()
    shard_of_one = survey(tiny_model("llama-multi-head"), Recipe(tensor_parallel=4))
    assert shard_of_one.notes == (note,) and "head_mix" not in {site.name for site in shard_of_one.sites}
    unasked = Recipe(tensor_parallel=4, rotations=Rotations(head_mix=False))
    assert survey(tiny_model("llama-multi-head"), unasked).notes == ()


@pytest.mark.parametrize(
    ("name", "recipe", "keys", "values"),
    [
        ("llama", "w4a4kv4", "none", "none"),
        ("qwen2", "w4a4kv4", "apart", "apart"),
        ("qwen2", "w4a4", "inside", "inside"),  # the cache is in float
        ("qwen2", "naive-w4a4kv4", "inside", "inside"),
        ("qwen2", Recipe(keys=IntFormat(bits=4)), "apart", "inside"),
        ("qwen2-dynamic-rope", "w4a4kv4", "inside", "apart"),  # frequencies depend on more than the position
        ("qwen3-tied", "w4a4kv4", "inside", "apart"),  # keys are normalised after their bias
        ("gpt-oss", "w4a4kv4", "apart", "inside"),  # weights of values sum to less than one
        ("gpt-neox", "w4a4kv4", "apart", "apart"),
    ],
)
def test_biases_are_where_they_belong(name: str, recipe: str | Recipe, keys: str, values: str) -> None:
    found = survey(tiny_model(name), recipe)
    assert (found.key_bias, found.value_bias) == (keys, values)


# --- refusals ---------------------------------------------------------------------------------------------------


def refusals(model: str | Path, recipe: str | Recipe, output: Path) -> tuple[str, str]:
    """What `survey` and `quantize` say."""
    with pytest.raises(RotaquantError) as ours:
        survey(model, recipe)
    with pytest.raises(RotaquantError) as theirs:
        rotaquant.quantize(model, recipe, output=output / "out")
    return str(ours.value), str(theirs.value)


@pytest.mark.parametrize(
    ("changes", "recipe", "words"),
    [
        ({"model_type": "mamba"}, RTN, "model_type 'mamba' is not supported; supported: cohere"),
        ({"quantization_config": {"quant_method": "gptq"}}, RTN, "is already quantized (gptq)"),
        ({"num_attention_heads": "many"}, RTN, "is not one that transformers can use"),
        ({}, RTN.model_copy(update={"skip": ("*.gate",)}), "skip: '*.gate' matches none"),
        ({}, Recipe(weights=IntFormat(bits=4, group_size=128)), "weights: group_size 128 does not divide"),
        ({}, Recipe(tied_embeddings="keep"), "so there is nothing to keep tied"),
        ({}, Recipe(tensor_parallel=2), "2 shards do not divide 3 heads"),
        ({}, "w5", "unknown recipe 'w5'"),
    ],
)
def test_it_refuses_what_quantizing_refuses(
    changes: dict[str, Any], recipe: str | Recipe, words: str, folder: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    edit_config(changed, **changes)
    ours, theirs = refusals(changed, recipe, tmp_path)
    assert ours == theirs and words in ours


def test_paths_that_are_no_model_are_refused_alike(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("words")
    for path in ("empty", "gone", "file.txt", "gone.gguf"):
        ours, theirs = refusals(tmp_path / path, RTN, tmp_path)
        assert ours == theirs and path in ours


def test_a_name_that_the_hub_does_not_know(hub: Hub) -> None:
    with pytest.raises(
        RotaquantError, match="^other/model is no local folder, and cannot be fetched from the hub: noth"
    ):
        survey("other/model")


def test_a_quantized_model_on_the_hub(hub: Hub) -> None:
    edit_config(hub.folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(RotaquantError, match=r"^some/model is already quantized \(awq\)"):
        survey("some/model")


def test_a_folder_with_a_config_alone_is_described(tmp_path: Path) -> None:
    tiny_model("gpt-oss").config.save_pretrained(tmp_path)
    found = survey(tmp_path)
    assert found.parameters == sizes(tiny_model("gpt-oss")) and found.experts > 0
