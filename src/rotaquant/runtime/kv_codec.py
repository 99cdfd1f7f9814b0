"""How the keys and values of a layer are stored: in pages where its format allows, else as rows of bytes.

A row is one token's key or value of one head: the packed codes, then per group an fp16 scale and an fp16 lowest value,
padded to a multiple of four bytes. Rows are plain uint8 tensors, so that transformers' stock cache layers concatenate,
crop and reorder them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotaquant.hadamard import Factorisation, base_matrix, transform_matrix
from rotaquant.ops import packing, reference
from rotaquant.ops.cache import WIDEST_HEAD, Turn
from rotaquant.ops.cache_layout import HEAD_UNIT, PageFormat
from rotaquant.recipe import IntFormat
from rotaquant.runtime.key_bias import take_positions

_ROW_ALIGNMENT = 4
_POSITION_BYTES = 4


@dataclass(frozen=True)
class RowCodec:
    """Encodes `[..., head_dim]` to uint8 `[..., row_bytes]` and back; `fmt` None keeps the bytes of the floats."""

    head_dim: int
    fmt: IntFormat | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a quantized row."""
        assert self.fmt is not None
        groups = self.head_dim // (self.fmt.group_size or self.head_dim)
        size = packing.packed_bytes(self.head_dim, self.fmt.bits) + 4 * groups
        return size + -size % _ROW_ALIGNMENT

    def encode(self, x: Tensor) -> Tensor:
        """Rows of bytes of `x` `[..., head_dim]`."""
        if self.fmt is None:
            return x.contiguous().view(torch.uint8)
        assert isinstance(self.fmt.clip_ratio, float)
        grouped = x.unflatten(-1, (-1, self.fmt.group_size or self.head_dim))
        codes, scale, lowest = reference.quantize_asymmetric(grouped, self.fmt.bits, self.fmt.clip_ratio)
        packed = packing.pack_unsigned(codes.flatten(-2), self.fmt.bits)
        parameters = torch.cat((scale, lowest), dim=-1).flatten(-2).view(torch.uint8)
        row = torch.cat((packed, parameters), dim=-1)
        return torch.nn.functional.pad(row, (0, self.row_bytes - row.shape[-1]))

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """What the rows stand for, `[..., head_dim]` in `dtype` (float rows keep their own, which is the model's)."""
        if self.fmt is None:
            return rows.view(dtype)
        width = packing.packed_bytes(self.head_dim, self.fmt.bits)
        groups = self.head_dim // (self.fmt.group_size or self.head_dim)
        codes = packing.unpack_unsigned(rows[..., :width], self.fmt.bits, self.head_dim)
        # A copy even where the slice counts as contiguous: its offset may be odd, and halves start at even bytes.
        parameters = rows[..., width : width + 4 * groups].clone(memory_format=torch.contiguous_format)
        parameters = parameters.view(torch.float16)
        scale, lowest = parameters.unflatten(-1, (groups, 2)).split(1, dim=-1)
        grouped = codes.unflatten(-1, (groups, -1))
        return reference.dequantize_asymmetric(grouped, scale, lowest, dtype).flatten(-2)


@dataclass
class LayerCodec:
    """The cache format of one layer: keys are rotated by `query_key` before they are stored, values come rotated.

    With `stores_positions` every token's position (int32) is stored beside its key: what is left out of keys depends
    on it, and there it follows the token through padding, windows, cropping and reordering.
    """

    keys: RowCodec
    values: RowCodec
    query_key: Factorisation | None
    stores_positions: bool = False
    _bases: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)
    _turns: dict[tuple[torch.device, torch.dtype], Turn] = field(default_factory=dict, compare=False, repr=False)

    def page_format(self, kv_heads: int) -> PageFormat | None:
        """The format of the layer's pages; `None` where they cannot hold it: groups, floats, other heads."""
        if self.keys.fmt is None or self.values.fmt is None:
            return None
        sides = [(side.head_dim, side.fmt.group_size or side.head_dim) for side in (self.keys, self.values) if side.fmt]
        head_dim = self.keys.head_dim
        if sides != [(head_dim, head_dim)] * 2 or head_dim % HEAD_UNIT or head_dim > WIDEST_HEAD:
            return None
        if self.query_key is not None and self.query_key.seed is not None:
            return None  # a dense base is not made of small integers
        return PageFormat(kv_heads, head_dim, self.keys.fmt.bits, self.values.fmt.bits, self.stores_positions)

    @property
    def is_paged(self) -> bool:
        """Whether pages can hold the format, however many heads there are."""
        return self.page_format(1) is not None

    @property
    def clips(self) -> tuple[float, float]:
        """The clip ratios of keys and values."""
        assert self.keys.fmt is not None
        assert self.values.fmt is not None
        clips = self.keys.fmt.clip_ratio, self.values.fmt.clip_ratio
        assert isinstance(clips[0], float)
        assert isinstance(clips[1], float)
        return clips[0], clips[1]

    def turn(self, device: torch.device, dtype: torch.dtype) -> Turn:
        """The rotation of queries and keys after RoPE as `cache_append` takes it, made once."""
        if (device, dtype) not in self._turns:
            self._turns[device, dtype] = self._turn(device, dtype)
        return self._turns[device, dtype]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _turn(self, device: torch.device, dtype: torch.dtype) -> Turn:
        if self.query_key is None:
            return Turn()
        norm = (self.query_key.blocks / self.query_key.size) ** 0.5
        signs = (transform_matrix(self.query_key) / norm).round()
        return Turn(rotation=signs.to(device, dtype), norm=norm)

    def rotate(self, x: Tensor) -> Tensor:
        """Queries or keys after RoPE in the frame in which keys are stored, `[..., head_dim]`."""
        if self.query_key is None:
            return x
        base = self.prepare(x.device)
        return reference.rotate_rows(x, base, self.query_key.blocks).to(x.dtype)

    def prepare(self, device: torch.device) -> Tensor:
        """The base of the query/key rotation on `device`, made once."""
        assert self.query_key is not None
        if device not in self._bases:
            self._bases[device] = base_matrix(self.query_key).to(device)
        return self._bases[device]

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Float keys (after RoPE) and values `[batch, kv_heads, length, head_dim]` -> stored rows."""
        rows = self.keys.encode(self.rotate(keys))
        if self.stores_positions:
            positions = take_positions(keys.shape[0], keys.shape[2])
            stamp = positions.to(torch.int32)[:, None, :, None].expand(*keys.shape[:3], 1).contiguous()
            rows = torch.cat((rows, stamp.view(torch.uint8)), dim=-1)
        return rows, self.values.encode(values)

    def decode(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Stored rows -> rotated keys and values in `dtype`."""
        if self.stores_positions:
            keys = keys[..., :-_POSITION_BYTES].contiguous()
        return self.keys.decode(keys, dtype), self.values.decode(values, dtype)

    def stored_positions(self, keys: Tensor) -> Tensor:
        """The positions `[batch, length]` that rows of keys hold (the same in every head)."""
        assert self.stores_positions
        stamp = keys[:, 0, :, -_POSITION_BYTES:].clone(memory_format=torch.contiguous_format)
        return stamp.view(torch.int32).squeeze(-1).long()
