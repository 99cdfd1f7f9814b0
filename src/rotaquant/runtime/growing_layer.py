"""The layer of a packed `DynamicCache`: pages are taken as tokens come, shared by beams, freed behind a window."""

from __future__ import annotations

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops.cache_layout import PAGE_TOKENS
from rotaquant.runtime.kv_codec import LayerCodec
from rotaquant.runtime.packed_layer import PackedLayer, Place
from rotaquant.runtime.page_group import PageGroup
from rotaquant.runtime.pages import LayerPages
from rotaquant.runtime.sequences import Pairs


class GrowingLayer(PackedLayer):
    """A layer whose sequences grow page by page; layers without a window share one `group`."""

    is_compileable = False
    pages: LayerPages

    def __init__(self, codec: LayerCodec, group: PageGroup, window: int | None = None) -> None:
        super().__init__(codec, window)
        self.group = group
        self.record_past = False
        self._seen = 0
        self._stored = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, device and dtype from the first keys, and begin the sequences."""
        super().lazy_initialization(key_states, value_states)
        # The definitions, which take what the kernels do not, want all pages in one piece.
        is_slabbed = self.device.type == "cuda" and self.dtype.itemsize == 2
        self.pages = LayerPages(self.form, self.device, slabbed=is_slabbed)
        self._change("begin", self.batch)

    def get_seq_length(self) -> int:
        """The number of tokens of each sequence."""
        return self._stored + (0 if self._pending is None else self._pending.count)

    def get_max_length(self) -> int:
        """The tokens that a query sees, at most; -1: all."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots a mask covers, and from which on."""
        first = self._mask_first()
        return self.get_seq_length() - first + query_length, first

    def activate_past_recording(self) -> None:
        """Free nothing behind the window until the next `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence, and then what no later token sees."""
        if tokens_to_remove > 0:
            raise RotaquantError(
                f"crop({tokens_to_remove}): give the number of tokens to remove, below zero: "
                f"crop({tokens_to_remove} - cache.get_seq_length()) leaves {tokens_to_remove}"
            )
        self.flush()
        if not self.is_initialized:
            return
        left = self._stored + tokens_to_remove
        if 0 < left and self._past(left) < self.first_slot:
            raise RotaquantError(
                f"crop({tokens_to_remove}): of {self._stored} tokens the first {self.first_slot} have left the window "
                f"of {self.window}, and are needed again; call activate_past_recording() after the prefill"
            )
        if tokens_to_remove < 0:
            self._change("crop", -tokens_to_remove)
            self._stored = left
        if self.window is not None:
            self._change("drop_before", self._past(left))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i be what sequence `beam_idx[i]` was."""
        self._select("reorder", beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every sequence be followed by `repeats` - 1 more of its kind."""
        self._select("repeat", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of the indices (or where a boolean tensor is true), in that order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        rows = indices.tolist()
        self._select("select", [row + self.batch if row < 0 else row for row in rows] if self.is_initialized else rows)

    def reset(self) -> None:
        """Forget all tokens; what comes next may be another batch."""
        self._pending = self._arrivals = None
        self._leaves = self.is_initialized = False
        self._stored = 0
        self._seen = self.group.changes
        self.__dict__.pop("pages", None)
        self.place = None

    @property
    def length(self) -> int:
        """The number of stored tokens of each sequence."""
        return self._stored

    @property
    def first_slot(self) -> int:
        """The first slot whose token is still held."""
        return self.group.sequences.first

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's pages."""
        return self.pages.nbytes if self.is_initialized else 0

    def positions(self, start: int, stop: int) -> Tensor:
        """The positions of the tokens in slots `start` to `stop`, `[batch, stop - start]`."""
        slots = torch.arange(start, stop, device=self.device)
        ids = self.group.sequences.ids(self.device)[:, slots // PAGE_TOKENS]
        return self.pages.positions()[ids, slots % PAGE_TOKENS].long()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _make_room(self, count: int) -> Place:
        # Sequences are books of plain numbers: nothing that a compiler can trace.
        self._bring_back()
        pairs = self._change("extend", count)
        self.group.require_newest(self._seen)
        self._stored += count
        self.pages.ensure(self.group.sequences.total)
        self.pages.copy(pairs)
        return self._locate(count)

    def _locate(self, new: int = 0) -> Place:
        self._bring_back()
        table = self.pages.table(self.group.sequences)
        first, lengths = self.group.counts(self.device, new)
        return Place(self.pages.base, table, first, lengths, self._stored)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _drop(self) -> None:
        if self.window is not None and not self.record_past:
            self._change("drop_before", self._past(self._stored))

    def _send_away(self) -> None:
        self.place = None
        self.pages.to_host()

    def _bring_back(self) -> None:
        self.pages.to_device()

    def _mask_first(self) -> int:
        return self._past(self.get_seq_length())

    def _change(self, name: str, *arguments: object) -> Pairs:
        pairs = self.group.change(self._seen, name, *arguments)
        self._seen += 1
        return pairs

    def _select(self, name: str, argument: object) -> None:
        self.flush()
        if self.is_initialized:
            self._change(name, argument)
            self.batch, self._arrivals = self.group.sequences.batch, None
