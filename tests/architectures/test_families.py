"""What configs may name that a family's own code ignores."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rotaquant.architectures import describe
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
