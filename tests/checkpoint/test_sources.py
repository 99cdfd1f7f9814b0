"""Opening float models: folders, GGUF files, and every way in which they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import rotaquant
from rotaquant import RotaquantError
from rotaquant.checkpoint import open_source
from rotaquant.recipe import Recipe
from rotaquant.survey import survey
from tests.tiny_models import CONFIGS, save_tiny, small_fields, tiny_model, tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_the_skeleton_has_the_buffers_of_the_model(name: str, tmp_path: Path) -> None:
    """RoPE frequencies are no tensors of the checkpoint: they must come out as `from_pretrained` makes them."""
    source = open_source(save_tiny(tmp_path / "float", name))
    skeleton, _ = source.skeleton()
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "float").named_buffers())
    guards = (".experts.gate_up_proj", ".experts.down_proj")
    found = {key: buffer for key, buffer in skeleton.named_buffers() if not key.endswith(guards)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_a_sharded_folder_reads_as_one(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    source = open_source(tmp_path / "sharded")
    assert all(torch.equal(source.read(name), tensor) for name, tensor in model.state_dict().items())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    source = open_source(save_tiny(tmp_path / "float", "llama-tied"))
    assert torch.equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight"))
    skeleton, _ = source.skeleton()
    assert skeleton.config.tie_word_embeddings is False
    assert skeleton.lm_head.weight is not skeleton.model.embed_tokens.weight


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Store a folder's tensors by other names, or other tensors."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


class TestTied:
    """A config may call tied what the checkpoint stores twice: then what is stored decides, as in transformers."""

    def test_two_weights_that_differ_are_not_tied(self, tmp_path: Path) -> None:
        source = save_tiny(tmp_path / "float", "llama-tied")
        resave(source, lambda tensors: {**tensors, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]})
        assert not open_source(source).tied and not survey(source).tied_embeddings
        with pytest.raises(RotaquantError, match="float has a head of its own, so there is nothing to keep tied"):
            rotaquant.quantize(source, Recipe(tied_embeddings="keep"), output=tmp_path / "kept")
        with torch.no_grad():
            rotaquant.quantize(source, Recipe(), output=tmp_path / "out")
            expected = AutoModelForCausalLM.from_pretrained(source)(input_ids=tokens(1, 8)).logits
            found = rotaquant.load(tmp_path / "out")(input_ids=tokens(1, 8)).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    def test_two_equal_weights_are_tied(self, tmp_path: Path) -> None:
        source = save_tiny(tmp_path / "float", "llama-tied")
        resave(source, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
        assert open_source(source).tied

    def test_the_head_alone_may_be_stored(self, tmp_path: Path) -> None:
        source = save_tiny(tmp_path / "float", "llama-tied")
        embedding = open_source(source).read("model.embed_tokens.weight")
        resave(source, lambda tensors: {**tensors, "lm_head.weight": tensors.pop("model.embed_tokens.weight")})
        opened = open_source(source)
        assert opened.tied and torch.equal(opened.read("model.embed_tokens.weight"), embedding)
        assert torch.equal(opened.read("lm_head.weight"), embedding)


def test_a_model_saved_without_its_head_has_names_without_the_prefix(tmp_path: Path) -> None:
    source, model = save_tiny(tmp_path / "float", "llama-tied"), tiny_model("llama-tied")
    resave(source, lambda tensors: {key.removeprefix("model."): value for key, value in tensors.items()})
    opened = open_source(source)
    assert all(torch.equal(opened.read(name), tensor) for name, tensor in model.state_dict().items())
    assert opened.unread(opened.skeleton()[0]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_the_models(dtype: torch.dtype, tmp_path: Path) -> None:
    assert open_source(save_tiny(tmp_path / "float", dtype=dtype)).dtype == dtype


def test_head_dim_is_the_configs() -> None:
    from rotaquant.architectures import describe

    assert describe(tiny_model("llama-wide-heads")).blocks[0].attention.head_dim == 32
    assert describe(tiny_model("llama")).blocks[0].attention.head_dim == 16


class TestRefusals:
    def refused(self, source: object, match: str) -> None:
        with pytest.raises(RotaquantError, match=match):
            open_source(source)

    def test_nothing_there(self) -> None:
        self.refused("./no/such/folder", "no/such/folder")

    def test_a_hub_id_without_a_hub(self) -> None:
        self.refused("someone/some-model", "someone/some-model is no local folder, and cannot be fetched from the hub")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "is empty")

    def test_a_folder_without_config(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        self.refused(tmp_path, r"holds no config\.json")

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        AutoConfig.for_model("llama").save_pretrained(tmp_path)
        self.refused(tmp_path, "no model.safetensors")

    def test_a_file_that_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "model.txt").write_text("hello")
        self.refused(tmp_path / "model.txt", "neither a model folder nor a .gguf file")

    def test_an_unknown_family_is_named_with_the_known_ones(self, tmp_path: Path) -> None:
        AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
        self.refused(tmp_path, r"model_type 'gpt2' is not supported; supported: cohere, gemma, .*qwen3_moe, smollm3")

    def test_a_name_that_contains_a_family_is_not_that_family(self, tmp_path: Path) -> None:
        fields = {"model_type": "llama-but-different"}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        self.refused(tmp_path, "'llama-but-different' is not supported")

    def test_a_text_config_that_is_no_mapping(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "foo", "text_config": "x"}))
        self.refused(tmp_path, "'foo' is not supported")

    def test_a_config_that_is_not_json(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        self.refused(tmp_path, "not valid JSON")

    def test_a_truncated_shard(self, tmp_path: Path) -> None:
        source = save_tiny(tmp_path / "float")
        shard = source / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-10])
        self.refused(source, r"model\.safetensors is truncated")

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
        victim = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
        victim.unlink()
        self.refused(tmp_path / "sharded", f"{victim.name} is missing")

    def test_a_missing_tensor(self, tmp_path: Path) -> None:
        source = save_tiny(tmp_path / "float")
        tensors = load_file(source / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RotaquantError, match=r"lacks tensor model\.norm\.weight"):
            open_source(source).read("model.norm.weight")

    @pytest.mark.parametrize("load", [AutoModel, AutoModelForSequenceClassification])
    def test_a_model_without_a_head(self, load: Any, tmp_path: Path) -> None:
        with torch.device("meta"):
            model = load.from_config(AutoConfig.for_model(**small_fields("llama")))
        with pytest.raises(RotaquantError, match=f"{type(model).__name__} has no head .*AutoModelForCausalLM"):
            rotaquant.quantize(model, "w4a4kv4-rtn", output=tmp_path / "out")

    def test_a_model_quantized_by_others(self, tmp_path: Path) -> None:
        source = save_tiny(tmp_path / "float")
        fields = json.loads((source / "config.json").read_text())
        fields["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (source / "config.json").write_text(json.dumps(fields))
        self.refused(source, r"already quantized \(gptq\)")

    def test_a_gguf_file_that_is_none(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "none.gguf", "does not exist")
        (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all, really")
        self.refused(tmp_path / "bad.gguf", "cannot be read as a GGUF model")
