"""Products of codes on the kernels against the reference: on the CPU through Triton's interpreter, and on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant.errors import RotaquantError
from rotaquant.ops import packing, product_plans, reference
from rotaquant.ops.product_kernels import product
from rotaquant.ops.product_plans import Plan, Problem

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def operands(m: int, n: int, k: int, bits: int, groups: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    half = 1 << (bits - 1)
    weight = torch.randint(-half, half, (n, k), generator=generator).to(torch.int8)
    codes = torch.randint(-half, half, (m, k), generator=generator).to(torch.int8)
    return {
        "weight": weight.to(device),
        "codes": codes.to(device),
        "token_scale": (torch.rand(m, groups, generator=generator) + 0.5).to(device),
        "weight_scale": (torch.rand(n, groups, generator=generator) + 0.5).to(torch.bfloat16).to(device),
        "bias": torch.randn(n, generator=generator).to(device),
    }


def run(data: dict[str, torch.Tensor], bits: int, dtype: torch.dtype, plan: Plan | None, biased: bool) -> torch.Tensor:
    return product(
        packing.to_planes(data["codes"], planar=bits == 4),
        data["token_scale"],
        packing.pack_weight(data["weight"], bits),
        data["weight_scale"],
        data["bias"] if biased else None,
        dtype,
        plan,
    )


def expected(data: dict[str, torch.Tensor], bits: int, biased: bool) -> torch.Tensor:
    cpu = {name: tensor.cpu() for name, tensor in data.items()}
    out = reference.quantized_matmul(cpu["codes"], cpu["token_scale"], cpu["weight"], cpu["weight_scale"], (bits, bits))
    return out + cpu["bias"] if biased else out


PLANS = {
    "tma": Plan(kernel="tma", outputs=64, tokens=32, bytes=32, warps=4, stages=3),
    "tile": Plan(kernel="tile", outputs=64, tokens=32, bytes=32, warps=4, stages=3, band=2),
    "sliced": Plan(kernel="sliced", outputs=32, tokens=16, bytes=32, warps=4, stages=3, slices=4, lines=64),
    "tile-of-8": Plan(kernel="tile", outputs=64, tokens=8, bytes=32, warps=2, stages=3),
    "sliced-of-8": Plan(kernel="sliced", outputs=32, tokens=8, bytes=64, warps=2, stages=3, slices=2, lines=64),
    "dot": Plan(kernel="dot", outputs=16, tokens=1, bytes=32, warps=4, stages=1),
    "dot-whole-rows": Plan(kernel="dot", outputs=4, tokens=1, bytes=256, warps=4, stages=1, resident=2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kernel", PLANS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (3, 7, 5), (33, 130, 200), (40, 64, 256)])
def test_every_kernel_is_exact(kernel: str, m: int, n: int, k: int, bits: int, device: str) -> None:
    if kernel == "tma" and (k % 32 or n % 8 or (bits == 8 and k % 16)):
        pytest.skip("the copy engine wants rows of whole 16 bytes")
    data = operands(m, n, k, bits, 1, device)
    for biased in (False, True):
        got = run(data, bits, torch.float32, PLANS[kernel], biased).cpu()
        assert torch.equal(got, expected(data, bits, biased))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(10))
def test_chosen_plans_are_exact_for_random_shapes(seed: int, device: str) -> None:
    """Twenty shapes a seed, awkward ones among them: odd numbers of tokens and outputs, tails of inputs."""
    generator = random.Random(seed)
    # The interpreter takes a millisecond a tile and step.
    most = (600, 700, 3000) if device == "cuda" else (40, 90, 300)
    for _ in range(20):
        m, n, k = (max(1, int(limit ** generator.random() + 0.5)) for limit in most)
        if generator.random() < 0.5:
            n, k = n + -n % 8, k + -k % 32
        bits, biased = generator.choice((4, 4, 8)), generator.random() < 0.5
        data = operands(m, n, k, bits, 1, device)
        got = run(data, bits, torch.float32, None, biased).cpu()
        assert torch.equal(got, expected(data, bits, biased)), (m, n, k, bits)


LARGE = [
    (1, 4096, 28672),
    (2, 11008, 4096),
    (3, 4096, 8192),
    (5, 12288, 2048),
    (8, 20000, 512),
    (8, 8192, 28672),
    (16, 4096, 1024),
    (16, 4096, 28672),
    (16, 8448, 1024),
    (16, 20000, 512),
    (40, 4096, 512),
    (64, 8192, 28672),
    (64, 20000, 512),
    (100, 4096, 1024),
    (200, 8192, 1024),
    (300, 11008, 4096),
    (2049, 4096, 4096),
    (16384, 1024, 512),
    (16384, 32768, 128),
]


def test_the_large_problems_are_given_every_plan_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_plans, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(product_plans, "tensor_copy_engine", lambda device: True)
    monkeypatch.setattr(product_plans, "shared_memory", lambda device: 227 * 1024)
    problems = [Problem(tokens=m, outputs=n, plane=k // 2, packed=True) for m, n, k in LARGE]
    given = {product_plans.choose(problem, torch.device("cuda"), 2) for problem in problems}
    table = {name: plan for name, plan in vars(product_plans).items() if isinstance(plan, Plan)}
    assert len(table) >= 10 and not {name for name, plan in table.items() if plan not in given}


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_plans_for_large_problems_are_exact(m: int, n: int, k: int) -> None:
    data = operands(m, n, k, 4, 1, "cuda")
    got = run(data, 4, torch.bfloat16, None, True)
    rows = torch.randint(m, (48,), generator=torch.Generator().manual_seed(m))
    sample = data | {name: data[name][rows.cuda()] for name in ("codes", "token_scale")}
    assert torch.equal(got[rows.cuda()].cpu(), expected(sample, 4, True).to(torch.bfloat16))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    """Outputs and codes beyond 2**31 elements are addressed, not wrapped round."""
    m, n, k = 70000, 32768, 64
    data = operands(8, n, k, 4, 1, "cuda")
    repeated = data | {name: data[name].repeat(m // 8, 1) for name in ("codes", "token_scale")}
    for plan in (None, PLANS["tile"]):
        got = run(repeated, 4, torch.bfloat16, plan, False)
        assert got.numel() > 2**31
        assert torch.equal(got[-8:].cpu(), expected(data, 4, False).to(torch.bfloat16))
        del got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 2, 5, 17, 40, 70])
def test_the_plan_that_is_chosen_is_exact(m: int, dtype: torch.dtype, device: str) -> None:
    data = operands(m, 72, 160, 4, 1, device)
    got = run(data, 4, dtype, None, True).cpu()
    if device == "cpu" and dtype == torch.bfloat16:
        # The interpreter cuts off what the device rounds.
        torch.testing.assert_close(got.float(), expected(data, 4, True), rtol=2**-7, atol=0)
    else:
        assert torch.equal(got, expected(data, 4, True).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 64, 96, 128])
@pytest.mark.parametrize("m", [1, 18])
def test_groups_are_summed_in_their_order(m: int, size: int, bits: int, device: str) -> None:
    data = operands(m, 50, 3 * size, bits, 3, device)
    assert torch.equal(run(data, bits, torch.float32, None, True).cpu(), expected(data, bits, True))
    data["token_scale"] = data["token_scale"][:, :1].contiguous()
    assert torch.equal(run(data, bits, torch.float32, None, False).cpu(), expected(data, bits, False))


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_is_not_finite_spoils_no_other(device: str) -> None:
    data = operands(6, 40, 64, 4, 1, device)
    clean = run(data, 4, torch.float32, None, False)
    data["token_scale"][2] = float("nan")
    spoilt = run(data, 4, torch.float32, None, False)
    assert spoilt[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_sums_do_not_overflow(device: str) -> None:
    k = 8192
    data = operands(2, 8, k, 4, 1, device)
    data["weight"].fill_(-8)
    data["codes"].fill_(-128)
    got = run(data, 4, torch.float32, None, False).cpu()
    sums = torch.full_like(got, 8 * 128 * k)
    assert torch.equal(got, sums * data["token_scale"].cpu() * data["weight_scale"].cpu().float().T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", PLANS)
def test_operands_may_be_strided(kernel: str, device: str) -> None:
    data = operands(5, 64, 128, 4, 1, device)
    strided = {name: torch.stack((tensor, tensor), dim=-1)[..., 0] for name, tensor in data.items()}
    codes = packing.to_planes(data["codes"], planar=True)
    packed = packing.pack_weight(data["weight"], 4)
    got = product(
        torch.stack((codes, codes), dim=-1)[..., 0],
        strided["token_scale"],
        torch.stack((packed, packed), dim=-1)[..., 0],
        strided["weight_scale"],
        strided["bias"],
        torch.float32,
        PLANS[kernel],
    )
    assert torch.equal(got.cpu(), expected(data, 4, True))


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_give_no_rows(device: str) -> None:
    data = operands(0, 8, 32, 4, 1, device)
    assert run(data, 4, torch.bfloat16, None, True).shape == (0, 8)


def test_inputs_too_wide_for_exact_sums_are_refused() -> None:
    for planes in (1, 2):
        codes = torch.zeros(1, planes, 131072 // planes, dtype=torch.int8)
        packed = torch.zeros(1, codes.shape[2] // 4, dtype=torch.int32)
        with pytest.raises(RotaquantError, match="131072 inputs is too wide"):
            product(codes, torch.ones(1, 1), packed, torch.ones(1, 1), None, torch.float32)
