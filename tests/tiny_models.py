"""A table of tiny random configurations: every family, and the shapes that break other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 96

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-9-heads": {
        "model_type": "llama",
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 192,
    },
    "llama-14-heads": {
        "model_type": "llama",
        "hidden_size": 112,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "llama-wide-heads": {"model_type": "llama", "head_dim": 32},
    "llama-dense-heads": {"model_type": "llama", "head_dim": 6},
    "llama-multi-head": {"model_type": "llama", "num_key_value_heads": 4, "intermediate_size": 344},
    "llama-no-hadamard": {"model_type": "llama", "hidden_size": 60, "intermediate_size": 214, "head_dim": 12},
    "llama-block-hadamard": {"model_type": "llama", "intermediate_size": 107 * 32},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied-sliding": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of the table: random gains and biases, and a few outlier channels in the embedding."""
    fields = {**_SMALL, **CONFIGS[name]}
    config = AutoConfig.for_model(**fields)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter_name.endswith("bias"):
                parameter.copy_(noise)
            elif "embed" in parameter_name:
                noise[:, :3] *= 20
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.to(dtype).model.rotary_emb.float()  # a model that is built in its dtype keeps RoPE's frequencies in float32
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words w3, w4, … with padding on the left."""
    words = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def save_tiny(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """A float model folder as a user has it: weights, config, tokenizer."""
    model = tiny_model(name, dtype)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids without the special ones, int64 `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)
