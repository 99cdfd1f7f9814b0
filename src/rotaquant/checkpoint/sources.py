"""Open a float model lazily: a Hugging Face folder, a hub id, a GGUF file, or a model in memory.

A `Source` hands out single tensors under their transformers names, so that no step needs the whole model in memory.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from rotaquant.architectures import Architecture, describe, require_supported
from rotaquant.checkpoint.gguf import gguf_config, gguf_tensors
from rotaquant.checkpoint.places import Places
from rotaquant.errors import RotaquantError
from rotaquant.integrations.headers import read_headers
from rotaquant.runtime.experts import unstack_experts

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# One stored tensor or, given an index along its first dimension, that entry of it without reading the others.
Load = Callable[[str, int | None], Tensor]


@dataclass(frozen=True)
class Source:
    """A float model to read from: `read(name)` gives one tensor, `name` says where it comes from.

    `names` are those by which tensors are stored, and by which `load` gives them.
    """

    name: str
    config: Any
    dtype: torch.dtype
    load: Load
    folder: Path | None
    gguf_file: str | None = None
    files: tuple[Path, ...] = ()
    names: frozenset[str] = frozenset()
    generation: GenerationConfig | None = None

    def skeleton(self) -> tuple[PreTrainedModel, Architecture]:
        """The model without weights (meta device, head untied, experts apart, buffers computed), and its roles."""
        config = copy.deepcopy(self.config)
        set_tied(config, False)
        with torch.device("meta"), quiet_transformers(), _naming_the_config(self.name):
            # The model's own default: some families' scores are more than SDPA can compute.
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=None)
        model.eval()
        compute_buffers(model)
        architecture = describe(model)
        unstack_experts(model, architecture)
        return model, architecture

    @cached_property
    def _places(self) -> Places:
        tied = bool(getattr(self.config, "tie_word_embeddings", False))
        return Places(self.names, *self.skeleton(), tied=tied)

    def read(self, name: str) -> Tensor:
        """The tensor that the skeleton calls `name`; raises `RotaquantError` naming a tensor that is not there."""
        place = self._places.find(name)
        if place is None:
            absent = self._places.absent(name)
            raise RotaquantError(f"{self.name} lacks tensor {absent}: the checkpoint is incomplete")
        try:
            parts = [self.load(part, place.entry) for part in place.names]
        except IndexError as error:
            raise RotaquantError(
                f"{place.names[0]} of {self.name} holds fewer experts than its config asks for"
            ) from error
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tensor.T.contiguous() if place.transposed else tensor

    def unread(self, skeleton: PreTrainedModel) -> list[str]:
        """Tensors of the source that are no part of the model its config describes (computed buffers aside)."""
        computed = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
        places = (self._places.find(name) for name in skeleton.state_dict())
        used = {part for place in places if place is not None for part in place.names}
        return sorted(name for name in self.names - used if not name.endswith(computed))

    def fill(self, module: nn.Module, prefix: str, *, device: torch.device, dtype: torch.dtype) -> None:
        """Give a skeleton module its weights. Raises for a missing, misshapen or non-finite tensor, naming it."""
        for name, parameter in list(module.named_parameters()):
            full = f"{prefix}.{name}"
            tensor = self.read(full)
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise RotaquantError(
                    f"tensor {full} of {self.name} is stored as {tensor.dtype}: give a model in a floating-point dtype"
                )
            if tensor.shape != parameter.shape:
                raise RotaquantError(
                    f"tensor {full} has shape {list(tensor.shape)}, the config asks for {list(parameter.shape)}"
                )
            # A sum in float64 is finite just when every value is: one pass instead of three.
            if not math.isfinite(tensor.sum(dtype=torch.float64).item()):
                raise RotaquantError(f"tensor {full} of {self.name} holds NaN or infinity; get an undamaged copy")
            owner = module.get_submodule(name.rpartition(".")[0])
            value = nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], value)


def set_tied(config: Any, tied: bool) -> None:
    """Say at every level of the config whether the head shares the embedding's weight."""
    config.tie_word_embeddings = tied
    config.get_text_config().tie_word_embeddings = tied


def is_tied(config: Any) -> bool:
    """Whether the config says that the head shares the embedding's weight."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def compute_buffers(model: PreTrainedModel, device: str | torch.device = "cpu") -> None:
    """Compute the buffers that no checkpoint holds (RoPE frequencies) as `from_pretrained` does."""
    for module in model.modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)


def open_source(model: str | Path | PreTrainedModel) -> Source:
    """A lazily read source for a hub id, a folder, a .gguf file or a model in memory.

    Raises `RotaquantError` for what is missing, empty, unsupported or already quantized.
    """
    if isinstance(model, PreTrainedModel):
        return _in_memory(model)
    path = Path(model)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    return _from_folder(path if path.exists() else _download(str(model)), str(model))


def _in_memory(model: PreTrainedModel) -> Source:
    _refuse_quantized(model.config, type(model).__name__)
    require_supported(model.config.model_type)
    tensors = model.state_dict()

    def load(tensor: str, entry: int | None = None) -> Tensor:
        return tensors[tensor] if entry is None else tensors[tensor][entry]

    origin = str(getattr(model.config, "name_or_path", "") or "")
    folder = Path(origin) if origin and Path(origin).is_dir() else None
    name = origin or type(model).__name__
    names = frozenset(tensors)
    return Source(name, model.config, model.dtype, load, folder, names=names, generation=model.generation_config)


def require_gguf_file(path: Path) -> None:
    """Raise `RotaquantError` unless the file is there."""
    if not path.is_file():
        raise RotaquantError(f"GGUF file {path} does not exist")


def _from_gguf(path: Path) -> Source:
    require_gguf_file(path)
    config = gguf_config(path)
    require_supported(config.model_type)
    with torch.device("meta"), quiet_transformers(), _naming_the_config(str(path)):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names, unpack = gguf_tensors(path, skeleton)
    _refuse_gguf_experts(path, skeleton, names)

    def load(tensor: str, _: int | None = None) -> Tensor:
        return unpack(tensor)

    # A GGUF file's own block formats are not computed in; transformers unpacks them to float32, and so do we.
    folder, file = path.parent, path.name
    return Source(str(path), config, torch.float32, load, folder, file, files=(path,), names=frozenset(names))


def _refuse_gguf_experts(path: Path, skeleton: PreTrainedModel, names: set[str]) -> None:
    first = describe(skeleton).blocks[0]
    # transformers' tables know a GGUF file's stacked experts by no name, and take Mixtral for Llama.
    if first.experts is not None or f"{first.path}.{first.mlps[0].down}.weight" not in names:
        raise RotaquantError(
            f"{path} holds no feed-forward weights that can be read: experts are not read from GGUF files; "
            "give the model's Hugging Face folder or hub id"
        )


def _from_folder(path: Path, name: str) -> Source:
    config = read_config(path)
    _refuse_quantized(config, str(path))
    require_supported(config.model_type)
    index = path / _INDEX
    if index.is_file():
        weight_map = read_weight_map(index)
    elif (path / _SINGLE).is_file():
        weight_map = {tensor: _SINGLE for tensor in read_headers([path / _SINGLE])}
    else:
        raise RotaquantError(f"{path} holds no {_SINGLE} and no {_INDEX}; convert the weights to safetensors first")
    files = tuple(sorted({path / file for file in weight_map.values()}))
    absent = sorted(weight_map.keys() - read_headers(files).keys())
    if absent:
        raise RotaquantError(f"{path / weight_map[absent[0]]} lacks tensor {absent[0]}, which the index places there")

    def load(tensor: str, entry: int | None = None) -> Tensor:
        with safe_open(path / weight_map[tensor], framework="pt") as opened:
            value: Tensor = opened.get_tensor(tensor) if entry is None else opened.get_slice(tensor)[entry]
        return value

    dtype = getattr(config, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        dtype = load(next(iter(weight_map))).dtype
    return Source(name, config, dtype, load, path, files=files, names=frozenset(weight_map))


def read_config(path: Path) -> Any:
    """The transformers config of a folder; raises naming the folder when it is missing, empty or no model."""
    if not path.exists():
        raise RotaquantError(f"{path} does not exist")
    if not path.is_dir():
        raise RotaquantError(f"{path} is neither a model folder nor a .gguf file")
    if not any(path.iterdir()):
        raise RotaquantError(f"{path} is empty")
    if not (path / "config.json").is_file():
        raise RotaquantError(f"{path} holds no config.json: it is no (finished) model folder")
    fields = read_json(path / "config.json")
    require_supported(str(fields.get("model_type")))
    with _naming_the_config(str(path)):
        return AutoConfig.from_pretrained(path)


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file of a sharded checkpoint's index; raises naming the index where it is damaged."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RotaquantError(f"{index} has no weight_map: it is damaged; get an undamaged copy")
    return weight_map


@contextmanager
def _naming_the_config(name: str) -> Iterator[None]:
    try:
        yield
    except RotaquantError:
        raise
    except Exception as error:  # transformers checks configs in many places, each with exceptions of its own
        raise RotaquantError(
            f"the config of {name} is not one that transformers can use: {_first_line(error)}"
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


def _refuse_quantized(config: Any, name: str) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method = fields.get("quant_method")
        raise RotaquantError(f"{name} is already quantized ({method}); give the float model it was made from")


def _download(model: str) -> Path:
    try:
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        # Some repositories ship the weights a second time, in their authors' own layout.
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=["consolidated*", "original/*"]))
    except HFValidationError as error:
        raise RotaquantError(f"{model} does not exist, and is no hub id") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise RotaquantError(
            f"{model} is no local folder, and cannot be fetched from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
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


def load_generation_config(source: Source) -> GenerationConfig:
    """How the source generates by default; raises `RotaquantError` naming a generation_config.json that is no use."""
    path = source.folder / "generation_config.json" if source.folder is not None else None
    stored = path is not None and path.is_file() and source.generation is None
    where = str(path) if stored else f"the generation_config of {source.name}"
    try:
        if stored:
            config = GenerationConfig.from_pretrained(source.folder)
        else:
            config = source.generation or GenerationConfig.from_model_config(source.config)
        with tempfile.TemporaryDirectory() as scratch:
            config.save_pretrained(scratch)  # transformers checks it only here
    except Exception as error:
        raise RotaquantError(f"{where} cannot be used: {_first_line(error)}; mend or remove it") from error
    return config


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


def load_tokenizer(source: Source) -> Any:
    """The source's tokenizer; raises `RotaquantError` where there is none."""
    if source.folder is None:
        raise RotaquantError(f"{source.name} has no tokenizer: save model and tokenizer to a folder, and give that")
    return read_tokenizer(source.folder, source.gguf_file)


def read_tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    """The tokenizer of a folder or GGUF file; raises `RotaquantError` naming the folder where there is none."""
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf_file} if gguf_file else {}))
    except Exception as error:  # tokenizer files are checked in many places, each with exceptions of its own
        raise RotaquantError(
            f"{folder} has no usable tokenizer; add the model's tokenizer.json and tokenizer_config.json"
        ) from error
