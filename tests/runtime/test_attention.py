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
def test_softcapped_attention_in_both_directions(tmp_path: Path) -> None:
    """Without a mask a query sees what comes before it, unless the model looks both ways."""
    config = AutoConfig.for_model(**small_fields("gemma2"), use_bidirectional_attention=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    rotaquant.quantize(model, Recipe(), output=tmp_path / "out")
    ids = tokens(2, 12)
    expected, causal = model(input_ids=ids, use_cache=False).logits, tiny_model("gemma2", torch.float64)
    causal.load_state_dict(model.state_dict())
    assert not torch.allclose(causal(input_ids=ids, use_cache=False).logits, expected, rtol=1e-3)
    found = rotaquant.load(tmp_path / "out")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
