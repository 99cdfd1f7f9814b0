"""Which pages the sequences of a paged cache own: kept on the host, and shared by layers that cache the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops.cache_layout import PAGE_TOKENS

Pairs = list[tuple[int, int]]
_Ints = npt.NDArray[np.int64]

# New ids beyond those needed, as a part of those there are: fewer changes, for 1.6 % of memory.
_SLACK = 64
_LEAST_COLUMNS = 8

# Shared by all, so that a layer whose sequences were replaced never takes the old ones' table for theirs.
_epochs = itertools.count(1)


class Sequences:
    """The sequences of one group of layers: lengths, and the ids of the pages in which their tokens lie.

    A token's slot is its place in its sequence, and never changes. Sequences that were one share their pages until they
    differ: a page is written only by a sequence that alone owns it. `epoch` changes with the table of ids, to a number
    that no other table has.
    """

    def __init__(self, batch: int = 0) -> None:
        _require_count("a batch", batch)
        self._ids: _Ints = np.zeros((batch, _LEAST_COLUMNS), np.int64)
        self._lengths: _Ints = np.zeros(batch, np.int64)
        # Columns of `_ids` from `_dropped` up to `_held` own pages, the others are 0.
        self._dropped: _Ints = np.zeros(batch, np.int64)
        self._held: _Ints = np.zeros(batch, np.int64)
        self._references: _Ints = np.zeros(0, np.int64)
        self._reserved = 0
        # Tokens since `_lengths` was written, the same number in all sequences: most steps change nothing else.
        self._since = 0
        self._on_device: dict[torch.device, Tensor] = {}
        self._settle(changed=True)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of every sequence, dropped ones included."""
        return (self._lengths + self._since).tolist()

    @property
    def longest(self) -> int:
        """The greatest of the lengths; 0 without sequences."""
        return self._longest + self._since

    @property
    def shortest(self) -> int:
        """The least of the lengths; 0 without sequences."""
        return self._shortest + self._since

    @property
    def first(self) -> int:
        """The first slot from which on all sequences have their pages; 0 where nothing was dropped."""
        return int(self._dropped.max(initial=0)) * PAGE_TOKENS

    @property
    def total(self) -> int:
        """The number of page ids for which layers need memory; ids are below it."""
        return len(self._references)

    @property
    def owned(self) -> int:
        """The number of pages that sequences own; the rest of `total` is free."""
        return int(np.count_nonzero(self._references))

    def ids(self, device: torch.device) -> Tensor:
        """Page ids int64 `[batch, columns]` on a device, of which columns without a page are 0; made once per epoch."""
        if device not in self._on_device:
            with torch.inference_mode(False):
                host = torch.from_numpy(self._ids)
                # From pinned memory, so that the host need not wait for the device.
                is_cuda = device.type == "cuda"
                own = host.pin_memory() if is_cuda else host.clone()
                self._on_device[device] = own.to(device, non_blocking=is_cuda)
        return self._on_device[device]

    def extend(self, count: int) -> Pairs:
        """Make room for `count` more tokens in every sequence; see `extend_each`."""
        if 0 <= count <= self._spare:
            self._since += count
            self._spare -= count
            return []
        return self.extend_each(self._each("extend", count))

    def extend_each(self, counts: Sequence[int]) -> Pairs:
        """Make room for more tokens, `counts` by sequence; return the pages (source, target) to copy before writing."""
        more = self._counts("extend_each", counts)
        self._add_up()
        rows = np.flatnonzero((more > 0) & (self._lengths % PAGE_TOKENS != 0))
        pairs = self._part(rows, self._lengths[rows] // PAGE_TOKENS)
        self._lengths += more
        taken = self._take(_pages(self._lengths))
        self._settle(changed=taken or bool(pairs))
        return pairs

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of every sequence."""
        self.crop_each(self._each("crop", count))

    def crop_each(self, counts: Sequence[int]) -> None:
        """Remove the last tokens, `counts` by sequence; one of which nothing is left starts anew."""
        fewer = self._counts("crop_each", counts)
        before = self._lengths + self._since
        left = before - fewer
        lost = np.flatnonzero((left < 0) | ((left > 0) & (left < self._dropped * PAGE_TOKENS)))
        if len(lost):
            row = int(lost[0])
            raise RotaquantError(
                f"crop by {fewer[row]} tokens: sequence {row} has {before[row]}, of which the first "
                f"{self._dropped[row] * PAGE_TOKENS} are dropped; crop fewer, or all of them"
            )
        self._add_up()
        self._lengths = left
        anew = (left == 0) & (self._dropped > 0)
        kept = np.minimum(np.maximum(_pages(left), self._reserved), self._held)
        kept = np.where(anew, self._dropped, kept)
        released = self._release(kept, self._held)
        self._held, self._dropped = np.where(anew, 0, kept), np.where(anew, 0, self._dropped)
        # Reserved pages of which nothing is left are written next, and may be another's still.
        parted = self._part(*_cells(_pages(left), np.minimum(_pages(before), self._held)))
        taken = self._take(np.zeros_like(left))
        self._settle(changed=released or taken or bool(parted))

    def select(self, indices: Sequence[int]) -> None:
        """Let sequence i be what sequence `indices[i]` was: permuted, repeated, left out."""
        for row in indices:
            self._require_row(row)
        rows = np.asarray(indices, np.int64)
        if np.array_equal(rows, np.arange(self.batch)):
            return
        self._add_up()
        self._ids, self._lengths = self._ids[rows], self._lengths[rows]
        self._dropped, self._held = self._dropped[rows], self._held[rows]
        owned = self._ids[_cells(self._dropped, self._held)]
        self._references = np.bincount(owned, minlength=self.total).astype(np.int64)
        self._part(*_cells(_pages(self._lengths), self._held))
        self._settle(changed=True)

    def reorder(self, indices: Sequence[int]) -> None:
        """`select` of as many sequences as there are, as beam search asks for."""
        if len(indices) != self.batch:
            raise RotaquantError(f"reorder: {len(indices)} indices for {self.batch} sequences; use select")
        self.select(indices)

    def repeat(self, count: int) -> None:
        """Let every sequence be followed by `count - 1` more of its kind."""
        if count < 1:
            raise RotaquantError(f"repeat: {count} is below 1; use leave to remove sequences")
        self.select([row for row in range(self.batch) for _ in range(count)])

    def join(self, length: int = 0) -> int:
        """Add a sequence with room for `length` tokens; return its row, the last."""
        _require_count("join", length)
        self._add_up()
        self._ids = np.concatenate((self._ids, np.zeros((1, self._ids.shape[1]), np.int64)))
        self._lengths = np.append(self._lengths, length)
        self._dropped, self._held = np.append(self._dropped, 0), np.append(self._held, 0)
        self._take(_pages(self._lengths))
        self._settle(changed=True)
        return self.batch - 1

    def leave(self, row: int) -> None:
        """Remove a sequence; those after it move up."""
        self._require_row(row)
        self.select([other for other in range(self.batch) if other != row])

    def drop_before(self, slots: int | Sequence[int]) -> None:
        """Free pages of which all tokens lie before `slots`, one for all sequences or by sequence.

        Reserved pages are promised to stay: with a reservation nothing is dropped.
        """
        if isinstance(slots, int):
            if 0 <= slots <= self.shortest and slots < self._drops_at:
                return
            slots = self._each("drop_before", slots)
        first = self._counts("drop_before", slots)
        beyond = np.flatnonzero(first > self._lengths + self._since)
        if len(beyond):
            row = int(beyond[0])
            raise RotaquantError(
                f"drop_before: slot {first[row]} of sequence {row}, which has {self.lengths[row]} tokens; "
                "give at most the length"
            )
        if self._reserved:
            return
        self._add_up()
        first = np.maximum(first // PAGE_TOKENS, self._dropped)
        released = self._release(self._dropped, first)
        self._dropped = first
        self._settle(changed=released)

    def reserve(self, tokens: int) -> None:
        """Let every sequence, also those that join, own pages for `tokens` tokens from now on.

        The table does not change until one grows beyond, nor by cropping; it does where sequences are selected.
        """
        _require_count("reserve", tokens)
        self._add_up()
        self._reserved = max(self._reserved, -(-tokens // PAGE_TOKENS))
        self._settle(changed=self._take(np.zeros_like(self._lengths), slack=False))

    # --- what the above is made of -------------------------------------------------------------------------------

    def _require_row(self, row: int) -> None:
        if not 0 <= row < self.batch:
            raise RotaquantError(f"sequence {row} is not there: give a row from 0 on, below {self.batch}")

    def _each(self, name: str, count: int) -> list[int]:
        _require_count(name, count)
        return [count] * self.batch

    def _counts(self, name: str, counts: Sequence[int]) -> _Ints:
        """One number per sequence, none below zero."""
        if len(counts) != self.batch:
            raise RotaquantError(f"{name}: {len(counts)} numbers for {self.batch} sequences; give one per sequence")
        if counts:
            _require_count(name, min(counts))
        return np.asarray(counts, np.int64)

    def _add_up(self) -> None:
        self._lengths = self._lengths + self._since
        self._since = 0

    def _settle(self, changed: bool) -> None:
        """After every change: renew the epoch, and what short steps go by instead of looking at every sequence."""
        if changed:
            self.epoch = next(_epochs)
            self._on_device.clear()
        if self.batch == 0:
            self._longest = self._shortest = self._spare = self._drops_at = 0
            return
        self._longest, self._shortest = int(self._lengths.max()), int(self._lengths.min())
        self._drops_at = (int(self._dropped.min()) + 1) * PAGE_TOKENS
        room = self._held * PAGE_TOKENS - self._lengths
        rows = np.flatnonzero(self._lengths % PAGE_TOKENS)
        last = self._ids[rows, self._lengths[rows] // PAGE_TOKENS]
        room[rows[self._references[last] > 1]] = 0
        self._spare = int(room.min())

    def _fresh(self, count: int, slack: bool = True) -> _Ints:
        """Ids of `count` free pages, the least there are, owned once from now on."""
        free = np.flatnonzero(self._references == 0)[:count]
        missing = count - len(free)
        if missing > 0:
            total = self.total
            grown = missing + (total // _SLACK if slack else 0)
            self._references = np.append(self._references, np.zeros(grown, np.int64))
            free = np.append(free, np.arange(total, total + missing))
        self._references[free] = 1
        return free

    def _take(self, ends: _Ints, slack: bool = True) -> bool:
        """Let sequences own pages up to columns `ends` and those reserved; return whether any was missing."""
        ends = np.maximum(np.maximum(ends, self._reserved), self._held)
        cells = _cells(self._held, ends)
        if not len(cells[0]):
            return False
        columns = int(ends.max())
        if columns > self._ids.shape[1]:
            # In steps of an eighth: few shapes, and no table that counts beside the pages.
            step = max(_LEAST_COLUMNS, 1 << (columns.bit_length() - 4))
            self._ids = np.pad(self._ids, ((0, 0), (0, -(-columns // step) * step - self._ids.shape[1])))
        self._ids[cells] = self._fresh(len(cells[0]), slack)
        self._held = ends
        return True

    def _release(self, begins: _Ints, ends: _Ints) -> bool:
        """Give up the pages in columns `begins` to `ends` of the sequences; return whether there were any."""
        cells = _cells(begins, ends)
        np.subtract.at(self._references, self._ids[cells], 1)
        self._ids[cells] = 0
        return len(cells[0]) > 0

    def _part(self, rows: _Ints, columns: _Ints) -> Pairs:
        """Give sequences pages of their own in place of shared ones; return (shared, own). The last owner keeps it."""
        moved = []
        for row, column, page in zip(rows.tolist(), columns.tolist(), self._ids[rows, columns].tolist(), strict=True):
            if self._references[page] > 1:
                self._references[page] -= 1
                moved.append((row, column, page))
        if not moved:
            return []
        rows, columns, pages = np.array(moved, np.int64).T
        fresh = self._fresh(len(moved))
        self._ids[rows, columns] = fresh
        return list(zip(pages.tolist(), fresh.tolist(), strict=True))


def _require_count(name: str, count: int) -> None:
    if count < 0:
        raise RotaquantError(f"{name}: {count} is below zero; give 0 or more")


def _pages(tokens: _Ints) -> _Ints:
    """How many pages so many tokens take."""
    return -(-tokens // PAGE_TOKENS)


def _cells(begins: _Ints, ends: _Ints) -> tuple[_Ints, _Ints]:
    """Rows and columns of all cells in columns `begins` to `ends` of each row, row after row."""
    counts = np.maximum(ends - begins, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - begins, counts)
