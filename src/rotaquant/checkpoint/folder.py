"""Our checkpoint folder: a Hugging Face folder that says all about itself. Written by the pipeline, loaded here."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from rotaquant.checkpoint.configs import (
    quiet_transformers,
    read_config,
    read_json,
    read_tokenizer,
    read_weight_map,
)
from rotaquant.checkpoint.sources import (
    open_source,
    require_gguf_file,
)
from rotaquant.errors import RotaquantError
from rotaquant.integrations.headers import read_headers
from rotaquant.integrations.transformers import QUANT_METHOD, RotaquantConfig, register
from rotaquant.recipe import IntFormat, Recipe
from rotaquant.runtime import ModelLayout, resolve_device

REPORT = "quantization_report.json"
_INDEX = "model.safetensors.index.json"


def is_quantized_folder(path: str | Path) -> bool:
    """Whether `path` is a finished folder of ours."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return False
    try:
        quantization = read_json(config).get("quantization_config")
    except RotaquantError:
        return False
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


def load(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "auto"
) -> PreTrainedModel:
    """Load a quantized folder, ready to run.

    `dtype` is that of activations and unquantized parts, by default as saved. Raises `RotaquantError` naming the
    file or tensor for a folder that is incomplete, damaged, newer than this version, or not quantized by rotaquant.
    """
    path = Path(folder)
    target = resolve_device(device)
    quantized_config(path)
    read_headers(_shards(path))
    register()
    with quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
    return model.to(target).eval()


def open_float_model(
    model: str | Path, *, device: str | torch.device = "auto", text_only: bool = False
) -> PreTrainedModel:
    """The float model of a hub id, folder or .gguf file in its own dtype, whole or its text part only."""
    target = resolve_device(device)
    source = open_source(model, text_only=text_only)
    skeleton, _ = source.skeleton()
    for name, child in skeleton.named_children():
        source.fill(child, name, device=target, dtype=source.dtype)
    return skeleton.to(target).eval()


def open_tokenizer(model: str | Path, *, text_only: bool = False) -> Any:
    """The tokenizer of a hub id, folder (quantized or not) or .gguf file."""
    path = Path(model)
    if path.suffix == ".gguf":
        require_gguf_file(path)
        return read_tokenizer(path.parent, path.name)
    if is_quantized_folder(path):
        return read_tokenizer(path)
    source = open_source(model, text_only=text_only)
    assert source.folder is not None
    return read_tokenizer(source.folder)


def require_quantized_folder(folder: str | Path) -> None:
    """Raise `RotaquantError` unless `folder` is a folder of ours that this version reads."""
    quantized_config(Path(folder))


def quantized_config(path: Path) -> RotaquantConfig:
    """The quantization config of a folder of ours, checked; raises `RotaquantError` for any other folder."""
    register()
    if path.exists() and path.is_dir() and (path / "config.json").is_file() and not is_quantized_folder(path):
        raise RotaquantError(f"{path} was not quantized by rotaquant: quantize it first, or load it with transformers")
    fields = read_config(path).quantization_config
    return RotaquantConfig(**(fields if isinstance(fields, dict) else fields.to_dict()))


def _shards(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.is_file():
        single = path / "model.safetensors"
        if single.is_file():  # written by save_pretrained
            return [single]
        raise RotaquantError(f"{path} lacks {_INDEX}: it is incomplete; copy or quantize it again")
    return [path / name for name in sorted(set(read_weight_map(index).values()))]


@dataclass(frozen=True)
class TensorGroup:
    """Size of one kind of module over all blocks, in bytes, against the original's dtype."""

    name: str
    format: str
    bytes: int
    original_bytes: int
    bits_per_weight: float
    weights: int
    quantized: bool


@dataclass(frozen=True)
class FolderSummary:
    """What `rotaquant inspect` tells: recipe, rotation sites, sizes and remarks of the quantizing run."""

    recipe: Recipe
    rotation_seed: int
    sites: dict[str, str]
    rows: tuple[TensorGroup, ...]
    total_bytes: int
    original_bytes: int
    base_model: str | None
    notes: tuple[str, ...]

    @property
    def quantized_bits_per_weight(self) -> float:
        """Bits on disk per weight of the quantized linears, scales included; those of a float where none are."""
        linears = [row for row in self.rows if row.quantized]
        if not linears:
            return max(row.bits_per_weight for row in self.rows)
        weights = sum(row.weights for row in linears)
        return sum(row.bits_per_weight * row.weights for row in linears) / weights


def inspect_folder(path: str | Path) -> FolderSummary:
    """Read headers and configs of a quantized folder; no tensor is loaded."""
    folder = Path(path)
    config = quantized_config(folder)
    layout = config.layout
    headers = read_headers(_shards(folder))
    report = read_json(folder / REPORT) if (folder / REPORT).is_file() else {}
    item = torch.empty(0, dtype=layout.torch_scale_dtype()).element_size()
    rows = _group(headers, _weight_counts(_shards(folder)), layout, item)
    return FolderSummary(
        recipe=layout.recipe,
        rotation_seed=layout.rotation.seed,
        sites=layout.rotation.describe(),
        rows=rows,
        total_bytes=sum(row.bytes for row in rows),
        original_bytes=int(report.get("original_bytes", sum(row.original_bytes for row in rows))),
        base_model=report.get("base_model"),
        notes=tuple(report.get("notes", ())),
    )


_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


def _group(
    headers: dict[str, tuple[tuple[int, ...], str]], shapes: dict[str, int], layout: ModelLayout, item: int
) -> tuple[TensorGroup, ...]:
    """Sizes by kind of module; `shapes` gives the weights that each packed tensor holds.

    What `skip` leaves in float is a kind of its own, beside the quantized linears of the same name.
    """
    stored: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    biases: Counter[str] = Counter()
    quantized: set[str] = set()
    for name, (shape, tag) in headers.items():
        module, _, kind = name.rpartition(".")
        group = _group_name(module, kind)
        # The pattern alone does not tell: it may match modules that are no linears.
        if f"{module}.rotated_weight" in headers and layout.skips(module):
            group = f"{group} (skipped)"
        count = math.prod(shape)
        stored[group] += count * _ITEM_BYTES[tag]
        if kind == "weight_packed":
            quantized.add(group)
            weights[group] += shapes[module]
        elif kind == "bias":
            biases[group] += count
        elif kind not in {"weight_scale", "weight_shape"}:
            weights[group] += count
    return tuple(
        TensorGroup(
            name=group,
            format=_format(layout.recipe.weights) if group in quantized else layout.scale_dtype,
            bytes=stored[group],
            original_bytes=(weights[group] + biases[group]) * item,
            bits_per_weight=(stored[group] - biases[group] * item) * 8 / weights[group] if weights[group] else 0.0,
            weights=weights[group],
            quantized=group in quantized,
        )
        for group in sorted(stored)
        if stored[group]  # guards alone hold nothing
    )


def _group_name(module: str, kind: str) -> str:
    """The last name of a module's path, or the tensor's own where it is no weight or bias of its module.

    Experts are numbered: all of them are one kind.
    """
    if kind not in {"weight", "bias", "rotated_weight", "weight_packed", "weight_scale", "weight_shape"}:
        return kind
    return next(part for part in reversed(module.split(".")) if not part.isdecimal())


def _weight_counts(files: list[Path]) -> dict[str, int]:
    """Module path -> weights of its packed tensor, whose own width is padded to whole words."""
    counts = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name.endswith(".weight_shape"):
                    counts[name.removesuffix(".weight_shape")] = int(opened.get_tensor(name).prod())
    return counts


def _format(fmt: IntFormat | None) -> str:
    if fmt is None:
        return "float"
    return f"int{fmt.bits}, " + (f"per {fmt.group_size}" if fmt.group_size else "per channel")
