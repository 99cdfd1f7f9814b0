"""Every operation as torch sees it: schema, fake, out of place, alike when compiled; and its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rotaquant import ops
from rotaquant.hadamard import base_matrix, factor_or_fallback
from rotaquant.ops import packing, reference, rotation_factors
from rotaquant.rotation.plan import plan_head_mix

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 576


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def calls(device: str) -> dict[str, tuple[Callable[..., object], tuple[object, ...]]]:
    """Each registered operation with arguments for it."""
    registered = torch.ops.rotaquant
    place = torch.device(device)
    x, up = random(5, WIDTH).to(place), random(5, WIDTH, seed=1).to(place)
    factors = rotation_factors(factor_or_fallback(WIDTH))
    assert factors is not None
    factors = factors.to(place, x.dtype)
    rotation = factors.left, factors.order, factors.right, factors.norm
    codes = torch.randint(-8, 8, (40, WIDTH), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale, bias = torch.rand(40, 1, generator=torch.Generator().manual_seed(3)).to(place), random(40).to(place)
    fours, eights = (packing.pack_weight(codes, bits).to(place) for bits in (4, 8))
    grid = 4, 0.9, None
    return {
        "quantize_rows": (registered.quantize_rows, (x, *grid, True)),
        "rmsnorm_quantize": (registered.rmsnorm_quantize, (x, None, 1e-5, *grid, True)),
        "rmsnorm_quantize of a sum": (registered.rmsnorm_quantize, (x, up, 1e-5, *grid, True)),
        "rotate": (registered.rotate, (x, *rotation, torch.float32)),
        "rotate_quantize": (registered.rotate_quantize, (x, *rotation, *grid, True)),
        "gated_rotate_quantize": (registered.gated_rotate_quantize, (x, up, "silu", *rotation, *grid, False)),
        "quantize_matmul": (registered.quantize_matmul, (x, *grid, 4, fours, scale, bias)),
        "quantize_matmul of a token": (registered.quantize_matmul, (x[:1], *grid, 8, eights, scale, bias)),
        "int4_matmul": (
            registered.int4_matmul,
            (*ops.quantize_rows(x, *grid, True), fours, scale, bias, torch.bfloat16),
        ),
        "int8_matmul": (
            registered.int8_matmul,
            (*ops.quantize_rows(x, *grid, False), eights, scale, None, torch.bfloat16),
        ),
        "w4a16_matmul": (registered.w4a16_matmul, (x, fours, scale, bias)),
    }


def test_every_registered_operation_is_tested_here() -> None:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("rotaquant::"))
    registered = {name.removeprefix("rotaquant::") for name in names}
    in_test_cache = {"cache_append", "cache_attention", "cache_read"}
    assert {name.split()[0] for name in calls("cpu")} | in_test_cache == registered


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_schema_fake_and_aliases_are_right(name: str, device: str) -> None:
    operation, arguments = calls(device)[name]
    torch.library.opcheck(
        operation, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_autograd_is_registered_right(name: str, device: str) -> None:
    operation, arguments = calls(device)[name]
    floats = {i for i, given in enumerate(arguments) if isinstance(given, Tensor) and given.is_floating_point()}
    # Weights, their scales and rotations are constants.
    differentiable = {"rotate": {0}, "w4a16_matmul": {0, 3}}.get(name)
    asked = [
        given.detach().clone().requires_grad_() if i in (differentiable or floats) else given
        for i, given in enumerate(arguments)
    ]
    utilities = ["test_autograd_registration"] + ["test_aot_dispatch_dynamic"] * (differentiable is not None)
    torch.library.opcheck(operation, asked, test_utils=utilities)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["float64", "transposed", "strided", "one row"])
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_fakes_say_dtypes_and_strides_as_they_come(name: str, layout: str, device: str) -> None:
    operation, arguments = calls(device)[name]
    # The products' own rows are integers: what is laid out anew is every activation.
    changed = [
        _laid_out(given, layout) if isinstance(given, Tensor) and given.shape == (5, WIDTH) else given
        for given in arguments
    ]
    torch.library.opcheck(operation, changed, test_utils=("test_schema", "test_faketensor"))
    if "rotate" not in name and "quantize" in name:
        grouped = [64 if given is None and i > 2 else given for i, given in enumerate(changed)]
        torch.library.opcheck(operation, grouped, test_utils="test_faketensor")


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "float64":
        return x.double()
    if layout == "transposed":
        return x.T.contiguous().T
    return x[::2, :] if layout == "strided" else x.T.contiguous().T[:1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_product_are_those_of_its_definition(dtype: torch.dtype, groups: int, device: str) -> None:
    codes = torch.randint(-8, 8, (40, WIDTH), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale = torch.rand(40, groups, generator=torch.Generator().manual_seed(3)).to(device)
    x, bias, gradient = (random(*shape, seed=seed) for seed, shape in enumerate([(5, WIDTH), (40,), (5, 40)]))
    x, bias, gradient = (tensor.to(device, dtype) for tensor in (x, bias, gradient))
    packed = packing.pack_weight(codes, 4).to(device)
    x.requires_grad_()
    bias.requires_grad_()
    scale.requires_grad_()
    out = ops.w4a16_matmul(x, packed, scale, bias)
    assert out.requires_grad
    got = torch.autograd.grad(out, (x, bias, scale), gradient, allow_unused=True)
    weight = reference.dequantize_groups(codes.to(device), scale.detach(), dtype)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, bias), gradient)
    for one, other in zip(got, expected, strict=False):
        torch.testing.assert_close(one, other)
    assert got[2] is None


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_below_a_product_is_trained(device: str) -> None:
    _, (_, packed, scale, _) = calls(device)["w4a16_matmul"]
    x, adapter = random(5, 8).to(device), random(8, WIDTH, seed=1).to(device).requires_grad_()
    ops.w4a16_matmul(x @ adapter, packed, scale, None).float().pow(2).sum().backward()
    assert adapter.grad is not None and bool(adapter.grad.isfinite().all()) and bool(adapter.grad.any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [1536, 14336, 0])
def test_gradients_of_a_rotation_are_the_rotation_back(columns: int, dtype: torch.dtype, device: str) -> None:
    if columns:
        factors = rotation_factors(factor_or_fallback(columns))
    else:
        mix = plan_head_mix(9, factor_or_fallback(64), 1)
        assert mix is not None
        columns = 576
        factors = ops.mix_factors(mix.matrix(), 1, columns)
    assert factors is not None
    factors = factors.to(torch.device(device), torch.bfloat16)
    left = factors.left[: factors.order, : factors.order]
    assert not torch.equal(left, left.T)
    x, gradient = (random(3, columns, seed=seed).to(device, dtype) for seed in range(2))
    x.requires_grad_()
    (got,) = torch.autograd.grad(ops.hadamard(x, factors), x, gradient)
    wide = x.detach().double().requires_grad_()
    rotated = reference.rotate_by_factors(wide, left, factors.right, factors.norm)
    (expected,) = torch.autograd.grad(rotated, wide, gradient.double())
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_inputs_are_left_as_they_were(name: str, device: str) -> None:
    operation, arguments = calls(device)[name]
    before = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
    operation(*arguments)
    for was, argument in zip(before, arguments, strict=True):
        assert torch.equal(was, argument) if isinstance(was, Tensor) else was == argument


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_strides_do_not_matter(name: str, device: str) -> None:
    operation, arguments = calls(device)[name]
    expected = operation(*arguments)
    got = operation(*(_strided(argument) if isinstance(argument, Tensor) else argument for argument in arguments))
    for one, other in zip(_outputs(expected), _outputs(got), strict=True):
        assert torch.equal(one, other)


def _strided(tensor: Tensor) -> Tensor:
    """The same values, two elements apart."""
    return torch.stack((tensor, torch.zeros_like(tensor)), dim=-1)[..., 0]


def _outputs(result: object) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


@pytest.mark.parametrize("columns", [96, 1536, 4864, 11008, 13696, 14336])
def test_factors_are_the_rotation(columns: int) -> None:
    transform = factor_or_fallback(columns)
    factors = rotation_factors(transform)
    if columns == 96:
        assert factors is None  # narrower than what matrix units take
        return
    assert factors is not None
    x = random(2, columns).double()
    left = factors.left[: factors.order, : factors.order]
    rotated = reference.rotate_by_factors(x, left, factors.right, factors.norm)
    torch.testing.assert_close(rotated, reference.rotate_rows(x, base_matrix(transform), transform.blocks))


@pytest.mark.parametrize(("heads", "head_dim", "shards"), [(32, 128, 1), (9, 64, 3), (14, 64, 1), (40, 128, 2)])
def test_factors_are_the_mix_of_heads(heads: int, head_dim: int, shards: int) -> None:
    mix = plan_head_mix(heads, factor_or_fallback(head_dim), shards)
    assert mix is not None
    factors = ops.mix_factors(mix.matrix(), shards, heads * head_dim)
    assert factors is not None
    x = random(2, heads * head_dim)
    mixed = ops.head_mix(x, factors, torch.float32)
    torch.testing.assert_close(mixed, reference.mix_rows(x, mix.matrix(), shards), rtol=1e-5, atol=1e-5)
