"""Quantized models as transformers uses them: caches, masks, padding, batches, generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import rotaquant
from rotaquant.runtime import attention
from rotaquant.runtime.cache import QuantizedCache
from tests.tiny_models import cache_name, tiny_model, tokens

FAMILIES = ["llama-9-heads", "qwen2"]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """One float64 model per family, `w4a4kv4-rtn`, loaded from disk."""
    models = {}
    for name in FAMILIES:
        output = tmp_path_factory.mktemp("quantized") / name
        rotaquant.quantize(tiny_model(name, torch.float64), "w4a4kv4-rtn", output=output)
        models[name] = rotaquant.load(output)
    return models


class OwnCache(DynamicCache):
    """A cache of a kind that rotaquant does not know."""


def test_an_unknown_cache_stays_float_and_gives_the_same_tokens(
    quantized: dict[str, PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    attention._warned.clear()
    model, ids = quantized["llama-9-heads"], tokens(1, 6)
    ours = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    arguments = {cache_name(model): OwnCache(config=model.config), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours, model.generate(input_ids=ids, **arguments))
    assert [record.message.split()[0] for record in caplog.records] == ["OwnCache"]


def test_an_unknown_cache_is_refused_where_keys_need_their_positions(quantized: dict[str, PreTrainedModel]) -> None:
    model = quantized["qwen2"]
    cache = OwnCache(config=model.config)
    model(input_ids=tokens(1, 6), **{cache_name(model): cache})
    with pytest.raises(rotaquant.RotaquantError, match="without their bias.*an empty DynamicCache or StaticCache"):
        model(input_ids=tokens(1, 1), **{cache_name(model): cache})


def test_an_empty_cache_of_the_users_is_filled_in_place(quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized["llama-9-heads"], tokens(1, 9)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :5], **{cache_name(model): cache})
    assert isinstance(cache, QuantizedCache)
    assert cache.get_seq_length() == 5
    continued = model(input_ids=ids[:, 5:], **{cache_name(model): cache}).logits
    whole = model(input_ids=ids, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(continued, whole, rtol=1e-9, atol=1e-9)


def test_another_attention_is_refused_not_run_with_a_float_cache(tmp_path: Path) -> None:
    rotaquant.quantize(tiny_model("llama"), "w4a4kv4-rtn", output=tmp_path / "out")
    model = rotaquant.load(tmp_path / "out")
    model.set_attn_implementation("sdpa")
    for use_cache in (True, False):
        with pytest.raises(rotaquant.RotaquantError, match=r"set_attn_implementation\('rotaquant'\)"):
            model(input_ids=tokens(1, 4), use_cache=use_cache)


def test_autocast_does_not_touch_the_integers(tmp_path: Path) -> None:
    rotaquant.quantize(tiny_model("llama-biased"), "w4a4kv4-rtn", output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 9)
    linear = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, linear.in_features)
    expected = linear(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x), expected)
        assert torch.isfinite(model(input_ids=ids, use_cache=True).logits).all()


def test_beams_reorder_the_packed_cache(quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized["llama-9-heads"], tokens(2, 5)
    cached = model.generate(input_ids=ids, max_new_tokens=8, num_beams=3, do_sample=False)
    uncached = model.generate(input_ids=ids, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(cached, uncached)


def test_a_row_that_is_not_finite_spoils_no_other(quantized: dict[str, PreTrainedModel]) -> None:
    model = quantized["llama-9-heads"]
    embeddings = model.get_input_embeddings()(tokens(2, 6))
    clean = model(inputs_embeds=embeddings, use_cache=False).logits
    embeddings[1, 2] = float("nan")
    spoilt = model(inputs_embeds=embeddings, use_cache=False).logits
    assert torch.equal(spoilt[0], clean[0])
    assert torch.isnan(spoilt[1, 2:]).all()


@pytest.mark.parametrize("keys", [2, 4, 8, None])
@pytest.mark.parametrize("values", [3, 4, None])
def test_keys_and_values_have_formats_apart(tmp_path: Path, keys: int | None, values: int | None) -> None:
    from rotaquant.recipe import IntFormat, Recipe

    recipe = Recipe(keys=IntFormat(bits=keys) if keys else None, values=IntFormat(bits=values) if values else None)
    original = tiny_model("qwen3", torch.float64)
    rotaquant.quantize(original, recipe, output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(1, 12)
    cached = torch.cat([model(input_ids=ids, use_cache=True).logits], 1)
    torch.testing.assert_close(cached, model(input_ids=ids, use_cache=False).logits, rtol=1e-9, atol=1e-9)
    error = (cached - original(input_ids=ids).logits).norm() / original(input_ids=ids).logits.norm()
    bits = min(bits for bits in (keys, values, 32) if bits)
    assert (error < 1e-4) if bits == 32 else (1e-4 < error < {2: 1.0, 3: 0.6, 4: 0.4, 8: 0.05}[bits])
