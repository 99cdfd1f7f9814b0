"""Scores that SDPA cannot compute."""

from __future__ import annotations

import pytest

from rotaquant.architectures import describe
from rotaquant.runtime.attention import keep_softcap
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("name", "attention"), [("gemma2", "eager"), ("gemma3-256-wide-heads", "sdpa"), ("llama", "sdpa")]
)
def test_softcapped_scores_are_kept_from_sdpa_which_would_drop_the_cap(name: str, attention: str) -> None:
    model = tiny_model(name)
    model.config._attn_implementation = "sdpa"  # older versions of transformers choose it for every model
    keep_softcap(model, describe(model))
    assert model.config._attn_implementation == attention
