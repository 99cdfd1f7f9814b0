"""The bias of keys, which stays out of the cache: attention adds its exact share at every token's own position.

A bias is one large vector that RoPE turns with the position; in the cache it would widen the range of every row and
drown the rest of the key. The share of key j in a score is q · RoPE_j(b), which depends on j alone.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from rotaquant.architectures import Rope
from rotaquant.errors import RotaquantError


class RotaryPositions:
    """RoPE of one vector at given positions, with the angles of the model's own rotary module."""

    def __init__(self, rotary: nn.Module, rope: Rope) -> None:
        self._rotary = rotary
        self._rope = rope

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """`[heads, head_dim]` at positions `[batch, length]` -> `[batch, heads, length, head_dim]`."""
        arguments: dict[str, Any] = {"layer_type": self._rope.layer_type} if self._rope.layer_type else {}
        cos, sin = self._rotary(x, positions, **arguments)
        if self._rope.style == "half-once":
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        elif self._rope.style == "interleaved-from-halves":
            cos, sin = (part.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for part in (cos, sin))
        cos, sin = cos[:, None], sin[:, None]
        turned, still = x[:, None].split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        turned = turned * cos + _quarter_turn(turned, self._rope.style) * sin
        return torch.cat((turned, still.expand(*turned.shape[:-1], -1)), dim=-1)


def _quarter_turn(x: Tensor, style: str) -> Tensor:
    """Each pair of channels (a, b) becomes (-b, a)."""
    if style.startswith("interleaved"):
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


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
