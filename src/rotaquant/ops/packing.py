"""Dense bit packing: the only place that knows how codes lie in bytes and words.

A row is a little-endian stream of bits: code j of a b-bit row occupies bits [j*b, (j+1)*b). For 4 bits, nibble j of
a 32-bit word is column 8i+j, which is compressed-tensors' `pack-quantized` layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CODES_PER_CHUNK = 8  # eight b-bit codes fill b whole bytes, for every b


def packed_bytes(columns: int, bits: int) -> int:
    """Bytes that hold `columns` codes of `bits` bits, without padding beyond the last byte."""
    return (columns * bits + 7) // 8


def pack_unsigned(codes: Tensor, bits: int) -> Tensor:
    """Pack codes in [0, 2**bits) along the last axis: uint8 `[..., n]` -> uint8 `[..., ceil(n*bits/8)]`."""
    columns = codes.shape[-1]
    padded = torch.nn.functional.pad(codes, (0, -columns % _CODES_PER_CHUNK))
    if bits == 8:
        return codes.contiguous()
    if bits == 4:
        packed = padded[..., 0::2] | (padded[..., 1::2] << 4)
    else:
        chunks = padded.unflatten(-1, (-1, _CODES_PER_CHUNK)).to(torch.int64)
        shifts = torch.arange(_CODES_PER_CHUNK, device=codes.device) * bits
        words = (chunks << shifts).sum(-1, keepdim=True)
        byte_shifts = torch.arange(bits, device=codes.device) * 8
        packed = ((words >> byte_shifts) & 0xFF).to(torch.uint8).flatten(-2)
    return packed[..., : packed_bytes(columns, bits)].contiguous()


def unpack_unsigned(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack_unsigned`: uint8 `[..., ceil(columns*bits/8)]` -> uint8 `[..., columns]`."""
    if bits == 8:
        return packed[..., :columns]
    if bits == 4:
        return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :columns]
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    byte_shifts = torch.arange(bits, device=packed.device) * 8
    words = (padded.unflatten(-1, (-1, bits)).to(torch.int64) << byte_shifts).sum(-1, keepdim=True)
    shifts = torch.arange(_CODES_PER_CHUNK, device=packed.device) * bits
    return ((words >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)[..., :columns]


def pack_weight(codes: Tensor, bits: int) -> Tensor:
    """Pack signed weight codes int8 `[out, in]` to int32 `[out, ceil(in*bits/32)]`, offset by 2**(bits-1)."""
    # Bytes wrap around, so the offset needs no wider type.
    packed = pack_unsigned(codes.view(torch.uint8) + (1 << (bits - 1)), bits)
    return torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).view(torch.int32)


def unpack_weight(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack_weight`: int32 `[out, ceil(columns*bits/32)]` -> int8 `[out, columns]`."""
    unsigned = unpack_unsigned(packed.contiguous().view(torch.uint8), bits, columns)
    return (unsigned - (1 << (bits - 1))).view(torch.int8)


def packed_words(columns: int, bits: int) -> int:
    """32-bit words that hold a row of `columns` codes."""
    return (columns * bits + 31) // 32


def plane_columns(columns: int, planar: bool) -> int:
    """Columns of one plane of `to_planes`: as many as the words of a packed row of weights have bytes."""
    return 4 * -(-columns // 8) if planar else 4 * -(-columns // 4)


def to_planes(codes: Tensor, planar: bool) -> Tensor:
    """Activation codes in the order that kernels read: int8 `[m, n]` -> `[m, 2, plane]` or `[m, 1, plane]`.

    Beside 4-bit weights, whose bytes hold two columns, even columns and odd ones are apart; the rest is zeros.
    """
    plane = plane_columns(codes.shape[-1], planar)
    planes = 2 if planar else 1
    padded = torch.nn.functional.pad(codes, (0, planes * plane - codes.shape[-1]))
    return padded.unflatten(-1, (plane, planes)).mT.contiguous()


def from_planes(codes: Tensor, columns: int) -> Tensor:
    """Undo `to_planes`: int8 `[m, planes, plane]` -> `[m, columns]`."""
    return codes.mT.flatten(-2)[..., :columns]
