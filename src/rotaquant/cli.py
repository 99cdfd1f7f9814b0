"""The command line: thin commands over the functions of the package.

stdout carries a command's result alone; progress, warnings and errors go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

from rotaquant import console, console_device
from rotaquant.data import Calibration
from rotaquant.errors import RotaquantError
from rotaquant.progress import Progress, progress
from rotaquant.recipe import PRESETS, resolve_recipe

# Each command imports what it runs, so that a wrong option or recipe is told before models are touched.

Found = TypeVar("Found")

INTERRUPTED = 130
DEFAULT_RECIPE = "w4a4kv4"


class _Commands(TyperGroup):
    """Commands whose foreseen failures end in one line on stderr instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RotaquantError as error:
            _end(f"error: {error}", 1)
        except KeyboardInterrupt:
            _end("interrupted", INTERRUPTED)
        except OSError as error:
            _end(f"error: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)


def _end(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantize language models to 4-bit weights, activations and KV cache by Hadamard rotation.",
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, model folder, or .gguf file.")]
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder made by `rotaquant quantize`.")]
TextOption = Annotated[str, typer.Option(help="Evaluation text: wikitext2, c4, builtin, or a UTF-8 FILE.")]
CalibrationOption = Annotated[
    str, typer.Option(help="Calibration text: wikitext2, c4, builtin (needs no network), or a UTF-8 FILE.")
]
SamplesOption = Annotated[int, typer.Option(help="Calibration sequences.")]
LengthOption = Annotated[int, typer.Option(help="Tokens in a sequence or window.")]
WindowsOption = Annotated[int | None, typer.Option(help="Evaluation windows; all by default.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, or cuda.")]
SeedOption = Annotated[int, typer.Option(help="Seed of rotations and calibration; the same seed gives the same bytes.")]
TextOnlyOption = Annotated[
    bool, typer.Option("--text-only", help="Take the text part of a model that has others, and leave these out.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rotaquant {version('rotaquant')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def quantize(
    model: ModelArgument,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to create.")],
    recipe: Annotated[str, typer.Option(help=f"A .yaml file, or one of: {', '.join(PRESETS)}.")] = DEFAULT_RECIPE,
    calibration: CalibrationOption = "wikitext2",
    samples: SamplesOption = 128,
    sequence_length: LengthOption = 2048,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    text_only: TextOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize MODEL into the new folder OUTPUT.

    An interrupted run creates no OUTPUT; the same command takes it up where it ended.
    """
    resolved = resolve_recipe(recipe)
    settings = Calibration(calibration, samples, sequence_length)
    with _resumable(output), _working() as shown:
        from rotaquant import pipeline

        report = pipeline.quantize(
            model,
            resolved,
            output=output,
            calibration=settings,
            device=device,
            seed=seed,
            text_only=text_only,
            on_step=shown.on_step,
        )
    if as_json:
        _print_json(console.report_json(report))
    else:
        console.print_report(report, shown.notes)


@app.command()
def evaluate(
    model: ModelArgument,
    text: TextOption = "wikitext2",
    sequence_length: LengthOption = 2048,
    windows: WindowsOption = None,
    device: DeviceOption = "auto",
    text_only: TextOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the perplexity of MODEL, a float model or a quantized folder."""
    with _working() as shown:
        from rotaquant import evaluate as evaluation

        result = evaluation.evaluate(
            model,
            text,
            sequence_length,
            windows,
            device,
            lambda done, count: shown.on_step(evaluation.window_step(done, count)),
            text_only=text_only,
        )
    if as_json:
        _print_json(result.to_json())
    else:
        console.print_perplexity(result)


@app.command()
def compare(
    model: ModelArgument,
    recipes: Annotated[str, typer.Option(metavar="A,B,C", help="Preset names or .yaml files, with commas between.")],
    calibration: CalibrationOption = "wikitext2",
    samples: SamplesOption = 128,
    sequence_length: LengthOption = 2048,
    text: TextOption = "wikitext2",
    windows: WindowsOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    text_only: TextOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize MODEL by several recipes and print their perplexities and sizes, the float model first."""
    resolved = [resolve_recipe(name.strip()) for name in recipes.split(",") if name.strip()]
    settings = Calibration(calibration, samples, sequence_length)
    with _working() as shown:
        from rotaquant.evaluate import Comparison, Protocol

        protocol = Protocol(text, sequence_length, windows)
        comparison = Comparison(model, settings, protocol, device, seed, text_only, shown.on_step)
        rows = comparison.rows(resolved)
    if as_json:
        _print_json(console.comparison_json(rows))
    else:
        console.print_comparison(rows)


@app.command()
def generate(
    folder: FolderArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue, taken as it is.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 64,
    device: DeviceOption = "auto",
) -> None:
    """Print PROMPT and its greedy continuation by the quantized model in FOLDER."""
    with _working():
        from rotaquant.evaluate import continue_text

        continued = continue_text(folder, prompt, max_new_tokens, device)
    typer.echo(continued)


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, model folder, .gguf file, or quantized folder.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option(help=f"What is to become of a float model: as for `quantize`, {DEFAULT_RECIPE} by default."),
    ] = None,
    text_only: TextOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what MODEL is made of, how it would be rotated and how large it would become; its weights are not read.

    Of a quantized folder: what in it is quantized how, its size against the original, and its rotation sites.
    """
    resolved = resolve_recipe(recipe or DEFAULT_RECIPE)
    with _working():
        from rotaquant.checkpoint import FolderSummary, inspect_folder, is_quantized_folder
        from rotaquant.survey import survey

        quantized = is_quantized_folder(model)
        if quantized and recipe is not None:
            raise RotaquantError(f"--recipe: {model} is quantized already, by the recipe that it holds; leave it out")
        found = inspect_folder(model) if quantized else survey(model, resolved, text_only=text_only)
    if isinstance(found, FolderSummary):
        _tell(found, as_json, console.summary_json, console.print_summary)
    else:
        _tell(found, as_json, console.survey_json, console.print_survey)


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(metavar="FILE.gguf", help="Model; by default SmolLM2-135M from its package."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the quantized model.")] = Path("demo"),
) -> None:
    """Quantize a small real model without a network, print what that costs, and let it write a sentence."""
    with _working() as shown:
        from rotaquant.demo import run_demo

        result = run_demo(model, output, shown.on_step)
    console.print_comparison(result.rows)
    typer.echo(f"\nThe quantized model, loaded back from {result.output}, writes:\n\n{result.sentence}")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say which devices and versions are here, what runs every operation on them, and why."""
    with _working():
        from rotaquant.doctor import examine

        found = examine()
    _tell(found, as_json, console_device.diagnosis_json, console_device.print_diagnosis)


@app.command()
def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, model folder, .gguf file, or quantized folder.")
    ],
    rows: Annotated[
        str | None, typer.Option(metavar="M,M,...", help="Numbers of tokens; by default some from 1 to 16384.")
    ] = None,
    limit: Annotated[float | None, typer.Option(help="Seconds after which nothing more is begun.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or one of several: cuda:1.")] = "cuda",
    text_only: TextOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest kernel plans for the products of MODEL on this machine, and keep them; weights are not read.

    What is found is used from the next run on. The same command goes on where an interrupted one ended.
    """
    with _working():
        from rotaquant.tune import DEFAULT_ROWS, parse_rows
        from rotaquant.tune import tune as tune_products

        counts = DEFAULT_ROWS if rows is None else parse_rows(rows)
        found = tune_products(
            model,
            rows=counts,
            limit=limit,
            device=device,
            text_only=text_only,
            on_result=console_device.show_tuned_product,
        )
    _tell(found, as_json, console_device.tuning_json, console_device.print_tuning)


@contextmanager
def _working() -> Iterator[Progress]:
    """Progress on stderr, and whatever a library prints on stdout kept off it."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with redirect_stdout(sys.stderr):
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        with progress() as shown:
            yield shown


@contextmanager
def _resumable(output: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _end(f"interrupted: {output} was not created; the same command resumes the run", INTERRUPTED)


def _tell(
    found: Found, as_json: bool, to_json: Callable[[Found], dict[str, Any]], show: Callable[[Found], None]
) -> None:
    if as_json:
        _print_json(to_json(found))
    else:
        show(found)


def _print_json(fields: dict[str, Any]) -> None:
    typer.echo(json.dumps(fields, allow_nan=False))


def main() -> None:
    """Entry point of the `rotaquant` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shall not end hours of work with an encoding error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="rotaquant")
