"""The part of the page of speeds on attention over the packed cache, out of the JSON that attention.py wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markdown import table

Row = dict[str, Any]

_TEXT = """\
One layer's decode step: one query token for each sequence of a batch over a 4-bit cache of pages, head_dim 128,
against flash attention in bfloat16 (torch's, over the layout of keys and values in which it is faster). Caches take
turns, so that none is in the L2 cache when it is read. A cell is the time in microseconds, the speed against flash
attention, and the speed of reading the cache in percent of that of a copy. Relative errors against float64 attention
over the same stored keys and values are at most {ours:.4f}; those of flash attention, over bfloat16, at most
{flash:.4f}. The cache takes {share:.1%} of the memory of one in bfloat16, its tables not counted. These
are the operations; loaded models do not use them yet.
"""


def section(result: Row, device: str, measured_on: str) -> str | None:
    """The section of one file, or `None` where nothing was measured."""
    rows = [row for row in result["rows"] if "us" in row]
    if not rows:
        return None
    text = _TEXT.format(
        ours=max(row["relative_error"] for row in rows),
        flash=max(row["flash_error"] for row in rows),
        share=max(row["of_bfloat16"] for row in rows),
    )
    lines = [f"## Attention over the 4-bit cache on {device}", "", text, measured_on, ""]
    heads = sorted({(row["heads"], row["kv_heads"]) for row in rows}, key=lambda pair: (-pair[1], pair[0]))
    for cached in sorted({row["cached"] for row in rows}):
        lines += [f"### {cached} cached tokens", ""]
        lines += table(["batch", *(f"{q}/{kv} heads" for q, kv in heads)], _cells(rows, cached, heads))
    lines += ["### What a step appends", ""]
    lines += [
        "RoPE, rotation, quantization and the write of a step's keys and values, and RoPE and rotation of its queries,",
        "all in one launch, in microseconds:",
        "",
    ]
    appended = [
        [str(batch), *(_append_time(rows, batch, pair) for pair in heads)]
        for batch in sorted({row["batch"] for row in rows})
    ]
    lines += table(["batch", *(f"{q}/{kv} heads" for q, kv in heads)], appended)
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"- {row['heads']}/{row['kv_heads']} heads, {row['batch']} × {row['cached']}: {row['error']}")
    return "\n".join(lines)


def _cells(rows: Sequence[Row], cached: int, heads: Sequence[tuple[int, int]]) -> list[list[str]]:
    here = {(row["batch"], row["heads"], row["kv_heads"]): row for row in rows if row["cached"] == cached}
    return [
        [str(batch), *(_cell(here.get((batch, *pair))) for pair in heads)] for batch in sorted({key[0] for key in here})
    ]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    us = f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:.0f}"
    return f"{us} ({row['ratio']:.2f}×, {row['fraction_of_copy']:.0%})"


def _append_time(rows: Sequence[Row], batch: int, heads: tuple[int, int]) -> str:
    times = [row["append_us"] for row in rows if row["batch"] == batch and (row["heads"], row["kv_heads"]) == heads]
    return f"{sorted(times)[len(times) // 2]:.1f}" if times else ""
