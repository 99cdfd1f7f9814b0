"""Read configs, indexes and tokenizers of model folders, with errors that name the file at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from rotaquant.architectures import require_supported
from rotaquant.errors import RotaquantError
from rotaquant.recipe import Recipe


def read_config(path: Path, *, text_only: bool = False) -> Any:
    """The transformers config of a folder; raises naming the folder when it is missing, empty or no model.

    With `text_only` that of the text part of a model that has others.
    """
    if not path.exists():
        raise RotaquantError(f"{path} does not exist")
    if not path.is_dir():
        raise RotaquantError(f"{path} is neither a model folder nor a .gguf file")
    if not any(path.iterdir()):
        raise RotaquantError(f"{path} is empty")
    if not (path / "config.json").is_file():
        raise RotaquantError(f"{path} holds no config.json: it is no (finished) model folder")
    fields = read_json(path / "config.json")
    text, model_type = fields.get("text_config"), str(fields.get("model_type"))
    text_type = text.get("model_type") if isinstance(text, dict) else None
    if not (text_only and text_type):
        require_supported(model_type, text_type)
    with naming_the_config(str(path)):
        config = AutoConfig.from_pretrained(path)
        return text_config(config) if text_only else config


def text_config(config: Any) -> Any:
    """The config of a model's text part, completed by what only the whole one says; of a text model its own."""
    text = config.get_text_config()
    require_supported(text.model_type)
    if text is not config:
        # Where the whole config does not say, the text part's own word holds.
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", True))
        text.dtype = text.dtype or config.dtype
        refuse_quantized(config, config.model_type)
    return text


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file of a sharded checkpoint's index; raises naming the index where it is damaged."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RotaquantError(f"{index} has no weight_map: it is damaged; get an undamaged copy")
    return weight_map


@contextmanager
def naming_the_config(name: str) -> Iterator[None]:
    """Turn whatever transformers raises over a config, or over running it, into a `RotaquantError` with its name."""
    try:
        yield
    except (RotaquantError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers checks configs in many places, each with exceptions of its own
        raise RotaquantError(
            f"the config of {name} is not one that transformers can use: {first_line(error)}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `RotaquantError` naming the file where it holds none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RotaquantError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise RotaquantError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(fields, dict):
        raise RotaquantError(f"{path} does not hold a JSON object")
    return fields


def refuse_quantized(config: Any, name: str) -> None:
    """Raise `RotaquantError` when a config says that its model is quantized already."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method = fields.get("quant_method")
        raise RotaquantError(f"{name} is already quantized ({method}); give the float model it was made from")


def first_line(error: BaseException) -> str:
    """What an exception says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' advice about models that are deliberately empty off the terminal."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def set_tied(config: Any, tied: bool) -> None:
    """Say at every level of the config whether the head shares the embedding's weight."""
    config.tie_word_embeddings = tied
    config.get_text_config().tie_word_embeddings = tied


def is_tied(config: Any) -> bool:
    """Whether the config says that the head shares the embedding's weight."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def require_tied_if_kept(tied: bool, recipe: Recipe, name: str) -> None:
    """Raise `RotaquantError` when a recipe keeps embeddings tied that are not."""
    if recipe.tied_embeddings == "keep" and not tied:
        raise RotaquantError(
            f"tied_embeddings: {name} has a head of its own, so there is nothing to keep tied; leave the field out of "
            "the recipe"
        )


def require_positions(config: Any, length: int, name: str) -> None:
    """Raise `RotaquantError` when sequences of `length` tokens exceed the model's positions."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise RotaquantError(
            f"sequences of {length} tokens exceed the {limit} positions of {name} (max_position_embeddings): "
            f"give --sequence-length {limit} or less"
        )


def require_vocabulary(config: Any, ids: Tensor, name: str) -> None:
    """Raise `RotaquantError` when token ids are outside the model's vocabulary."""
    size = config.get_text_config().vocab_size
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= size:
        raise RotaquantError(
            f"token {high if high >= size else low} is outside the vocabulary of {size} of {name}: "
            "is the tokenizer that of another model?"
        )


def read_tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    """The tokenizer of a folder or GGUF file; raises `RotaquantError` naming the folder where there is none."""
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf_file} if gguf_file else {}))
    except Exception as error:  # tokenizer files are checked in many places, each with exceptions of its own
        raise RotaquantError(
            f"{folder} has no usable tokenizer; add the model's tokenizer.json and tokenizer_config.json"
        ) from error
