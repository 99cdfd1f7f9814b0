"""Single tokens that are quantized where they are multiplied: the same codes and sums as by two operations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant import ops
from rotaquant.errors import RotaquantError
from rotaquant.ops import packing, reference
from rotaquant.ops.product_kernels import quantizing_product
from rotaquant.ops.product_plans import Plan, Problem, choose_quantizing

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
PLAN = Plan(kernel="dot", outputs=4, tokens=1, bytes=256, warps=4, stages=1, resident=2)
STEPS = replace(PLAN, bytes=32, resident=0)


def operands(m: int, n: int, k: int, weight_bits: int, device: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Rows, packed weights, their scales and biases."""
    generator = torch.Generator().manual_seed(seed + m * n * k)
    x = (torch.randn(m, k, generator=generator) * torch.rand(k, generator=generator).square() * 8).to(dtype)
    codes, scale = reference.quantize_rows(torch.randn(n, k, generator=generator), weight_bits, 1.0)
    bias = torch.randn(n, generator=generator)
    made = x, packing.pack_weight(codes, weight_bits), scale.bfloat16(), bias.bfloat16()
    return [tensor.to(device) for tensor in made]


def expected(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, grid: tuple[int, float, int]) -> Tensor:
    """By the definition, in float32 before the cast."""
    bits, clip_ratio, weight_bits = grid
    x, packed, scale = x.cpu(), packed.cpu(), scale.cpu()
    codes, token_scale = reference.quantize_rows(x, bits, clip_ratio)
    weight = packing.unpack_weight(packed, weight_bits, x.shape[1])
    out = reference.quantized_matmul(codes, token_scale, weight, scale, (bits, weight_bits))
    return out if bias is None else out + bias.cpu().float()


def require_equal(actual: Tensor, exact: Tensor) -> None:
    """Equal to the bit on a device; the interpreter cuts bfloat16 off where devices round."""
    rounds = actual.is_cuda or actual.dtype != torch.bfloat16
    wanted = exact.to(actual.dtype)
    torch.testing.assert_close(actual.cpu(), wanted, rtol=0 if rounds else 2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", [PLAN, STEPS])
@pytest.mark.parametrize(("bits", "weight_bits"), [(4, 4), (8, 8), (3, 4), (6, 8)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (2, 7, 58), (1, 131, 200), (1, 33, 512)])
def test_codes_and_sums_are_exact(m: int, n: int, k: int, bits: int, weight_bits: int, plan: Plan, device: str) -> None:
    plan = replace(plan, bytes=512) if plan is PLAN and weight_bits == 8 else plan
    for dtype in (torch.float16, torch.bfloat16):
        x, packed, scale, bias = operands(m, n, k, weight_bits, device, dtype)
        for one in (None, bias):
            out = quantizing_product(x, packed, scale, one, bits, 0.9, weight_bits, plan)
            assert out is not None
            require_equal(out, expected(x, packed, scale, one, (bits, 0.9, weight_bits)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_through_the_operation(seed: int, device: str) -> None:
    generator = random.Random(seed)
    most = (9000, 14000) if device == "cuda" else (90, 300)
    for _ in range(10):
        m = generator.choice((1, 1, 2, 3))
        n, k = (max(1, int(limit ** (0.3 + 0.7 * generator.random()))) for limit in most)
        weight_bits = generator.choice((4, 8))
        grid = generator.choice((weight_bits, 4)), generator.choice((1.0, 0.9, 0.5)), weight_bits
        x, packed, scale, bias = operands(m, n, k, weight_bits, device, torch.float16, seed)
        if generator.random() < 0.3:
            x = torch.cat((x, x), 1)[:, x.shape[1] :]
        out = ops.quantize_matmul(x, grid[0], grid[1], None, weight_bits, packed, scale, bias)
        assert torch.equal(out.cpu(), expected(x, packed, scale, bias, grid).half()), (m, n, k, grid)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names what is meant here
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan, 6e4, 1e-7])
def test_rows_of_extreme_values(value: float, device: str) -> None:
    x, packed, scale, bias = operands(1, 24, 64, 4, device, torch.bfloat16)
    for row in (torch.full_like(x, value), torch.where(torch.arange(64, device=device) == 5, value, x)):
        row = row.to(x.dtype)
        out = quantizing_product(row, packed, scale, bias, 4, 1.0, 4, PLAN)
        assert out is not None
        require_equal(out, expected(row, packed, scale, bias, (4, 1.0, 4)))


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernel_does_not_take_runs_as_two(device: str) -> None:
    x, packed, scale, _ = operands(1, 24, 63, 4, device, torch.float16)
    assert quantizing_product(x, packed, scale, None, 4, 1.0, 4, PLAN) is None
    wide = torch.zeros(1, 64, dtype=torch.float32, device=device)
    assert quantizing_product(wide, packed, scale, None, 4, 1.0, 4, PLAN) is None
    out = ops.quantize_matmul(x, 4, 1.0, None, 4, packed, scale, None)
    assert torch.equal(out.cpu(), expected(x, packed, scale, None, (4, 1.0, 4)).half())


def test_the_choice() -> None:
    device = torch.device("cpu")

    def chosen(tokens: int, columns: int, groups: int = 1) -> Plan | None:
        problem = Problem(tokens=tokens, outputs=4096, plane=columns // 2, packed=True, groups=groups)
        return choose_quantizing(problem, device)

    assert chosen(1, 4096) is not None and chosen(2, 8192) is not None
    assert chosen(3, 4096) is chosen(1, 11008) is chosen(1, 4096, groups=32) is None


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("group", [None, 16])
def test_the_operation_is_registered_right(m: int, group: int | None) -> None:
    x, packed, _, bias = operands(m, 24, 64, 4, "cpu", torch.bfloat16)
    scale = torch.rand(24, 1 if group is None else 64 // group)
    torch.library.opcheck(torch.ops.rotaquant.quantize_matmul, (x, 4, 0.9, group, 4, packed, scale, bias))


@pytest.mark.parametrize("device", DEVICES)
def test_operands_that_do_not_fit_are_refused(device: str) -> None:
    x, packed, scale, bias = operands(1, 24, 64, 4, device, torch.float16)
    with pytest.raises(RotaquantError, match="weight_bits is 5"):
        ops.quantize_matmul(x, 4, 1.0, None, 5, packed, scale, bias)
    with pytest.raises(RotaquantError, match="weight_packed is int32"):
        ops.quantize_matmul(torch.cat((x, x), 1), 4, 1.0, None, 4, packed, scale, bias)
    with pytest.raises(RotaquantError, match="bias is"):
        ops.quantize_matmul(x, 4, 1.0, None, 4, packed, scale, bias[1:])
    with pytest.raises(RotaquantError, match="bits is 9"):
        ops.quantize_matmul(x, 9, 1.0, None, 4, packed, scale, bias)


def test_rows_that_begin_at_an_odd_value_of_their_storage_are_quantized_apart() -> None:
    buffer = bytearray(2 * 64 + 8)
    values = torch.frombuffer(buffer, dtype=torch.float16, offset=2, count=66)
    # Words lie at even addresses, which are odd places of this storage.
    x = values[1 if values.data_ptr() % 4 else 0 :][:64].view(1, 64)
    assert x.data_ptr() % 4 == 0
    _, packed, scale, bias = operands(1, 16, 64, 4, "cpu", torch.float16)
    out = quantizing_product(x, packed, scale, bias, 4, 0.9, 4)
    assert x.storage_offset() % 2 and out is None
