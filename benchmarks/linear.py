"""Time the linear layers of named models, ours and others' in the same run, and write one JSON file.

    python benchmarks/linear.py --output benchmarks/results/linear-h200.json

A layer that quantizes its input does so within the time. With up to 256 tokens its weights come from memory, not from
the cache. A product of ours is compared with the reference before it is timed, and its timed results afterwards; one
that differs gets no time. The file is whole after every cell: `--limit-s` ends a run early, and `--merge --missing`
goes on where it ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import peers
import shapes
import timing
from peers import Copies, Product
from rotaquant import ops
from rotaquant.ops import packing, reference
from shapes import Linear
from timing import Row, Session, relative_error, sample

ROWS = (2048, 16384, 1, 16, 8, 64, 256)
DTYPE = torch.bfloat16
CLIP_RATIO = {4: 0.9, 8: 1.0}

_CHECKED_ROWS, _CHECKED_OUTPUTS = 64, 512
_NO_WORSE = 1.25  # than the naive product in the same dtype, by relative error


# --- ours ------------------------------------------------------------------------------------------------------


def _stored(weight: Tensor, bits: int, copies: Copies) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Copies of a weight's packed codes and scales (as checkpoints store them), and the bytes of one."""
    codes, scale = reference.quantize_rows(weight, bits, 1.0)
    packed, scale = packing.pack_weight(codes, bits), scale.to(weight.dtype)
    size = packed.nbytes + scale.nbytes
    return [(packed, scale)] + [(packed.clone(), scale.clone()) for _ in range(copies(size) - 1)], size


def _integers(weight: Tensor, m: int, copies: Copies, bits: int) -> Product:
    """Integer weights times integer activations of the same bits, the input quantized within."""
    stored, size = _stored(weight, bits, copies)

    def run(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        return ops.quantize_matmul(x, bits, CLIP_RATIO[bits], None, bits, packed, scale, None)

    runs = [partial(run, packed=packed, scale=scale) for packed, scale in stored]
    return Product(runs, size, partial(_exact, bits=bits, packed=stored[0][0], scale=stored[0][1]))


def _exact(x: Tensor, out: Tensor, bits: int, packed: Tensor, scale: Tensor) -> Row:
    rows, outputs = sample(len(out), _CHECKED_ROWS), sample(len(packed), _CHECKED_OUTPUTS)
    codes, token_scale = reference.quantize_rows(x[rows.to(x.device)].cpu(), bits, CLIP_RATIO[bits])
    at = outputs.to(packed.device)
    weight = packing.unpack_weight(packed[at].cpu(), bits, x.shape[1])
    expected = reference.quantized_matmul(codes, token_scale, weight, scale[at].cpu(), (bits, bits)).to(out.dtype)
    got = out[rows.to(out.device)][:, at].cpu()
    if not torch.equal(got, expected):
        raise ValueError(f"not the reference's integers: {int((got != expected).sum())} of {got.numel()} differ")
    if not bool(out.isfinite().all()):
        raise ValueError("outputs are missing or not finite")
    return {"verified": f"{len(rows)} x {len(outputs)} equal to the reference"}


def _w4a16(weight: Tensor, m: int, copies: Copies) -> Product:
    """Integer weights times float activations."""
    stored, size = _stored(weight, 4, copies)

    def run(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        return ops.w4a16_matmul(x, packed, scale, None)  # type: ignore[attr-defined]

    runs = [partial(run, packed=packed, scale=scale) for packed, scale in stored]
    return Product(runs, size, partial(_close, packed=stored[0][0], scale=stored[0][1]))


def _close(x: Tensor, out: Tensor, packed: Tensor, scale: Tensor) -> Row:
    rows, outputs = (sample(size, _CHECKED_ROWS).to(x.device) for size in out.shape)
    codes = packing.unpack_weight(packed[outputs], 4, x.shape[1])
    exact = x[rows].double() @ reference.dequantize_groups(codes, scale[outputs], torch.float64).T
    naive = x[rows] @ reference.dequantize_groups(codes, scale[outputs], x.dtype).T
    error, allowed = relative_error(out[rows][:, outputs], exact), _NO_WORSE * relative_error(naive, exact)
    if not error <= allowed or not bool(out.isfinite().all()):
        raise ValueError(f"relative error {error:.3g}, more than {allowed:.3g}")
    return {"relative_error": round(error, 6)}


Maker = Callable[[Tensor, int, Copies], Product]

IMPLEMENTATIONS: dict[str, Maker] = {
    "bf16": peers.bf16,
    "rotaquant-w4a4": partial(_integers, bits=4),
    "float8": peers.float8,
    "humming-w4a8": peers.humming_w4a8,
    "rotaquant-w8a8": partial(_integers, bits=8),
    "rotaquant-w4a16": _w4a16,
}


# --- cells -----------------------------------------------------------------------------------------------------


def _work(make: Maker, weight: Tensor, inputs: list[Tensor], bandwidth: float) -> Row:
    """Check one implementation on one shape, time it, and check what the timed calls gave."""
    m, columns = inputs[0].shape
    cold = m <= timing.COLD_ROWS
    product = make(weight, m, timing.copies_beyond_cache if cold else lambda size: 1)
    once = product.runs[0](inputs[0])
    checked = product.check(inputs[0], once)
    copies = len(product.runs)
    calls = []
    for turn in range(timing.turns(max(copies, len(inputs)), m)):
        calls.append(partial(product.runs[turn % copies], inputs[turn % len(inputs)]))
    moved = product.weight_bytes + inputs[0].nbytes + m * weight.shape[0] * weight.element_size()
    figures, results = timing.timed(calls, moved, bandwidth)
    again = results[(len(calls) - 1) // len(inputs) * len(inputs)]
    if "verified" in checked and not (torch.equal(results[0], once) and torch.equal(again, once)):
        raise ValueError("the timed calls gave other results than a single one")
    return figures | {"cold": cold, "copies": copies, "weight_bytes": product.weight_bytes} | checked | product.notes


def _group(session: Session, linear: Linear, m: int, names: list[str], bandwidth: float) -> None:
    """All implementations of one shape, the float one first: the others' ratios are to its time."""
    identity: dict[str, Any] = {"model": linear.model, "linear": linear.name, "m": m}
    due = [name for name in names if session.due(identity | {"implementation": name})]
    if not due:
        return
    torch.manual_seed(m)
    weight = torch.randn(linear.outputs, linear.inputs, device=timing.device(), dtype=DTYPE) * 0.02
    inputs = [torch.randn(m, linear.inputs, device=timing.device(), dtype=DTYPE) for _ in range(2)]
    float_us: float | None = None
    for name in ["bf16", *(name for name in due if name != "bf16")]:
        if session.over:
            return
        cell = identity | {"implementation": name, "outputs": linear.outputs, "inputs": linear.inputs}

        def work(name: str = name, float_us: float | None = float_us) -> Row:
            row = _work(IMPLEMENTATIONS[name], weight, inputs, bandwidth)
            float_row_us = row["us"] if name == "bf16" else float_us
            ratio = {} if float_row_us is None else {"bf16_us": float_row_us, "ratio": float_row_us / row["us"]}
            return row | {key: round(value, 4) for key, value in ratio.items()}

        row = session.cell(cell, work)
        if name == "bf16":
            float_us = row.get("us")
    if timing.device().type == "cuda":
        torch.cuda.empty_cache()


def _build_ahead(session: Session, linears: list[Linear], m: int) -> None:
    """Compile the other package's kernels of all shapes together, in the time that one of them would take."""
    name = "humming-w4a8"
    wanted = [
        linear
        for linear in linears
        if session.due({"model": linear.model, "linear": linear.name, "m": m, "implementation": name})
    ]
    if wanted and timing.device().type == "cuda":
        try:
            peers.build_humming(((linear.outputs, linear.inputs) for linear in wanted), m)
        except Exception as error:
            print(f"humming-kernels: {error}"[:400], flush=True)


def available() -> list[str]:
    """The implementations that this version of the package has."""
    return [name for name in IMPLEMENTATIONS if name != "rotaquant-w4a16" or hasattr(ops, "w4a16_matmul")]


def measure_all(session: Session, models: list[str], rows: list[int], names: list[str], bandwidth: float) -> None:
    """Every cell, all shapes of one number of tokens together."""
    linears = [linear for model in models for linear in shapes.block(model).linears]
    for m in (m for m in ROWS if m in rows):
        if "humming-w4a8" in names and not session.over:
            _build_ahead(session, linears, m)
        for linear in linears:
            _group(session, linear, m, names, bandwidth)


def main() -> None:
    """Measure what the command line asks for."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(shapes.CONFIGS), default=list(shapes.CONFIGS))
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    parser.add_argument("--implementations", nargs="+", choices=list(IMPLEMENTATIONS), default=available())
    timing.add_run_options(parser)
    arguments = parser.parse_args()
    with torch.no_grad():
        session, bandwidth = timing.start(arguments, "linear", ("model", "linear", "m", "implementation"), started)
        measure_all(session, arguments.models, arguments.rows, arguments.implementations, bandwidth)


if __name__ == "__main__":
    main()
