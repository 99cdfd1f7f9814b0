"""Open a float model lazily: a Hugging Face folder, a hub id, a GGUF file, or a model in memory.

A `Source` hands out single tensors under their transformers names, so that no step needs the whole model in memory.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rotaquant.architectures import Architecture, describe, require_supported
from rotaquant.checkpoint.configs import (
    first_line,
    is_tied,
    naming_the_config,
    quiet_transformers,
    read_config,
    read_tokenizer,
    read_weight_map,
    refuse_quantized,
    set_tied,
    text_config,
)
from rotaquant.checkpoint.gguf import gguf_config, gguf_tensors
from rotaquant.checkpoint.places import Places
from rotaquant.errors import RotaquantError
from rotaquant.integrations.headers import read_headers
from rotaquant.runtime.attention import keep_softcap
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

    def skeleton(self, device: str | torch.device = "cpu") -> tuple[PreTrainedModel, Architecture]:
        """The model without weights, and its roles: meta device, head untied, experts apart, buffers on `device`."""
        config = copy.deepcopy(self.config)
        set_tied(config, False)
        with torch.device("meta"), quiet_transformers(), naming_the_config(self.name):
            # The model's own default: attention sinks are more than SDPA can compute.
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=None)
        model.eval()
        compute_buffers(model, device)
        architecture = describe(model)
        keep_softcap(model, architecture)
        unstack_experts(model, architecture)
        return model, architecture

    @cached_property
    def _places(self) -> Places:
        return Places(self.names, *self.skeleton(), tied=is_tied(self.config))

    @cached_property
    def tied(self) -> bool:
        """Whether head and embedding are one weight: where the config says so, and no two that differ are stored."""
        if not is_tied(self.config):
            return False
        ends = self._places.stored_ends()
        return len(ends) < 2 or torch.equal(*(self.load(name, None) for name in ends))

    def read(self, name: str) -> Tensor:
        """The tensor that the skeleton calls `name`; raises `RotaquantError` naming a tensor that is not there."""
        place = self._places.find(name)
        if place is None:
            absent = self._places.absent(name)
            raise RotaquantError(f"{self.name} lacks tensor {absent}: it is incomplete; get an undamaged copy")
        try:
            parts = [self.load(part, place.entry) for part in place.names]
        except IndexError as error:
            raise RotaquantError(
                f"{place.names[0]} of {self.name} holds fewer experts than its config asks for"
            ) from error
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            shapes = " and ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
            raise RotaquantError(f"{place} of {self.name} do not fit together: {shapes}; get an undamaged copy")
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
            tensor = self.read(f"{prefix}.{name}")
            place = self._places.find(f"{prefix}.{name}")
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise RotaquantError(
                    f"tensor {place} of {self.name} is stored as {tensor.dtype}: give a model in a floating-point dtype"
                )
            if tensor.shape != parameter.shape:
                way = -1 if place is not None and place.transposed else 1
                found, wanted = list(tensor.shape)[::way], list(parameter.shape)[::way]
                raise RotaquantError(f"tensor {place} of {self.name} has shape {found}, the config asks for {wanted}")
            # A sum in float64 is finite just when every value is: one pass instead of three.
            if not math.isfinite(tensor.sum(dtype=torch.float64).item()):
                raise RotaquantError(f"tensor {place} of {self.name} holds NaN or infinity; get an undamaged copy")
            owner = module.get_submodule(name.rpartition(".")[0])
            value = nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], value)


def compute_buffers(model: PreTrainedModel, device: str | torch.device) -> None:
    """Compute the buffers that no checkpoint holds (RoPE frequencies) as `from_pretrained` does: on the CPU."""
    for module in model.modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
            model._init_weights(module)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)


def open_source(model: str | Path | PreTrainedModel, *, text_only: bool = False, weights: bool = True) -> Source:
    """A lazily read source for a hub id, a folder, a .gguf file or a model in memory.

    With `text_only` only the text part of a model that has others; without `weights` the config alone will do, and of
    a hub id no more is fetched. Raises `RotaquantError` for what is missing, empty, unsupported or already quantized.
    """
    if isinstance(model, PreTrainedModel):
        return _in_memory(model, text_only)
    path = Path(model)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    local = path.exists()
    folder = path if local else _download(str(model), weights)
    if weights or local and any((folder / file).is_file() for file in (_INDEX, _SINGLE)):
        return _from_folder(folder, str(model), text_only)
    return _without_weights(folder, str(model), text_only)


def _without_weights(path: Path, name: str, text_only: bool) -> Source:
    config = read_config(path, text_only=text_only)
    refuse_quantized(config, name)

    def load(tensor: str, _: int | None = None) -> Tensor:
        raise RotaquantError(f"tensor {tensor} of {name} is not at hand")

    return Source(name, config, config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32, load, path)


def _in_memory(model: PreTrainedModel, text_only: bool) -> Source:
    refuse_quantized(model.config, type(model).__name__)
    text = model.config.get_text_config()
    require_supported(text.model_type if text_only else model.config.model_type, text.model_type)
    if model.get_output_embeddings() is None:
        raise RotaquantError(
            f"{type(model).__name__} has no head that gives logits: give a causal language model, of "
            "AutoModelForCausalLM"
        )
    config = text_config(copy.deepcopy(model.config)) if text_only else model.config
    tensors = model.state_dict()

    def load(tensor: str, entry: int | None = None) -> Tensor:
        return tensors[tensor] if entry is None else tensors[tensor][entry]

    origin = str(getattr(model.config, "name_or_path", "") or "")
    folder = Path(origin) if origin and Path(origin).is_dir() else None
    name = origin or type(model).__name__
    names = frozenset(tensors)
    return Source(name, config, model.dtype, load, folder, names=names, generation=model.generation_config)


def require_gguf_file(path: Path) -> None:
    """Raise `RotaquantError` unless the file is there."""
    if not path.is_file():
        raise RotaquantError(f"GGUF file {path} does not exist")


def _from_gguf(path: Path) -> Source:
    require_gguf_file(path)
    config = gguf_config(path)
    require_supported(config.model_type)
    with torch.device("meta"), quiet_transformers(), naming_the_config(str(path)):
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
    # transformers' tables know a GGUF file's stacked experts by no name, and take a sparse model for a dense one.
    if first.experts is not None or f"{first.path}.{first.mlps[0].down}.weight" not in names:
        raise RotaquantError(
            f"{path} holds no feed-forward weights that can be read: experts are not read from GGUF files; "
            "give the model's Hugging Face folder or hub id"
        )


def _from_folder(path: Path, name: str, text_only: bool) -> Source:
    config = read_config(path, text_only=text_only)
    refuse_quantized(config, str(path))
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


def _download(model: str, weights: bool) -> Path:
    try:
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"] if weights else ["config.json"]
        # Some repositories ship the weights a second time, in their authors' own layout.
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=["consolidated*", "original/*"]))
    except HFValidationError as error:
        raise RotaquantError(f"{model} does not exist, and is no hub id") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise RotaquantError(
            f"{model} is no local folder, and cannot be fetched from the hub: {first_line(error)}"
        ) from error


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
        raise RotaquantError(f"{where} cannot be used: {first_line(error)}; mend or remove it") from error
    return config


def load_tokenizer(source: Source) -> Any:
    """The source's tokenizer; raises `RotaquantError` where there is none."""
    if source.folder is None:
        raise RotaquantError(f"{source.name} has no tokenizer: save model and tokenizer to a folder, and give that")
    return read_tokenizer(source.folder, source.gguf_file)
