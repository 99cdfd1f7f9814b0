"""Perplexity against independent computations, and comparisons on real quantized folders of a tiny model."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rotaquant import checkpoint, pipeline
from rotaquant.data import Calibration
from rotaquant.errors import RotaquantError
from rotaquant.evaluate import (
    Comparison,
    Perplexity,
    Protocol,
    continue_text,
    describe_protocol,
    evaluate,
    perplexity,
    window_step,
)
from tests.tiny_models import VOCABULARY, save_tiny, tiny_model, tiny_tokenizer, tokens

LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float model as a user has it."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama-tied")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 500 words of the tiny vocabulary."""
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(" ".join(f"w{token}" for token in tokens(1, 500)[0].tolist()))
    return path


@pytest.fixture(scope="module")
def rotated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model rotated and saved, with nothing quantized."""
    output = tmp_path_factory.mktemp("rotated") / "folder"
    pipeline.quantize(folder, "float-rotated", output=output, device="cpu")
    return output


def protocol(text: Path, windows: int | None = 3) -> Protocol:
    return Protocol(text, LENGTH, windows)


# --- perplexity ---------------------------------------------------------------


def test_perplexity_is_that_of_a_float64_softmax_taken_by_hand() -> None:
    model = tiny_model("llama")
    # Longer than the positions whose logits are taken at once, and not a multiple of them.
    windows = tokens(2, 300)
    losses = []
    for window in windows:
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0].double().numpy()
        for position in range(299):
            row = logits[position] - logits[position].max()
            losses.append(math.log(np.exp(row).sum()) - row[int(window[position + 1])])
    assert len(losses) == 2 * 299
    assert perplexity(model, windows) == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)


def test_perplexity_agrees_with_transformers_own_loss() -> None:
    model, windows = tiny_model("qwen3"), tokens(4, 20)
    with torch.no_grad():
        losses = [model(input_ids=window[None], labels=window[None]).loss.item() for window in windows]
    assert perplexity(model, windows) == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)


def test_uniform_logits_give_the_size_of_the_vocabulary() -> None:
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    assert perplexity(model, tokens(2, 10)) == pytest.approx(VOCABULARY, rel=1e-6)


def test_a_low_precision_model_has_its_softmax_in_float32() -> None:
    model, windows = tiny_model("llama", torch.bfloat16), tokens(2, 40)
    with torch.no_grad():
        logits = model(input_ids=windows).logits.double()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    # bfloat16 sums would be off in the third digit.
    assert perplexity(model, windows) == pytest.approx(math.exp(losses.item()), rel=1e-3)


def test_model_is_run_in_evaluation_mode_without_cache_and_left_as_it_was() -> None:
    model, seen = tiny_model("llama"), []
    model.train()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((module.training, kwargs["use_cache"])), with_kwargs=True
    )
    calls: list[tuple[int, int]] = []
    perplexity(model, tokens(3, 8), lambda done, count: calls.append((done, count)))
    assert seen == [(False, False)] * 3
    assert model.training
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_perplexity_beyond_all_floats_is_infinite_and_null_in_json() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e6)
    value = perplexity(model, tokens(1, 20))
    assert value == math.inf
    assert Perplexity(value, 20, 1, 20, "t", "m", "float").to_json()["perplexity"] is None


def test_json_has_the_documented_keys_and_the_protocol_is_in_words() -> None:
    result = Perplexity(19.922, 20480, 10, 2048, "wikitext2", "some/model", "w4a4kv4")
    assert result.to_json() == {
        "perplexity": 19.922,
        "tokens": 20480,
        "windows": 10,
        "sequence_length": 2048,
        "text": "wikitext2",
        "model": "some/model",
        "recipe": "w4a4kv4",
    }
    assert result.protocol == (
        "WikiText-2 test, 10 windows of 2048 tokens, non-overlapping, no special tokens, "
        "mean NLL over 10·2047 positions"
    )
    assert describe_protocol("a/b.txt", 1, 8).startswith("b.txt, 1 window of 8 tokens,")


# --- evaluate -----------------------------------------------------------------


def test_float_folder(folder: Path, text: Path) -> None:
    result = evaluate(str(folder), text, LENGTH, 3, "cpu")
    expected = perplexity(tiny_model("llama-tied"), tokens(1, 500)[0, : 3 * LENGTH].reshape(3, LENGTH))
    assert result.perplexity == pytest.approx(expected, rel=1e-6)
    assert (result.tokens, result.windows, result.sequence_length) == (3 * LENGTH, 3, LENGTH)
    assert (result.recipe, result.model, result.text) == ("float", str(folder), str(text))


def test_all_whole_windows_by_default(folder: Path, text: Path) -> None:
    assert evaluate(folder, text, LENGTH, device="cpu").windows == 500 // LENGTH


def test_model_in_memory_is_evaluated_like_its_folder(folder: Path, text: Path) -> None:
    model = checkpoint.open_float_model(str(folder), device="cpu")
    model.name_or_path = str(folder)
    assert evaluate(model, text, LENGTH, 2) == evaluate(folder, text, LENGTH, 2, "cpu")


def test_quantized_folder_is_measured_as_saved(folder: Path, text: Path, tmp_path: Path) -> None:
    pipeline.quantize(folder, "w8a8kv8-rtn", output=tmp_path / "q", device="cpu")
    result = evaluate(tmp_path / "q", text, LENGTH, 3, "cpu")
    windows = tokens(1, 500)[0, : 3 * LENGTH].reshape(3, LENGTH)
    assert result.recipe == "w8a8kv8-rtn"
    assert result.perplexity == perplexity(checkpoint.load(tmp_path / "q", device="cpu"), windows)
    assert result.perplexity == pytest.approx(evaluate(folder, text, LENGTH, 3, "cpu").perplexity, rel=0.1)


def test_bad_requests_are_named(folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RotaquantError, match=r"sequences of 300 tokens exceed the 256 positions .*--sequence-length 256"
    ):
        evaluate(folder, text, 300, device="cpu")
    with pytest.raises(RotaquantError, match="holds 500 tokens, but one evaluation window needs 501"):
        evaluate(folder, text, 501, device="cpu")
    with pytest.raises(RotaquantError, match="--sequence-length.* at least 2, not 1"):
        evaluate(folder, text, 1, device="cpu")
    with pytest.raises(RotaquantError, match="does not exist"):
        evaluate(tmp_path / "nothing", text, LENGTH, device="cpu")


def test_out_of_memory_names_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(**_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    model = tiny_model("llama")
    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(RotaquantError, match=r"window of 64 tokens does not fit .*--device cpu"):
        perplexity(model, tokens(1, 64))


# --- compare ------------------------------------------------------------------


def test_comparison_measures_saved_folders_and_leaves_none(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loaded: list[Path] = []
    load = checkpoint.load

    def spy(path: Path, **options: Any) -> Any:
        assert checkpoint.is_quantized_folder(path) and path.is_relative_to(tmp_path)
        loaded.append(path)
        return load(path, **options)

    monkeypatch.setattr(checkpoint, "load", spy)
    steps: list[pipeline.Step] = []
    calibration = Calibration(text, samples=4, sequence_length=16)
    comparison = Comparison(str(folder), calibration, protocol(text), "cpu", on_step=steps.append)
    rows = comparison.rows(["float-rotated", "w4a4kv4-rtn"])

    assert [row.name for row in rows] == ["float", "float-rotated", "w4a4kv4-rtn"]
    float_row, rotated_row, quantized_row = rows
    assert float_row.perplexity == evaluate(folder, text, LENGTH, 3, "cpu")
    assert rotated_row.perplexity.perplexity == pytest.approx(float_row.perplexity.perplexity, rel=1e-3)
    assert abs(quantized_row.perplexity.perplexity / float_row.perplexity.perplexity - 1) > 1e-3
    assert (float_row.recipe, float_row.bits_per_weight) == (None, 32.0)
    assert 4.0 < quantized_row.bits_per_weight < 6.0
    # The tied head counts once: the float model is as large as it lies on disk.
    assert float_row.size == sum(p.numel() for p in tiny_model("llama-tied").parameters()) * 4
    assert len(loaded) == 2 and list(tmp_path.iterdir()) == []
    phases = list(dict.fromkeys(step.phase for step in steps))
    assert phases[0] == "float: evaluating" and phases[-1] == "w4a4kv4-rtn: evaluating"
    assert "float-rotated: quantizing" in phases


def test_kept_folder_stays(folder: Path, text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    comparison = Comparison(str(folder), protocol=protocol(text), device="cpu")
    rows = comparison.rows(["float-rotated"], keep={"float-rotated": kept})
    assert evaluate(kept, text, LENGTH, 3, "cpu").perplexity == rows[1].perplexity.perplexity


def test_failure_leaves_no_temporary_folder(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, output: Path, **__: Any) -> None:
        output.mkdir()
        (output / "half").write_text("written")
        raise RotaquantError("no")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pipeline, "quantize", fail)
    with pytest.raises(RotaquantError, match="^no$"):
        Comparison(str(folder), protocol=protocol(text), device="cpu").rows(["w4a4kv4-rtn"])
    assert list(tmp_path.iterdir()) == []


def test_everything_is_checked_before_any_work(
    folder: Path, text: Path, rotated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(checkpoint, "open_float_model", never)
    monkeypatch.setattr(pipeline, "quantize", never)
    good = Comparison(str(folder), Calibration(text, 4, 16), protocol(text), "cpu")
    with pytest.raises(RotaquantError, match="unknown recipe 'w3'"):
        good.rows(["w4a4kv4", "w3"])
    with pytest.raises(RotaquantError, match="no recipe"):
        good.rows([])
    with pytest.raises(RotaquantError, match=r"gone\.txt"):
        Comparison(str(folder), Calibration("gone.txt"), protocol(text), "cpu").rows(["w4a4kv4"])
    with pytest.raises(RotaquantError, match="calibration sequence needs 2048"):
        Comparison(str(folder), Calibration(text), protocol(text), "cpu").rows(["w4a4kv4"])
    with pytest.raises(RotaquantError, match="already quantized"):
        Comparison(str(rotated), Calibration(text, 4, 16), protocol(text), "cpu").rows(["w4a4kv4"])
    # Round-to-nearest reads no calibration text, so a missing one is no fault.
    with pytest.raises(AssertionError, match="work was begun"):
        Comparison(str(folder), Calibration("gone.txt"), protocol(text), "cpu").rows(["w4a4kv4-rtn"])


def test_no_room_for_temporary_folders_is_explained(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RotaquantError, match=r"no temporary folder .*TMPDIR"):
        Comparison(str(folder), protocol=protocol(text), device="cpu").rows(["w4a4kv4-rtn"])


def test_window_steps_name_the_window_in_work() -> None:
    assert [window_step(done, 3).block for done in range(4)] == [0, 1, 2, 2]
    assert window_step(0, 3).phase == "evaluating"


# --- generation ---------------------------------------------------------------


def test_continuation_is_the_argmax_token_by_token(rotated: Path, folder: Path) -> None:
    ids = [3, 50, 7]
    model = tiny_model("llama-tied")
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 2:  # the end of the text
            break
    expected = tiny_tokenizer().decode(ids, skip_special_tokens=True)
    assert continue_text(rotated, "w3 w50 w7", max_new_tokens=6, device="cpu") == expected


def test_generation_faults_are_named(rotated: Path, folder: Path) -> None:
    with pytest.raises(RotaquantError, match="prompt is empty"):
        continue_text(rotated, "", device="cpu")
    with pytest.raises(RotaquantError, match="--max-new-tokens.*not 0"):
        continue_text(rotated, "w3", max_new_tokens=0, device="cpu")
    with pytest.raises(RotaquantError, match="not quantized by rotaquant"):
        continue_text(folder, "w3", device="cpu")
