"""Packed caches on the kernels: models attend by them as by the definitions, from pages anywhere in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

pytest.importorskip("triton", reason="needs Triton: pip install triton")

import rotaquant
from rotaquant.ops import cache as cache_ops
from rotaquant.ops import cache_append_kernels, cache_attention_kernels, cache_read_kernels
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.runtime import growing_layer, packed_layer
from rotaquant.runtime.pages import LayerPages
from tests.tiny_models import cache_name, tiny_model, tokens

NAMES = ["llama-wide-heads", "gemma2", "gpt-oss", "qwen2-tied-sliding", "mistral-sliding"]
KV = Recipe(keys=IntFormat(bits=4, clip_ratio=0.95), values=IntFormat(bits=3))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def slabbed_pages(form: Any, device: torch.device, slabbed: bool) -> LayerPages:
    """Slabs also on the CPU, as a GPU has them."""
    return LayerPages(form, device, slabbed=True)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where models run."""
    return str(request.param)


@pytest.fixture
def on_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let 16 bits be the kernels' on the CPU too, by Triton's interpreter; counts the launches."""
    launches: Counter[str] = Counter()
    for module, name in (
        (cache_append_kernels, "append"),
        (cache_attention_kernels, "attend"),
        (cache_read_kernels, "read"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name), name, launches))
    if device == "cpu":
        monkeypatch.setattr(cache_ops, "_by_kernel", lambda x: x.element_size() == 2)
        monkeypatch.setattr(cache_ops, "_reads_by_kernel", lambda pages, dtype: dtype.itemsize == 2)
        monkeypatch.setattr(growing_layer, "LayerPages", slabbed_pages)
    return launches


def counted(function: Any, name: str, calls: Counter[str]) -> Any:
    """The function, whose calls are counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def loaded(name: str, folder: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose cache alone is quantized."""
    rotaquant.quantize(tiny_model(name, torch.float64), KV, output=folder / name)
    return rotaquant.load(folder / name).to(device, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_models_attend_by_the_kernels(
    name: str, kind: type, device: str, tmp_path: Path, on_kernels: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text, a few tokens and one, against float64."""
    monkeypatch.setattr(packed_layer, "STRETCH", 32)
    ids, parts = tokens(2, 90), (80, 5, 1, 1, 3)
    exact = loaded(name, tmp_path, "cpu", torch.float64)
    expected = exact(input_ids=ids, use_cache=False).logits
    assert not on_kernels
    model = exact.to(device, torch.float16)
    lengths = {"max_cache_len": 100} if kind is StaticCache else {}
    cache = kind(config=model.config, **lengths)
    given = ids.to(device)
    logits = [model(input_ids=part, **{cache_name(model): cache}).logits for part in given.split(parts, dim=1)]
    assert on_kernels["append"] >= len(parts) * len(cache.layers)
    assert on_kernels["read"] > 0
    # Where a bias of keys has to be added, keys are read.
    assert (on_kernels["attend"] > 0) == (name not in ("qwen2-tied-sliding", "gpt-oss"))
    error = (torch.cat(logits, 1).cpu().double() - expected).norm() / expected.norm()
    assert error < 0.02


@pytest.mark.parametrize("name", ["llama-wide-heads", "mistral-sliding"])
def test_beams_part_and_windows_drop_on_the_kernels(
    name: str, device: str, tmp_path: Path, on_kernels: Counter[str]
) -> None:
    """Pages that are copied, given back and taken again lie in several pieces of memory: the tokens stay the same."""
    model = loaded(name, tmp_path, device, torch.float16)
    ids = tokens(1, 60).to(device)
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    cached = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    uncached = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **settings)
    assert on_kernels["attend"] > 0
    assert torch.equal(cached, uncached)
