"""The method on one page: open, describe, check, fold, rotate, quantize, save; a block at a time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, Block
from rotaquant.calibration import BlockArguments, BlockRecord, quantize_block, record_block_inputs, run_block
from rotaquant.checkpoint.card import model_card
from rotaquant.checkpoint.configs import (
    require_positions,
    require_tied_if_kept,
    require_vocabulary,
    set_tied,
)
from rotaquant.checkpoint.folder import REPORT, inspect_folder, is_quantized_folder
from rotaquant.checkpoint.sources import (
    Source,
    load_generation_config,
    load_tokenizer,
    open_source,
)
from rotaquant.checkpoint.writer import PartialFolder, require_usable_output
from rotaquant.data import Calibration, calibration_sequences, read_text, tokenize
from rotaquant.errors import RotaquantError
from rotaquant.integrations.transformers import FORMAT_VERSION, RotaquantConfig, register
from rotaquant.invariance_gate import require_invariance
from rotaquant.memory import peak_process_bytes
from rotaquant.preflight import note_of_untied_head, require_resources
from rotaquant.recipe import Recipe, resolve_recipe
from rotaquant.rotation.fuse import fuse_ends
from rotaquant.rotation.plan import plan_rotations
from rotaquant.runtime import ModelLayout, resolve_device
from rotaquant.runtime.layout import require_applicable
from rotaquant.runtime.linear import QuantizedLinear
from rotaquant.runtime.structure import (
    reshape_block,
    reshape_ends,
    return_key_bias,
    rotate_in_place,
    take_key_bias,
)


@dataclass(frozen=True)
class Step:
    """One progress event: the phase, the block (from 0, of `blocks`), a module and its relative output error."""

    phase: str
    block: int
    blocks: int
    module: str = ""
    error: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class QuantizationReport:
    """What a run made: sizes in bytes, bits on disk per quantized weight, time in seconds, remarks."""

    output: Path
    recipe: Recipe
    bytes_on_disk: int
    original_bytes: int
    bits_per_weight: float
    seconds: float
    peak_memory_bytes: int
    notes: tuple[str, ...] = ()


@dataclass
class _Run:
    """What one run carries from block to block."""

    source: Source
    model: PreTrainedModel
    architecture: Architecture
    layout: ModelLayout
    device: torch.device
    on_step: Callable[[Step], None]
    folder: PartialFolder
    records: list[BlockRecord] = field(default_factory=list)


def quantize(
    model: str | Path | PreTrainedModel,
    recipe: str | Path | Recipe = "w4a4kv4",
    *,
    output: str | Path,
    calibration: str | Path | Calibration | Tensor = "wikitext2",
    device: str | torch.device = "auto",
    seed: int = 0,
    text_only: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> QuantizationReport:
    """Rotate and quantize a model into the folder `output` (arXiv 2404.00456).

    `model` is a hub id, a folder, a .gguf file or a float model in memory (left as it is); `calibration` a named text,
    a file, a `Calibration`, or token ids `[sequences, length]`; `text_only` takes the text part of a model that has
    others, and leaves these out. Raises `RotaquantError` for bad input before any
    work is done; `output` appears only when it is complete.
    """
    started = time.monotonic()
    step = on_step or (lambda _: None)
    chosen, target, folder = resolve_recipe(recipe), resolve_device(device), Path(output)
    if not 0 <= seed < 2**63 or int(seed) != seed:
        raise RotaquantError(f"the seed (--seed) must be a whole number from 0 to 2**63 - 1, not {seed}")
    require_usable_output(folder)
    text = _calibration_text(chosen, calibration)
    source = open_source(model, text_only=text_only)
    skeleton, architecture = source.skeleton(target)
    original = _original_bytes(source, skeleton, architecture)
    require_applicable(architecture, chosen)
    require_tied_if_kept(source.tied, chosen, source.name)
    layout = ModelLayout(
        recipe=chosen,
        rotation=plan_rotations(architecture, chosen, seed),
        scale_dtype=str(source.dtype).removeprefix("torch."),
    )
    tokenizer = load_tokenizer(source) if source.folder is not None or source.gguf_file else None
    load_generation_config(source)
    sequences, short = _calibration_sequences(source, tokenizer, calibration, text, seed)
    before = [note for note in (short, _note_of_unread(source, skeleton)) if note]
    for note in before:
        step(Step("reading", 0, len(architecture.blocks), note=note))
    require_resources(skeleton, architecture, layout, sequences, target, folder)
    of_head = note_of_untied_head(skeleton, architecture, layout, tied=source.tied)
    require_invariance(source, layout, target, lambda index: step(Step("checking", index, len(architecture.blocks))))
    fingerprint = _fingerprint(source, skeleton, layout, sequences)
    partial = PartialFolder(folder, len(architecture.blocks) + 2, fingerprint)
    run = _Run(source, skeleton, architecture, layout, target, step, partial)
    _quantize_blocks(run, sequences)
    notes = (*before, *(note for record in run.records for note in record.notes), *((of_head,) if of_head else ()))
    partial.finish(lambda path: _write_rest(run, path, tokenizer, notes, original))
    return QuantizationReport(
        output=folder,
        recipe=chosen,
        bytes_on_disk=sum(file.stat().st_size for file in folder.iterdir()),
        original_bytes=original,
        bits_per_weight=inspect_folder(folder).quantized_bits_per_weight,
        seconds=time.monotonic() - started,
        peak_memory_bytes=peak_memory(target),
        notes=notes,
    )


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the CUDA device where one is used, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_process_bytes()


# --- the blocks --------------------------------------------------------------------------------------------------


def _quantize_blocks(run: _Run, sequences: Tensor | None) -> None:
    blocks = run.architecture.blocks
    _fill_ends(run)
    hidden, arguments = None, [{} for _ in blocks]  # type: tuple[Tensor | None, list[BlockArguments]]
    if sequences is not None:
        hidden, arguments = record_block_inputs(run.model, run.architecture, sequences.to(run.device))
    _write_ends(run)
    for index, block in enumerate(blocks):
        module = run.model.get_submodule(block.path)
        calibration = None if hidden is None else (hidden, arguments[index])
        record = _restored(run, module, block, index)
        if record is not None:
            hidden = None if calibration is None else run_block(module, *calibration)
        else:
            record, hidden = _quantize_one(run, module, block, index, calibration)
            tensors = {f"{block.path}.{name}": tensor for name, tensor in module.state_dict().items()}
            run.folder.write(index + 1, tensors, asdict(record))
        run.records.append(record)
        for text in record.notes:
            run.on_step(Step("quantizing", index, len(blocks), note=text))
        run.model.set_submodule(block.path, nn.Identity())  # releases the block


def _quantize_one(
    run: _Run, module: nn.Module, block: Block, index: int, calibration: tuple[Tensor, BlockArguments] | None
) -> tuple[BlockRecord, Tensor | None]:
    run.source.fill(module, block.path, device=run.device, dtype=torch.float64)
    rotate_in_place(module, block, run.architecture, run.layout)
    module.to(run.source.dtype)

    def tell(path: str, error: float | None) -> None:
        run.on_step(Step("quantizing", index, len(run.architecture.blocks), path, error))

    record, hidden = quantize_block(module, block, run.layout, calibration, tell)
    # Only now: calibration runs the model's stock attention, which wants keys with their bias.
    take_key_bias(module, block, run.layout)
    return record, hidden


def _restored(run: _Run, module: nn.Module, block: Block, index: int) -> BlockRecord | None:
    """A block that an interrupted run had finished: its tensors are read back instead of made again."""
    fields = run.folder.record(index + 1)
    if fields is None:
        return None
    tensors = run.folder.read(index + 1)
    reshape_block(module, block, run.layout)
    take_key_bias(module, block, run.layout)
    for path in block.linears:
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        # The next block is calibrated on float activations, here as in the run that was interrupted.
        layout = replace(run.layout.linear(block, path), activations=None)
        quantized = QuantizedLinear.empty_like(linear, layout, run.layout.torch_scale_dtype())
        module.set_submodule(path, quantized)
    state = {name.removeprefix(f"{block.path}."): tensor.to(run.device) for name, tensor in tensors.items()}
    module.load_state_dict(state, assign=True)
    return_key_bias(module, block.attention)
    run.on_step(Step("resuming", index, len(run.architecture.blocks)))
    return BlockRecord(**fields)


def _end_paths(run: _Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands before the blocks, and what after them and has weights of its own."""
    tail = (run.architecture.final_norm.path, *(() if run.layout.keeps_tied else (run.architecture.head,)))
    return run.architecture.embeddings, tail


def _fill_ends(run: _Run) -> None:
    for path in (path for paths in _end_paths(run) for path in paths):
        module = run.model.get_submodule(path)
        run.source.fill(module, path, device=run.device, dtype=run.source.dtype)
    fuse_ends(run.model, run.architecture, run.layout.rotation, keep_tied=run.layout.keeps_tied)
    reshape_ends(run.model, run.architecture, run.layout)


def _write_ends(run: _Run) -> None:
    last = len(run.architecture.blocks) + 1
    for part, paths in zip((0, last), _end_paths(run), strict=True):
        if run.folder.record(part) is None:
            modules = {path: run.model.get_submodule(path) for path in paths}
            tensors = {f"{path}.{name}": t for path, m in modules.items() for name, t in m.state_dict().items()}
            run.folder.write(part, tensors, asdict(BlockRecord()))


# --- before and after ---------------------------------------------------------------------------------------------


def _calibration_text(recipe: Recipe, calibration: str | Path | Calibration | Tensor) -> str | None:
    """The text to calibrate on, read before the model is opened, or `None` where none is needed."""
    if not recipe.needs_calibration or isinstance(calibration, Tensor):
        return None
    return read_text(calibration.text if isinstance(calibration, Calibration) else calibration, "calibration")


def _calibration_sequences(
    source: Source, tokenizer: Any, calibration: str | Path | Calibration | Tensor, text: str | None, seed: int
) -> tuple[Tensor | None, str | None]:
    if text is None and not isinstance(calibration, Tensor):
        return None, None
    if isinstance(calibration, Tensor):
        sequences, note = calibration.cpu(), None
        if sequences.ndim != 2 or sequences.dtype != torch.int64 or sequences.numel() == 0:
            got = f"{sequences.dtype} {list(sequences.shape)}"
            raise RotaquantError(f"calibration tokens must be int64 [sequences, length], got {got}")
    else:
        settings = calibration if isinstance(calibration, Calibration) else Calibration(text=calibration)
        assert text is not None
        tokens = tokenize(tokenizer or load_tokenizer(source), text)
        sequences, note = calibration_sequences(tokens, settings.samples, settings.sequence_length, seed)
    require_positions(source.config, sequences.shape[1], source.name)
    require_vocabulary(source.config, sequences, source.name)
    return sequences, note


def _note_of_unread(source: Source, skeleton: PreTrainedModel) -> str | None:
    unread = source.unread(skeleton)
    if not unread:
        return None
    more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
    return f"not part of the model that the config describes, and left out: {', '.join(unread[:3])}{more}"


def _fingerprint(
    source: Source, skeleton: PreTrainedModel, layout: ModelLayout, sequences: Tensor | None
) -> dict[str, Any]:
    """What must be equal for an interrupted run to be taken up: model, recipe, seed, calibration tokens."""
    tokens = b"" if sequences is None else sequences.contiguous().numpy().tobytes()
    weights = hashlib.sha256()
    for file in source.files:
        weights.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    if not source.files:  # a model in memory has no date: all of it is read
        for name, _ in skeleton.named_parameters():
            weights.update(source.read(name).double().cpu().numpy().tobytes())
    config = json.dumps(source.config.to_dict(), sort_keys=True, default=str)
    return {
        "source": source.name,
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "weights": weights.hexdigest(),
        "layout": layout.model_dump(mode="json"),
        "calibration": hashlib.sha256(tokens).hexdigest(),
    }


def _original_bytes(source: Source, skeleton: PreTrainedModel, architecture: Architecture) -> int:
    sizes = {name: parameter.numel() for name, parameter in skeleton.named_parameters()}
    if source.tied:
        del sizes[f"{architecture.head}.weight"]  # the skeleton's head is untied
    return sum(sizes.values()) * source.dtype.itemsize


def _write_rest(run: _Run, path: Path, tokenizer: Any, notes: tuple[str, ...], original_bytes: int) -> None:
    ratios = {name: ratio for record in run.records for name, ratio in record.clip_ratios.items()}
    errors = {name: error for record in run.records for name, error in record.errors.items()}
    layout = run.layout.model_copy(update={"clip_ratios": ratios})
    register()
    config = run.model.config
    set_tied(config, run.layout.keeps_tied)
    config.dtype = run.source.dtype
    config.architectures = [type(run.model).__name__]
    config.quantization_config = RotaquantConfig(
        format_version=FORMAT_VERSION, **layout.model_dump(mode="json")
    ).to_dict()
    config.save_pretrained(path)
    load_generation_config(run.source).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    base_model = _base_model(run.source)
    report = {
        "base_model": base_model,
        "original_bytes": original_bytes,
        "output_errors": errors,
        "notes": list(notes),
    }
    (path / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    (path / "recipe.yaml").write_text(layout.recipe.to_yaml())
    (path / "README.md").write_text(model_card(base_model, layout.recipe, layout.rotation))


def _base_model(source: Source) -> str:
    return Path(source.name).name if Path(source.name).exists() else source.name


__all__ = ["Calibration", "QuantizationReport", "Step", "is_quantized_folder", "peak_memory", "quantize"]
