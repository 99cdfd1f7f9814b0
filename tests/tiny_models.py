"""A table of tiny random configurations: every family, and the shapes that break other tools."""

from __future__ import annotations

import inspect
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
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2-dynamic-rope": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "smollm3": {
        "model_type": "smollm3",
        "tie_word_embeddings": True,
        "no_rope_layers": [1, 0],
        "attention_bias": True,
    },
    "gemma": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3-256-wide-heads": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    },
    "glm4": {
        "model_type": "glm4",
        "head_dim": 32,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3": {
        "model_type": "phi3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3-odd-heads": {
        "model_type": "phi3",
        "hidden_size": 60,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "sliding_window": 8,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "attention_bias": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {
        "model_type": "granite",
        "attention_bias": True,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3-moe-dense-first": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [0],
        "head_dim": 32,
    },
    "qwen2-moe-shared": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "opt": {
        "model_type": "opt",
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "tie_word_embeddings": True,
        "num_key_value_heads": None,
    },
    "cohere": {"model_type": "cohere", "attention_bias": True, "tie_word_embeddings": True, "logit_scale": 0.5},
    "cohere-normalised": {"model_type": "cohere", "use_qk_norm": True},
    "gpt-neox": {
        "model_type": "gpt_neox",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "gpt-neox-sequential": {"model_type": "gpt_neox", "use_parallel_residual": False, "tie_word_embeddings": True},
    "starcoder2": {"model_type": "starcoder2", "tie_word_embeddings": True, "sliding_window": 8},
    "starcoder2-unbiased": {"model_type": "starcoder2", "use_bias": False},
}


def small_fields(name: str) -> dict[str, Any]:
    """The fields of a config of the table."""
    fields = {**_SMALL, **CONFIGS[name]}
    return {field: value for field, value in fields.items() if value is not None}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of the table: random gains and biases, and a few outlier channels in the embedding."""
    config = AutoConfig.for_model(**small_fields(name))
    generator = torch.Generator().manual_seed(seed)
    # SDPA, which transformers chose for Gemma-2 before 5.24, drops softcaps.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    # The stock experts' default needs a grouped product that has no float64.
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, experts_implementation="eager", attn_implementation=attention
    )
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if "norm" in parameter_name and parameter_name.endswith("weight"):
                neutral = 0.0 if config.model_type.startswith("gemma") else 1.0
                parameter.copy_(neutral + 0.3 * noise)
            elif parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.copy_(noise)
            elif "embed" in parameter_name:
                noise[:, :3] *= 20
                parameter.copy_(noise + (0.7 if config.model_type == "opt" else 0.0))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.to(dtype)
    for module in model.modules():
        if hasattr(module, "inv_freq") or "Rotary" in type(module).__name__:
            module.float()  # a model that is built in its dtype keeps RoPE's frequencies in float32
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


def cache_name(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"
