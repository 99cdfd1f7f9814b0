"""Operands that do not fit are refused: by an error that names them, alike on every device and while tracing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rotaquant import ops
from rotaquant.errors import RotaquantError
from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import Factors, checks

DEVICES = ["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 576


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int8)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def factors(left: Tensor | None = None, order: int | None = None, right: Tensor | None = None) -> Factors:
    whole = ops.rotation_factors(factor_or_fallback(WIDTH))
    assert whole is not None
    whole = whole.to(floats(1).device, torch.bfloat16)
    return Factors(
        whole.left if left is None else left,
        whole.order if order is None else order,
        whole.right if right is None else right,
        whole.norm,
    )


def quantize(columns: int, bits: int, group: int | None, planar: bool, clip_ratio: float = 0.9) -> Callable[[], object]:
    return lambda: ops.quantize_rows(floats(3, columns), bits, clip_ratio, group, planar)


def norm(residual: Tensor) -> Callable[[], object]:
    return lambda: ops.rmsnorm_quantize(floats(3, 64), residual, 1e-5, 4, 0.9)


def gated(up: Tensor, activation: str = "silu") -> Callable[[], object]:
    gate = floats(3, WIDTH)
    return lambda: ops.gated_hadamard_quantize(gate, up, activation, factors(), 4, 0.9)


def rotate(wrong: Factors) -> Callable[[], object]:
    return lambda: ops.hadamard(floats(3, WIDTH), wrong)


def single(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Callable[[], object]:
    return lambda: ops.w4a16_matmul(x, packed, scale, bias)


def product(
    rows: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    bits: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], object]:
    matmul = ops.int4_matmul if bits == 4 else ops.int8_matmul
    return lambda: matmul(rows, token_scale, packed, weight_scale, bias, dtype)


def both(
    x: Tensor, packed: Tensor, weight_scale: Tensor, bits: int = 4, group: int | None = None
) -> Callable[[], object]:
    return lambda: ops.quantize_matmul(x, 4, 0.9, group, bits, packed, weight_scale, None)


F32 = torch.float32
SCALE = floats(3, 1, dtype=F32)
# A call that is refused, made where its operands live, and what the error says.
CALLS: dict[str, tuple[Callable[[], Callable[[], object]], str]] = {
    "no bits": (lambda: quantize(64, 1, None, True), "bits is 1; it must be from 2 to 8"),
    "too many bits": (lambda: quantize(64, 9, None, False), "bits is 9; it must be from 2 to 8"),
    "groups that leave a rest": (
        lambda: quantize(64, 4, 24, True),
        "group_size is 24; it must divide the 64 columns of a row",
    ),
    "groups of none": (lambda: quantize(64, 4, 0, True), "group_size is 0; it must divide"),
    "groups of half words": (
        lambda: quantize(36, 4, 12, True),
        "group_size is 12; beside 4-bit weights it must be a multiple of 8",
    ),
    "groups of half words of bytes": (
        lambda: quantize(30, 4, 10, False),
        "group_size is 10; beside 8-bit weights it must be a multiple of 4",
    ),
    **{
        f"a range of {clip_ratio}": (
            lambda clip_ratio=clip_ratio: quantize(64, 4, None, True, clip_ratio),  # type: ignore[misc]
            f"clip_ratio is {clip_ratio}; it must be a number above 0",
        )
        for clip_ratio in (0.0, -0.5, float("nan"), float("inf"))
    },
    "no columns": (lambda: quantize(0, 4, None, True), "x is bfloat16 [3, 0] on"),
    "three axes": (lambda: lambda: ops.quantize_rows(floats(2, 3, 8), 4, 0.9), "x is bfloat16 [2, 3, 8] on"),
    "a residual of another dtype": (lambda: norm(floats(3, 64, dtype=F32)), "residual is float32 [3, 64] on"),
    "a residual of another shape": (lambda: norm(floats(1, 64)), "residual is bfloat16 [1, 64] on"),
    "an unknown activation": (
        lambda: gated(floats(3, WIDTH), "relu"),
        "activation is 'relu'; it must be one of silu, gelu_tanh, gelu",
    ),
    "up of another shape": (lambda: gated(floats(3, 64)), "up is bfloat16 [3, 64] on"),
    "up of another dtype": (lambda: gated(floats(3, WIDTH, dtype=F32)), "up is float32 [3, 576] on"),
    "an order that leaves a rest": (lambda: rotate(factors(order=35)), "order is 35; it must divide the 576 columns"),
    "a left without padding": (lambda: rotate(factors(left=floats(36, 36))), "left is bfloat16 [36, 36] on"),
    "a right of another width": (lambda: rotate(factors(right=floats(3, 3))), "right is bfloat16 [3, 3] on"),
    "groups of a rotation": (
        lambda: lambda: ops.hadamard_quantize(floats(3, WIDTH), factors(), 4, 0.9, 100),
        "group_size is 100; it must divide the 576 columns of a row",
    ),
    "x wider than the weight": (
        lambda: single(floats(3, 72), words(5, 8), floats(5, 1)),
        "weight_packed is int32 [5, 8] on",
    ),
    "scales of too few outputs": (
        lambda: single(floats(3, 64), words(5, 8), floats(4, 1)),
        "weight_scale is bfloat16 [4, 1] on",
    ),
    "groups of weights that leave a rest": (
        lambda: single(floats(3, 64), words(5, 8), floats(5, 3)),
        "weight_scale is bfloat16 [5, 3] on",
    ),
    "a short bias": (
        lambda: single(floats(3, 64), words(5, 8), floats(5, 1), floats(4)),
        "bias is bfloat16 [4] on",
    ),
    "natural codes for 4 bits": (
        lambda: product(codes(3, 1, 64), floats(3, 1, dtype=F32), words(5, 8), floats(5, 1)),
        "codes is int8 [3, 1, 64] on",
    ),
    "planes for 8 bits": (
        lambda: product(codes(3, 2, 32), floats(3, 1, dtype=F32), words(5, 8), floats(5, 1), bits=8),
        "codes is int8 [3, 2, 32] on",
    ),
    "a narrow weight": (
        lambda: product(codes(3, 2, 32), floats(3, 1, dtype=F32), words(5, 7), floats(5, 1)),
        "weight_packed is int32 [5, 7] on",
    ),
    "token scales of other rows": (
        lambda: product(codes(3, 2, 32), floats(1, 1, dtype=F32), words(5, 8), floats(5, 1)),
        "token_scale is float32 [1, 1] on",
    ),
    "token scales of 16 bits": (
        lambda: product(codes(3, 2, 32), floats(3, 1), words(5, 8), floats(5, 1)),
        "token_scale is bfloat16 [3, 1] on",
    ),
    "weight scales of other outputs": (
        lambda: product(codes(3, 2, 32), floats(3, 1, dtype=F32), words(5, 8), floats(6, 1)),
        "weight_scale is bfloat16 [6, 1] on",
    ),
    "groups that differ": (
        lambda: product(codes(3, 2, 32), floats(3, 4, dtype=F32), words(5, 8), floats(5, 2)),
        "weight_scale is bfloat16 [5, 2] on",
    ),
    "groups that share codes": (
        lambda: product(codes(3, 1, 64), floats(3, 3, dtype=F32), words(5, 16), floats(5, 1), bits=8),
        "scales are of 3 groups, which must part the 64 codes of a plane in multiples of 4",
    ),
    "groups of weights that share a word": (
        lambda: both(floats(3, 12), words(5, 2), floats(5, 2)),
        "scales are of 2 groups, which must part the 12 columns of x in multiples of 8",
    ),
    "groups of one token that share a word": (
        lambda: both(floats(1, 12), words(5, 3), floats(5, 2), bits=8),
        "scales are of 2 groups, which must part the 12 columns of x in multiples of 4",
    ),
    "groups of x that share a word": (
        lambda: both(floats(3, 10), words(5, 3), floats(5, 2), bits=8, group=5),
        "group_size is 5; beside 8-bit weights it must be a multiple of 4",
    ),
    "groups of x and others of weights": (
        lambda: both(floats(3, 64), words(5, 8), floats(5, 2), group=16),
        "weight_scale is bfloat16 [5, 2] on",
    ),
    "weights of other bits": (
        lambda: both(floats(3, 64), words(5, 8), floats(5, 1), bits=3),
        "weight_bits is 3; it must be 4 or 8",
    ),
    "outputs of integers": (
        lambda: product(codes(3, 2, 32), floats(3, 1, dtype=F32), words(5, 8), floats(5, 1), dtype=torch.int32),
        "dtype is torch.int32; it must be one of floats",
    ),
    "complex outputs": (
        lambda: product(codes(3, 2, 32), floats(3, 1, dtype=F32), words(5, 8), floats(5, 1), dtype=torch.complex64),
        "dtype is torch.complex64; it must be one of floats",
    ),
    "a long bias": (
        lambda: product(codes(3, 2, 32), floats(3, 1, dtype=F32), words(5, 8), floats(5, 1), floats(6)),
        "bias is bfloat16 [6] on",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(CALLS))
def test_the_error_names_the_operand(name: str, device: str) -> None:
    call, message = CALLS[name]
    # Factors are kept, so they are made before, and for real.
    ops.rotation_factors(factor_or_fallback(WIDTH))
    where = FakeTensorMode(allow_non_fake_inputs=True) if device == "fake" else torch.device(device)
    with where, pytest.raises(RotaquantError, match=re.escape(message)):
        call()()


def test_operands_are_on_one_device() -> None:
    here, there = floats(3, 64), floats(3, 64).to("meta")
    with pytest.raises(RotaquantError, match=re.escape("up is bfloat16 [3, 64] on meta; it must be as gate")):
        checks.alike("up", there, "gate", here)
    with pytest.raises(RotaquantError, match="weight_packed is int32 .* on meta; it must be on cpu"):
        checks.float_product(here, words(5, 8).to("meta"), floats(5, 1), None)
    with pytest.raises(RotaquantError, match="bias is bfloat16 .* on meta; it must be on cpu"):
        checks.float_product(here, words(5, 8), floats(5, 1), floats(5).to("meta"))
    with pytest.raises(RotaquantError, match="token_scale is float32 .* on meta; it must be on cpu"):
        checks.integer_product(codes(3, 2, 32), SCALE.to("meta"), words(5, 8), floats(5, 1), None, 4, F32)


def test_what_fits_is_not_refused() -> None:
    checks.grid(15, 4, 0.9, 15, True)  # a single group may be odd
    checks.grid(12, 8, 1.5, 4, False)
    checks.integer_product(codes(3, 2, 32), floats(3, 4, dtype=F32), words(5, 8), floats(5, 1), floats(5), 4, F32)
    checks.integer_product(codes(3, 1, 32), SCALE, words(5, 8), floats(5, 4), None, 8, F32)
    checks.quantizing_product(floats(3, 24), 4, 0.9, 8, 4, words(5, 3), floats(5, 3), None)
    checks.quantizing_product(floats(3, 15), 4, 0.9, None, 4, words(5, 2), floats(5, 1), None)
    checks.float_product(floats(0, 60), words(5, 8), floats(5, 5), None)
    with pytest.raises(RotaquantError):
        checks.rows("x", words(3, 8))
