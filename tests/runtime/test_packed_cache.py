"""Packed caches behind transformers' interface: whatever is done to one, it goes on as its tokens would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import rotaquant
from rotaquant.errors import RotaquantError
from rotaquant.ops.cache_layout import PAGE_TOKENS
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.runtime import fixed_layer, packed_layer, paged_attention
from rotaquant.runtime.fixed_layer import FixedLayer
from rotaquant.runtime.growing_layer import GrowingLayer
from tests.stored_bytes import same_bytes
from tests.tiny_models import cache_name, tiny_model, tokens

# No window; one in every layer; one in every other, without and with what SDPA lacks (softcaps, sinks); biases of keys.
NAMES = ["llama-9-heads", "mistral-sliding", "gemma3-256-wide-heads", "gemma2", "gpt-oss", "qwen2-tied-sliding", "opt"]
WINDOWED = [name for name in NAMES if name not in ("llama-9-heads", "opt")]
KV = Recipe(keys=IntFormat(bits=4, clip_ratio=0.95), values=IntFormat(bits=3))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """A float64 model of each name with nothing quantized but keys and values."""
    models = {}
    for name in NAMES:
        output = tmp_path_factory.mktemp("quantized") / name
        rotaquant.quantize(tiny_model(name, torch.float64), KV, output=output)
        models[name] = rotaquant.load(output)
    return models


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with windows take a few tokens at once, and pieces of attention are as small as they can be."""
    monkeypatch.setattr(packed_layer, "STRETCH", 24)
    monkeypatch.setattr(fixed_layer, "STRETCH", 24)
    monkeypatch.setattr(paged_attention, "PIECE_BYTES", 1000)


def logits_of(model: PreTrainedModel, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    """Logits of tokens that a cache is continued with."""
    return model(input_ids=ids, **{cache_name(model): cache}, **more).logits


def assert_holds(model: PreTrainedModel, cache: Any, ids: Tensor, more: int = 4) -> None:
    """The cache goes on as if it had seen the tokens `ids` and no others: by one token, and by several at once."""
    for count in (1, more):
        new = tokens(ids.shape[0], count, seed=count + 50)
        expected = model(input_ids=torch.cat((ids, new), dim=1), use_cache=False).logits[:, -count:]
        found = logits_of(model, new, copy.deepcopy(cache))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def filled(model: PreTrainedModel, ids: Tensor, *parts: int) -> DynamicCache:
    """A cache that was given the tokens in parts."""
    cache = DynamicCache(config=model.config)
    for part in ids.split(parts or (ids.shape[1],), dim=1):
        logits_of(model, part, cache)
    return cache


def layers_of(cache: DynamicCache) -> list[GrowingLayer]:
    """All of them, which must be paged."""
    layers = list(cache.layers)
    assert all(isinstance(layer, GrowingLayer) for layer in layers)
    return layers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [(63, 1, 1), (64, 64, 2), (1, 129), (5, 16, 17, 90)])
@pytest.mark.usefixtures("short_stretches")
def test_any_parts_are_one_text(name: str, parts: tuple[int, ...], quantized: dict[str, PreTrainedModel]) -> None:
    """Across the ends of pages and of windows, in one token, up to 16, and more."""
    model, ids = quantized[name], tokens(2, sum(parts))
    whole = model(input_ids=ids, use_cache=True)
    cache = DynamicCache(config=model.config)
    logits = torch.cat([logits_of(model, part, cache) for part in ids.split(parts, dim=1)], dim=1)
    torch.testing.assert_close(logits, whole.logits, rtol=1e-9, atol=1e-9)
    assert cache.get_seq_length() == sum(parts)
    together = getattr(whole, cache_name(model))
    assert all(same_bytes(one, other) for one, other in zip(cache.layers, together.layers, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("short_stretches")
def test_rows_of_other_lengths_are_padded_on_the_left(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    """A row that is all padding spoils none; the padding may be longer than a window or a page."""
    model, lengths = quantized[name], (90, 70, 3, 0)
    length = max(lengths)
    rows = [tokens(1, size, seed=size)[0] if size else torch.zeros(0, dtype=torch.long) for size in lengths]
    ids = torch.stack([torch.cat((torch.zeros(length - len(row), dtype=torch.long), row)) for row in rows])
    mask = torch.stack([(torch.arange(length) >= length - size).long() for size in lengths])
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    prefill = logits_of(model, ids, cache, attention_mask=mask, position_ids=positions)
    new = tokens(len(lengths), 3, seed=9)
    steps = []
    for step in range(3):
        mask = torch.cat((mask, torch.ones(len(lengths), 1, dtype=torch.long)), dim=1)
        at = mask.sum(-1, keepdim=True) - 1
        steps.append(logits_of(model, new[:, step : step + 1], cache, attention_mask=mask, position_ids=at))
    for index, row in enumerate(rows[:3]):
        alone = model(input_ids=torch.cat((row, new[index]))[None], use_cache=False).logits[0]
        torch.testing.assert_close(prefill[index, length - len(row) :], alone[:-3], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cat(steps, 1)[index], alone[-3:], rtol=1e-9, atol=1e-9)
    assert torch.isfinite(torch.cat(steps, 1)).all()


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.usefixtures("short_stretches")
def test_behind_a_window_pages_are_given_back(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized[name], tokens(2, 250)
    cache = filled(model, ids, 200, *[1] * 50)
    for layer in layers_of(cache):
        if layer.window is None:
            assert layer.group.sequences.total == 2 * -(-250 // PAGE_TOKENS)
        else:
            assert layer.window == 8
            # Also of the 200 tokens at once never more than a stretch was held.
            assert layer.group.sequences.total <= 2 * 2
            assert layer.first_slot == (250 - 7) // PAGE_TOKENS * PAGE_TOKENS
    assert_holds(model, cache, ids)


def test_memory_is_what_pages_take(quantized: dict[str, PreTrainedModel]) -> None:
    """16 channels: 8 bytes of keys and 6 of values, and two pairs of halves; whole pages of 64 tokens."""
    model = quantized["llama-9-heads"]
    cache = filled(model, tokens(3, 130))
    assert cache.nbytes == 2 * 3 * 3 * 192 * (8 + 6 + 8)  # layers, sequences, heads, tokens


def test_all_layers_without_windows_share_their_books(quantized: dict[str, PreTrainedModel]) -> None:
    full = [layer.group for layer in layers_of(filled(quantized["llama-9-heads"], tokens(1, 4)))]
    assert full[0] is full[1]
    mixed = [layer.group for layer in layers_of(filled(quantized["gemma2"], tokens(1, 4)))]
    assert mixed[0] is not mixed[1]


# --- what transformers does to caches ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "removed"), [(70, 7), (70, 6), (64, 64), (130, 3), (129, 1)])
def test_what_is_cropped_was_never_there(
    name: str, length: int, removed: int, quantized: dict[str, PreTrainedModel]
) -> None:
    model, ids = quantized[name], tokens(2, length)
    cache = DynamicCache(config=model.config)
    logits_of(model, ids[:, :2], cache)
    cache.activate_past_recording()
    logits_of(model, ids[:, 2:], cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == length - removed
    if removed < length:
        assert_holds(model, cache, ids[:, :-removed])
    else:
        logits_of(model, ids[:, :9], cache)
        assert_holds(model, cache, ids[:, :9])


def test_what_left_a_window_cannot_be_cropped_to(quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized["mistral-sliding"], tokens(1, 150)
    cache = filled(model, ids)
    with pytest.raises(RotaquantError, match=r"first 128 have left the window of 8.*activate_past_recording"):
        cache.crop(-20)
    assert_holds(model, cache, ids)  # nothing was lost
    cache.crop(-2)  # its page is still there
    assert_holds(model, cache, ids[:, :-2])


def test_a_crop_to_a_length_is_told_how_to_ask(quantized: dict[str, PreTrainedModel]) -> None:
    cache = filled(quantized["llama-9-heads"], tokens(1, 9))
    with pytest.raises(RotaquantError, match=r"crop\(5 - cache.get_seq_length\(\)\) leaves 5"):
        cache.crop(5)
    with pytest.raises(RotaquantError, match="crop by 10 tokens: sequence 0 has 9"):
        cache.crop(-10)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_are_reordered_repeated_and_left_out(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized[name], tokens(3, 70)
    cache = filled(model, ids)
    for change, argument, left in (
        ("reorder_cache", torch.tensor([2, 2, 0]), [2, 2, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([5, 0, -2]), [5, 0, 4]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
    ):
        getattr(cache, change)(argument)
        ids = ids[left]
        assert_holds(model, cache, ids)
        new = tokens(len(left), 5, seed=len(left))  # those that were one go apart
        logits_of(model, new, cache)
        ids = torch.cat((ids, new), dim=1)
        assert_holds(model, cache, ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_was_reset_takes_another_batch(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    model = quantized[name]
    cache = filled(model, tokens(3, 70))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
    ids = tokens(2, 9, seed=8)
    logits_of(model, ids, cache)
    assert_holds(model, cache, ids)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_were_sent_away_come_back(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    """Told in the middle of a step, as an offloading cache does, a layer goes when it was attended to."""
    model, ids = quantized[name], tokens(2, 70)
    cache = DynamicCache(config=model.config)
    logits_of(model, ids[:, :66], cache)
    kind, sent = type(cache), []

    class Offloading(kind):  # type: ignore[misc, valid-type]
        def update(self, keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
            self.layers[index].prefetch()
            stored = super().update(keys, values, index, *args, **kwargs)
            self.layers[index].offload()
            sent.append(self.layers[index].pages._is_away)
            return stored

    cache.__class__ = Offloading
    for part in ids[:, 66:].split((1, 3), dim=1):
        logits_of(model, part, cache)
    cache.__class__ = kind
    assert not any(sent)
    assert len(sent) == 4
    assert all(layer.pages._is_away for layer in layers_of(cache))
    assert_holds(model, cache, ids)


def test_a_cache_that_knows_no_configuration(quantized: dict[str, PreTrainedModel]) -> None:
    for name in ("llama-9-heads", "mistral-sliding"):
        model, ids, cache = quantized[name], tokens(2, 20), DynamicCache()
        logits = torch.cat([logits_of(model, part, cache) for part in ids.split((12, 1, 7), dim=1)], dim=1)
        expected = model(input_ids=ids, use_cache=False).logits
        assert len(layers_of(cache)) == 2
        if name == "llama-9-heads":  # of windows, masks for such a cache know nothing
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_another_batch_is_refused(quantized: dict[str, PreTrainedModel]) -> None:
    model = quantized["llama-9-heads"]
    cache = filled(model, tokens(2, 5))
    with pytest.raises(RotaquantError, match="holds 2 sequences, and is given tokens of 3: reset it"):
        logits_of(model, tokens(3, 1), cache)


def test_after_an_interrupted_step_the_cache_is_refused_until_reset(quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized["llama-9-heads"], tokens(2, 5)
    cache = filled(model, ids)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(model, ids, cache)
    handle.remove()
    with pytest.raises(RotaquantError, match="do not hold the same tokens.*reset the cache"):
        logits_of(model, ids, cache)
    cache.reset()
    logits_of(model, ids, cache)
    assert_holds(model, cache, ids)


def test_keys_and_values_can_be_read(quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized["gemma2"], tokens(2, 70)
    cache = filled(model, ids)
    windowed, full = layers_of(cache)
    assert full.keys.shape == full.values.shape == (2, 2, 70, 32)
    assert windowed.keys.shape == (2, 2, 70 - windowed.first_slot, 32)
    cache.reorder_cache(torch.tensor([1, 0]))
    before = full.keys
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(full.keys, before.flip(0))
    cache.reset()
    assert full.keys is None


def test_what_is_given_without_attention_is_stored_too(quantized: dict[str, PreTrainedModel]) -> None:
    model = quantized["mistral-sliding"]
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        logits_of(model, tokens(1, 3), cache)
    states = torch.randn(1, 2, 90, 16, dtype=torch.float64)
    for part in (states, *states.split((40, 50), dim=2)):
        cache = caches[0 if part is states else 1]
        for index in range(2):
            cache.update(part, part.flip(-1), index)
    for cache in caches:
        assert cache.get_seq_length() == 93
        cache.crop(-1)
        assert cache.get_seq_length() == 92
    assert all(same_bytes(one, other) for one, other in zip(*(cache.layers for cache in caches), strict=True))


# --- static caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [(63, 1, 1), (5, 16, 17, 90), (200, 1, 1, 40)])
@pytest.mark.usefixtures("short_stretches")
def test_static_caches_go_round(name: str, parts: tuple[int, ...], quantized: dict[str, PreTrainedModel]) -> None:
    """With a window, in fewer pages than tokens."""
    model, ids = quantized[name], tokens(2, sum(parts))
    cache = StaticCache(config=model.config, max_cache_len=250)
    logits = torch.cat([logits_of(model, part, cache) for part in ids.split(parts, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits, rtol=1e-9, atol=1e-9)
    for layer in cache.layers:
        assert isinstance(layer, FixedLayer)
        assert len(layer.pages) == 2 * (4 if layer.window is None else 2)
    assert_holds(model, cache, ids)


@pytest.mark.parametrize("name", ["llama-9-heads", "gemma2", "qwen2-tied-sliding"])
def test_static_caches_are_cropped_reordered_and_reset(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    model, ids = quantized[name], tokens(2, 70)
    cache = StaticCache(config=model.config, max_cache_len=200)
    logits_of(model, ids, cache)
    cache.crop(-5)
    assert_holds(model, cache, ids[:, :65])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert_holds(model, cache, ids[[1, 1], :65])
    cache.reset()
    logits_of(model, ids[:, :30], cache)
    assert_holds(model, cache, ids[:, :30])


@pytest.mark.usefixtures("short_stretches")
def test_a_static_cache_says_what_does_not_fit(quantized: dict[str, PreTrainedModel]) -> None:
    model = quantized["llama-9-heads"]
    cache = StaticCache(config=model.config, max_cache_len=20)
    logits_of(model, tokens(1, 18), cache)
    with pytest.raises(RuntimeError, match="room for 20 tokens"):
        logits_of(model, tokens(1, 3), cache)
    model = quantized["mistral-sliding"]
    cache = StaticCache(config=model.config, max_cache_len=250)
    logits_of(model, tokens(1, 200), cache)
    with pytest.raises(RotaquantError, match="of 200 tokens the first 128 are overwritten"):
        cache.crop(-70)


# --- generation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "way",
    [
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 20},
        {"num_return_sequences": 3, "num_beams": 4},
    ],
    ids=lambda way: "-".join(way),
)
def test_generation_with_and_without_a_cache_is_the_same(
    name: str, way: dict[str, Any], quantized: dict[str, PreTrainedModel]
) -> None:
    model = quantized[name]
    ids = tokens(1, 20).repeat(1, 3)  # what repeats itself can be looked up
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    cached = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings, **way)
    beams = {key: value for key, value in way.items() if key.startswith("num")}
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **settings, **beams)
    assert torch.equal(cached, expected)


@pytest.mark.parametrize("name", ["llama-9-heads", "mistral-sliding"])
def test_a_compiled_step_over_a_static_cache_is_the_same(name: str, quantized: dict[str, PreTrainedModel]) -> None:
    """In one graph for every length: nothing of the books is on the host."""
    model, ids = quantized[name], tokens(2, 24)
    cache = StaticCache(config=model.config, max_cache_len=70)
    logits_of(model, ids[:, :18], cache)
    torch.compiler.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    found = [step(input_ids=part, **{cache_name(model): cache}).logits for part in ids[:, 18:].split(1, dim=1)]
    expected = model(input_ids=ids, use_cache=False).logits[:, 18:]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


# --- formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "values"),
    [({"bits": 4, "group_size": 8}, {"bits": 4}), (None, {"bits": 4}), ({"bits": 4}, None), ({"bits": 4}, {"bits": 4})],
)
def test_what_pages_cannot_hold_stays_in_rows(keys: Any, values: Any, tmp_path: Path) -> None:
    recipe = Recipe(keys=IntFormat(**keys) if keys else None, values=IntFormat(**values) if values else None)
    rotaquant.quantize(tiny_model("mistral-sliding", torch.float64), recipe, output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 30)
    cache = filled(model, ids[:, :20])
    is_paged = keys == values
    assert all(isinstance(layer, GrowingLayer) == is_paged for layer in cache.layers)
    assert cache.nbytes > 0
    assert_holds(model, cache, ids[:, :20])


@pytest.mark.parametrize("keys", [2, 3, 5, 8])
def test_bits_are_in_the_bytes(keys: int, tmp_path: Path) -> None:
    recipe = Recipe(keys=IntFormat(bits=keys), values=IntFormat(bits=4))
    rotaquant.quantize(tiny_model("llama-wide-heads", torch.float64), recipe, output=tmp_path / "out")
    model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 20)
    cache = filled(model, ids)
    assert cache.nbytes == 2 * 2 * 2 * PAGE_TOKENS * ({2: 8, 3: 12, 5: 32, 8: 32}[keys] + 16 + 8)
    assert_holds(model, cache, ids)
