"""A paged cache beside what it must amount to, and anything that may be done to it, at random."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rotaquant.ops import cache_reference
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat
from rotaquant.runtime.pages import LayerPages
from rotaquant.runtime.sequences import Sequences

PLAIN = PageFormat(kv_heads=1, head_dim=16, key_bits=4, value_bits=3)
STAMPED = PageFormat(kv_heads=2, head_dim=8, key_bits=3, value_bits=8, has_positions=True)
CPU = torch.device("cpu")
BITS = 1 << torch.arange(16)


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class World:
    """Sequences and two layers, beside what they must amount to: the list of every sequence's tokens.

    A token is a number that occurs once. The first layer writes and reads it by the operations' definitions: 16 bits of
    it are the key, 16 the value. The second has its memory in slabs, as on CUDA; there a token is the position, written
    and read by address.
    """

    def __init__(self, batch: int, reserved: int = 0) -> None:
        self.sequences = Sequences(batch)
        self.sequences.reserve(reserved)
        self.reserved = pages_of(reserved)
        self.plain, self.slabbed = LayerPages(PLAIN, "cpu"), LayerPages(STAMPED, "cpu", slabbed=True)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.dropped = [0] * batch
        self.made = self.most = 0
        self.last = (0, torch.zeros(0))

    def layers(self) -> tuple[LayerPages, LayerPages]:
        return self.plain, self.slabbed

    # --- what is done, to both sides -----------------------------------------------------------------------------

    def extend(self, counts: list[int]) -> list[tuple[int, int]]:
        equal = len(set(counts)) == 1
        pairs = self.sequences.extend(counts[0]) if equal else self.sequences.extend_each(counts)
        self._count_most()
        for layer in self.layers():
            layer.ensure(self.sequences.total)
            layer.copy(pairs)
        for count in set(counts) - {0}:
            self._write([row for row, own in enumerate(counts) if own == count], count)
        return pairs

    def _write(self, rows: list[int], count: int) -> None:
        new = torch.arange(self.made, self.made + len(rows) * count).view(len(rows), count)
        self.made += new.numel()
        first = torch.tensor([len(self.tokens[row]) for row in rows])
        keys, values = (((new[..., None] >> shift) & BITS > 0).float()[:, :, None] for shift in (0, 16))
        table = self.plain.table(self.sequences)[rows]
        cache_reference.append(self.plain.base, table, first, keys, values, None, PLAIN, (1.0, 1.0))
        offsets = self.slabbed.table(self.sequences).tolist()
        for row, added in zip(rows, new.tolist(), strict=True):
            for slot, token in enumerate(added, start=len(self.tokens[row])):
                self.stamps(offsets[row][slot // PAGE_TOKENS])[slot % PAGE_TOKENS] = token
            self.tokens[row] += added

    def stamps(self, offset: int) -> Any:
        """The positions in a page of the second layer, by the page's offset."""
        start = STAMPED.kv_heads * STAMPED.head_bytes
        return (ctypes.c_int32 * PAGE_TOKENS).from_address(self.slabbed.base.data_ptr() + offset + start)

    def crop(self, counts: list[int]) -> None:
        equal = len(set(counts)) == 1
        _ = self.sequences.crop(counts[0]) if equal else self.sequences.crop_each(counts)
        for row, count in enumerate(counts):
            self.tokens[row] = self.tokens[row][: len(self.tokens[row]) - count]
            self.dropped[row] = self.dropped[row] if self.tokens[row] else 0

    def select(self, indices: list[int], do: Callable[[], object]) -> None:
        do()
        self._count_most()
        self.tokens = [list(self.tokens[row]) for row in indices]
        self.dropped = [self.dropped[row] for row in indices]

    def join(self, length: int) -> None:
        row = self.sequences.join(length)
        assert row == len(self.tokens)
        self.tokens.append([])
        self.dropped.append(0)
        if length:
            for layer in self.layers():
                layer.ensure(self.sequences.total)
            self._write([row], length)

    def drop_before(self, slots: list[int]) -> None:
        self.sequences.drop_before(slots[0] if len(set(slots)) == 1 else slots)
        if not self.reserved:
            self.dropped = [max(old, slot // PAGE_TOKENS) for old, slot in zip(self.dropped, slots, strict=True)]

    def _count_most(self) -> None:
        self.most = max(self.most, self.sequences.owned)

    # --- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_tokens()
        self._check_owners()
        ids = self.sequences.ids(CPU)
        if self.last[0] == self.sequences.epoch:
            assert torch.equal(ids, self.last[1])
        self.last = self.sequences.epoch, ids.clone()
        self._count_most()
        assert self.sequences.total <= self.most + self.most // 64
        for layer in self.layers():
            assert layer.nbytes == max(1, self.sequences.total) * layer.form.page_bytes

    def _check_tokens(self) -> None:
        lengths = [len(own) for own in self.tokens]
        assert self.sequences.lengths == lengths
        assert self.sequences.batch == len(lengths)
        assert self.sequences.longest == max(lengths, default=0)
        assert self.sequences.shortest == min(lengths, default=0)
        table, offsets = (layer.table(self.sequences) for layer in self.layers())
        longest = self.sequences.longest
        keys, values = cache_reference.read(self.plain.base, table, 0, longest, PLAIN, torch.float32)
        low, high = ((x[:, 0].round().long() * BITS).sum(dim=-1) for x in (keys, values))
        read = low + (high << 16)
        for row, own in enumerate(self.tokens):
            start = self.dropped[row] * PAGE_TOKENS
            assert read[row, start : len(own)].tolist() == own[start:]
            stamps = [np.array(self.stamps(offset)) for offset in offsets[row, : pages_of(len(own))].tolist()]
            assert [number for page in stamps for number in page.tolist()][start : len(own)] == own[start:]

    def _check_owners(self) -> None:
        owners: dict[int, list[tuple[int, int]]] = {}
        for row, ids in enumerate(self.sequences.ids(CPU).tolist()):
            held = range(self.dropped[row], max(pages_of(len(self.tokens[row])), self.reserved))
            for column, page in enumerate(ids):
                if column in held:
                    owners.setdefault(page, []).append((row, column))
                else:
                    assert page == 0
        assert len(owners) == self.sequences.owned  # all others are free
        assert all(0 <= page < self.sequences.total for page in owners)
        for cells in owners.values():
            parts = [self.tokens[row][column * PAGE_TOKENS : (column + 1) * PAGE_TOKENS] for row, column in cells]
            if len(parts) > 1:
                assert len({column for _, column in cells}) == 1
                assert all(parts), "pages without a token are nobody else's"
            for one, other in zip(parts, parts[1:], strict=False):
                common = min(len(one), len(other))
                assert one[:common] == other[:common]


def step(world: World, rng: random.Random) -> None:
    """Anything that a cache may be asked for, done at random."""
    batch, sequences = len(world.tokens), world.sequences
    lengths = [len(own) for own in world.tokens]
    action = rng.choices(
        ["extend", "extend each", "fill", "crop", "crop each", "select", "repeat", "join", "leave", "drop", "clear"],
        [30, 14, 4, 3, 8, 10, 3, 5, 5, 8, 0.2],
    )[0]
    if action == "extend" and max(lengths, default=0) < 500:
        world.extend([rng.choice([0, 1, 1, 1, 2, 5, 64, rng.randrange(150)])] * batch)
    elif action == "extend each":
        world.extend([rng.choice([0, 1, 3, rng.randrange(90)]) if own < 500 else 0 for own in lengths])
    elif action == "fill":  # to the end of the page
        world.extend([-own % PAGE_TOKENS for own in lengths])
    elif action in ("crop", "crop each"):
        most = [own - kept * PAGE_TOKENS for own, kept in zip(lengths, world.dropped, strict=True)]
        counts = [rng.choice([0, 1, 4, own % PAGE_TOKENS, rng.randrange(own + 1)]) for own in lengths]
        counts = [count if count <= limit else own for count, limit, own in zip(counts, most, lengths, strict=True)]
        together = rng.choice([0, 1, 4, 50])
        world.crop([min([together, *most])] * batch if action == "crop" else counts)
    elif action == "select" and batch:
        indices = [rng.randrange(batch) for _ in range(rng.choice([batch, batch, rng.randrange(9)]))]
        if len(indices) == batch:
            world.select(indices, lambda: sequences.reorder(indices))
        else:
            world.select(indices, lambda: sequences.select(indices))
    elif action == "repeat" and batch:
        count = rng.randint(1, max(1, 9 // batch))
        world.select([row for row in range(batch) for _ in range(count)], lambda: sequences.repeat(count))
    elif action == "join" and batch < 9:
        world.join(rng.choice([0, 1, 64, rng.randrange(200)]))
    elif action == "leave" and batch:
        row = rng.randrange(batch)
        world.select([other for other in range(batch) if other != row], lambda: sequences.leave(row))
    elif action == "drop":
        window = rng.choice([1, 10, 64, 100, 200])
        world.drop_before([max(0, own - window) for own in lengths])
    elif action == "clear":
        world.select([], lambda: sequences.select([]))
        assert sequences.owned == 0
