"""A layer's memory for the pages of a paged cache; `cache_layout` says what is in a page, `Sequences` whose it is.

A step of the cache is

    pairs = sequences.extend(length)
    for layer in layers:
        layer.ensure(sequences.total)
        layer.copy(pairs)
        table = layer.table(sequences)  # then `append` and `attend`, with `layer.base`
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops.cache_layout import PageFormat
from rotaquant.runtime.sequences import Sequences


class LayerPages:
    """One layer's memory for the page ids of its sequences: slabs uint8 `[n, page_bytes]`, never initialised.

    Kernels find a page by its offset in bytes from the start of `base`, the first slab. On CUDA memory grows by further
    slabs, anywhere in the device's memory; elsewhere there is one, so that `base` holds all pages in the order of ids.
    """

    def __init__(self, form: PageFormat, device: torch.device | str, slabbed: bool | None = None) -> None:
        self.form = form
        self.device = self._home = torch.device(device)
        self._slabbed = self.device.type == "cuda" if slabbed is None else slabbed
        self._slabs: list[Tensor] = []
        self._firsts: list[int] = []  # each slab's first id
        self._count = 0
        self._is_away = False
        self.offsets = torch.empty(0, dtype=torch.int64, device=self.device)
        self._table: Tensor | None = None
        self._epoch = 0

    @property
    def base(self) -> Tensor:
        """The slab from whose start offsets count; there is one once there is a table."""
        return self._slabs[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return sum(slab.nbytes for slab in self._slabs)

    def ensure(self, ids: int) -> None:
        """Have memory for `ids` page ids."""
        if ids <= self._count:
            return
        if self._slabbed and not self._is_away:
            self._add(self._new(ids - self._count))
        else:
            self._replace(self._new(ids))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, given as ids (source, target)."""
        if not pairs:
            return
        last = max(max(pair) for pair in pairs)
        if last >= self._count:
            raise RotaquantError(f"page {last} has no memory: call ensure({last + 1}) before copy")
        targets = [self._page(target) for _, target in pairs]
        torch._foreach_copy_(targets, [self._page(source) for source, _ in pairs])

    def table(self, sequences: Sequences) -> Tensor:
        """The offsets of the sequences' pages, int64 `[batch, columns]`; those of columns without a page are 0.

        Made anew when the sequences' epoch changes, in place as long as its shape lasts: a captured graph goes on
        reading the right pages.
        """
        if self._table is not None and self._epoch == sequences.epoch:
            return self._table
        self.ensure(max(1, sequences.total))  # offset 0 is a page always
        with torch.inference_mode(False):
            table = self.offsets[sequences.ids(self.device)]
            if self._table is not None and self._table.shape == table.shape:
                self._table.copy_(table)
            else:
                self._table = table
        self._epoch = sequences.epoch
        return self._table

    def positions(self) -> Tensor:
        """The positions of the tokens in all pages, int32 `[ids, tokens]`; formats without them have none."""
        return torch.cat([self.form.positions(slab) for slab in self._slabs])

    def to_host(self) -> None:
        """Move all pages to the CPU, where they are one slab."""
        self._move(torch.device("cpu"), is_away=True)

    def to_device(self) -> None:
        """Move all pages back to the device of the layer."""
        self._move(self._home, is_away=False)

    def _move(self, device: torch.device, is_away: bool) -> None:
        if self._is_away == is_away:
            return
        self.device, self._is_away, self._table = device, is_away, None
        if self._count:
            self._replace(self._new(self._count))
        else:
            self._hold([])

    def _new(self, pages: int) -> Tensor:
        # Not an inference tensor, even in inference mode: those cannot be written outside of it.
        with torch.inference_mode(False):
            return torch.empty((pages, self.form.page_bytes), dtype=torch.uint8, device=self.device)

    def _replace(self, slab: Tensor) -> None:
        """Let one slab take the place, and the content, of all."""
        for first, old in zip(self._firsts, self._slabs, strict=True):
            slab[first : first + len(old)].copy_(old)
        self._hold([slab])

    def _hold(self, slabs: list[Tensor]) -> None:
        self._slabs, self._firsts, self._count = [], [], 0
        self.offsets = torch.empty(0, dtype=torch.int64, device=self.device)
        for slab in slabs:
            self._add(slab)

    def _add(self, slab: Tensor) -> None:
        self._slabs.append(slab)
        self._firsts.append(self._count)
        self._count += len(slab)
        with torch.inference_mode(False):
            places = torch.arange(len(slab), device=self.device) * self.form.page_bytes
            start = slab.data_ptr() - self.base.data_ptr()
            self.offsets = torch.cat((self.offsets, places + start))

    def _page(self, index: int) -> Tensor:
        slab = bisect_right(self._firsts, index) - 1
        # In words: a page is a multiple of 64 bytes, which one by one would take longer to copy.
        return self._slabs[slab][index - self._firsts[slab]].view(torch.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None, "offsets": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has slabs elsewhere in memory, hence other offsets."""
        self.__dict__.update(state)
        with torch.inference_mode(False):  # see `_new`
            self._hold([slab.clone() if slab.is_inference() else slab for slab in self._slabs])
