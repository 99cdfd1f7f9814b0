"""The quantized linear against its parts."""

import copy

import pytest
import torch
from torch import nn

from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import reference
from rotaquant.quantization.weights import round_to_nearest, weight_scale
from rotaquant.recipe import IntFormat
from rotaquant.runtime.layout import LinearLayout, float_layout
from rotaquant.runtime.linear import QuantizedLinear


def make(
    weights: IntFormat | None, activations: IntFormat | None, dtype: torch.dtype = torch.float32
) -> tuple[QuantizedLinear, nn.Linear]:
    linear = nn.Linear(96, 40, dtype=dtype).requires_grad_(False)
    layout = LinearLayout(weights=weights, activations=activations, transform=factor_or_fallback(96))
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
