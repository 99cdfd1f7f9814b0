"""What configs may name that a family's own code ignores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rotaquant.architectures import describe, expert_families, families, pieces
from rotaquant.architectures.families import FAMILIES
from rotaquant.errors import RotaquantError
from tests.tiny_models import small_fields


def test_positions_of_layers_that_are_not_there() -> None:
    config = AutoConfig.for_model(**{**small_fields("smollm3"), "no_rope_layers": [0, 1, 1, 0, 1]})
    with torch.device("meta"):
        blocks = describe(AutoModelForCausalLM.from_config(config)).blocks
    assert [block.attention.rope is None for block in blocks] == [True, False]


def test_a_head_width_that_opt_does_not_read() -> None:
    fields = {**small_fields("opt"), "head_dim": 8, "num_key_value_heads": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    attention = describe(model).attention
    assert attention.heads == attention.kv_heads
    assert attention.head_dim == model.config.hidden_size // attention.heads


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-dense-first", "gpt-oss"])
@pytest.mark.parametrize("chosen", [0, 7])
def test_more_experts_per_token_than_there_are(name: str, chosen: int) -> None:
    config = AutoConfig.for_model(**{**small_fields(name), "num_experts_per_tok": chosen})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(RotaquantError, match=rf"asks for {chosen} experts per token \(num_experts_per_tok\) of [46]"):
        describe(model)


def test_the_recipe_for_a_family_names_what_is_there() -> None:
    root = Path(__file__).resolve().parents[2]
    recipe = (root / "CONTRIBUTING.md").read_text().partition("## Add a family")[2].partition("\n## ")[0]
    for file in ("families", "expert_families", "pieces", "roles"):
        assert f"`architectures/{file}.py`" in recipe
        assert (root / "src" / "rotaquant" / "architectures" / f"{file}.py").is_file()
    for piece in ("split_attention", "gated_mlp", "pre_norms", "sparse_block", "decoder_of", "head_dim"):
        assert f"`{piece}" in recipe and callable(getattr(pieces, piece))
    assert {family.__module__ for family in FAMILIES.values()} == {families.__name__, expert_families.__name__}
