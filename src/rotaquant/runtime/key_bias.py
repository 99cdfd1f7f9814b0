"""The bias of keys, which stays out of the cache: attention adds its exact share at every token's own position.

A bias is one large vector that RoPE turns with the position; in the cache it would widen the range of every row and
drown the rest of the key. The share of key j in a score is q · RoPE_j(b), which depends on j alone.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from rotaquant.architectures import Rope
from rotaquant.errors import RotaquantError
from rotaquant.ops import cache_reference


class RotaryPositions:
    """RoPE of one vector at given positions, with the angles of the model's own rotary module."""

    def __init__(self, rotary: nn.Module, rope: Rope) -> None:
        self._rotary = rotary
        self._rope = rope

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """`[heads, head_dim]` at positions `[batch, length]` -> `[batch, heads, length, head_dim]`."""
        arguments: dict[str, Any] = {"layer_type": self._rope.layer_type} if self._rope.layer_type else {}
        cos, sin = self._rotary(x, positions, **arguments)
        everywhere = x.expand(*positions.shape, *x.shape)
        return cache_reference.rope(everywhere, cos, sin, self._rope.style).transpose(1, 2)


class _RunningCall(threading.local):
    """The attention call that a thread is in. Neither models nor caches hold it: both may be copied or shared."""

    positions: Tensor | None = None


_running_call = _RunningCall()


def note_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of an attention module: notes the positions of the tokens it is called with."""
    _running_call.positions = kwargs.get("position_ids")


def take_positions(batch: int, length: int) -> Tensor:
    """The positions `[batch or 1, length]` of the running attention call's tokens, which stores them once."""
    positions, _running_call.positions = _running_call.positions, None
    if positions is None or positions.shape[-1] != length or positions.shape[0] not in (1, batch):
        raise RotaquantError(
            "the keys of this model are stored without their bias, which needs every token's position: pass no "
            "cache, or an empty DynamicCache or StaticCache"
        )
    return positions
