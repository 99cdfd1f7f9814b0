"""Packing: every width and bit count comes back, and lies where the format says."""

import pytest
import torch

from rotaquant.ops import packing


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 7, 8, 31, 32, 33, 64, 172, 576])
def test_weights_come_back(bits: int, columns: int) -> None:
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (5, columns)).to(torch.int8)
    packed = packing.pack_weight(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (5, -(-columns * bits // 32))
    assert torch.equal(packing.unpack_weight(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_code_j_occupies_its_bits_of_the_row(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (1, 24)).to(torch.uint8)
    stream = int.from_bytes(packing.pack_unsigned(codes, bits)[0].numpy().tobytes(), "little")
    assert [(stream >> (j * bits)) & ((1 << bits) - 1) for j in range(24)] == codes[0].tolist()


def test_four_bit_words_hold_nibble_j_for_column_8i_plus_j() -> None:
    codes = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7, 3, 3, 3, 3, 3, 3, 3, -8]], dtype=torch.int8)
    words = packing.pack_weight(codes, 4)
    first = sum((code + 8) << (4 * j) for j, code in enumerate(codes[0, :8].tolist()))
    assert int(words[0, 0]) & 0xFFFFFFFF == first


@pytest.mark.parametrize("bits", range(2, 9))
def test_rows_of_a_cache_unpack_alone(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (2, 3, 4, 64)).to(torch.uint8)
    packed = packing.pack_unsigned(codes, bits)
    assert packed.shape[-1] == packing.packed_bytes(64, bits)
    assert torch.equal(packing.unpack_unsigned(packed[:, :, 2:3], bits, 64), codes[:, :, 2:3])
