"""Products of float activations and packed weights: on the CPU through Triton's interpreter, and on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant.ops import packing, reference, weight_only_few_kernels, weight_only_kernels
from rotaquant.ops.weight_only_kernels import FewPlan, choose, product, widen

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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 2, 16, 33, 64])
@pytest.mark.parametrize(("k", "size"), [(256, 8), (256, 16), (192, 24), (256, 32), (256, 64), (256, 128), (60, 12)])
def test_few_tokens_meet_packed_weights_in_groups_of_any_size(
    k: int, size: int, m: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only_kernels, "widen", None)
    codes, scale = operands(40, k, k // size, dtype)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    packed = packing.pack_weight(codes, 4)
    out = product(x.to(device), packed.to(device), scale.to(device), None).cpu().double()
    exact = x.double() @ reference.dequantize_groups(codes, scale.double(), torch.float64).T
    # As far off as weights and results that are rounded to the dtype.
    assert (out - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    if size % 64 == 0 or (m == 1 and size % 8 == 0):
        bound = exact.abs() * torch.finfo(dtype).eps + 1e-5 * k**0.5
        assert ((out - exact).abs() <= bound).all()


PLANS = [
    FewPlan(outputs=32, bytes=64),
    FewPlan(outputs=64, bytes=128, stages=3),
    FewPlan(outputs=32, bytes=64, slices=2),
    FewPlan(outputs=16, bytes=32, slices=4, warps=2),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("m", "n", "k", "groups"), [(1, 40, 256, 1), (7, 70, 328, 1), (20, 33, 512, 4), (9, 16, 384, 48), (70, 48, 192, 3)]
)
def test_every_plan_is_as_good(
    m: int, n: int, k: int, groups: int, plan: FewPlan, dtype: torch.dtype, device: str
) -> None:
    codes, scale = operands(n, k, groups, dtype)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    out = product(x.to(device), packing.pack_weight(codes, 4).to(device), scale.to(device), None, plan).cpu().double()
    exact = x.double() @ reference.dequantize_groups(codes, scale.double(), torch.float64).T
    if k // groups < 64:
        assert (out - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    else:
        assert ((out - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-5 * k**0.5).all()


@pytest.mark.parametrize(("kind", "spread"), [(torch.bfloat16, "_SPREAD_BFLOAT16"), (torch.float16, "_SPREAD_FLOAT16")])
def test_nibbles_in_a_mantissa_are_their_values(kind: torch.dtype, spread: str) -> None:
    """The constants of the assembly, which the interpreter does not run."""
    text = getattr(weight_only_few_kernels, spread).value
    found = {name: int(word, 16) & 0xFFFF for name, word in re.findall(r"mov.b32 (\w+), (0x\w+)", text)}
    power, one, less = (
        torch.tensor(found[name]).to(torch.uint16).view(torch.int16) for name in ("power", "one", "less")
    )
    codes = torch.arange(16, dtype=torch.int16)
    values = (codes | power).view(kind) * one.view(kind) + less.view(kind)
    unit = 2**24 if kind == torch.bfloat16 else 1
    assert torch.equal(values.double() * unit, codes.double() - 8)


TOKENS = [1, 2, 16, 32, 33, 64]
LAYERS = [(1024, 4096), (8192, 2048), (12296, 4096), (20000, 1024), (4096, 28672)]


def test_the_layers_are_given_every_plan_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only_kernels, "multiprocessors", lambda device: 132)
    given = {choose(m, n, k // 2, torch.device("cuda")) for m in TOKENS for n, k in LAYERS}
    table = {plan for plan in vars(weight_only_kernels).values() if isinstance(plan, FewPlan)}
    assert len(table) >= 4 and given == table


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [None, 128])
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_layers_of_any_width_are_as_good(n: int, k: int, m: int, size: int | None, dtype: torch.dtype) -> None:
    codes, scale = operands(n, k, k // (size or k), dtype)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).cuda()
    codes, scale = codes.cuda(), scale.cuda()
    out = product(x, packing.pack_weight(codes, 4), scale, None).double()
    weight = reference.dequantize_groups(codes, scale.double(), torch.float64)
    exact, magnitude = x.double() @ weight.T, x.abs().double() @ weight.abs().T
    # Matrix units cut off what they add: in a long row a few units in the last place of all that was added.
    assert ((out - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 2**-19 * magnitude).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("m", [1, 5])
def test_huge_activations_leave_the_others_their_digits(m: int, groups: int, device: str) -> None:
    codes, scale = operands(40, 256, groups, torch.bfloat16)
    x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).bfloat16()
    x[:, 7::64] = torch.tensor([1e6, -3e8, 1e20, 3.3e38]).bfloat16()
    # These meet zeros: a sum that they were part of in between shows.
    codes[:, 7::64] = 0
    packed = packing.pack_weight(codes, 4)
    out = product(x.to(device), packed.to(device), scale.to(device), None).cpu().double()
    exact = x.double() @ reference.dequantize_groups(codes, scale.double(), torch.float64).T
    # Sixteen bits of a weight in groups finer than a step, of which several tokens know no more.
    rounded = 0.05 if groups == 16 and m > 1 else 1e-5 * 16
    assert ((out - exact).abs() <= exact.abs() * torch.finfo(torch.bfloat16).eps + rounded).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("m", [1, 5])
def test_sums_overflow_where_their_results_do(m: int, groups: int, device: str) -> None:
    codes, scale = operands(40, 256, groups, torch.bfloat16)
    signs = torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).sign()
    x = (signs * 3.3e38).bfloat16()
    scale = (scale * 0.01).bfloat16()
    packed = packing.pack_weight(codes, 4)
    out = product(x.to(device), packed.to(device), scale.to(device), None).cpu().double()
    exact = x.double() @ reference.dequantize_groups(codes, scale.double(), torch.float64).T
    assert out.isfinite().all()
    assert (out - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names what is meant here
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("m", [1, 3])
def test_infinity_and_nan_are_those_of_a_float_product(m: int, groups: int, dtype: torch.dtype, device: str) -> None:
    codes, scale = operands(40, 256, groups, dtype)
    x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).to(dtype)
    codes[0, 9], codes[1, 9], codes[2, 9] = 0, 3, -8
    packed = packing.pack_weight(codes, 4).to(device)
    weight = reference.dequantize_groups(codes, scale.float(), torch.float32)
    for value in (float("inf"), float("-inf"), float("nan")):
        x[0, 9] = value
        out = product(x.to(device), packed, scale.to(device), None).cpu().float()
        plain = x.float() @ weight.T
        assert plain[0, 0].isnan() and not plain[0].isfinite().any()
        torch.testing.assert_close(out[0], plain[0], rtol=0, atol=0, equal_nan=True)
        assert out[1:].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_many_tokens_meet_the_weight_widened_once(groups: int, dtype: torch.dtype, device: str) -> None:
    codes, scale = operands(24, 64, groups, dtype)
    packed = packing.pack_weight(codes, 4).to(device)
    expected = reference.dequantize_groups(codes, scale, dtype)
    wide = widen(packed, scale.to(device), 64, dtype).cpu()
    if device == "cpu" and dtype == torch.bfloat16:
        # The interpreter cuts off what the device rounds.
        torch.testing.assert_close(wide, expected, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(wide, expected)
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = product(x.to(device), packed, scale.to(device), None).cpu().double()
    exact = x.double() @ expected.double().T
    assert (out - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_odd_groups_are_widened(device: str) -> None:
    codes, scale = operands(24, 45, 9, torch.float16)
    x = torch.randn(3, 45, generator=torch.Generator().manual_seed(1)).half()
    out = product(x.to(device), packing.pack_weight(codes, 4).to(device), scale.to(device), None).cpu().double()
    exact = x.double() @ reference.dequantize_groups(codes, scale.double(), torch.float64).T
    assert (out - exact).norm() <= torch.finfo(torch.float16).eps * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_and_none(device: str) -> None:
    codes, scale = operands(16, 64, 1, torch.float16)
    packed, scale = packing.pack_weight(codes, 4).to(device), scale.to(device)
    wide = torch.randn(6, 131, generator=torch.Generator().manual_seed(2)).half().to(device)
    x = wide[::2, 33:97]
    assert torch.equal(product(x, packed, scale, None), product(x.contiguous(), packed, scale, None))
    assert product(x[:0], packed, scale, None).shape == (0, 16)
