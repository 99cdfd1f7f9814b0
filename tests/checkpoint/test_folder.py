"""Our folder: what is in it, how it loads, and how it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rotaquant
from rotaquant import RotaquantError
from rotaquant.checkpoint import inspect_folder, is_quantized_folder, open_float_model
from rotaquant.recipe import resolve_recipe
from tests.tiny_models import save_tiny, tiny_model, tokens

CALIBRATION = tokens(4, 32, seed=9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    source = save_tiny(root / "float", "llama-tied")
    rotaquant.quantize(source, "w4a4kv4-tuned", output=root / "quantized", calibration=CALIBRATION, seed=7)
    return root / "quantized"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"].update(changes)
    path.write_text(json.dumps(fields))


def edit_shard(folder: Path, part: int, change: object) -> str:
    path = sorted(folder.glob("*.safetensors"))[part]
    tensors = load_file(path)
    name = change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return name


class TestContents:
    def test_files(self, made: Path) -> None:
        names = {file.name for file in made.iterdir()}
        assert names >= {
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "quantization_report.json",
            "README.md",
            "recipe.yaml",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert not [
            name for name in names if name.endswith((".bin", ".pt", ".pkl", ".tmp")) or name.startswith("part-")
        ]

    def test_shards_are_as_readable_as_the_other_files(self, made: Path) -> None:
        modes = {file.stat().st_mode for file in made.iterdir()}
        assert len(modes) == 1

    def test_the_config_says_it_all(self, made: Path) -> None:
        fields = json.loads((made / "config.json").read_text())
        quantization = fields["quantization_config"]
        assert quantization["quant_method"] == "rotaquant"
        assert quantization["format_version"] == 2
        assert quantization["rotation"]["seed"] == 7
        assert [site["size"] for site in quantization["rotation"]["down_input"]] == [96]
        assert quantization["recipe"]["name"] == "w4a4kv4-tuned"
        assert fields["tie_word_embeddings"] is False
        assert fields["architectures"] == ["LlamaForCausalLM"]
        assert resolve_recipe(made / "recipe.yaml") == resolve_recipe("w4a4kv4-tuned")

    def test_the_card_has_the_metadata_of_a_hub(self, made: Path) -> None:
        text = (made / "README.md").read_text()
        metadata = yaml.safe_load(text.split("---")[1])
        assert metadata["base_model_relation"] == "quantized"
        assert metadata["base_model"] == "float"

    def test_linears_are_packed_and_guarded(self, made: Path) -> None:
        tensors = load_file(made / "model-00002-of-00004.safetensors")
        name = "model.layers.0.mlp.down_proj"
        assert tensors[f"{name}.weight"].shape == (0,)
        assert tensors[f"{name}.weight_packed"].dtype == torch.int32
        assert tensors[f"{name}.weight_packed"].shape == (64, 96 * 4 // 32)
        assert tensors[f"{name}.weight_shape"].tolist() == [64, 96]
        assert tensors[f"{name}.weight_scale"].shape == (64, 1)

    def test_the_index_lists_every_tensor_of_every_shard(self, made: Path) -> None:
        index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
        stored = {}
        for shard in made.glob("*.safetensors"):
            with safe_open(shard, framework="pt") as opened:
                stored.update(dict.fromkeys(opened.keys(), shard.name))
        assert index == stored


class TestLoading:
    def test_through_transformers_after_import(self, made: Path) -> None:
        ids = tokens(1, 9)
        ours, theirs = rotaquant.load(made), AutoModelForCausalLM.from_pretrained(made)
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
        assert AutoTokenizer.from_pretrained(made)("w3 w4").input_ids == [3, 4]

    def test_in_another_dtype_the_scales_stay(self, made: Path) -> None:
        model = rotaquant.load(made, dtype=torch.bfloat16)
        linear = model.model.layers[0].mlp.down_proj
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert linear.weight_scale.dtype == torch.float32
        exact = rotaquant.load(made)
        assert torch.equal(linear.weight_scale, exact.model.layers[0].mlp.down_proj.weight_scale)
        got, expected = (m(input_ids=tokens(1, 9)).logits.float() for m in (model, exact))
        assert ((got - expected).norm() / expected.norm()).item() < 0.3

    def test_saved_again_it_is_the_same_model(self, made: Path, tmp_path: Path) -> None:
        model = rotaquant.load(made)
        model.save_pretrained(tmp_path / "again")
        again = rotaquant.load(tmp_path / "again")
        assert torch.equal(again(input_ids=tokens(1, 9)).logits, model(input_ids=tokens(1, 9)).logits)

    def test_without_our_import_transformers_fails_loudly(self, made: Path) -> None:
        script = (
            "import sys; from transformers import AutoModelForCausalLM;"
            "AutoModelForCausalLM.from_pretrained(sys.argv[1]); print('LOADED')"
        )
        done = subprocess.run([sys.executable, "-c", script, str(made)], capture_output=True, text=True)
        assert done.returncode != 0
        assert "LOADED" not in done.stdout
        assert "size mismatch" in done.stderr.lower() or "mismatched" in done.stderr.lower()

    def test_a_float_rotated_folder_is_guarded_too(self, tmp_path: Path) -> None:
        """Its weights are floats, but without the online rotations they would give garbage."""
        rotaquant.quantize(tiny_model("llama"), "float-rotated", output=tmp_path / "out")
        script = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True)
        assert done.returncode != 0


class TestRefusals:
    def refused(self, folder: Path, match: str) -> None:
        """By `rotaquant.load` and by transformers alike."""
        with pytest.raises(RotaquantError, match=match):
            rotaquant.load(folder)

    def refused_by_both(self, folder: Path, match: str) -> None:
        self.refused(folder, match)
        with pytest.raises(RotaquantError, match=match):
            AutoModelForCausalLM.from_pretrained(folder)

    def test_a_newer_format(self, folder: Path) -> None:
        edit_config(folder, format_version=3)
        self.refused_by_both(folder, "format version 3, this rotaquant reads up to 2: upgrade")

    def test_an_older_format(self, folder: Path) -> None:
        edit_config(folder, format_version=1)
        self.refused_by_both(folder, "format version 1, .*quantize the model again")

    def test_no_format_version(self, folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]["format_version"]
        (folder / "config.json").write_text(json.dumps(fields))
        self.refused_by_both(folder, "format_version None is no version; get a good copy")

    def test_a_head_of_its_own_that_the_recipe_calls_tied(self, folder: Path) -> None:
        """Its embedding is rotated: run with it as the head, the model would talk nonsense."""
        fields = json.loads((folder / "config.json").read_text())["quantization_config"]["recipe"]
        edit_config(folder, recipe={**fields, "tied_embeddings": "keep"})
        self.refused_by_both(folder, r"holds tensors that its config does not explain: lm_head\.weight")

    def test_a_class_without_a_head(self, folder: Path) -> None:
        for load in (AutoModel, AutoModelForSequenceClassification):
            with pytest.raises(RotaquantError, match="no head that gives logits .*AutoModelForCausalLM"):
                load.from_pretrained(folder)

    def test_a_damaged_config(self, folder: Path) -> None:
        edit_config(folder, rotation={"seed": 0, "residual": {"size": 64}})
        self.refused_by_both(folder, r"quantization_config is damaged at rotation\.residual")

    @pytest.mark.parametrize("site", ["residual", "value_head", "head_mix", "query_key", "down_input"])
    def test_a_rotation_that_contradicts_the_recipe(self, folder: Path, site: str) -> None:
        rotation = json.loads((folder / "config.json").read_text())["quantization_config"]["rotation"]
        edit_config(folder, rotation={**rotation, site: [] if site == "down_input" else None})
        self.refused_by_both(folder, f"damaged: rotation '{site}' contradicts")

    @pytest.mark.parametrize("ratio", [None, 0.0, 3.0])
    def test_a_clip_ratio_that_is_missing_or_out_of_range(self, folder: Path, ratio: float | None) -> None:
        """Without its ratio a layer's input would silently run in float."""
        stored = json.loads((folder / "config.json").read_text())["quantization_config"]["clip_ratios"]
        name = "model.layers.1.mlp.down_proj"
        stored.pop(name)
        edit_config(folder, clip_ratios=stored if ratio is None else {**stored, name: ratio})
        self.refused_by_both(folder, rf"clip_ratios has {ratio} for {name}")

    @pytest.mark.parametrize("text", ["", "{}", '{"weight_map": []}'])
    def test_a_damaged_index(self, folder: Path, text: str) -> None:
        (folder / "model.safetensors.index.json").write_text(text)
        self.refused(folder, r"model\.safetensors\.index\.json")

    def test_a_missing_tensor(self, folder: Path) -> None:
        name = edit_shard(folder, 1, lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale") is None or "up_proj")
        assert name
        self.refused_by_both(folder, r"lacks model\.layers\.0\.mlp\.up_proj\.weight_scale")

    def test_an_unknown_tensor(self, folder: Path) -> None:
        def add(tensors: dict[str, torch.Tensor]) -> str:
            tensors["model.layers.0.mlp.up_proj.zeros"] = torch.zeros(3)
            return ""

        edit_shard(folder, 1, add)
        index = folder / "model.safetensors.index.json"
        fields = json.loads(index.read_text())
        fields["weight_map"]["model.layers.0.mlp.up_proj.zeros"] = "model-00002-of-00004.safetensors"
        index.write_text(json.dumps(fields))
        self.refused_by_both(folder, r"does not explain: model\.layers\.0\.mlp\.up_proj\.zeros")

    def test_a_misshapen_tensor(self, folder: Path) -> None:
        def cut(tensors: dict[str, torch.Tensor]) -> str:
            name = "model.layers.0.self_attn.o_proj.weight_packed"
            tensors[name] = tensors[name][:, :4].contiguous()
            return name

        edit_shard(folder, 1, cut)
        self.refused_by_both(folder, r"o_proj\.weight_packed has shape \[64, 4\], its config asks for \[64, 8\]")

    def test_other_bits_than_the_config_says(self, folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())["quantization_config"]["recipe"]
        fields["weights"]["bits"] = 8
        edit_config(folder, recipe=fields)
        self.refused_by_both(folder, "weight_packed has shape")

    def test_a_truncated_shard(self, folder: Path) -> None:
        shard = folder / "model-00003-of-00004.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        self.refused(folder, r"model-00003-of-00004\.safetensors is truncated")

    def test_a_missing_shard(self, folder: Path) -> None:
        (folder / "model-00003-of-00004.safetensors").unlink()
        self.refused(folder, r"model-00003-of-00004\.safetensors is missing")

    def test_a_missing_index(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        self.refused(folder, r"lacks model\.safetensors\.index\.json")

    def test_a_float_folder(self, tmp_path: Path) -> None:
        self.refused(save_tiny(tmp_path / "float"), "was not quantized by rotaquant")

    def test_nothing_there(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nowhere", "does not exist")
        (tmp_path / "empty").mkdir()
        self.refused(tmp_path / "empty", "is empty")


def test_inspect_tells_sizes_and_sites(made: Path) -> None:
    summary = inspect_folder(made)
    assert summary.recipe.name == "w4a4kv4-tuned"
    assert summary.rotation_seed == 7
    assert summary.sites["down_input"].startswith("12·2^3")
    rows = {row.name: row for row in summary.rows}
    assert rows["q_proj"].bits_per_weight == pytest.approx(4 + 32 / 64 + 2 * 64 / (64 * 64))
    assert rows["embed_tokens"].bytes == 96 * 64 * 4
    stored = sum(shard.stat().st_size for shard in made.glob("*.safetensors"))
    assert summary.total_bytes < stored < summary.total_bytes * 1.5  # headers are all that is between them here
    assert summary.original_bytes == sum(p.numel() for p in tiny_model("llama-tied").parameters()) * 4


def test_is_quantized_folder(made: Path, tmp_path: Path) -> None:
    assert is_quantized_folder(made)
    assert not is_quantized_folder(save_tiny(tmp_path / "float"))
    assert not is_quantized_folder(tmp_path / "nowhere")


def test_open_float_model_is_the_model(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "qwen2-tied-sliding")
    model = open_float_model(source, device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(source)
    ids = tokens(2, 20)
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
