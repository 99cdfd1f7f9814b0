"""GPTQ: what must hold whatever the data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotaquant.quantization.gptq import gptq, inverse_cholesky, output_error
from rotaquant.quantization.weights import round_to_nearest, weight_scale
from rotaquant.recipe import Gptq, IntFormat


def problem(seed: int, rows: int = 24, columns: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator) ** 2
    inputs = torch.randn(512, columns, generator=generator) @ mixing
    return weight, inputs.T @ inputs / 512


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("block_size", [1, 17, 128])
@pytest.mark.parametrize("activation_order", [False, True])
def test_identity_hessian_is_round_to_nearest(
    bits: int, group_size: int | None, block_size: int, activation_order: bool
) -> None:
    weight, _ = problem(bits)
    fmt = IntFormat(bits=bits, group_size=group_size, clip_ratio="search")
    scale = weight_scale(weight, fmt, torch.float32)
    chosen = gptq(weight, torch.eye(96), fmt, scale, Gptq(block_size=block_size, activation_order=activation_order))
    assert chosen is not None
    assert torch.equal(chosen.codes, round_to_nearest(weight, fmt, scale).codes)


@given(seed=st.integers(0, 10_000), bits=st.integers(2, 6), ordered=st.booleans())
@settings(max_examples=30, deadline=None)
def test_output_error_is_below_round_to_nearest(seed: int, bits: int, ordered: bool) -> None:
    weight, hessian = problem(seed)
    fmt = IntFormat(bits=bits, clip_ratio="search")
    scale = weight_scale(weight, fmt, torch.float32)
    chosen = gptq(weight, hessian, fmt, scale, Gptq(activation_order=ordered))
    assert chosen is not None
    nearest = output_error(weight, round_to_nearest(weight, fmt, scale), hessian)
    assert output_error(weight, chosen, hessian) < nearest


def test_the_block_size_only_orders_the_work() -> None:
    weight, hessian = problem(7)
    fmt = IntFormat(bits=4, clip_ratio="search")
    scale = weight_scale(weight, fmt, torch.float32)
    errors = []
    for size in (1, 13, 96):
        chosen = gptq(weight, hessian, fmt, scale, Gptq(block_size=size))
        assert chosen is not None
        errors.append(output_error(weight, chosen, hessian))
    assert max(errors) < 1.05 * min(errors)


def test_activation_order_takes_the_largest_columns_first() -> None:
    """They are rounded before any error is pushed onto them, so their codes are the nearest ones."""
    weight, hessian = problem(11)
    hessian = hessian + torch.diag(torch.where(torch.arange(96) == 90, 1e4, 0.0))
    fmt = IntFormat(bits=4)
    scale = weight_scale(weight, fmt, torch.float32)
    plain, ordered = (gptq(weight, hessian, fmt, scale, Gptq(activation_order=order)) for order in (False, True))
    assert plain is not None and ordered is not None
    nearest = round_to_nearest(weight, fmt, scale).codes
    assert torch.equal(ordered.codes[:, 90], nearest[:, 90])
    assert not torch.equal(ordered.codes, plain.codes)


def test_columns_never_seen_are_rounded_and_disturb_nothing() -> None:
    weight, hessian = problem(3)
    hessian[:, 5] = hessian[5, :] = 0
    fmt = IntFormat(bits=4)
    scale = weight_scale(weight, fmt, torch.float32)
    chosen = gptq(weight, hessian, fmt, scale, Gptq())
    assert chosen is not None
    assert torch.equal(chosen.codes[:, 5], round_to_nearest(weight, fmt, scale).codes[:, 5])


def test_a_hessian_of_rank_one_is_factored_by_its_damping() -> None:
    direction = torch.randn(64, 1)
    upper = inverse_cholesky(direction @ direction.T, 0.01)
    assert upper is not None and torch.isfinite(upper).all()


@pytest.mark.parametrize("bad", ["nan", "negative", "zero"])
def test_a_hopeless_hessian_is_reported_as_none(bad: str) -> None:
    weight, hessian = problem(0)
    if bad == "nan":
        hessian[0, 0] = float("nan")
    elif bad == "negative":
        hessian = -1e6 * torch.eye(96) + torch.diag(torch.arange(96.0))
    else:
        assert inverse_cholesky(torch.zeros(96, 96), 0.01) is None
        return
    fmt = IntFormat(bits=4)
    assert gptq(weight, hessian, fmt, weight_scale(weight, fmt, torch.float32), Gptq()) is None


def test_an_indefinite_hessian_gets_more_damping() -> None:
    hessian = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.02]))
    assert inverse_cholesky(hessian, 0.01) is not None
