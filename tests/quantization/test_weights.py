"""Weight grids: round-to-nearest by hand, the clip search, scales as stored."""

import pytest
import torch

from rotaquant.quantization.weights import round_to_nearest, weight_scale
from rotaquant.recipe import IntFormat


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    return torch.distributions.StudentT(3.0).sample((rows, columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_taken_against_the_scale_as_stored(dtype: torch.dtype) -> None:
    weight = heavy_tailed(8, 64)
    fmt = IntFormat(bits=4)
    scale = weight_scale(weight, fmt, dtype)
    assert scale.dtype == dtype
    quantized = round_to_nearest(weight, fmt, scale)
    error = (quantized.dequantize() - weight).abs()
    inside = weight.abs() <= 7 * scale.float()
    assert (error <= scale.float() / 2 * (1 + 1e-6))[inside].all()


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("group_size", [None, 16])
def test_the_searched_clip_has_the_least_error_of_its_grid(group_size: int | None, norm: float) -> None:
    weight = heavy_tailed(6, 64)

    def error(clip: float | str) -> torch.Tensor:
        fmt = IntFormat(bits=4, group_size=group_size, clip_ratio=clip, clip_norm=norm)
        quantized = round_to_nearest(weight, fmt, weight_scale(weight, fmt, torch.float32))
        groups = (quantized.dequantize() - weight).unflatten(-1, (-1, group_size or 64))
        return groups.abs().pow(norm).sum(-1)

    searched = error("search")
    fixed = torch.stack([error(round(1 - 0.01 * step, 2)) for step in range(80)])
    torch.testing.assert_close(searched, fixed.amin(0))
    assert (searched < fixed[0]).any()


@pytest.mark.parametrize("clip", [1.0, "search"])
def test_a_channel_of_zeros_has_scale_one_and_codes_zero(clip: float | str) -> None:
    weight = heavy_tailed(3, 32)
    weight[1] = 0
    fmt = IntFormat(bits=4, clip_ratio=clip)
    quantized = round_to_nearest(weight, fmt, weight_scale(weight, fmt, torch.float16))
    assert quantized.scale[1].item() == 1.0
    assert not quantized.codes[1].any()
    assert torch.isfinite(quantized.dequantize()).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_stay_in_range_at_every_width(bits: int) -> None:
    fmt = IntFormat(bits=bits, clip_ratio=0.5)
    weight = heavy_tailed(4, 128)
    codes = round_to_nearest(weight, fmt, weight_scale(weight, fmt, torch.float32)).codes
    assert codes.min() >= -(1 << (bits - 1))
    assert codes.max() <= (1 << (bits - 1)) - 1
