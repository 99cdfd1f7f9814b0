"""The quantized linear against its parts."""

import copy

import pytest
import torch
from torch import nn

from rotaquant.hadamard import Factorisation, factor_or_fallback
from rotaquant.ops import reference
from rotaquant.quantization.weights import round_to_nearest, weight_scale
from rotaquant.recipe import IntFormat
from rotaquant.rotation.plan import HeadMix, plan_head_mix
from rotaquant.runtime.layout import LinearLayout, float_layout
from rotaquant.runtime.linear import QuantizedLinear
from tests.runtime.on_kernels import on_kernels

TRANSFORM = factor_or_fallback(96)  # has no kernel
MIXED = 192
MIXES = [plan_head_mix(heads, factor_or_fallback(MIXED // heads)) for heads in (12, 6)]


def make(
    weights: IntFormat | None,
    activations: IntFormat | None,
    dtype: torch.dtype = torch.float32,
    transform: Factorisation | HeadMix = TRANSFORM,
) -> tuple[QuantizedLinear, nn.Linear]:
    width = transform.size if isinstance(transform, Factorisation) else MIXED
    linear = nn.Linear(width, 40, dtype=dtype).requires_grad_(False)
    layout = LinearLayout(weights=weights, activations=activations, transform=transform)
    module = QuantizedLinear.from_float(linear, float_layout(layout))
    if weights is None:
        module.layout = layout
    else:
        scale = weight_scale(linear.weight, weights, dtype)
        module.store(round_to_nearest(linear.weight.detach(), weights, scale), layout)
    return module, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [None, 32])
@pytest.mark.parametrize(("weights", "activations"), [(4, 4), (8, 8), (4, None), (None, 4), (3, 6)])
@torch.no_grad()
def test_output_is_that_of_the_dequantized_parts(
    weights: int | None, activations: int | None, groups: int | None, dtype: torch.dtype
) -> None:
    weight_format = IntFormat(bits=weights, group_size=groups) if weights else None
    input_format = IntFormat(bits=activations, clip_ratio=0.9, group_size=groups) if activations else None
    module, linear = make(weight_format, input_format, dtype)
    x = torch.randn(2, 3, 96).to(dtype)
    rotated = module.rotate_input(x)
    if input_format is not None:
        codes, scale = reference.quantize_rows(rotated, input_format.bits, 0.9, groups)
        rotated = reference.dequantize_groups(codes, scale, torch.float64)
    expected = rotated.double() @ module.float_weight(torch.float64).T + linear.bias.double()
    out = module(x)
    assert out.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert ((out.double() - expected).abs().max() / expected.abs().max()).item() < tolerance


def test_casting_the_model_keeps_the_scales() -> None:
    module, _ = make(IntFormat(bits=4), IntFormat(bits=4))
    before = module.weight_scale.clone()
    cast = copy.deepcopy(module).to(torch.bfloat16)
    assert cast.bias.dtype == torch.bfloat16
    assert cast.weight_scale.dtype == torch.float32
    assert torch.equal(cast.weight_scale, before)


def test_tokens_are_quantized_each_alone() -> None:
    module, _ = make(IntFormat(bits=8), IntFormat(bits=8))
    x = torch.randn(4, 96) * torch.tensor([1.0, 1e-3, 1e3, 1])[:, None]
    alone = torch.cat([module(row[None]) for row in x])
    torch.testing.assert_close(module(x), alone)


@torch.no_grad()
def test_the_layer_compiles_without_changing_a_bit() -> None:
    module, _ = make(IntFormat(bits=4), IntFormat(bits=4, clip_ratio=0.9))
    module.prepare(torch.device("cpu"))
    x = torch.randn(5, 96)
    kept = x.clone()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [None, 32])
@pytest.mark.parametrize("bits", [(4, 4), (8, 8), (3, 6)])
@pytest.mark.parametrize("transform", [factor_or_fallback(192), factor_or_fallback(128), TRANSFORM, *MIXES])
@torch.no_grad()
def test_on_kernels_it_is_the_product_of_the_codes(
    transform: Factorisation | HeadMix, bits: tuple[int, int], groups: int | None, dtype: torch.dtype
) -> None:
    activations = IntFormat(bits=bits[1], clip_ratio=0.9, group_size=groups)
    module, _ = make(IntFormat(bits=bits[0], group_size=groups), activations, dtype, transform)
    x = torch.randn(2, 3, module.in_features).to(dtype)
    with on_kernels() as calls:
        out = module(x)
    factors = module.kernel_factors(x)
    assert (factors is None) == (transform is TRANSFORM)
    assert dict(calls) == {
        "quantize_rows" if factors is None else "hadamard_quantize": 1,
        "int4_matmul" if bits[0] <= 4 else "int8_matmul": 1,
    }
    rotated = module.rotate_input(x)
    if factors is not None:
        left = factors.left[: factors.order, : factors.order]
        by_factors = reference.rotate_by_factors(x.flatten(0, -2), left, factors.right, factors.norm).view(x.shape)
        torch.testing.assert_close(by_factors, rotated, rtol=1e-4, atol=1e-5)
        rotated = by_factors
    codes, scale = reference.quantize_rows(rotated, bits[1], 0.9, groups)
    flat = codes.flatten(0, -2), scale.flatten(0, -2), module.codes(), module.weight_scale
    expected = (reference.quantized_matmul(*flat, (bits[1], bits[0])) + module.bias.float()).to(dtype)
    assert torch.equal(out, expected.view(2, 3, 40))


@pytest.mark.parametrize("bits", [3, 6])
@torch.no_grad()
def test_a_state_dict_changes_the_weight_that_kernels_read(bits: int) -> None:
    module, other = (make(IntFormat(bits=bits), IntFormat(bits=8))[0] for _ in range(2))
    x = torch.randn(5, 96)
    with on_kernels():
        module(x)
        module.load_state_dict(other.state_dict())
        assert torch.equal(module(x), other(x))
        module.weight_packed = module.weight_packed ^ 1
        assert not torch.equal(module(x), other(x))


@pytest.mark.parametrize("transform", [factor_or_fallback(192), MIXES[0]])
@torch.no_grad()
def test_on_kernels_it_compiles_without_changing_a_bit(transform: Factorisation | HeadMix) -> None:
    module, _ = make(IntFormat(bits=4), IntFormat(bits=4, clip_ratio=0.9), torch.bfloat16, transform)
    x = torch.randn(2, 5, 192).bfloat16()
    with on_kernels():
        expected = module(x)
        assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), expected)
        assert torch.equal(copy.deepcopy(module)(x), expected)
        single = module.to(torch.float32)(x.float())
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, expected.float(), rtol=0.05, atol=0.05)
