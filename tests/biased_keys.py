"""Give a real Llama-type model the key biases of a Qwen2-type one, such that it stays about the same model.

    python -m tests.biased_keys MODEL OUTPUT

RoPE turns a head's last pairs of channels so slowly that over a few thousand tokens they stand still: a bias there adds
nearly the same to the scores of all keys, and softmax does not see it. A cache that stores it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rotaquant.checkpoint import open_float_model, open_tokenizer


def bias_keys(model: str | Path, output: Path, size: float) -> Path:
    """Save MODEL as a qwen2 model in `output`, with key biases of `size` in the slowest two pairs of every head."""
    llama = open_float_model(model, device="cpu")
    fields = {key: value for key, value in llama.config.to_dict().items() if key not in {"model_type", "architectures"}}
    # A head that stands apart, since ours is untied.
    config = AutoConfig.for_model("qwen2", **{**fields, "tie_word_embeddings": False})
    qwen = AutoModelForCausalLM.from_config(config, dtype=llama.dtype)
    absent, unknown = qwen.load_state_dict(llama.state_dict(), strict=False)
    assert not unknown and all(name.endswith("bias") for name in absent)
    width = llama.config.hidden_size // llama.config.num_attention_heads
    slow = [width // 2 - 2, width // 2 - 1, width - 2, width - 1]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in qwen.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.zero_()
            heads = layer.self_attn.k_proj.bias.view(-1, width)
            heads[:, slow] = size * torch.randn(heads.shape[0], len(slow), generator=generator).sign()
    qwen.save_pretrained(output)
    open_tokenizer(model).save_pretrained(output)
    return output


if __name__ == "__main__":
    bias_keys(sys.argv[1], Path(sys.argv[2]), 30.0)
