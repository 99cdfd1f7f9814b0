"""Scores that SDPA cannot compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rotaquant
from rotaquant.architectures import describe
from rotaquant.recipe import Recipe
from rotaquant.runtime.attention import keep_softcap
from tests.tiny_models import small_fields, tiny_model, tokens


@pytest.mark.parametrize(
    ("name", "attention"), [("gemma2", "eager"), ("gemma3-256-wide-heads", "sdpa"), ("llama", "sdpa")]
)
def test_softcapped_scores_are_kept_from_sdpa_which_would_drop_the_cap(name: str, attention: str) -> None:
    model = tiny_model(name)
    model.config._attn_implementation = "sdpa"  # older versions of transformers choose it for every model
    keep_softcap(model, describe(model))
    assert model.config._attn_implementation == attention


@torch.no_grad()
@pytest.mark.parametrize(
    ("fields", "ahead"), [({}, False), ({"use_bidirectional_attention": True}, False), ({"is_causal": False}, True)]
)
def test_softcapped_attention_looks_where_the_stock_one_does(
    fields: dict[str, bool], ahead: bool, tmp_path: Path
) -> None:
    """The stock attention that knows softcaps is the eager one, for which only `is_causal` of the config counts."""
    config = AutoConfig.for_model(**small_fields("gemma2"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    torch.nn.init.normal_(model.model.embed_tokens.weight, generator=torch.Generator().manual_seed(0))
    rotaquant.quantize(model, Recipe(), output=tmp_path / "out")
    loaded = rotaquant.load(tmp_path / "out")
    for length in (6, 12):  # within the window and beyond it
        ids = tokens(2, length)
        changed = torch.cat((ids[:, :-1], (ids[:, -1:] + 1) % 96), dim=1)
        expected = [model(input_ids=x, use_cache=False).logits for x in (ids, changed)]
        assert ((expected[1] - expected[0])[:, :-1].abs().max() > 1e-3) == ahead
        found = [loaded(input_ids=x, use_cache=False).logits for x in (ids, changed)]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
