"""Stored rows of keys and values."""

import pytest
import torch

from rotaquant.hadamard import factor_or_fallback
from rotaquant.recipe import IntFormat
from rotaquant.runtime.kv_codec import LayerCodec, RowCodec


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("head_dim", [8, 12, 64, 80, 128, 192, 256])
def test_rows_come_back_within_half_a_step(bits: int, head_dim: int) -> None:
    codec = RowCodec(head_dim, IntFormat(bits=bits))
    x = torch.randn(2, 3, 5, head_dim)
    rows = codec.encode(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (2, 3, 5, codec.row_bytes)
    assert codec.row_bytes % 4 == 0
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / ((1 << bits) - 1)
    assert ((codec.decode(rows, torch.float32) - x).abs() <= step * 0.51 + 2e-3).all()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("head_dim", [6, 8, 40, 72])
def test_one_row_alone_decodes_like_many(bits: int, head_dim: int) -> None:
    """The scale of a row may start at an odd byte."""
    codec = RowCodec(head_dim, IntFormat(bits=bits))
    rows = codec.encode(torch.randn(1, 1, 2, head_dim))
    both = codec.decode(rows, torch.float32)
    assert torch.equal(codec.decode(rows[:, :, :1], torch.float32), both[:, :, :1])
    assert torch.equal(codec.decode(rows[:, :, 1:], torch.float32), both[:, :, 1:])


def test_the_clip_ratio_narrows_the_range() -> None:
    x = torch.linspace(-1, 1, 64)[None]
    whole, clipped = (RowCodec(64, IntFormat(bits=4, clip_ratio=ratio)) for ratio in (1.0, 0.5))
    assert whole.decode(whole.encode(x), torch.float32).abs().max() == pytest.approx(1.0, abs=2e-3)
    assert clipped.decode(clipped.encode(x), torch.float32).abs().max() == pytest.approx(0.5, abs=2e-3)


def test_a_row_of_128_at_4_bits_is_its_codes_and_four_bytes() -> None:
    assert RowCodec(128, IntFormat(bits=4)).row_bytes == 64 + 4


def test_every_token_and_head_is_quantized_alone() -> None:
    codec = RowCodec(32, IntFormat(bits=4, clip_ratio=0.95))
    x = torch.randn(2, 4, 6, 32)
    changed = x.clone()
    changed[0, 1, 2] *= 100
    before, after = codec.encode(x), codec.encode(changed)
    differs = (before != after).any(-1)
    assert differs[0, 1, 2]
    assert differs.sum() == 1


def test_groups_within_a_head() -> None:
    codec = RowCodec(64, IntFormat(bits=4, group_size=16))
    x = torch.cat((torch.randn(3, 16), 100 * torch.randn(3, 48)), -1)
    error = (codec.decode(codec.encode(x), torch.float32) - x)[:, :16].abs().max()
    assert error < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_rows_keep_every_bit(dtype: torch.dtype) -> None:
    codec = RowCodec(16, None)
    x = torch.randn(2, 2, 3, 16).to(dtype)
    assert torch.equal(codec.decode(codec.encode(x), dtype), x)


def test_rotated_queries_and_keys_keep_their_scores() -> None:
    codec = LayerCodec(RowCodec(80, None), RowCodec(80, None), factor_or_fallback(80))
    q, k = torch.randn(1, 2, 3, 80, dtype=torch.float64), torch.randn(1, 2, 5, 80, dtype=torch.float64)
    stored, _ = codec.decode(*codec.encode(k, k), torch.float64)
    assert not torch.allclose(stored, k)
    torch.testing.assert_close(codec.rotate(q) @ stored.mT, q @ k.mT)
