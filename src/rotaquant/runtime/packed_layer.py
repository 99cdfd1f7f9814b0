"""What the layers of a packed cache have in common: keys and values in pages, as attention fills and reads them.

What `update` is given is only noted; attention stores it (`PackedLayer.append`), so that one kernel turns its query
too, a long text passes a window in stretches, and an offloaded layer is sent away when it has been attended to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from rotaquant.errors import RotaquantError
from rotaquant.ops.cache import arrivals_for, cache_append, cache_read
from rotaquant.ops.cache_layout import PageFormat
from rotaquant.runtime.key_bias import take_positions
from rotaquant.runtime.kv_codec import LayerCodec

# Tokens of a long text that a layer with a window takes at once.
STRETCH = 1024


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Keys (after RoPE) and values `[batch, kv_heads, length, head_dim]` on their way into a layer.

    `update` returns it in place of stored keys and values. Masks of the call cover the slots from `mask_first` on.
    """

    layer: PackedLayer
    keys: Tensor
    values: Tensor
    positions: Tensor | None
    mask_first: int

    @property
    def count(self) -> int:
        """Tokens of each sequence."""
        return self.keys.shape[2]

    def part(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values `[batch, length, kv_heads, head_dim]` of a stretch of the tokens, and their positions."""
        keys, values = (x[:, :, begin:end].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values, None if self.positions is None else self.positions[:, begin:end]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a layer's tokens are, as the operations on the cache take it: pages and the table of their offsets.

    `first` and `lengths`, int32 `[batch]`, are on the device; no length exceeds `longest`.
    """

    pages: Tensor
    table: Tensor
    first: Tensor
    lengths: Tensor
    longest: int


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values in pages; what differs between kinds of caches is where the pages come from."""

    is_sliding = False
    is_croppable = True
    form: PageFormat
    device: torch.device
    dtype: torch.dtype
    batch: int

    def __init__(self, codec: LayerCodec, window: int | None) -> None:
        # Not the stock `__init__`, which would set `keys` and `values`.
        self.codec = codec
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = False
        self.place: Place | None = None
        self._pending: NewTokens | None = None
        self._arrivals: Tensor | None = None
        self._leaves = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, device and dtype from the first keys."""
        form = self.codec.page_format(key_states.shape[1])
        assert form is not None, "cache layers are paged where pages can hold the format"
        self.form, self.device, self.dtype = form, key_states.device, key_states.dtype
        self.batch = key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Note new keys (after RoPE) and values `[batch, kv_heads, length, head_dim]`; attention stores them."""
        self.flush()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, length = key_states.shape[0], key_states.shape[2]
        if batch != self.batch:
            raise RotaquantError(
                f"the cache holds {self.batch} sequences, and is given tokens of {batch}: reset it, make a new one, "
                "or use batch_repeat_interleave or batch_select_indices"
            )
        positions = take_positions(batch, length) if self.form.has_positions else None
        self._pending = NewTokens(self, key_states, value_states, positions, self._mask_first())
        return self._pending, self._pending

    def stretches(self, count: int, is_causal: bool = True) -> Iterator[tuple[int, int]]:
        """Begin and end of the stretches in which so many new tokens are stored and attended to.

        With a window not all pages of a long text need be held at once, unless queries see what comes after them.
        """
        step = STRETCH if self.window is not None and is_causal else max(count, 1)
        for begin in range(0, count, step):
            yield begin, min(begin + step, count)

    def take(self, tokens: NewTokens) -> None:
        """Leave it to the caller to store the tokens that `update` noted last."""
        if self._pending is not tokens:
            raise RotaquantError("attention is called twice for one update of the cache: call update before each")
        self._pending = None

    def flush(self) -> None:
        """Store what `update` noted and no attention did."""
        tokens, self._pending = self._pending, None
        if tokens is not None:
            for begin, end in self.stretches(tokens.count):
                self.append(tokens, begin, end, None)
                self.release()

    def append(self, tokens: NewTokens, begin: int, end: int, query: Tensor | None) -> Tensor:
        """Store a stretch of new tokens; gives their `query` `[batch, length, heads, head_dim]` turned as keys are."""
        place = self.place = self._make_room(end - begin)
        keys, values, positions = tokens.part(begin, end)
        turn = self.codec.turn(self.device, keys.dtype)
        return cache_append(
            place.pages, place.table, place.first, (query, keys, values), positions, self.form, self.codec.clips, turn
        )

    def release(self) -> None:
        """After attention: give up what no later token sees, and go where `offload` asked for."""
        self._drop()
        if self._leaves and self._pending is None:
            self._leaves = False
            self._send_away()

    def offload(self) -> None:
        """Send the pages to the CPU, once attention is through with them."""
        self._leaves = self._pending is not None
        if self.is_initialized and not self._leaves:
            self._send_away()

    def prefetch(self) -> None:
        """Bring the pages back."""
        if self.is_initialized:
            self._bring_back()

    def read(self, start: int, stop: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values in slots `start` to `stop` of heads, `[batch, heads, stop - start, head_dim]`."""
        if self.place is None:
            self.place = self._locate()
        return cache_read(self.place.pages, self.place.table, start, stop, heads, self.form, dtype)

    def arrivals(self, heads: int) -> Tensor:
        """The counts that attention with so many query heads wants."""
        if self._arrivals is None or self._arrivals.device != self.device:
            with torch.inference_mode(False):
                self._arrivals = arrivals_for(self.batch, self.form.kv_heads, heads // self.form.kv_heads, self.device)
        return self._arrivals

    @property
    def keys(self) -> Tensor | None:
        """All stored keys, rotated, `[batch, kv_heads, slots, head_dim]`; `None` in an empty layer."""
        return self._all(0)

    @property
    def values(self) -> Tensor | None:
        """All stored values `[batch, kv_heads, slots, head_dim]`; `None` in an empty layer."""
        return self._all(1)

    def _all(self, side: int) -> Tensor | None:
        self.flush()
        if not self.is_initialized or self.length == 0:
            return None
        self.place = None  # sequences may have changed since
        return self.read(self.first_slot, self.length, (0, self.form.kv_heads), self.dtype)[side]

    def _past(self, length: int) -> int:
        """The first slot that a token after `length` ones sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its pages elsewhere."""
        self.flush()
        return {**self.__dict__, "place": None}

    # --- what kinds of layers differ in ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of stored tokens of each sequence, on the host."""

    @property
    @abstractmethod
    def first_slot(self) -> int:
        """The first slot whose token is still held."""

    @abstractmethod
    def positions(self, start: int, stop: int) -> Tensor:
        """The positions of the tokens in slots `start` to `stop`, `[batch, stop - start]`."""

    @abstractmethod
    def _drop(self) -> None:
        """Give up what no later token sees."""

    @abstractmethod
    def _send_away(self) -> None:
        """Move the pages to the CPU."""

    @abstractmethod
    def _bring_back(self) -> None:
        """Move the pages to where the tokens come from, if they are not there."""

    @abstractmethod
    def _make_room(self, count: int) -> Place:
        """Room for `count` more tokens of each sequence."""

    @abstractmethod
    def _locate(self) -> Place:
        """Where the tokens are now."""

    @abstractmethod
    def _mask_first(self) -> int:
        """The first slot that a mask of the next tokens covers."""
