"""How keys and values lie in the pages of the packed cache: the only place that knows, but for the kernels.

A page holds `PAGE_TOKENS` tokens of one sequence in one layer. It is a stretch of bytes, head by head; a head's are,
each of them token after token,

    codes of keys | codes of values | scale and lowest value of keys | scale and lowest value of values

and after the heads, where keys' positions are kept, those of the tokens (int32). Scale and lowest value are fp16, and
stand for `codes * scale + lowest`. Codes of 2 and 4 bits are dense, as in `packing`; of 3 bits, the lower two of all
channels are followed by the upper one of all; those of 5 to 8 bits take a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaquant.ops import packing

PAGE_TOKENS = 64
PARAMETER_BYTES = 4  # a scale and a lowest value
POSITION_BYTES = 4
HEAD_UNIT = 8  # channels of a head are a multiple of it


def code_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one token's codes of one head."""
    return head_dim if bits > 4 else packing.packed_bytes(head_dim, bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[..., head_dim]` below 2**bits -> uint8 `[..., code_bytes]`."""
    if bits > 4:
        return codes
    if bits != 3:
        return packing.pack_unsigned(codes, bits)
    return torch.cat((packing.pack_unsigned(codes & 3, 2), packing.pack_unsigned(codes >> 2, 1)), dim=-1)


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Undo `pack_codes`."""
    if bits > 4:
        return packed
    if bits != 3:
        return packing.unpack_unsigned(packed, bits, head_dim)
    lower, upper = packed.split((head_dim // 4, head_dim // 8), dim=-1)
    return packing.unpack_unsigned(lower, 2, head_dim) | (packing.unpack_unsigned(upper, 1, head_dim) << 2)


@dataclass(frozen=True)
class PageFormat:
    """The shape of a layer's pages: heads, channels, bits of keys and of values, and whether positions are kept."""

    kv_heads: int
    head_dim: int
    key_bits: int
    value_bits: int
    has_positions: bool = False

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's codes."""
        return code_bytes(self.head_dim, self.key_bits)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value's codes."""
        return code_bytes(self.head_dim, self.value_bits)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a page."""
        return PAGE_TOKENS * (self.key_bytes + self.value_bytes + 2 * PARAMETER_BYTES)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 64."""
        return self.kv_heads * self.head_bytes + (PAGE_TOKENS * POSITION_BYTES if self.has_positions else 0)

    def split(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of uint8 `[n, page_bytes]`: codes of keys and of values `[n, kv_heads, tokens, bytes]`, parameters.

        Parameters are fp16 `[n, kv_heads, tokens, 2]`.
        """
        heads = pages[:, : self.kv_heads * self.head_bytes].unflatten(-1, (self.kv_heads, self.head_bytes))
        sizes = [PAGE_TOKENS * size for size in (self.key_bytes, self.value_bytes, PARAMETER_BYTES, PARAMETER_BYTES)]
        parts = [part.unflatten(-1, (PAGE_TOKENS, -1)) for part in heads.split(sizes, dim=-1)]
        return parts[0], parts[1], parts[2].view(torch.float16), parts[3].view(torch.float16)

    def positions(self, pages: Tensor) -> Tensor:
        """A view of uint8 `[n, page_bytes]`: the tokens' positions, int32 `[n, tokens]`."""
        assert self.has_positions
        return pages[:, self.kv_heads * self.head_bytes :].view(torch.int32)
