"""Rotations on the kernels against the reference: on the CPU through Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant.hadamard import Factorisation, factor_or_fallback
from rotaquant.ops import packing, reference, rotation_kernels
from rotaquant.ops.factors import Factors, mix_factors, rotation_factors
from rotaquant.ops.rotation_kernels import rotate, rotate_quantize
from rotaquant.rotation.plan import plan_head_mix

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# 36·2^4; 12·2^7; 2^12; 76·2^6; 172·2^6 (two parts); 140·2^6 (two parts); 28·2^9, 108·2^8 (butterflies).
WIDTHS = [576, 1536, 4096, 4864, 11008, 8960, 14336, 27648]
HEADS = [(8, 64), (9, 64), (14, 64), (32, 128), (40, 128), (12, 96)]


def random(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    # Few channels stand out by a thousand times, as before down projections.
    x[:, torch.randint(columns, (3,), generator=generator)] *= 1000
    return x.to(dtype)


def factors_of(transform: Factorisation, device: str, dtype: torch.dtype) -> Factors:
    factors = rotation_factors(transform)
    assert factors is not None
    return factors.to(torch.device(device), dtype)


def check_float(x: torch.Tensor, factors: Factors, expected: torch.Tensor, device: str) -> None:
    out = rotate(x.to(device), factors.left, factors.order, factors.right, factors.norm, torch.float32).cpu()
    assert out.dtype == torch.float32
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 2**-15


def check_codes(codes: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor, bits: int, clip: float) -> None:
    """Codes are those of the exact values, but where these lie within rounding of the middle between two."""
    ideal_scale = reference.symmetric_scale(expected, bits, clip, torch.float64)
    torch.testing.assert_close(scale.cpu().double(), ideal_scale, rtol=2e-4, atol=0)
    steps = expected / scale.cpu().double()
    ideal = reference.symmetric_codes(expected, scale.cpu().double(), bits)
    back = packing.from_planes(codes.cpu(), expected.shape[1]).double()
    wrong = back != ideal
    # The sixteen bits of a value in the middle of the rotation leave this much of the largest step in doubt.
    doubt = 2**-14 * 2 ** (bits - 1)
    assert wrong.float().mean() < doubt
    assert ((steps - steps.floor() - 0.5).abs()[wrong] < doubt).all()
    assert (back - ideal).abs().max() <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_are_rotated_as_the_reference_does(columns: int, device: str) -> None:
    transform = factor_or_fallback(columns)
    x = random(3, columns, columns)
    expected = reference.rotate_rows(x.double(), base(transform), transform.blocks)
    check_float(x, factors_of(transform, device, x.dtype), expected, device)


def base(transform: Factorisation) -> torch.Tensor:
    from rotaquant.hadamard import base_matrix

    return base_matrix(transform)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("columns", "shards"), [(1536, 3), (4096, 8), (14336, 2), (13696, 1)])
def test_rotations_in_blocks(columns: int, shards: int, device: str) -> None:
    part = factor_or_fallback(columns // shards)
    transform = part.model_copy(update={"size": columns, "blocks": part.blocks * shards})
    x = random(2, columns, columns)
    expected = reference.rotate_rows(x.double(), base(transform), transform.blocks)
    check_float(x, factors_of(transform, device, x.dtype), expected, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_heads_are_mixed_as_the_reference_does(heads: int, head_dim: int, shards: int, device: str) -> None:
    if heads % shards:
        pytest.skip("heads do not divide")
    mix = plan_head_mix(heads, factor_or_fallback(head_dim), shards)
    assert mix is not None
    x = random(3, heads * head_dim, heads)
    factors = mix_factors(mix.matrix(), shards, heads * head_dim)
    assert factors is not None
    factors = factors.to(torch.device(device), x.dtype)
    expected = reference.mix_rows(x.double(), mix.matrix(), shards)
    check_float(x, factors, expected, device)
    for planar in (True, False):
        codes, scale = rotate_quantize(
            x.to(device), None, None, factors.left, factors.order, factors.right, factors.norm, 4, 0.9, planar
        )
        check_codes(codes, scale, expected, 4, 0.9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("bits", "clip", "planar"), [(4, 0.9, True), (8, 1.0, False), (8, 1.0, True)])
@pytest.mark.parametrize("columns", WIDTHS)
def test_rotated_rows_are_quantized(columns: int, bits: int, clip: float, planar: bool, device: str) -> None:
    transform = factor_or_fallback(columns)
    x = random(3, columns, columns + 1)
    factors = factors_of(transform, device, x.dtype)
    codes, scale = rotate_quantize(
        x.to(device), None, None, factors.left, factors.order, factors.right, factors.norm, bits, clip, planar
    )
    check_codes(codes, scale, reference.rotate_rows(x.double(), base(transform), transform.blocks), bits, clip)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp(20) is too large for numpy's liking
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("columns", [1536, 11008, 14336])
def test_gates_are_applied_first(columns: int, activation: str, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts off what the device rounds")
    transform = factor_or_fallback(columns)
    both = random(3, 2 * columns, columns, torch.float32).clamp(-20, 20).to(dtype)
    gate, up = both[:, :columns], both[:, columns:]
    factors = factors_of(transform, device, dtype)
    codes, scale = rotate_quantize(
        both.to(device)[:, :columns], both.to(device)[:, columns:], activation,
        factors.left, factors.order, factors.right, factors.norm, 4, 0.9, True,
    )  # fmt: skip
    gated = reference.ACTIVATIONS[activation](gate.double()) * up.double()
    exact = reference.rotate_rows(gated, base(transform), transform.blocks)
    # Rounding to the model's dtype, twice, is the definition; which way it goes may differ by an ulp of the function.
    plain = (reference.ACTIVATIONS[activation](gate) * up).double()
    rounded = reference.rotate_rows(plain, base(transform), transform.blocks)
    naive = (rounded - exact).norm() / exact.norm()
    step = scale.cpu().double()
    ideal = reference.symmetric_codes(rounded, step, 4)
    back = packing.from_planes(codes.cpu(), columns).double()
    assert (back != ideal).float().mean() < 20 * naive
    torch.testing.assert_close(step, reference.symmetric_scale(rounded, 4, 0.9, torch.float64), rtol=0.01, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names what is meant here
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_zeros_and_values_that_are_not_finite_spoil_no_other(device: str) -> None:
    transform = factor_or_fallback(576)
    x = random(6, 576, 5)
    x[1] = 0
    x[2, 7] = float("nan")
    x[4, 9] = float("inf")
    factors = factors_of(transform, device, x.dtype)
    codes, scale = rotate_quantize(
        x.to(device), None, None, factors.left, factors.order, factors.right, factors.norm, 4, 0.9, True
    )
    sound = [0, 3, 5]
    expected = reference.rotate_rows(x[sound].double(), base(transform), 1)
    check_codes(codes[sound], scale[sound], expected, 4, 0.9)
    assert scale[1] == 1
    assert not codes[[1, 2, 4]].any()
    assert not scale[[2, 4]].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_no_rows_and_many(device: str) -> None:
    transform = factor_or_fallback(576)
    factors = factors_of(transform, device, torch.float16)
    wide = random(40, 640, 6)
    x = wide[::2, 32:608]
    args = (None, None, factors.left, factors.order, factors.right, factors.norm, 4, 0.9, True)
    codes, scale = rotate_quantize(wide.to(device)[::2, 32:608], *args)
    check_codes(codes, scale, reference.rotate_rows(x.double(), base(transform), 1), 4, 0.9)
    codes, scale = rotate_quantize(wide.to(device)[:0, 32:608], *args)
    assert codes.shape == (0, 2, 288) and scale.shape == (0, 1)


def test_rows_on_their_way_fit_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stages = torch.device("cuda"), {}
    for kib in (227, 163, 99):
        monkeypatch.setattr(rotation_kernels, "shared_memory", lambda device, kib=kib: kib * 1024)
        plans = {tile: rotation_kernels.choose(tile, device) for tile in ((64, 64), (128, 64), (192, 64), (128, 128))}
        stages[kib] = [None if plan is None else plan.stages for plan in plans.values()]
    assert stages == {227: [2, 2, 3, 1], 163: [2, 2, 1, 1], 99: [2, 1, None, 1]}
