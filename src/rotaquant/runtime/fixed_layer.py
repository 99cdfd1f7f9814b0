"""The layer of a packed `StaticCache`: all pages from the start, at addresses that never change, for compiled steps."""

from __future__ import annotations

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops.cache_layout import PAGE_TOKENS
from rotaquant.runtime.kv_codec import LayerCodec
from rotaquant.runtime.packed_layer import STRETCH, PackedLayer, Place


class FixedLayer(PackedLayer):
    """A layer with pages for `max_cache_len` tokens of each sequence; with a window, a ring of fewer pages.

    How many tokens there are is known to the device alone: a compiled step is the same for every length.
    """

    is_compileable = True

    def __init__(self, codec: LayerCodec, max_cache_len: int, window: int | None = None) -> None:
        super().__init__(codec, window)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)
        columns = -(-max_cache_len // PAGE_TOKENS)
        # A window's tokens, and a stretch of new ones, wherever in a page they begin.
        ring = columns if window is None else -(-(window - 1 + STRETCH) // PAGE_TOKENS) + 1
        self._columns, self._ring = columns, min(columns, ring)
        # The most tokens there ever were: what a ring has overwritten does not come back by cropping.
        self._reached = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, device and dtype from the first keys, and all memory."""
        super().lazy_initialization(key_states, value_states)
        self.cumulative_length = self.cumulative_length.to(self.device)
        with torch.inference_mode(False):
            shape = self.batch * self._ring, self.form.page_bytes
            self.pages = torch.empty(shape, dtype=torch.uint8, device=self.device)
            rows, columns = (torch.arange(size, device=self.device) for size in (self.batch, self._columns))
            self.table = (rows[:, None] * self._ring + columns % self._ring) * self.form.page_bytes
        if not torch.compiler.is_compiling():
            for tensor in (self.pages, self.table, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    @property
    def batch_size(self) -> int:
        """The number of sequences, known from the first tokens on."""
        return self.batch

    def get_seq_length(self) -> Tensor | int:
        """The number of tokens of each sequence, a tensor on the device."""
        if not self.is_initialized:
            return 0
        return self.cumulative_length + (0 if self._pending is None else self._pending.count)

    def get_max_length(self) -> int:
        """The most tokens there is room for."""
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots a mask covers, and from which on: all there are."""
        return self.max_cache_len, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence."""
        if tokens_to_remove > 0:
            raise RotaquantError(f"crop({tokens_to_remove}): give the number of tokens to remove, below zero")
        self.flush()
        left = self.length + tokens_to_remove
        held = self.first_slot
        if left < 0 or (left > 0 and self._past(left) < held):
            raise RotaquantError(
                f"crop({tokens_to_remove}): of {self.length} tokens the first {held} are overwritten, and those of the "
                f"window of {self.window} before the last ones would be needed; crop fewer, or use a DynamicCache"
            )
        self._reached = max(self._reached, self.length)
        self.cumulative_length.sub_(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i be what sequence `beam_idx[i]` was."""
        self.flush()
        if self.is_initialized:
            self._bring_back()
            by_sequence = self.pages.view(self.batch, -1)
            by_sequence.copy_(by_sequence.index_select(0, beam_idx.to(self.device)))

    def reset(self) -> None:
        """Forget all tokens, and keep the memory."""
        self._pending, self._leaves = None, False
        self._reached = 0
        self.cumulative_length.zero_()

    @property
    def length(self) -> int:
        """The number of stored tokens of each sequence: waits for the device."""
        return int(self.cumulative_length)

    @property
    def first_slot(self) -> int:
        """The first slot whose token is still held: waits for the device."""
        reached = max(self._reached, self.length)
        return max(0, -(-reached // PAGE_TOKENS) - self._ring) * PAGE_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's pages."""
        return self.pages.nbytes if self.is_initialized else 0

    def positions(self, start: int, stop: int) -> Tensor:
        """The positions of the tokens in slots `start` to `stop`, `[batch, stop - start]`."""
        slots = torch.arange(start, stop, device=self.device)
        ids = self.table[:, slots // PAGE_TOKENS] // self.form.page_bytes
        return self.form.positions(self.pages)[ids, slots % PAGE_TOKENS].long()

    def _drop(self) -> None:
        """A ring overwrites what no later token sees."""

    def _send_away(self) -> None:
        self.place, self.pages = None, self.pages.cpu()

    def _bring_back(self) -> None:
        self.pages = self.pages.to(self.device)

    def _make_room(self, count: int) -> Place:
        self._bring_back()
        length = self.cumulative_length
        first = length.to(torch.int32).expand(self.batch).contiguous()
        length.add_(count)
        # As an index that is too large stops a stock cache: past its table an append would write anywhere.
        torch._assert_async(length <= self.max_cache_len, f"the cache has room for {self.max_cache_len} tokens")
        return Place(self.pages, self.table, first, first + count, self.max_cache_len)

    def _locate(self) -> Place:
        self._bring_back()
        first = self.cumulative_length.to(torch.int32).expand(self.batch).contiguous()
        return Place(self.pages, self.table, first, first, self.max_cache_len)

    def _mask_first(self) -> int:
        return 0
