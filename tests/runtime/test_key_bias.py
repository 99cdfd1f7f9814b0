"""Biases of keys and values stay out of the cache, and count exactly all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import rotaquant
from rotaquant.architectures import Rope, describe
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.runtime.key_bias import RotaryPositions
from tests.tiny_models import cache_name, tiny_model, tokens

KV4 = Recipe(keys=IntFormat(bits=4, clip_ratio=0.95), values=IntFormat(bits=4, clip_ratio=0.95))
NAMES = ["llama-biased", "qwen2", "qwen2-yarn", "smollm3", "cohere", "gpt-neox", "opt", "gpt-oss"]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def with_biases(name: str, scale: float, seed: int = 0) -> PreTrainedModel:
    """A float64 model whose keys' biases are `scale` times the spread of its keys; values' too, where they can leave.

    Under sinks they cannot: a query's weights sum to less than one there.
    """
    model = tiny_model(name, torch.float64, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for block in describe(model).blocks:
        module = model.get_submodule(block.path)
        for rows in (block.attention.k, *(() if block.attention.sinks else (block.attention.v,))):
            bias = rows.view(module.get_submodule(rows.path).bias.detach())
            # Inputs are normalised, and weights of variance 1/width: keys have a spread of about one.
            bias.copy_(scale * torch.randn(bias.shape, generator=generator, dtype=torch.float64))
    return model


def kv4_error(model: PreTrainedModel, recipe: Recipe, folder: Path) -> float:
    """Relative error of the logits with a 4-bit cache and nothing else quantized."""
    rotaquant.quantize(model, recipe, output=folder)
    ids = tokens(4, 40)
    expected = model(input_ids=ids).logits
    return float((rotaquant.load(folder)(input_ids=ids).logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
def test_large_biases_cost_nothing(name: str, tmp_path: Path) -> None:
    """Biases of ten times the keys' spread: the error is no larger than without biases, and larger if stored."""
    plain, biased, stored = [], [], []
    inside = KV4.model_copy(update={"cache_bias": "inside"})
    for seed in range(3):
        plain.append(kv4_error(with_biases(name, 0.0, seed), KV4, tmp_path / f"plain{seed}"))
        biased.append(kv4_error(with_biases(name, 10.0, seed), KV4, tmp_path / f"biased{seed}"))
        stored.append(kv4_error(with_biases(name, 10.0, seed), inside, tmp_path / f"stored{seed}"))
    assert sum(biased) < 1.1 * sum(plain), (biased, plain)
    assert sum(stored) > 1.3 * sum(biased), (stored, biased)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_layers_rows_are_those_of_a_model_without_biases(name: str, tmp_path: Path) -> None:
    rows = []
    for scale in (0.0, 10.0):
        folder = tmp_path / str(scale)
        rotaquant.quantize(with_biases(name, scale), KV4, output=folder)
        model = rotaquant.load(folder)
        layer = getattr(model(input_ids=tokens(2, 9), use_cache=True), cache_name(model)).layers[0]
        rows.append((layer.keys, layer.values))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied-sliding", "gpt-neox", "cohere"])
def test_the_positions_are_the_tokens_own(name: str, tmp_path: Path) -> None:
    """Positions with gaps, given by the caller: a prefill equals the same tokens one by one, byte by byte."""
    rotaquant.quantize(with_biases(name, 10.0), KV4, output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 6)
    positions = torch.tensor([[0, 1, 2, 40, 41, 90], [7, 8, 9, 10, 11, 12]])
    together = model(input_ids=ids, position_ids=positions, use_cache=True)
    cache = DynamicCache(config=model.config)
    for step in range(ids.shape[1]):
        part = slice(step, step + 1)
        out = model(input_ids=ids[:, part], position_ids=positions[:, part], **{cache_name(model): cache})
        torch.testing.assert_close(out.logits, together.logits[:, part], rtol=1e-9, atol=1e-9)
    last = getattr(together, cache_name(model)).layers[-1]
    assert torch.equal(cache.layers[-1].keys, last.keys)
    moved = model(input_ids=ids, use_cache=True).logits
    assert (moved[0] - together.logits[0]).abs().max() > 1e-3  # positions do matter


def test_cropping_and_beams_take_the_positions_along(tmp_path: Path) -> None:
    rotaquant.quantize(with_biases("qwen2", 10.0), KV4, output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, **{cache_name(model): cache})
    cache.crop(-4)
    again = model(input_ids=ids[:, 5:], **{cache_name(model): cache}).logits
    torch.testing.assert_close(again, model(input_ids=ids).logits[:, 5:], rtol=1e-9, atol=1e-9)
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    cached, uncached = (model.generate(input_ids=ids, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, uncached)


def test_a_copied_model_keeps_its_bias(tmp_path: Path) -> None:
    rotaquant.quantize(with_biases("qwen2", 10.0), KV4, output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 9)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-11, atol=1e-11)
    twin.model.layers[0].self_attn.k_bias.zero_()
    assert (twin(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() > 1e-3


def test_biases_are_stored_where_the_design_says(tmp_path: Path) -> None:
    rotaquant.quantize(with_biases("qwen2", 10.0), "w4a4kv4-rtn", output=tmp_path / "out")
    names = set(rotaquant.load(tmp_path / "out").state_dict())
    layer = "model.layers.0.self_attn."
    assert {layer + "k_bias", layer + "q_proj.bias", layer + "o_proj.bias"} <= names
    assert not names & {layer + "k_proj.bias", layer + "v_proj.bias"}


def test_rope_of_a_vector_is_the_models(tmp_path: Path) -> None:
    """Against the stock function, for each way to pair channels."""
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as half
    from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as half_once

    for name, style, stock in (
        ("cohere", "interleaved", interleaved),
        ("gpt-neox", "half", half),
        ("gpt-oss", "half-once", half_once),
    ):
        rotary = tiny_model(name).base_model.rotary_emb
        x, positions = torch.randn(2, 16), torch.randint(0, 200, (3, 5))
        ours = RotaryPositions(rotary, Rope(module="", style=style)).rotate(x, positions)
        everywhere = x[None, :, None].expand(3, 2, 5, 16)
        theirs = stock(everywhere, everywhere, *rotary(x, positions))[1]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
