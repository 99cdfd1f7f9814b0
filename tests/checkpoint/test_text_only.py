"""Models that see as well: their text part by explicit choice, else a refusal that says how."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import rotaquant
from rotaquant.checkpoint import open_float_model
from rotaquant.recipe import Recipe
from rotaquant.survey import survey
from tests.tiny_models import save_tiny, small_fields, tiny_model, tiny_tokenizer, tokens

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
CLIP = {**VISION, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 32}


def vision_language_model(kind: str) -> PreTrainedModel:
    """A tiny Gemma-3 (tied) or Llava (a Llama of its own head) with random weights."""
    if kind == "gemma3":
        text = small_fields("gemma3-256-wide-heads")
        config = AutoConfig.for_model("gemma3", text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4)
    else:
        text = small_fields("llama")
        config = AutoConfig.for_model("llava", text_config=text, vision_config=CLIP, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "language_model" in name and "norm" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(params=["gemma3", "llava"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return vision_language_model(request.param)


def save(model: PreTrainedModel, folder: Path) -> None:
    """A folder with a tokenizer, as a user has it."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def as_first_published(folder: Path) -> None:
    """Rename a folder's tensors as checkpoints from before transformers 5 have them."""
    old = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("model.language_model."):
            name = name.replace("model.language_model.", "language_model.model.")
        elif name.startswith("lm_head"):
            name = f"language_model.{name}"
        old[name.removeprefix("model.")] = tensor
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("old_names", [False, True])
@torch.no_grad()
def test_the_text_part_alone_is_quantized_when_asked_for(
    model: PreTrainedModel, old_names: bool, tmp_path: Path
) -> None:
    save(model, tmp_path / "float")
    if old_names:
        as_first_published(tmp_path / "float")
    ids = tokens(2, 12)
    expected = model(input_ids=ids).logits
    steps = []
    rotaquant.quantize(
        tmp_path / "float", Recipe(), output=tmp_path / "out", text_only=True, on_step=lambda step: steps.append(step)
    )
    loaded = rotaquant.load(tmp_path / "out")
    assert loaded.config.model_type in {"gemma3_text", "llama"}
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
    told = [step.note for step in steps if step.note and "left out" in step.note]
    assert len(told) == 1 and re.search("vision|projector", told[0])
    float_text = open_float_model(tmp_path / "float", text_only=True)
    torch.testing.assert_close(float_text(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_model_in_memory_too(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = tokens(2, 12)
    expected = model(input_ids=ids).logits
    rotaquant.quantize(model, Recipe(), output=tmp_path / "out", text_only=True)
    torch.testing.assert_close(rotaquant.load(tmp_path / "out")(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)


def test_without_asking_it_is_refused_with_the_way_out(model: PreTrainedModel, tmp_path: Path) -> None:
    save(model, tmp_path / "float")
    match = f"{model.config.model_type!r} has parts that are no text model.*--text-only"
    for source in (model, tmp_path / "float"):
        with pytest.raises(rotaquant.RotaquantError, match=match):
            rotaquant.quantize(source, Recipe(), output=tmp_path / "out")
    with pytest.raises(rotaquant.RotaquantError, match=match):
        survey(tmp_path / "float")
    assert survey(tmp_path / "float", text_only=True).layers == 2
    assert not (tmp_path / "out").exists()


def test_an_unsupported_text_part_is_named(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_vl").save_pretrained(tmp_path)
    with pytest.raises(rotaquant.RotaquantError, match="'qwen2_vl_text' is not supported"):
        rotaquant.quantize(tmp_path, Recipe(), output=tmp_path / "out", text_only=True)


def test_the_choice_changes_nothing_for_a_text_model(tmp_path: Path) -> None:
    assert survey(save_tiny(tmp_path / "float"), text_only=True) == survey(tmp_path / "float")


@pytest.mark.parametrize(("kind", "text"), [("qwen2_audio", "qwen2"), ("voxtral", "llama"), ("blip-2", "opt")])
def test_a_whole_config_that_says_nothing_of_tied_embeddings(kind: str, text: str, tmp_path: Path) -> None:
    fields = {**small_fields(text), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": fields}))
    found = survey(tmp_path, text_only=True)
    assert found.model_type == text and not found.tied_embeddings


@torch.no_grad()
def test_the_text_part_may_be_called_text_model(tmp_path: Path) -> None:
    save_tiny(tmp_path / "float", "llama")
    config = {"model_type": "idefics3", "text_config": json.loads((tmp_path / "float" / "config.json").read_text())}
    (tmp_path / "float" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    renamed = {name.replace("model.", "model.text_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    rotaquant.quantize(tmp_path / "float", Recipe(), output=tmp_path / "out", text_only=True)
    ids = tokens(2, 12)
    found = rotaquant.load(tmp_path / "out")(input_ids=ids).logits
    torch.testing.assert_close(found, tiny_model("llama")(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
