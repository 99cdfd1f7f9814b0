"""What a finished model does: its perplexity, how recipes compare by it, how it continues a prompt.

The perplexity of a quantized model is that of its saved folder, loaded and run as any user would.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaquant import checkpoint, pipeline
from rotaquant.checkpoint.configs import require_positions, require_vocabulary
from rotaquant.data import (
    Calibration,
    calibration_sequences,
    check_sequence_length,
    describe_text,
    evaluation_windows,
    read_text,
    tokenize,
)
from rotaquant.errors import RotaquantError
from rotaquant.recipe import PRESETS, Recipe, resolve_recipe
from rotaquant.runtime.layout import require_applicable

OnWindow = Callable[[int, int], None]
OnStep = Callable[[pipeline.Step], None]

# float32 logits of a 262144-word vocabulary take 1 MB a position; they are made for so many at a time.
_POSITIONS_AT_ONCE = 256


@dataclass(frozen=True)
class Protocol:
    """What perplexity is measured on: the first `windows` windows (`None`: all) of a text."""

    text: str | Path = "wikitext2"
    sequence_length: int = 2048
    windows: int | None = None


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and what it was measured on; `tokens` counts those in the windows."""

    perplexity: float
    tokens: int
    windows: int
    sequence_length: int
    text: str
    model: str
    recipe: str

    @property
    def protocol(self) -> str:
        """The protocol in words: figures by different protocols cannot be compared."""
        return describe_protocol(self.text, self.windows, self.sequence_length)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON knows them; a perplexity beyond all floats is null."""
        return {
            "perplexity": finite_or_none(self.perplexity),
            "tokens": self.tokens,
            "windows": self.windows,
            "sequence_length": self.sequence_length,
            "text": self.text,
            "model": self.model,
            "recipe": self.recipe,
        }


@dataclass(frozen=True)
class Row:
    """One line of a comparison; `recipe` is `None` for the float model, sizes are in bytes.

    `original_size` is that of a float checkpoint in the model's own dtype, and so the float model's `size`.
    """

    name: str
    recipe: Recipe | None
    perplexity: Perplexity
    bits_per_weight: float
    size: int
    original_size: int
    notes: tuple[str, ...] = ()


def describe_protocol(text: str | Path, windows: int, length: int) -> str:
    """How a perplexity was measured, in one line."""
    plural = "window" if windows == 1 else "windows"
    return (
        f"{describe_text(text, 'evaluation')}, {windows} {plural} of {length} tokens, "
        f"non-overlapping, no special tokens, mean NLL over {windows}·{length - 1} positions"
    )


def finite_or_none(value: float) -> float | None:
    """A number that JSON can hold, or `None` for infinity and NaN."""
    return value if math.isfinite(value) else None


def perplexity(model: PreTrainedModel, windows: Tensor, on_window: OnWindow | None = None) -> float:
    """exp of the mean negative log-likelihood of each token of a window, after its first, given those before.

    `windows` is int64 `[n, length]`. Windows run one at a time and without a cache; the logits' softmax is in
    float32 and the sum in float64. `on_window(done, n)` is called before the first window and after each.
    """
    count, length = windows.shape
    total = 0.0
    was_training = model.training
    model.eval()
    try:
        for index, window in enumerate(windows):
            if on_window is not None:
                on_window(index, count)
            total += _window_loss(model, window[None].to(model.device))
        if on_window is not None:
            on_window(count, count)
    except torch.OutOfMemoryError as error:
        raise RotaquantError(
            f"a window of {length} tokens does not fit into the memory of {model.device}: "
            "give a shorter --sequence-length, or --device cpu"
        ) from error
    finally:
        model.train(was_training)
    mean = total / (count * (length - 1))
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


@torch.inference_mode()
def _window_loss(model: PreTrainedModel, ids: Tensor) -> float:
    """The summed negative log-likelihood of ids `[1, length]` after the first."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    total = 0.0
    for start in range(0, logits.shape[0], _POSITIONS_AT_ONCE):
        part = logits[start : start + _POSITIONS_AT_ONCE]
        targets = ids[0, 1 + start :][: part.shape[0]]
        losses = torch.nn.functional.cross_entropy(part.float(), targets.to(part.device), reduction="none")
        total += losses.double().sum().item()
    return total


def evaluate(
    model: str | Path | PreTrainedModel,
    text: str | Path = "wikitext2",
    sequence_length: int = 2048,
    windows: int | None = None,
    device: str = "auto",
    on_window: OnWindow | None = None,
    *,
    text_only: bool = False,
) -> Perplexity:
    """The perplexity of a float model (hub id, folder, .gguf file), a quantized folder, or a model in memory.

    A model in memory stays on its device and needs a `name_or_path` that its tokenizer is found by; `text_only` takes
    the text part of a float model that has others. Raises `RotaquantError` for a text shorter than one window and a
    window longer than the model's context.
    """
    protocol = Protocol(text, sequence_length, windows)
    if isinstance(model, PreTrainedModel):
        name = str(model.name_or_path)
        return _measure(model, name, _windows(name, protocol), protocol, on_window)
    ids = _windows(str(model), protocol, text_only)
    return _measure(_open(str(model), device, text_only), str(model), ids, protocol, on_window)


def _windows(model: str, protocol: Protocol, text_only: bool = False) -> Tensor:
    # Text and tokenizer come before the model: what can fail fast does.
    check_sequence_length(protocol.sequence_length)
    text = read_text(protocol.text, "evaluation")
    tokens = tokenize(checkpoint.open_tokenizer(model, text_only=text_only), text)
    return evaluation_windows(tokens, protocol.sequence_length, protocol.windows)


def _open(model: str, device: str, text_only: bool) -> PreTrainedModel:
    if checkpoint.is_quantized_folder(model):
        return checkpoint.load(model, device=device)
    return checkpoint.open_float_model(model, device=device, text_only=text_only)


def _measure(
    model: PreTrainedModel, name: str, windows: Tensor, protocol: Protocol, on_window: OnWindow | None
) -> Perplexity:
    count, length = windows.shape
    require_positions(model.config, length, name)
    require_vocabulary(model.config, windows, name)
    value = perplexity(model, windows, on_window)
    return Perplexity(value, count * length, count, length, str(protocol.text), name, _recipe_name(model))


def _recipe_name(model: PreTrainedModel) -> str:
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return "float"
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return str(fields["recipe"]["name"])


@dataclass(frozen=True)
class Comparison:
    """One model by several recipes, calibrated on the same text and measured by the same protocol."""

    model: str
    calibration: Calibration = Calibration()
    protocol: Protocol = Protocol()
    device: str = "auto"
    seed: int = 0
    text_only: bool = False
    on_step: OnStep | None = None

    def rows(self, recipes: Sequence[str | Path | Recipe], keep: Mapping[str, Path] | None = None) -> list[Row]:
        """The float model's row and one for every recipe, each measured on its saved folder.

        Folders are temporary, except those of the recipes (by name) for which `keep` has a path.
        Recipes, texts and tokenizer are checked before any work.
        """
        resolved = [resolve_recipe(recipe) for recipe in recipes]
        if not resolved:
            raise RotaquantError(f"no recipe to compare: give some of {', '.join(PRESETS)}, or .yaml files")
        if checkpoint.is_quantized_folder(self.model):
            raise RotaquantError(
                f"{self.model} is already quantized: compare the float model, or use `rotaquant evaluate`"
            )
        windows = _windows(self.model, self.protocol, self.text_only)
        source = checkpoint.open_source(self.model, text_only=self.text_only)
        _, architecture = source.skeleton()
        for recipe in resolved:
            require_applicable(architecture, recipe)
        require_positions(source.config, self.protocol.sequence_length, self.model)
        if any(recipe.needs_calibration for recipe in resolved):
            self._check_calibration(source.config)
        kept = keep or {}
        measured, bits = self._float_perplexity(windows)
        rows: list[Row] = []
        for recipe in resolved:
            if recipe.name in kept:
                rows.append(self._quantized_row(recipe, kept[recipe.name], windows))
            else:
                with _temporary_folder() as scratch:
                    rows.append(self._quantized_row(recipe, scratch / "quantized", windows))
        return [Row("float", None, measured, bits, rows[0].original_size, rows[0].original_size), *rows]

    def _check_calibration(self, config: Any) -> None:
        settings = self.calibration
        tokenizer = checkpoint.open_tokenizer(self.model, text_only=self.text_only)
        tokens = tokenize(tokenizer, read_text(settings.text, "calibration"))
        calibration_sequences(tokens, settings.samples, settings.sequence_length, self.seed)
        require_positions(config, settings.sequence_length, self.model)

    def _float_perplexity(self, windows: Tensor) -> tuple[Perplexity, float]:
        model = checkpoint.open_float_model(self.model, device=self.device, text_only=self.text_only)
        measured = _measure(model, self.model, windows, self.protocol, self._on_window("float"))
        return measured, 8.0 * model.dtype.itemsize

    def _quantized_row(self, recipe: Recipe, folder: Path, windows: Tensor) -> Row:
        report = pipeline.quantize(
            self.model,
            recipe,
            output=folder,
            calibration=self.calibration,
            device=self.device,
            seed=self.seed,
            text_only=self.text_only,
            on_step=self._on_step(recipe.name),
        )
        model = checkpoint.load(folder, device=self.device)
        measured = _measure(model, self.model, windows, self.protocol, self._on_window(recipe.name))
        sizes = (report.bytes_on_disk, report.original_bytes)
        return Row(recipe.name, recipe, measured, report.bits_per_weight, *sizes, tuple(report.notes))

    def _on_step(self, name: str) -> OnStep | None:
        report = self.on_step
        if report is None:
            return None
        return lambda step: report(replace(step, phase=f"{name}: {step.phase}"))

    def _on_window(self, name: str) -> OnWindow | None:
        report = self.on_step
        if report is None:
            return None
        return lambda done, count: report(window_step(done, count, phase=f"{name}: evaluating"))


def window_step(done: int, count: int, phase: str = "evaluating") -> pipeline.Step:
    """The progress of an evaluation, `done` windows of `count`, as the event that quantizing reports too."""
    # A step names the block that is being worked on; after the last there is none further.
    return pipeline.Step(phase=phase, block=min(done, count - 1), blocks=count, module="", error=None)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        holder = tempfile.TemporaryDirectory(prefix="rotaquant-")
    except OSError as error:
        raise RotaquantError(
            f"no temporary folder can be made ({error}): set TMPDIR to a folder with room for the model"
        ) from error
    with holder as folder:
        yield Path(folder)


@torch.inference_mode()
def continue_text(folder: str | Path, prompt: str, max_new_tokens: int = 64, device: str = "auto") -> str:
    """The prompt and the quantized model's greedy continuation of it, as the tokenizer decodes them.

    Raises `RotaquantError` for an empty prompt, and what loading the folder raises.
    """
    if max_new_tokens < 1:
        raise RotaquantError(f"the number of new tokens (--max-new-tokens) must be at least 1, not {max_new_tokens}")
    checkpoint.require_quantized_folder(folder)
    tokenizer = checkpoint.open_tokenizer(str(folder))
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if encoded["input_ids"].numel() == 0:
        raise RotaquantError("the prompt is empty: give at least one word to continue")
    model = checkpoint.load(folder, device=device)
    require_vocabulary(model.config, encoded["input_ids"], str(folder))
    generated = model.generate(
        **encoded.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=_padding(model, tokenizer),
    )
    return str(tokenizer.decode(generated[0], skip_special_tokens=True))


def _padding(model: PreTrainedModel, tokenizer: Any) -> int:
    # One sequence is never padded, but `generate` advises at length where no token is named for it.
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, model.config.get_text_config().pad_token_id)
    return next((candidate for candidate in candidates if candidate is not None), 0)
