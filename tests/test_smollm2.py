"""A real model, SmolLM2-135M: the figures that the documentation gives, and what must hold on real weights.

Minutes each, so marked `slow`. Bars leave room above the measured figures for other processors' last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import rotaquant
from rotaquant import Calibration
from rotaquant.checkpoint import inspect_folder, open_float_model, open_tokenizer
from rotaquant.data import evaluation_windows, read_text, tokenize
from rotaquant.evaluate import evaluate, perplexity
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.rotation.invariance import relative_error
from tests.biased_keys import bias_keys
from tests.tiny_models import cache_name

pytestmark = pytest.mark.slow

KV4 = Recipe(keys=IntFormat(bits=4, clip_ratio=0.95), values=IntFormat(bits=4, clip_ratio=0.95))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def rtn(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("smollm2") / "w4a4kv4-rtn"
    rotaquant.quantize(smollm2_gguf, "w4a4kv4-rtn", output=output)
    return output


@pytest.fixture(scope="module")
def ids(smollm2_gguf: Path) -> torch.Tensor:
    tokens = tokenize(open_tokenizer(str(smollm2_gguf)), read_text("builtin", "evaluation"))
    return evaluation_windows(tokens, 256, 2)


def test_rotated_in_float_it_is_the_same_model(smollm2_gguf: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    rotaquant.quantize(smollm2_gguf, "float-rotated", output=tmp_path / "rotated")
    original = open_float_model(smollm2_gguf)(input_ids=ids).logits
    rotated = rotaquant.load(tmp_path / "rotated")(input_ids=ids).logits
    assert relative_error(rotated, original) < 1e-3


def test_linears_take_a_little_over_four_bits_on_disk(rtn: Path) -> None:
    summary = inspect_folder(rtn)
    assert summary.quantized_bits_per_weight <= 4.2
    assert summary.sites["head_mix"].startswith("9 heads mixed by a 36x36 matrix")
    assert summary.original_bytes == pytest.approx(134_515_008 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_twice_gives_the_same_logits(rtn: Path, ids: torch.Tensor, dtype: torch.dtype) -> None:
    first, second = (rotaquant.load(rtn, dtype=dtype)(input_ids=ids[:1]).logits for _ in range(2))
    assert first.dtype == dtype
    assert torch.equal(first, second)


def decode_one_by_one(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for position in range(ids.shape[1]):
        model(input_ids=ids[:, position : position + 1], **{cache_name(model): cache})
    return cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prefill_equals_decoding(rtn: Path, ids: torch.Tensor, dtype: torch.dtype) -> None:
    """The same stored bytes in float64. In float32 the last bit of a product depends on its shape and may flip a code.

    A flip is a few bytes in one layer, from where it spreads; a fault would be many bytes at once, or in layer 0.
    """
    prompt = ids[:1, :24]
    model = rotaquant.load(rtn, dtype=dtype)
    prefill = getattr(model(input_ids=prompt, use_cache=True), cache_name(model))
    decoded = decode_one_by_one(model, prompt)
    rates = []
    for a, b in zip(prefill.layers, decoded.layers, strict=True):
        rates.append(torch.cat(((a.keys != b.keys).flatten(), (a.values != b.values).flatten())).double().mean().item())
    first = next((rate for rate in rates if rate > 0), 0.0)
    print(f"{dtype}: bytes that differ, by layer: {' '.join(f'{rate:.3f}' for rate in rates)}")
    assert rates[0] == 0
    assert first < (0.1 if dtype == torch.float32 else 1e-300)


class TestWikiText:
    """WikiText-2 test, 10 windows of 2048; calibrated on 32 sequences of 1024 of other Wikipedia text."""

    @pytest.fixture
    def measure(self, smollm2_gguf: Path, shared_data: Path, tmp_path: Path) -> object:
        def measured(recipe: str) -> float:
            calibration = Calibration(shared_data / "wiki-calibration.txt", 32, 1024)
            rotaquant.quantize(smollm2_gguf, recipe, output=tmp_path / recipe, calibration=calibration)
            return evaluate(tmp_path / recipe, shared_data / "wikitext2-test.txt", 2048, 10).perplexity

        return measured

    def test_float(self, smollm2_gguf: Path, shared_data: Path) -> None:
        result = evaluate(str(smollm2_gguf), shared_data / "wikitext2-test.txt", 2048, 10)
        assert result.perplexity == pytest.approx(19.922, abs=0.005)
        assert result.tokens == 20480

    @pytest.mark.parametrize(
        ("recipe", "bar"), [("w8a8kv8-rtn", 20.25), ("w6a6kv6-rtn", 22.0), ("w4a4kv4", 44), ("w4a4kv4-tuned", 37.5)]
    )
    def test_quantized(self, recipe: str, bar: float, measure: object) -> None:
        value = measure(recipe)
        print(f"{recipe}: {value:.3f}")
        assert 19.9 < value <= bar


def test_builtin_text_tells_rotated_from_naive(smollm2_gguf: Path, rtn: Path, tmp_path: Path) -> None:
    """Without any file: naive 4 bits destroy the model, rotated ones do not."""
    tokens = tokenize(open_tokenizer(str(smollm2_gguf)), read_text("builtin", "evaluation"))
    windows = evaluation_windows(tokens, 512, 2)
    rotaquant.quantize(smollm2_gguf, "naive-w4a4kv4", output=tmp_path / "naive")
    naive, rotated = (perplexity(rotaquant.load(folder), windows) for folder in (tmp_path / "naive", rtn))
    assert rotated < 300 < 3000 < naive


def test_large_key_biases_cost_nothing(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Biases far beyond the keys' spread, on real weights: a 4-bit cache costs what it costs without them."""
    biased = bias_keys(smollm2_gguf, tmp_path / "biased", 30.0)

    def measured(model: Path, name: str, recipe: Recipe | None) -> float:
        if recipe is not None:
            rotaquant.quantize(model, recipe, output=tmp_path / name)
        return evaluate(tmp_path / name if recipe else model, "builtin", 512, 4).perplexity

    plain = measured(smollm2_gguf, "plain", KV4) / measured(smollm2_gguf, "", None)
    floating = measured(biased, "", None)
    apart = measured(biased, "apart", KV4) / floating
    inside = measured(biased, "inside", KV4.model_copy(update={"cache_bias": "inside"})) / floating
    assert apart < 1.0 + 1.3 * (plain - 1.0)
    assert inside > 1.5 * apart
