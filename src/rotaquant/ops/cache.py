"""The operations on the paged cache as torch sees them: appending writes to `pages`, attention to a count alone.

On the CPU, and in float32 and float64, each is its definition in `cache_reference`; on a CUDA device in 16 bits it is a
Triton kernel. The kernels go by the offsets of a table alone, so that a cache on a GPU may lie in several pieces of
memory, of which `pages` is the first; the definitions want all pages in that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops import cache_reference, reference
from rotaquant.ops.cache_layout import HEAD_UNIT, PAGE_TOKENS, PageFormat
from rotaquant.ops.library import LIBRARY, register

MOST_QUERIES = 16
WIDEST_HEAD = 256
_READ_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_FORMAT = "int kv_heads, int key_bits, int value_bits, bool has_positions"
LIBRARY.define(
    "cache_append(Tensor(a!) pages, Tensor table, Tensor first, Tensor? query, Tensor keys, Tensor values,"
    " Tensor? positions, Tensor? cos, Tensor? sin, str style, Tensor? rotation, float norm,"
    f" {_FORMAT}, float key_clip, float value_clip) -> Tensor"
)
LIBRARY.define(
    "cache_attention(Tensor query, Tensor pages, Tensor table, Tensor lengths, Tensor(a!) arrivals, Tensor? mask,"
    f" Tensor? sinks, {_FORMAT}, int longest, float scaling, int? window, float? softcap, int mask_first) -> Tensor"
)
LIBRARY.define(
    "cache_read(Tensor pages, Tensor table, SymInt start, SymInt stop, int first_head, int end_head,"
    f" {_FORMAT}, int head_dim, ScalarType dtype) -> (Tensor, Tensor)"
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How keys and queries are turned before keys are stored: RoPE, then the rotation `norm * matrix`.

    `cos` and `sin` are `[batch or 1, length, angles]` as the model's rotary module gives them, `style` that of `Rope`,
    "none" without RoPE. `rotation` `[head_dim, head_dim]` holds small integers in the dtype of the keys.
    """

    style: str = "none"
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotation: Tensor | None = None
    norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What attention makes of scores: q·k times `scaling`, bounded by `softcap`, beside `sinks` `[heads]`.

    Of what came before a query, `window` counts the last tokens, itself included; `mask` bool `[batch, 1 or heads,
    queries, n]` says which slots from `mask_first` on it may see.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    mask_first: int = 0


def cache_append(
    pages: Tensor,
    table: Tensor,
    first: Tensor,
    states: tuple[Tensor | None, Tensor, Tensor],
    positions: Tensor | None,
    form: PageFormat,
    clips: tuple[float, float],
    turn: Turn,
) -> Tensor:
    """Turn, quantize and store keys and values of new tokens; gives the query turned alike (or nothing, `[0]`).

    `states` are query (or `None`), keys and values `[batch, length, heads, head_dim]`; sequence b's go to slots
    `first[b]` onwards of the pages at `table[b]`, int64 bytes from the start of `pages` uint8 `[n, page_bytes]`.
    `positions` is `[batch or 1, length]` where the format has them. Sections 3 and 4.3 of the paper, stage 1d.
    """
    query, keys, values = states
    return torch.ops.rotaquant.cache_append(
        pages, table, first, query, keys, values, positions, turn.cos, turn.sin, turn.style, turn.rotation, turn.norm,
        form.kv_heads, form.key_bits, form.value_bits, form.has_positions, *clips,
    )  # fmt: skip


def cache_attention(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    arrivals: Tensor,
    form: PageFormat,
    longest: int,
    scores: Scores,
) -> Tensor:
    """Attention of the last tokens of sequences, up to 16, over their pages: `[batch, queries, heads, head_dim]`.

    `lengths` int32 `[batch]` counts the tokens of each sequence, these included, and `longest` is no less than any.
    `arrivals` int32 is zero and left so, one for each sequence, key/value head and 16 rows of queries.
    """
    return torch.ops.rotaquant.cache_attention(
        query, pages, table, lengths, arrivals, scores.mask, scores.sinks,
        form.kv_heads, form.key_bits, form.value_bits, form.has_positions,
        longest, scores.scaling, scores.window, scores.softcap, scores.mask_first,
    )  # fmt: skip


def cache_read(
    pages: Tensor,
    table: Tensor,
    start: int,
    stop: int,
    heads: tuple[int, int],
    form: PageFormat,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values in slots `start` to `stop` of sequences, each `[batch, heads, stop - start, head_dim]`.

    `heads` is the first key/value head and the one after the last. A row of `table` is a sequence; where it has no
    page, and in slots that were never written, what comes back means nothing.
    """
    return torch.ops.rotaquant.cache_read(
        pages, table, start, stop, *heads, form.kv_heads, form.key_bits, form.value_bits, form.has_positions,
        form.head_dim, dtype,
    )  # fmt: skip


def arrivals_for(batch: int, kv_heads: int, group: int, device: torch.device) -> Tensor:
    """The counts that `cache_attention` wants for a batch, of up to `MOST_QUERIES` queries."""
    return torch.zeros(batch * kv_heads * -(-group * MOST_QUERIES // 16), dtype=torch.int32, device=device)


# --- fakes, and what is refused ----------------------------------------------------------------------------------


def _format(
    pages: Tensor, table: Tensor, head_dim: int, kv_heads: int, key_bits: int, value_bits: int, has: bool
) -> PageFormat:
    if head_dim % HEAD_UNIT or not 0 < head_dim <= WIDEST_HEAD:
        raise RotaquantError(
            f"head_dim is {head_dim}; pages hold heads of up to {WIDEST_HEAD} channels, a multiple of {HEAD_UNIT}"
        )
    for name, bits in (("keys", key_bits), ("values", value_bits)):
        if not 2 <= bits <= 8:
            raise RotaquantError(f"{name} have {bits} bits; it must be from 2 to 8")
    form = PageFormat(kv_heads, head_dim, key_bits, value_bits, has)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != form.page_bytes:
        raise RotaquantError(f"pages is {pages.dtype} {list(pages.shape)}; it must be uint8 [n, {form.page_bytes}]")
    if table.dtype != torch.int64 or table.dim() != 2 or table.stride(-1) != 1:
        raise RotaquantError(f"table is {table.dtype} {list(table.shape)}; it must be int64 [batch, columns]")
    return form


def _append_fake(
    pages: Tensor, table: Tensor, first: Tensor, query: Tensor | None, keys: Tensor, values: Tensor,
    positions: Tensor | None, cos: Tensor | None, sin: Tensor | None, style: str, rotation: Tensor | None, norm: float,
    kv_heads: int, key_bits: int, value_bits: int, has_positions: bool, key_clip: float, value_clip: float,
) -> Tensor:  # fmt: skip
    _format(pages, table, keys.shape[-1], kv_heads, key_bits, value_bits, has_positions)
    batch, length = keys.shape[:2]
    if keys.shape != values.shape or keys.shape[2] != kv_heads or table.shape[0] != batch:
        raise RotaquantError(
            f"keys {list(keys.shape)}, values {list(values.shape)} and a table of {table.shape[0]} rows do not meet"
        )
    if query is not None and (query.shape[:2] != keys.shape[:2] or query.shape[3] != keys.shape[3]):
        raise RotaquantError(f"query is {list(query.shape)}, which does not meet keys {list(keys.shape)}")
    if has_positions and (positions is None or positions.shape[-1] != length or positions.shape[0] not in (1, batch)):
        raise RotaquantError(f"positions must be [{batch} or 1, {length}]: the format keeps them")
    if style not in cache_reference.ROPE_STYLES:
        raise RotaquantError(f"RoPE has no style {style!r}; it must be one of {', '.join(cache_reference.ROPE_STYLES)}")
    if first.shape != (batch,):
        raise RotaquantError(f"first is {list(first.shape)}; it must be [{batch}], a slot for each sequence")
    if rotation is not None and rotation.shape != (keys.shape[3], keys.shape[3]):
        raise RotaquantError(f"rotation is {list(rotation.shape)}; it must be square, of {keys.shape[3]} channels")
    if (style == "none") != (cos is None) or (cos is None) != (sin is None):
        raise RotaquantError(f"RoPE of style {style!r} needs cos and sin, and no style, neither")
    return keys.new_empty(0) if query is None else query.new_empty(query.shape)


def _attention_fake(
    query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, arrivals: Tensor, mask: Tensor | None,
    sinks: Tensor | None, kv_heads: int, key_bits: int, value_bits: int, has_positions: bool,
    longest: int, scaling: float, window: int | None, softcap: float | None, mask_first: int,
) -> Tensor:  # fmt: skip
    _format(pages, table, query.shape[-1], kv_heads, key_bits, value_bits, has_positions)
    batch, queries, heads, _ = query.shape
    if heads % kv_heads or table.shape[0] != batch or lengths.shape != (batch,):
        raise RotaquantError(
            f"query {list(query.shape)}, {kv_heads} key/value heads, a table of {table.shape[0]} and lengths"
            f" {list(lengths.shape)} do not meet"
        )
    if not 0 < queries <= MOST_QUERIES:
        raise RotaquantError(f"{queries} queries; it must be from 1 to {MOST_QUERIES}, more are a prefill")
    wanted = batch * kv_heads * -(-heads // kv_heads * queries // 16)
    if arrivals.dtype != torch.int32 or arrivals.numel() < wanted:
        raise RotaquantError(
            f"arrivals is {arrivals.dtype} {list(arrivals.shape)}; it must be int32 [{wanted}] or more"
        )
    if mask is not None and (
        mask.dtype != torch.bool or mask.shape[:3] not in ((batch, 1, queries), (batch, heads, queries))
    ):
        raise RotaquantError(
            f"mask is {mask.dtype} {list(mask.shape)}; it must be bool [{batch}, 1 or {heads}, {queries}, n]"
        )
    if longest > table.shape[1] * PAGE_TOKENS:
        raise RotaquantError(f"longest is {longest}, and the table has {table.shape[1]} pages of {PAGE_TOKENS} tokens")
    return query.new_empty(query.shape)


def _readable(
    pages: Tensor, table: Tensor, start: int, stop: int, heads: tuple[int, int], form: PageFormat, dtype: torch.dtype
) -> None:
    _format(pages, table, form.head_dim, form.kv_heads, form.key_bits, form.value_bits, form.has_positions)
    if dtype not in _READ_DTYPES:
        raise RotaquantError(f"dtype is {dtype}; it must be one of {', '.join(map(str, _READ_DTYPES))}")
    if not 0 <= start <= stop <= table.shape[1] * PAGE_TOKENS:
        raise RotaquantError(
            f"slots {start} to {stop} cannot be read; they must be in order, from 0 to"
            f" {table.shape[1] * PAGE_TOKENS}: the table has {table.shape[1]} pages of {PAGE_TOKENS} tokens"
        )
    if not 0 <= heads[0] <= heads[1] <= form.kv_heads:
        raise RotaquantError(
            f"heads {heads[0]} to {heads[1]} cannot be read; they must be in order, from 0 to {form.kv_heads}"
        )


def _read_fake(
    pages: Tensor, table: Tensor, start: int, stop: int, first_head: int, end_head: int, kv_heads: int,
    key_bits: int, value_bits: int, has_positions: bool, head_dim: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    form = PageFormat(kv_heads, head_dim, key_bits, value_bits, has_positions)
    _readable(pages, table, start, stop, (first_head, end_head), form, dtype)
    shape = table.shape[0], end_head - first_head, stop - start, head_dim
    return pages.new_empty(shape, dtype=dtype), pages.new_empty(shape, dtype=dtype)


# --- the definitions, and the kernels ----------------------------------------------------------------------------


def _by_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() == 2


def _reads_by_kernel(pages: Tensor, dtype: torch.dtype) -> bool:
    return pages.is_cuda and dtype.itemsize == 2


def _append(
    pages: Tensor, table: Tensor, first: Tensor, query: Tensor | None, keys: Tensor, values: Tensor,
    positions: Tensor | None, cos: Tensor | None, sin: Tensor | None, style: str, rotation: Tensor | None, norm: float,
    kv_heads: int, key_bits: int, value_bits: int, has_positions: bool, key_clip: float, value_clip: float,
) -> Tensor:  # fmt: skip
    _append_fake(
        pages, table, first, query, keys, values, positions, cos, sin, style, rotation, norm, kv_heads, key_bits,
        value_bits, has_positions, key_clip, value_clip,
    )  # fmt: skip
    form = PageFormat(kv_heads, keys.shape[-1], key_bits, value_bits, has_positions)
    turn, clips = Turn(style=style, cos=cos, sin=sin, rotation=rotation, norm=norm), (key_clip, value_clip)
    if _by_kernel(keys):
        from rotaquant.ops import cache_append_kernels

        out = cache_append_kernels.append(pages, table, first, query, keys, values, positions, form, clips, turn)
    else:
        cache_reference.append(pages, table, first, _turned(keys, turn), values, positions, form, clips)
        out = None if query is None else _turned(query, turn).to(query.dtype)
    return keys.new_empty(0) if out is None else out


def _turned(x: Tensor, turn: Turn) -> Tensor:
    """RoPE in the dtype of x, as models apply it, then the rotation in `compute_dtype`."""
    if turn.cos is not None:
        assert turn.sin is not None
        x = cache_reference.rope(x, turn.cos, turn.sin, turn.style)
    if turn.rotation is not None:
        compute = reference.compute_dtype(x.dtype)
        x = (x.to(compute) @ turn.rotation.to(compute)) * turn.norm
    return x


def _attention(
    query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, arrivals: Tensor, mask: Tensor | None,
    sinks: Tensor | None, kv_heads: int, key_bits: int, value_bits: int, has_positions: bool,
    longest: int, scaling: float, window: int | None, softcap: float | None, mask_first: int,
) -> Tensor:  # fmt: skip
    _attention_fake(
        query, pages, table, lengths, arrivals, mask, sinks, kv_heads, key_bits, value_bits, has_positions,
        longest, scaling, window, softcap, mask_first,
    )  # fmt: skip
    form = PageFormat(kv_heads, query.shape[-1], key_bits, value_bits, has_positions)
    if _by_kernel(query):
        from rotaquant.ops import cache_attention_kernels

        return cache_attention_kernels.attend(
            query, pages, table, lengths, arrivals, mask, sinks, form,
            longest=longest, scaling=scaling, window=window, softcap=softcap, mask_first=mask_first,
        )  # fmt: skip
    compute = reference.compute_dtype(query.dtype)
    keys, values = cache_reference.read(pages, table, 0, longest, form, compute)
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (mask_first, 0))[..., :longest]
        mask = torch.nn.functional.pad(mask, (0, longest - mask.shape[-1]))
    out = cache_reference.attend(
        query, keys, values, lengths, mask, scaling=scaling, window=window, softcap=softcap, sinks=sinks
    )
    return out.contiguous()


def _read(
    pages: Tensor, table: Tensor, start: int, stop: int, first_head: int, end_head: int, kv_heads: int,
    key_bits: int, value_bits: int, has_positions: bool, head_dim: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    form, heads = PageFormat(kv_heads, head_dim, key_bits, value_bits, has_positions), (first_head, end_head)
    _readable(pages, table, start, stop, heads, form, dtype)
    if _reads_by_kernel(pages, dtype):
        from rotaquant.ops import cache_read_kernels

        return cache_read_kernels.read(pages, table, start, stop, heads, form, dtype)
    keys, values = cache_reference.read(pages, table, start, stop, form, dtype, heads)
    return keys.contiguous(), values.contiguous()


register("cache_append", _append, _append_fake)
register("cache_attention", _attention, _attention_fake)
register("cache_read", _read, _read_fake)
