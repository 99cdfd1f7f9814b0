"""Measure the perplexity of one model by many recipes and seeds, each on its saved folder; write one JSON file.

    python benchmarks/accuracy.py MODEL --calibration TEXT --text TEXT --output benchmarks/results/NAME.json

Give recipes as names or YAML files; the files in benchmarks/recipes are the ablations of the documentation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

import rotaquant
from provenance import commit
from rotaquant.checkpoint import is_quantized_folder
from rotaquant.data import Calibration
from rotaquant.evaluate import evaluate
from rotaquant.recipe import resolve_recipe


def measure(arguments: argparse.Namespace, recipe: str, seed: int) -> dict[str, Any]:
    """Quantize by one recipe and seed (or take the float model as it is) and evaluate the folder."""
    transformers.utils.logging.disable_progress_bar()
    started = time.monotonic()
    row: dict[str, Any] = {"recipe": recipe, "seed": seed}
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if recipe != "float":
            model = f"{scratch}/quantized"
            report = rotaquant.quantize(
                arguments.model,
                recipe,
                output=model,
                calibration=Calibration(arguments.calibration, arguments.samples, arguments.sequence_length),
                device=arguments.device,
                seed=seed,
            )
            assert is_quantized_folder(model)
            row |= {
                "recipe": resolve_recipe(recipe).name,
                "bits_per_weight": report.bits_per_weight,
                "bytes_on_disk": report.bytes_on_disk,
                "original_bytes": report.original_bytes,
                "peak_memory_bytes": report.peak_memory_bytes,
                "notes": list(report.notes),
            }
        row["quantize_seconds"] = round(time.monotonic() - started, 1)
        started = time.monotonic()
        result = evaluate(model, arguments.text, arguments.window, arguments.windows, arguments.device)
        row |= {"perplexity": result.perplexity, "protocol": result.protocol}
        row["evaluate_seconds"] = round(time.monotonic() - started, 1)
    return row


def environment(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def main() -> None:
    """Run every recipe with every seed, several at a time, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--calibration", default="wikitext2")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--text", default="wikitext2")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    unseeded = {"float", "naive-w4a4kv4"}
    runs = [(r, s) for r in arguments.recipes for s in (arguments.seeds if r not in unseeded else arguments.seeds[:1])]
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        futures = [pool.submit(measure, arguments, recipe, seed) for recipe, seed in runs]
        for future in futures:
            rows.append(future.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    figures: dict[str, list[float]] = {}
    for row in rows:
        figures.setdefault(row["recipe"], []).append(row["perplexity"])
    result = {
        "benchmark": "accuracy",
        "model": Path(arguments.model).name,
        "calibration": f"{Path(arguments.calibration).name}, {arguments.samples} x {arguments.sequence_length}",
        "environment": environment(arguments.device),
        "median": {recipe: statistics.median(values) for recipe, values in figures.items()},
        "spread": {recipe: [min(values), max(values)] for recipe, values in figures.items()},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
