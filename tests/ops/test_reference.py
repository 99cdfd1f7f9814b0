"""The definitions: grids by hand, exact integers, rotations against dense matrices."""

import pytest
import torch

from rotaquant.hadamard import base_matrix, factor_or_fallback, transform_matrix
from rotaquant.ops import reference


def test_symmetric_grid_by_hand() -> None:
    x = torch.tensor([[7.0, -3.5, 1.2, 0.5], [0.0, 0.0, 0.0, 0.0]])
    codes, scale = reference.quantize_rows(x, bits=4, clip_ratio=1.0)
    assert scale[:, 0].tolist() == [1.0, 1.0]  # a row of zeros has scale one
    assert codes.tolist() == [[7, -4, 1, 0], [0, 0, 0, 0]]  # half to even: -3.5 -> -4, 0.5 -> 0


def test_clip_ratio_shrinks_the_range_and_clamps() -> None:
    codes, scale = reference.quantize_rows(torch.tensor([[10.0, -10.0, 1.0]]), bits=4, clip_ratio=0.5)
    assert scale.item() == pytest.approx(5 / 7)
    assert codes.tolist() == [[7, -8, 1]]


def test_groups_have_their_own_scales() -> None:
    x = torch.cat((torch.randn(3, 32), 100 * torch.randn(3, 32)), dim=1)
    codes, scale = reference.quantize_rows(x, bits=4, clip_ratio=1.0, group_size=32)
    alone, alone_scale = reference.quantize_rows(x[:, :32], bits=4, clip_ratio=1.0)
    assert torch.equal(codes[:, :32], alone)
    assert torch.equal(scale[:, :1], alone_scale)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x = torch.randn(3, 16)
    x[1, 4] = float("nan")
    x[2, 0] = float("inf")
    codes, scale = reference.quantize_rows(x, bits=4, clip_ratio=0.9)
    clean_codes, clean_scale = reference.quantize_rows(x[:1], bits=4, clip_ratio=0.9)
    assert torch.equal(codes[:1], clean_codes)
    assert torch.equal(scale[:1], clean_scale)
    assert not torch.isfinite(reference.dequantize_groups(codes, scale, torch.float32)[1:]).any()


def test_asymmetric_grid_of_one_signed_rows() -> None:
    x = torch.tensor([[4.0, 5.0, 6.0, 19.0]])
    codes, scale, lowest = reference.quantize_asymmetric(x, bits=4, clip_ratio=1.0)
    assert (scale.item(), lowest.item()) == (1.0, 4.0)
    assert codes.tolist() == [[0, 1, 2, 15]]
    # The clip narrows the range about its middle; scaling min and max themselves would move it off the data.
    _, scale, lowest = reference.quantize_asymmetric(x, bits=4, clip_ratio=0.5)
    assert lowest.item() == pytest.approx(11.5 - 3.75)
    assert scale.item() == pytest.approx(0.5)


@pytest.mark.parametrize("value", [0.0, -3.25, 1024.0])
def test_a_constant_row_comes_back_exactly(value: float) -> None:
    x = torch.full((2, 8), value)
    codes, scale, lowest = reference.quantize_asymmetric(x, bits=4, clip_ratio=0.95)
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(reference.dequantize_asymmetric(codes, scale, lowest, torch.float32), x)


def test_stored_scales_saturate_in_fp16() -> None:
    codes, scale, lowest = reference.quantize_asymmetric(torch.tensor([[-3e5, 3e5, 0.0]]), bits=4, clip_ratio=1.0)
    assert torch.isfinite(scale).all() and torch.isfinite(lowest).all()
    assert codes.max() <= 15


def test_asymmetric_error_is_at_most_half_a_step_within_the_range() -> None:
    x = torch.randn(64, 128) * 3 + 5
    for bits in range(2, 9):
        codes, scale, lowest = reference.quantize_asymmetric(x, bits=bits, clip_ratio=1.0)
        error = (reference.dequantize_asymmetric(codes, scale, lowest, torch.float32) - x).abs()
        # fp16 rounding of the offset may shift the grid by a little.
        assert (error <= scale.float() * 0.5 + x.abs().amax() * 2e-3).all()


@pytest.mark.parametrize(("a_bits", "b_bits"), [(4, 4), (8, 8), (8, 4), (6, 6), (2, 8)])
@pytest.mark.parametrize("columns", [1, 576, 1040, 1041, 5000])
def test_integer_products_are_exact_at_the_extremes(a_bits: int, b_bits: int, columns: int) -> None:
    def extreme(rows: int, bits: int) -> torch.Tensor:
        half = 1 << (bits - 1)
        codes = torch.randint(-half, half, (rows, columns))
        codes[0] = -half  # all partial sums as large as they get
        return codes.to(torch.int8)

    a, b = extreme(3, a_bits), extreme(4, b_bits)
    assert torch.equal(reference.int_matmul(a, a_bits, b, b_bits).long(), a.long() @ b.long().T)


def test_grouped_product_equals_the_product_of_dequantized_values() -> None:
    x, w = torch.randn(5, 96, dtype=torch.float64), torch.randn(7, 96, dtype=torch.float64)
    codes, scale = reference.quantize_rows(x, 4, 1.0, group_size=32)
    w_codes, w_scale = reference.quantize_rows(w, 4, 1.0, group_size=32)
    product = reference.quantized_matmul(codes, scale, w_codes, w_scale, (4, 4))
    dense = reference.dequantize_groups(codes, scale, torch.float64)
    expected = dense @ reference.dequantize_groups(w_codes, w_scale, torch.float64).T
    torch.testing.assert_close(product, expected, rtol=1e-12, atol=1e-12)


def test_an_accumulator_beyond_half_precision_does_not_overflow() -> None:
    codes = torch.full((1, 4096), 7, dtype=torch.int8)
    scale = torch.full((1, 1), 1e-4)
    out = reference.quantized_matmul(codes, scale, codes, torch.full((1, 1), 1e-4, dtype=torch.float16), (4, 4))
    assert out.item() == pytest.approx(49 * 4096 * 1e-8, rel=1e-2)


@pytest.mark.parametrize("size", [1, 2, 12, 45, 64, 172, 576, 1536, 4096, 107 * 32, 3584])
def test_rotation_equals_the_dense_product(size: int) -> None:
    factorisation = factor_or_fallback(size)
    x = torch.randn(3, size, dtype=torch.float64)
    rotated = reference.rotate_rows(x, base_matrix(factorisation), factorisation.blocks)
    torch.testing.assert_close(rotated, x @ transform_matrix(factorisation), rtol=1e-11, atol=1e-11)


def test_sylvester_by_products_equals_butterflies() -> None:
    x = torch.randn(2, 3, 8192, dtype=torch.float64)
    torch.testing.assert_close(
        reference._sylvester_by_products(x), reference.sylvester_transform(x), rtol=1e-11, atol=1e-11
    )
