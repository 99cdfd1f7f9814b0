"""Time the online transforms and quantizations at the widths of named models, and write one JSON file.

    python benchmarks/transforms.py --output benchmarks/results/transforms-h200.json

Each is compared with its byte floor (the bytes it must read and write, at the speed of a copy measured in the same
run) and with the same work by single torch operations in bfloat16. A row `block` is a whole block's prefill: its four
products and its attention, with the online transforms against plain quantization in their place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import shapes
import timing
from prefill import (
    BITS,
    CLIP_RATIO,
    DTYPE,
    Quantized,
    block_work,
    gate_rotate_quantize,
    head_mix_factors,
    placed,
    quantize,
    rotate_quantize,
    silu_mul,
)
from rotaquant import ops
from rotaquant.hadamard import Factorisation, base_matrix, hadamard
from rotaquant.ops import packing, reference, rotation_factors
from shapes import Block
from timing import Row, Session, relative_error, sample

ROWS = (2048, 16384, 1, 16)
BLOCKS = ("Llama-2-7B", "Llama-2-70B")
BLOCK_ROWS = 2048
EPS = 1e-5

_CHECKED_ROWS = 64
_NO_WORSE = {"codes": 1.02, "values": 2.0}  # than the exact values quantized, or rounded once
_COLD_FROM = 2048  # fewer tokens were written just now by the kernel before, and are in the cache


@dataclass(frozen=True)
class Operation:
    """What is timed at one width: ours, the same by single torch operations, and its exact values in float64.

    An input is `[m, inputs * width]`, side by side; `written` counts bytes for a value of `width`.
    """

    name: str
    width: int
    ours: Callable[[Tensor], Any]
    unfused: Callable[[Tensor], Any]
    exact: Callable[[Tensor], Tensor]
    inputs: int = 1
    written: int = 1
    gives: str = "codes"

    def bytes(self, m: int) -> int:
        """The fewest bytes for `m` tokens."""
        return m * (self.width * (2 * self.inputs + self.written) + (4 if self.gives == "codes" else 0))


# --- the operations --------------------------------------------------------------------------------------------


def _matrices(transform: Factorisation) -> list[Tensor]:
    """Small orthonormal matrices whose Kronecker product is one block of the transform."""
    parts = [base_matrix(transform)] if transform.order > 1 else []
    left = transform.exponent
    while left:
        taken = min(left, 6)
        parts.append(hadamard(1 << taken).double() * 2 ** (-taken / 2))
        left -= taken
    return [part.to(timing.device(), DTYPE) for part in parts]


def rotate_unfused(x: Tensor, matrices: list[Tensor], width: int) -> Tensor:
    """Rows times the Kronecker product of `matrices` (in each block), by one matrix product a factor."""
    rest = 1
    for matrix in matrices:
        rest *= matrix.shape[0]
    shape = x.shape
    for matrix in matrices:
        rest //= matrix.shape[0]
        if rest == 1:
            x = x.reshape(-1, matrix.shape[0]) @ matrix
        else:
            x = torch.matmul(matrix.T, x.reshape(-1, matrix.shape[0], rest))
    return x.reshape(shape[0], width)


def _normed(x: Tensor) -> Quantized:
    hidden, residual = x.chunk(2, -1)
    codes, scale, _ = ops.rmsnorm_quantize(  # type: ignore[attr-defined]
        hidden, residual, EPS, BITS, CLIP_RATIO, None, True
    )
    return codes, scale


def _normed_unfused(x: Tensor) -> tuple[Quantized, Tensor]:
    hidden, residual = x.chunk(2, -1)
    total = hidden + residual
    return quantize(functional.rms_norm(total, total.shape[-1:], eps=EPS)), total


def _normed_exactly(x: Tensor) -> Tensor:
    hidden, residual = x.chunk(2, -1)
    total = hidden + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)


def _plain(name: str, width: int) -> Operation:
    unfused = partial(reference.quantize_rows, bits=BITS, clip_ratio=CLIP_RATIO)
    return Operation(name, width, quantize, unfused, lambda x: x)


def _of_down(block: Block) -> list[Callable[[], Operation]]:
    """The operations at the width of the down projection's input."""
    width, transform = block.intermediate, block.down_transform
    base = base_matrix(transform)

    def turn(x: Tensor) -> Tensor:
        return reference.rotate_rows(x, base, transform.blocks)

    def make(name: str, **given: Any) -> Operation:
        f, matrices = placed(rotation_factors(transform)), _matrices(transform)
        unfused = partial(rotate_unfused, matrices=matrices, width=width)
        kinds: dict[str, dict[str, Any]] = {
            "hadamard": {"ours": partial(ops.hadamard, factors=f), "unfused": unfused, "exact": turn},
            "hadamard_quantize": {
                "ours": partial(rotate_quantize, f=f),
                "unfused": lambda x: quantize(unfused(x)),
                "exact": turn,
            },
            "silu_mul_hadamard_quantize": {
                "ours": partial(gate_rotate_quantize, f=f),
                "unfused": lambda x: quantize(unfused(silu_mul(x))),
                "exact": lambda x: turn(silu_mul(x)),
            },
        }
        return Operation(name=name, width=width, **kinds[name], **given)

    return [
        partial(make, "hadamard", written=2, gives="values"),
        partial(make, "hadamard_quantize"),
        partial(make, "silu_mul_hadamard_quantize", inputs=2),
    ]


def _of_heads(block: Block) -> Operation:
    mix, width = block.head_mix, block.heads * block.head_dim
    matrix, f = mix.matrix(), head_mix_factors(block)
    small = matrix.to(timing.device(), DTYPE)

    def unfused(x: Tensor) -> Quantized:
        heads = x.unflatten(-1, (mix.shards, matrix.shape[0], -1))
        return quantize(torch.matmul(small.T, heads).flatten(1))

    return Operation(
        "head_mix_quantize",
        width,
        partial(rotate_quantize, f=f),
        unfused,
        lambda x: reference.mix_rows(x, matrix, mix.shards),
    )


def _of_norm(block: Block) -> Operation:
    return Operation("rmsnorm_quantize", block.hidden, _normed, _normed_unfused, _normed_exactly, inputs=2, written=3)


def operations(block: Block) -> list[tuple[str, int, Callable[[], Operation]]]:
    """Name, width and maker of everything that is timed in a model's block."""
    down = ("hadamard", "hadamard_quantize", "silu_mul_hadamard_quantize")
    hidden, wide = block.hidden, block.intermediate
    found: list[tuple[str, int, Callable[[], Operation]]] = [
        ("quantize_rows", hidden, partial(_plain, "quantize_rows", hidden)),
        ("quantize_rows", wide, partial(_plain, "quantize_rows", wide)),
        *((name, wide, make) for name, make in zip(down, _of_down(block), strict=True)),
        ("head_mix_quantize", block.heads * block.head_dim, partial(_of_heads, block)),
        ("rmsnorm_quantize", hidden, partial(_of_norm, block)),
    ]
    return [operation for operation in found if operation[0] != "rmsnorm_quantize" or hasattr(ops, operation[0])]


# --- cells -----------------------------------------------------------------------------------------------------


def verify(operation: Operation, x: Tensor, out: Any) -> Row:
    """Compare a sample of rows with the exact values; raises where they are worse than one rounding explains."""
    rows = sample(len(x), _CHECKED_ROWS)
    exact = operation.exact(x[rows.to(x.device)].cpu().double())
    if operation.gives == "values":
        got, ideal = out[rows.to(x.device)].cpu(), exact.to(DTYPE)
    else:
        codes, scale = (part[rows.to(x.device)].cpu() for part in out)
        got = packing.from_planes(codes, operation.width) * scale
        ideal_codes, ideal_scale = reference.quantize_rows(exact, BITS, CLIP_RATIO)
        ideal = reference.dequantize_groups(ideal_codes, ideal_scale, torch.float64)
        if operation.name == "quantize_rows":
            same, same_scale = reference.quantize_rows(x[rows.to(x.device)].cpu(), BITS, CLIP_RATIO)
            if not (torch.equal(codes, packing.to_planes(same, True)) and torch.equal(scale, same_scale)):
                raise ValueError("not the reference's codes and scales")
    error = relative_error(got, exact)
    allowed = _NO_WORSE[operation.gives] * relative_error(ideal, exact)
    if not error <= allowed:
        raise ValueError(f"relative error {error:.4g}, more than {allowed:.4g}")
    return {"relative_error": round(error, 6)}


def _work(make: Callable[[], Operation], m: int, bandwidth: float) -> Row:
    operation = make()
    torch.manual_seed(m)
    cold = m >= _COLD_FROM
    columns = operation.inputs * operation.width
    copies = timing.copies_beyond_cache(2 * m * columns) if cold else 4
    inputs = [torch.randn(m, columns, device=timing.device(), dtype=DTYPE) for _ in range(copies)]
    checked = verify(operation, inputs[0], operation.ours(inputs[0]))
    turns = timing.turns(copies, min(m, _COLD_FROM))
    figures, _ = timing.timed(
        [partial(operation.ours, inputs[turn % copies]) for turn in range(turns)], operation.bytes(m), bandwidth
    )
    unfused, _ = timing.measure([partial(operation.unfused, inputs[turn % copies]) for turn in range(turns)])
    compared = {
        "unfused_us": unfused.us,
        "unfused_us_iqr": unfused.us_iqr,
        "ratio": round(unfused.us / figures["us"], 3),
    }
    over = {"over_floor": round(figures["us"] / figures["floor_us"], 3)}
    return figures | over | compared | {"cold": cold} | checked


# --- the script ------------------------------------------------------------------------------------------------


def measure_all(session: Session, models: list[str], rows: list[int], bandwidth: float) -> None:
    """Every cell, all widths of one number of tokens together."""
    for m in (m for m in ROWS if m in rows):
        for model in models:
            block = shapes.block(model)
            for name, width, make in operations(block):
                identity = {"model": model, "operation": name, "width": width, "m": m}
                if session.due(identity):
                    session.cell(identity, partial(_work, make, m, bandwidth))
            identity = {"model": model, "operation": "block", "width": block.hidden, "m": m}
            if m == BLOCK_ROWS and model in BLOCKS and session.due(identity):
                session.cell(identity, partial(block_work, block, m, bandwidth))
            if timing.device().type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    """Measure what the command line asks for."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(shapes.CONFIGS), default=list(shapes.CONFIGS))
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    timing.add_run_options(parser)
    arguments = parser.parse_args()
    with torch.no_grad():
        session, bandwidth = timing.start(arguments, "transforms", ("model", "operation", "width", "m"), started)
        measure_all(session, arguments.models, arguments.rows, bandwidth)


if __name__ == "__main__":
    main()
