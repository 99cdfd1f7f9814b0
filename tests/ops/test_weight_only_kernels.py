"""Products of float activations and packed weights: on the CPU through Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant.ops import packing, reference
from rotaquant.ops.weight_only_kernels import product, widen

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def operands(n: int, k: int, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(-8, 8, (n, k), generator=generator).to(torch.int8)
    return codes, (torch.rand(n, groups, generator=generator) * 0.1 + 0.01).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 256), (5, 40, 128), (17, 96, 384), (40, 33, 128), (3, 7, 10)])
def test_sums_are_as_good_as_float32(m: int, n: int, k: int, groups: int, dtype: torch.dtype, device: str) -> None:
    if groups > 1 and k % 128:
        pytest.skip("groups are of whole words")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no arithmetic in bfloat16")
    codes, scale = operands(n, k, groups, dtype)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    packed = packing.pack_weight(codes, 4)
    out = product(x.to(device), packed.to(device), scale.to(device), bias.to(device)).cpu()
    exact = x.double() @ reference.dequantize_groups(codes, scale.double(), torch.float64).T + bias.double()
    assert out.dtype == dtype
    # One rounding of the result, and what float32 sums lose where terms cancel.
    bound = exact.abs() * torch.finfo(dtype).eps + 1e-5 * k**0.5
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 4])
def test_many_tokens_meet_the_weight_widened_once(groups: int, device: str) -> None:
    codes, scale = operands(24, 64, groups, torch.float16)
    packed = packing.pack_weight(codes, 4).to(device)
    expected = reference.dequantize_groups(codes, scale, torch.float16)
    assert torch.equal(widen(packed, scale.to(device), 64, torch.float16).cpu(), expected)
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).half()
    out = product(x.to(device), packed, scale.to(device), None).cpu()
    torch.testing.assert_close(out.float(), x.float() @ expected.float().T, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_and_none(device: str) -> None:
    codes, scale = operands(16, 64, 1, torch.float16)
    packed, scale = packing.pack_weight(codes, 4).to(device), scale.to(device)
    wide = torch.randn(6, 131, generator=torch.Generator().manual_seed(2)).half().to(device)
    x = wide[::2, 33:97]
    assert torch.equal(product(x, packed, scale, None), product(x.contiguous(), packed, scale, None))
    assert product(x[:0], packed, scale, None).shape == (0, 16)
