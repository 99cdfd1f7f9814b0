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
    assert {name.split()[0] for name in calls("cpu")} == registered


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_schema_fake_and_aliases_are_right(name: str, device: str) -> None:
    operation, arguments = calls(device)[name]
    torch.library.opcheck(
        operation, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


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
