"""Which layouts run on kernels, and what is said where a part of one does not."""

from __future__ import annotations

import pytest
import torch

from rotaquant.hadamard import Factorisation, factor_or_fallback
from rotaquant.ops import rotation_factors
from rotaquant.recipe import IntFormat
from rotaquant.runtime import kernel_path
from rotaquant.runtime.layout import LinearLayout
from tests.fake_gpu import fake_gpu

CUDA = torch.device("cuda")


def told(transform: Factorisation, device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    kernel_path._tell_what_is_slow(transform, rotation_factors(transform), transform.size, device, dtype)
    return caplog.text


def test_a_rotation_without_a_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_path, "_TRITON_MISSING", None)
    wide, usual = factor_or_fallback(53248), factor_or_fallback(11008)
    assert rotation_factors(wide) is None
    assert "52·2^10 (paley-2)" in told(wide, CUDA, torch.bfloat16, caplog)
    assert told(wide, torch.device("cpu"), torch.bfloat16, caplog) == ""
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    with fake_gpu((9, 0)) as device:
        assert told(usual, device, torch.bfloat16, caplog) == ""
    with fake_gpu((8, 6)) as device:
        assert "more shared memory than this device has" in told(usual, device, torch.bfloat16, caplog)
        assert told(factor_or_fallback(14336), device, torch.bfloat16, caplog) == ""
    assert "bfloat16 or float16" in told(usual, CUDA, torch.float32, caplog)
    # Where no kernel can be had at all, that has been said instead.
    monkeypatch.setattr(kernel_path, "_TRITON_MISSING", "the package triton is not installed")
    assert told(wide, CUDA, torch.bfloat16, caplog) == ""


@pytest.mark.parametrize(
    ("weights", "activations", "columns", "expected"),
    [
        (IntFormat(bits=4), IntFormat(bits=4), 4096, True),
        (IntFormat(bits=4), None, 4096, True),
        (IntFormat(bits=8), None, 4096, False),
        (None, IntFormat(bits=4), 4096, False),
        (IntFormat(bits=4), IntFormat(bits=4), 65537, False),
        (IntFormat(bits=4, group_size=12), IntFormat(bits=4, group_size=12), 4800, False),
    ],
)
def test_products_have_kernels_by_their_formats(
    weights: IntFormat | None, activations: IntFormat | None, columns: int, expected: bool
) -> None:
    layout = LinearLayout(weights=weights, activations=activations)
    assert kernel_path.has_product(layout, columns) is expected
