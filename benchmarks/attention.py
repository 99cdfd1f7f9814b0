"""Time attention over the packed cache, and the append to it, against flash attention in bfloat16; write one JSON file.

    python benchmarks/attention.py --output benchmarks/results/attention-h200.json

A cell is one layer's decode step: one query token for each sequence of a batch, all of one length. Caches take turns,
so that none is in the L2 cache when it is read. Flash attention is torch's, over the layout of keys and values in which
it is faster. Errors are those against float64 attention over the same stored keys and values, of a sample of heads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import timing
from rotaquant.ops import cache_append_kernels, cache_attention_kernels, cache_reference
from rotaquant.ops.cache import Turn
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat
from timing import Row, Session, relative_error

HEADS = ((32, 32), (32, 8), (64, 8))
HEAD_DIM = 128
BATCHES = (1, 4, 8, 16, 32, 64)
CACHED = (2048, 8192, 32768, 131072, 512)
BITS = 4
SCALING = HEAD_DIM**-0.5

_LARGEST_BYTES = 40 << 30  # of the cache in bfloat16
_LARGE_BYTES = 1 << 29
_FEWEST_CALLS = 16
_MOST_COPIES = 160

Cache = tuple[PageFormat, Tensor, Tensor]


def _random_cache(heads: int, batch: int, cached: int) -> Cache:
    """Pages in disorder, filled with codes and with scales of normal rows."""
    form, device = PageFormat(heads, HEAD_DIM, BITS, BITS), timing.device()
    columns = -(-cached // PAGE_TOKENS)
    pages = torch.empty(batch * columns, form.page_bytes, dtype=torch.uint8, device=device)
    pages.view(-1)[: len(pages) * form.page_bytes // 8 * 8].view(torch.int64).random_(-(1 << 62), 1 << 62)
    for parameters in form.split(pages)[2:]:
        parameters[..., 0].uniform_(0.25, 0.4)
        parameters[..., 1] = parameters[..., 0] * -7.5
    table = torch.randperm(len(pages), device=device).view(batch, columns) * form.page_bytes
    return form, pages, table


def _lengths(batch: int, cached: int) -> Tensor:
    return torch.full((batch,), cached, dtype=torch.int32, device=timing.device())


def _attend(query: Tensor, cache: Cache, lengths: Tensor, arrivals: Tensor, longest: int) -> Tensor:
    form, pages, table = cache
    return cache_attention_kernels.attend(
        query, pages, table, lengths, arrivals, None, None, form, longest=longest, scaling=SCALING
    )


def _error(query: Tensor, cache: Cache, out: Tensor, cached: int) -> float:
    """Of the last sequence's first key/value head."""
    form, pages, table = cache
    one = PageFormat(1, HEAD_DIM, BITS, BITS)
    group = query.shape[2] // form.kv_heads
    columns = table[-1:] // form.page_bytes
    picked = pages[columns[0]][:, : form.head_bytes].contiguous()
    places = torch.arange(columns.shape[1], device=pages.device)[None] * one.page_bytes
    keys, values = cache_reference.read(picked, places, 0, cached, one, torch.float64)
    wanted = cache_reference.attend(
        query[-1:, :, :group].double(), keys, values, _lengths(1, cached), None, scaling=SCALING
    )
    return relative_error(out[-1:, :, :group], wanted)


def _flash(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(
            query, keys, values, scale=SCALING, enable_gqa=query.shape[1] != keys.shape[1]
        )


def _turns(copies: int, size: int) -> int:
    """How often the copies take turns in a graph: more often where calls are short."""
    return 1 if size > _LARGE_BYTES else -(-_FEWEST_CALLS // copies)


def _flash_time(query: Tensor, kv_heads: int, cached: int, by_head: bool) -> Row:
    """Flash attention's time in one layout of keys and values, and its error."""
    batch, _, heads, _ = query.shape
    size = 4 * batch * cached * kv_heads * HEAD_DIM
    copies = min(timing.copies_beyond_cache(size), _MOST_COPIES)
    shape = (kv_heads, cached) if by_head else (cached, kv_heads)
    stored = [
        torch.empty(2, batch, *shape, HEAD_DIM, dtype=query.dtype, device=query.device).normal_() for _ in range(copies)
    ]
    if not by_head:
        stored = [pair.transpose(2, 3) for pair in stored]
    calls: list[Callable[[], Tensor]] = [partial(_flash, query.transpose(1, 2), *pair) for pair in stored]
    clock, outs = timing.measure(calls * _turns(copies, size))
    keys, values = (part[-1:, :1].double() for part in stored[0])
    group = heads // kv_heads
    wanted = cache_reference.attend(
        query[-1:, :, :group].double(), keys, values, _lengths(1, cached), None, scaling=SCALING
    )
    error = relative_error(outs[0].transpose(1, 2)[-1:, :, :group], wanted)
    layout = "batch, heads, tokens" if by_head else "batch, tokens, heads"
    return {"flash_us": clock.us, "flash_us_iqr": clock.us_iqr, "flash_layout": layout, "flash_error": error}


def _flash_best(query: Tensor, kv_heads: int, cached: int) -> Row:
    found = []
    for by_head in (True, False):
        found.append(_flash_time(query, kv_heads, cached, by_head))
        torch.cuda.empty_cache()
    return min(found, key=lambda row: row["flash_us"])


def _append_times(heads: int, kv_heads: int, batch: int, cache: Cache) -> Row:
    """The time to turn, rotate, quantize and store the step's own keys and values, and to turn its queries."""
    form, pages, table = cache
    device = pages.device
    states = torch.randn(batch, 1, heads + 2 * kv_heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
    query, keys, values = states.split((heads, kv_heads, kv_heads), dim=2)
    angles = torch.rand(batch, 1, HEAD_DIM, device=device)
    sylvester = torch.ones(1, 1)
    while len(sylvester) < HEAD_DIM:
        sylvester = torch.kron(sylvester, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    turn = Turn(
        style="half",
        cos=angles.cos().bfloat16(),
        sin=angles.sin().bfloat16(),
        rotation=sylvester.to(device, torch.bfloat16),
        norm=HEAD_DIM**-0.5,
    )
    first = torch.zeros(batch, dtype=torch.int32, device=device)
    clips = (0.95, 0.95)
    call = partial(cache_append_kernels.append, pages, table, first, query, keys, values, None, form, clips, turn)
    clock, _ = timing.measure([call] * 48)
    return {"append_us": clock.us, "append_us_iqr": clock.us_iqr}


def _work(heads: int, kv_heads: int, batch: int, cached: int, bandwidth: float) -> Row:
    torch.manual_seed(cached + batch)
    query = torch.randn(batch, 1, heads, HEAD_DIM, device=timing.device(), dtype=torch.bfloat16)
    flash = _flash_best(query, kv_heads, cached)
    before = torch.cuda.memory_allocated()
    caches = [_random_cache(kv_heads, batch, cached)]
    held = torch.cuda.memory_allocated() - before
    size = held
    copies = min(timing.copies_beyond_cache(size), _MOST_COPIES)
    caches += [_random_cache(kv_heads, batch, cached) for _ in range(copies - 1)]
    lengths = _lengths(batch, cached)
    arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=timing.device())
    calls: list[Callable[[], Tensor]] = [partial(_attend, query, cache, lengths, arrivals, cached) for cache in caches]
    moved = batch * cached * kv_heads * (HEAD_DIM + 8)
    figures, outs = timing.timed(calls * _turns(copies, size), moved, bandwidth)
    error = _error(query, caches[0], outs[0], cached)
    if not error <= 1.5 * flash["flash_error"]:
        raise ValueError(f"relative error {error:.4g}, flash attention's own is {flash['flash_error']:.4g}")
    append = _append_times(heads, kv_heads, batch, caches[0])
    memory = {
        "bytes_per_token": round(held / (batch * cached), 2),
        "of_bfloat16": round(held / (4 * batch * cached * kv_heads * HEAD_DIM), 4),
    }
    ratio = {"ratio": round(flash["flash_us"] / figures["us"], 3), "relative_error": error}
    return figures | flash | ratio | append | memory


def measure_all(session: Session, heads: list[tuple[int, int]], bandwidth: float) -> None:
    """Every cell whose cache in bfloat16 is no larger than what is compared."""
    for cached in CACHED:
        for batch in BATCHES:
            for query_heads, kv_heads in heads:
                if 4 * batch * cached * kv_heads * HEAD_DIM > _LARGEST_BYTES:
                    continue
                identity = {"heads": query_heads, "kv_heads": kv_heads, "batch": batch, "cached": cached}
                if session.due(identity):
                    session.cell(identity, partial(_work, query_heads, kv_heads, batch, cached, bandwidth))


def main() -> None:
    """Read the options and measure."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--heads", nargs="*", default=[f"{q}/{kv}" for q, kv in HEADS], help="such as 32/8")
    timing.add_run_options(parser)
    arguments = parser.parse_args()
    session, bandwidth = timing.start(arguments, "attention", ("heads", "kv_heads", "batch", "cached"), started)
    heads = [(int(q), int(kv)) for q, kv in (name.split("/") for name in arguments.heads)]
    measure_all(session, heads, bandwidth)


if __name__ == "__main__":
    main()
