"""Biases of keys and values stay out of the cache, and count exactly all the same."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import rotaquant
from rotaquant.architectures import Rope, describe
from rotaquant.errors import RotaquantError
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.runtime.cache import QuantizedCache
from rotaquant.runtime.key_bias import RotaryPositions
from tests.stored_bytes import same_bytes, stored_bytes
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
        rows.append(stored_bytes(layer))
    assert len(rows[0]) == len(rows[1])
    assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))


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
    assert same_bytes(cache.layers[-1], last)
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
    from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as from_halves
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as half
    from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as half_once

    for name, style, stock in (
        ("cohere", "interleaved", interleaved),
        ("gpt-neox", "half", half),
        ("gpt-oss", "half-once", half_once),
        ("glm4", "interleaved-from-halves", from_halves),
    ):
        rotary = tiny_model(name).base_model.rotary_emb
        width = 32 if name == "glm4" else 16
        x, positions = torch.randn(2, width), torch.randint(0, 200, (3, 5))
        ours = RotaryPositions(rotary, Rope(module="", style=style)).rotate(x, positions)
        everywhere = x[None, :, None].expand(3, 2, 5, width)
        theirs = stock(everywhere, everywhere, *rotary(x, positions))[1]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# --- caches that wander ------------------------------------------------------------------------------------------

WANDERING = ["qwen2", "gpt-neox", "opt", "llama"]  # positions in the rows, twice; a bias without positions; no bias


def made(name: str, folder: Path) -> PreTrainedModel:
    model = tiny_model(name, torch.float64) if name == "llama" else with_biases(name, 10.0)
    rotaquant.quantize(model, KV4, output=folder / name)
    return rotaquant.load(folder / name)


def filled(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, **{cache_name(model): cache})
    return cache


@pytest.mark.parametrize("name", WANDERING)
def test_a_copied_cache_goes_on(name: str, tmp_path: Path) -> None:
    """One prefix, several continuations: each from a copy of the cache, by forward passes and by `generate`."""
    model, prefix = made(name, tmp_path), tokens(2, 9)
    cache = filled(model, prefix)
    for length, seed in ((9, 5), (1, 6), (4, 7)):
        suffix = tokens(2, length, seed)
        whole = torch.cat((prefix, suffix), dim=1)
        parted = model(input_ids=suffix, **{cache_name(model): copy.deepcopy(cache)}).logits
        torch.testing.assert_close(parted, model(input_ids=whole).logits[:, 9:], rtol=1e-9, atol=1e-9)
        settings = {"max_new_tokens": 6, "do_sample": False}
        continued = model.generate(input_ids=whole, **{cache_name(model): copy.deepcopy(cache)}, **settings)
        assert torch.equal(continued, model.generate(input_ids=whole, **settings))


@pytest.mark.parametrize("name", WANDERING)
def test_a_cache_goes_on_in_another_load_of_the_model(name: str, tmp_path: Path) -> None:
    first, ids = made(name, tmp_path), tokens(2, 12)
    second = rotaquant.load(tmp_path / name)
    cache = filled(first, ids[:, :7])
    second(input_ids=tokens(1, 3))  # whatever the second model saw before
    expected = first(input_ids=ids).logits[:, 7:]
    found = second(input_ids=ids[:, 7:], **{cache_name(second): cache}).logits
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_cache_of_another_format_is_refused(tmp_path: Path) -> None:
    first = made("qwen2", tmp_path)
    other = Recipe(keys=IntFormat(bits=8), values=IntFormat(bits=8))
    rotaquant.quantize(with_biases("qwen2", 10.0), other, output=tmp_path / "other")
    cache = filled(rotaquant.load(tmp_path / "other"), tokens(2, 7))
    with pytest.raises(RotaquantError, match="filled by a model that stores keys and values in another format"):
        first(input_ids=tokens(2, 1), **{cache_name(first): cache})


def test_threads_do_not_mix_their_positions(tmp_path: Path) -> None:
    """One model serves several threads at once, each with a batch and a length of its own."""
    model = made("qwen2", tmp_path)
    batches = [tokens(rows, 12, seed) for seed, rows in enumerate((1, 2, 3, 4))]
    shifts = [torch.arange(12)[None] + 17 * index for index in range(4)]

    def stepwise(index: int) -> torch.Tensor:
        ids, positions = batches[index], shifts[index]
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            steps = [
                model(
                    input_ids=ids[:, step : step + 1],
                    position_ids=positions[:, step : step + 1],
                    **{cache_name(model): cache},
                ).logits
                for step in range(12)
            ]
        return torch.cat(steps, dim=1)

    expected = [stepwise(index) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, right in zip(pool.map(stepwise, range(4)), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_cache_given_by_position_is_packed(name: str, tmp_path: Path) -> None:
    model, ids = made(name, tmp_path), tokens(2, 6)
    cache = DynamicCache(config=model.config)
    decoder = model.get_decoder()
    names = list(inspect.signature(decoder.forward).parameters)
    given = {"input_ids": ids, cache_name(model): cache}
    hidden = decoder(*(given.get(argument) for argument in names[: names.index(cache_name(model)) + 1]))[0]
    assert isinstance(cache, QuantizedCache)
    assert cache.layers[0].get_seq_length() == 6
    assert torch.equal(hidden, decoder(input_ids=ids)[0])


def test_positions_are_taken_once(tmp_path: Path) -> None:
    """What stores keys outside of an attention call is told so, and not given positions of the last call."""
    model = made("qwen2", tmp_path)
    cache = filled(model, tokens(2, 5))
    states = torch.zeros(2, 2, 5, 16, dtype=torch.float64)
    with pytest.raises(RotaquantError, match="needs every token's position"):
        cache.update(states, states, 0)


def test_compiled_it_is_the_same_model(tmp_path: Path) -> None:
    model, ids = made("qwen2", tmp_path), tokens(2, 5)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    cache = DynamicCache(config=model.config)
    steps = [compiled(input_ids=ids[:, step : step + 1], **{cache_name(model): cache}).logits for step in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(input_ids=ids).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen2", "gpt-neox", "gpt-oss", "glm4"])
def test_positions_below_zero_are_positions_too(name: str, tmp_path: Path) -> None:
    """Scores depend on differences of positions alone: the stock model's logits are those of any shift."""
    model, ids = with_biases(name, 10.0), tokens(2, 14)
    rotaquant.quantize(model, Recipe(keys=IntFormat(bits=8), values=IntFormat(bits=8)), output=tmp_path / "out")
    loaded = rotaquant.load(tmp_path / "out")
    positions = torch.arange(14)[None].expand(2, -1)
    expected = model(input_ids=ids, position_ids=positions - 6, use_cache=False).logits
    for use_cache in (False, True):
        found = loaded(input_ids=ids, position_ids=positions - 6, use_cache=use_cache).logits
        assert (found - expected).norm() / expected.norm() < 0.006
