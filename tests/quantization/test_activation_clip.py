"""The search of activation clips."""

import torch

from rotaquant.ops import reference
from rotaquant.quantization.activation_clip import ACTIVATION_GRID, search_activation_clip
from rotaquant.recipe import IntFormat


def output_error(inputs: torch.Tensor, weight: torch.Tensor, ratio: float) -> float:
    codes, scale = reference.quantize_rows(inputs, 4, ratio)
    return (
        (reference.dequantize_groups(codes, scale, torch.float32) @ weight.T - inputs @ weight.T).square().sum().item()
    )


def test_the_ratio_of_least_output_error_is_found() -> None:
    inputs, weight = torch.randn(256, 128), torch.randn(64, 128)
    found = search_activation_clip(inputs, weight, inputs @ weight.T, IntFormat(bits=4, clip_ratio="search"))
    errors = {ratio: output_error(inputs, weight, ratio) for ratio in ACTIVATION_GRID}
    assert found == min(errors, key=lambda ratio: errors[ratio])
    assert found < 1.0


def test_two_valued_inputs_are_not_clipped() -> None:
    inputs = torch.randint(0, 2, (64, 128)).float() * 2 - 1
    weight = torch.randn(16, 128)
    assert search_activation_clip(inputs, weight, inputs @ weight.T, IntFormat(bits=4, clip_ratio="search")) == 1.0
