"""Quantization of rows on the kernels against the reference: on the CPU through Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant.ops import packing, reference
from rotaquant.ops.quantize_kernels import quantize_rows, rmsnorm_quantize

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def check(x: torch.Tensor, bits: int, clip: float, group: int | None, planar: bool) -> None:
    codes, scale = quantize_rows(x, bits, clip, group, planar)
    expected_codes, expected_scale = reference.quantize_rows(x.cpu(), bits, clip, group)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes.cpu(), packing.to_planes(expected_codes, planar))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize("columns", [1, 5, 96, 576, 2000])
def test_codes_and_scales_equal_the_reference(columns: int, planar: bool, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).to(dtype).to(device)
    for bits, clip in ((4, 0.9), (8, 1.0), (3, 0.55)):
        check(x, bits, clip, None, planar)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize(("columns", "group"), [(512, 128), (192, 64), (288, 96), (36, 12)])
def test_groups_have_scales_of_their_own(columns: int, group: int, planar: bool, device: str) -> None:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).to(device)
    check(x, 4, 0.9, group, planar)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names what is meant here
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_zeros_denormals_ties_and_values_that_are_not_finite(device: str) -> None:
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1] *= 1e-42
    x[2, 5] = float("nan")
    x[3, 7] = float("inf")
    x[4] = torch.arange(96).remainder(15).sub(7).float() * 0.5
    x[5] *= 3e38 / x[5].abs().max()
    for planar in (True, False):
        check(x.to(device), 4, 1.0, None, planar)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_strided_and_none(device: str) -> None:
    wide = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)).to(device)
    check(wide[::2, 20:180], 4, 0.9, None, True)
    check(wide.T, 4, 0.9, None, True)
    assert quantize_rows(wide[:0], 4, 0.9, None, True)[0].shape == (0, 2, 152)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_and_quantization_in_one(dtype: torch.dtype, with_residual: bool, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts off what the device rounds")
    generator = torch.Generator().manual_seed(2)
    x, other = (torch.randn(9, 200, generator=generator).to(dtype) for _ in range(2))
    codes, scale, total = rmsnorm_quantize(
        x.to(device), other.to(device) if with_residual else None, 1e-5, 4, 0.9, None, True
    )
    expected_total = x + other if with_residual else x
    assert torch.equal(total.cpu(), expected_total)
    wide = expected_total.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    back = packing.from_planes(codes.cpu(), 200) * scale.cpu()
    ideal, step = reference.quantize_rows(normed, 4, 0.9)
    # Half a unit in the last place of the normed values can move a code to its neighbour, seldom.
    steps = (back - normed.float()).abs() / step
    assert ((back - ideal * step).abs() > step / 2).float().mean() < 0.02
    inside = normed.abs() <= 7 * step
    assert steps[inside].max() < 0.52


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    x = torch.randn(16, 32768, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    wide = x.cuda().repeat(4200, 1)
    assert wide.numel() > 2**31
    codes, scale = quantize_rows(wide, 4, 0.9, None, True)
    expected_codes, expected_scale = reference.quantize_rows(x, 4, 0.9)
    assert torch.equal(codes[-16:].cpu(), packing.to_planes(expected_codes, True))
    assert torch.equal(scale[-16:].cpu(), expected_scale)


@pytest.mark.gpu
def test_quotients_are_rounded_as_division_rounds() -> None:
    """Rows drawn so that many values lie at, or one float32 from, the middle between two codes."""
    generator = torch.Generator().manual_seed(4)
    scale = torch.rand(4096, 1, generator=generator) + 0.1
    steps = torch.randint(-7, 7, (4096, 1024), generator=generator) + 0.5
    x = scale * steps
    nudged = torch.nextafter(x, x + torch.randint(-1, 2, x.shape, generator=generator))
    nudged[:, :1] = scale * 7
    check(nudged.cuda(), 4, 1.0, None, True)
    for exponent in (-140, -126, -100, 100, 120):
        check((nudged.double() * 2.0**exponent).float().cuda(), 4, 1.0, None, False)
