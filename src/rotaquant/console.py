"""What a command tells on stdout: fields and tables for a person, or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotaquant.progress import human_size, human_time
from rotaquant.recipe import IntFormat, Recipe

if TYPE_CHECKING:
    from rotaquant.checkpoint import FolderSummary
    from rotaquant.evaluate import Perplexity, Row
    from rotaquant.pipeline import QuantizationReport
    from rotaquant.survey import ModelSurvey

# A table that is piped into a file shall not be folded at the 80 columns that rich assumes there.
_PIPED_WIDTH = 160


def bits_text(recipe: Recipe | None) -> str:
    """Bits of weights / activations / keys and values, such as `4/4/4`; `-` is the model's own dtype."""
    if recipe is None:
        return "-/-/-"
    keys, values = _bits(recipe.keys), _bits(recipe.values)
    cache = keys if keys == values else f"K{keys} V{values}"
    return f"{_bits(recipe.weights)}/{_bits(recipe.activations)}/{cache}"


def _bits(fmt: IntFormat | None) -> str:
    return "-" if fmt is None else str(fmt.bits)


def print_perplexity(result: Perplexity) -> None:
    """One perplexity with the protocol it was measured by."""
    _print_fields(
        [
            ("perplexity", f"{result.perplexity:.4f}"),
            ("model", result.model),
            ("recipe", result.recipe),
            ("protocol", result.protocol),
        ]
    )


def print_report(report: QuantizationReport, shown_notes: Sequence[str]) -> None:
    """What quantizing made; notes that progress has shown are not repeated."""
    share = report.bytes_on_disk / report.original_bytes if report.original_bytes else 0.0
    size = human_size(report.bytes_on_disk)
    _print_fields(
        [
            ("written to", str(report.output)),
            ("recipe", report.recipe.name),
            ("size on disk", f"{size}, {share:.0%} of {human_size(report.original_bytes)}"),
            ("quantized linears", f"{report.bits_per_weight:.2f} bits a weight"),
            ("time", human_time(report.seconds)),
            ("peak memory", human_size(report.peak_memory_bytes)),
            *(("note", note) for note in report.notes if note not in shown_notes),
        ]
    )


def print_comparison(rows: Sequence[Row]) -> None:
    """The recipes of a comparison side by side, and the protocol that they share."""
    table = _table("recipe", "perplexity", "bits W/A/KV", "bits/weight", "size on disk")
    for row in rows:
        table.add_row(
            Text(row.name),
            f"{row.perplexity.perplexity:.3f}",
            bits_text(row.recipe),
            f"{row.bits_per_weight:.2f}",
            human_size(row.size),
        )
    out = _out()
    out.print(table)
    out.print(rows[0].perplexity.protocol, markup=False, highlight=False)


def print_summary(summary: FolderSummary) -> None:
    """What a quantized folder holds: formats, rotation sites, sizes against the original."""
    share = summary.total_bytes / summary.original_bytes if summary.original_bytes else 0.0
    total, original = human_size(summary.total_bytes), human_size(summary.original_bytes)
    _print_fields(
        [
            ("base model", summary.base_model or "unknown"),
            *_recipe_fields(summary.recipe),
            ("tensors", f"{total}, {share:.0%} of {original}"),
            ("rotation seed", str(summary.rotation_seed)),
            *((f"rotation {site}", text) for site, text in summary.sites.items()),
            *(("note", note) for note in summary.notes),
        ]
    )
    table = _table("module", "format", "size", "original", "bits/weight", text_columns=2)
    for row in summary.rows:
        sizes = (human_size(row.bytes), human_size(row.original_bytes))
        table.add_row(Text(row.name), Text(row.format), *sizes, f"{row.bits_per_weight:.2f}")
    _out().print(table)


def print_survey(found: ModelSurvey) -> None:
    """What a float model is made of, and what its recipe would make of it: sizes, biases, rotation sites."""
    widths = ", ".join(map(str, found.down_widths))
    routed = f"; {_number(found.experts, 'expert')} in {found.sparse_layers} layers" if found.experts else ""
    share = found.expected_bytes / found.original_bytes
    expected, original = human_size(found.expected_bytes), human_size(found.original_bytes)
    _print_fields(
        [
            ("model", found.model),
            ("family", found.model_type),
            ("layers", str(found.layers)),
            ("hidden size", str(found.hidden_size)),
            ("heads", f"{found.heads} ({found.kv_heads} of keys and values), {found.head_dim} channels each"),
            ("feed-forward", f"{widths} wide{routed}"),
            ("parameters", f"{found.parameters:,}"),
            ("size", f"{original} in {found.dtype}"),
            ("embeddings", _embeddings_text(found)),
            *_recipe_fields(found.recipe),
            ("bias of keys", _BIAS_PLACES[found.key_bias]),
            ("bias of values", _BIAS_PLACES[found.value_bias]),
            ("linears", _linears_text(found)),
            ("stays float", _float_text(found)),
            ("quantized", f"about {expected}, {share:.0%} of {original}"),
            *(("note", note) for note in found.notes),
        ]
    )
    exact = {site.name for site in found.sites if site.form == "exact"}
    table = _table("rotation", "transform", "kind", "width", text_columns=3)
    for site in found.sites:
        width, kind = str(site.width), _FORMS[site.form]
        if site.name == "head_mix":
            width = _number(site.width, "head")
            kind += " with value_head" if {"head_mix", "value_head"} <= exact else ""
        table.add_row(Text(site.name), Text(site.transform), kind, width)
    if found.sites:
        _out().print(table)


_BIAS_PLACES = {
    "none": "none",
    "apart": "kept out of the cache, added exactly",
    "inside": "in the cache",
    "mixed": "kept out of the cache in some layers, in it in others",
}
_FORMS = {
    "exact": "one exact Hadamard matrix",
    "blocks": "block-diagonal Hadamard",
    "dense": "dense orthogonal, no Hadamard",
}


def _embeddings_text(found: ModelSurvey) -> str:
    if not found.tied_embeddings:
        return "not tied to the head"
    kept = found.recipe.tied_embeddings == "keep"
    return "tied to the head, and kept so" if kept else "tied to the head; the head gets its own weight"


def _linears_text(found: ModelSurvey) -> str:
    if found.bits_per_weight is None:
        return f"{found.linears}, none with quantized weights"
    quantized = found.linears - len(found.skipped)
    return f"{quantized} of {found.linears} quantized, {found.bits_per_weight:.2f} bits a weight"


def _float_text(found: ModelSurvey) -> str:
    routers = ", routers" if found.experts else ""
    skipped = ""
    if found.skipped:
        skipped = f"; by skip {_number(len(found.skipped), 'linear')} ({', '.join(found.recipe.skip)})"
    return f"embeddings, head, norms{routers}{skipped}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _recipe_fields(recipe: Recipe) -> list[tuple[str, str]]:
    from rotaquant.checkpoint.card import describe_format

    parts = ("weights", "activations", "keys", "values")
    return [("recipe", recipe.name), *((part, describe_format(getattr(recipe, part))) for part in parts)]


def report_json(report: QuantizationReport) -> dict[str, Any]:
    """What quantizing made, for `--json`; sizes in bytes."""
    return {
        "output": str(report.output),
        "recipe": report.recipe.name,
        "bytes_on_disk": report.bytes_on_disk,
        "original_bytes": report.original_bytes,
        "bits_per_weight": report.bits_per_weight,
        "seconds": report.seconds,
        "peak_memory_bytes": report.peak_memory_bytes,
        "notes": list(report.notes),
    }


def comparison_json(rows: Sequence[Row]) -> dict[str, Any]:
    """A comparison for `--json`: what all rows share, and the rows."""
    shared = rows[0].perplexity
    return {
        "model": shared.model,
        "text": shared.text,
        "tokens": shared.tokens,
        "windows": shared.windows,
        "sequence_length": shared.sequence_length,
        "rows": [
            {
                "recipe": row.name,
                "perplexity": row.perplexity.to_json()["perplexity"],
                "bits_per_weight": row.bits_per_weight,
                "bytes_on_disk": row.size,
                "notes": list(row.notes),
            }
            for row in rows
        ],
    }


def summary_json(summary: FolderSummary) -> dict[str, Any]:
    """A folder's summary for `--json`; sizes in bytes."""
    return {"quantized": True, **asdict(summary), "recipe": summary.recipe.model_dump(mode="json")}


def survey_json(found: ModelSurvey) -> dict[str, Any]:
    """A float model's survey for `--json`; sizes in bytes."""
    return {"quantized": False, **asdict(found), "recipe": found.recipe.model_dump(mode="json")}


def _table(*columns: str, text_columns: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        text = index < text_columns
        # On a narrow terminal names are folded; a number cut short would be a wrong number.
        table.add_column(column, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def _print_fields(fields: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def _out() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)
