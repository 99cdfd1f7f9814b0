"""What the append kernel leaves in the pages, against the definition: the same bytes, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotaquant.hadamard import base_matrix, factor_or_fallback
from rotaquant.ops import cache_reference, reference
from rotaquant.ops.cache import Turn
from rotaquant.ops.cache_append_kernels import append
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
CLIPS = (0.95, 0.9)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, where kernels run in Triton's interpreter, and a GPU."""
    return torch.device(request.param)


def states(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random keys or values with outliers, some rows constant or zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 20
    x[0, 0, 0] = 0.0
    x[0, -1, -1] = 0.37
    x[0, 1, 0] *= 1e-9  # a scale that fp16 does not hold
    return x.to(dtype)


def pages_for(form: PageFormat, batch: int, columns: int) -> tuple[Tensor, Tensor]:
    """Pages of random bytes, and a table of some of them in disorder."""
    generator = torch.Generator().manual_seed(7)
    count = batch * columns + 2
    pages = torch.randint(0, 256, (count, form.page_bytes), dtype=torch.uint8, generator=generator)
    return pages, torch.randperm(count, generator=generator)[: batch * columns].view(batch, columns) * form.page_bytes


@pytest.mark.parametrize("bits", [(4, 4), (2, 3), (3, 2), (8, 5), (6, 7)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_the_bytes_are_the_definitions(head_dim: int, bits: tuple[int, int], device: torch.device) -> None:
    """Sequences that begin at different slots, cross pages and end exactly at one; other bytes stay as they were."""
    form = PageFormat(2, head_dim, *bits, has_positions=True)
    pages, table = pages_for(form, 3, 2)
    first, length = torch.tensor([0, 61, PAGE_TOKENS - 5], dtype=torch.int32), 5
    keys, values = states((3, length, 2, head_dim), 1), states((3, length, 2, head_dim), 2)
    positions = torch.arange(3 * length, dtype=torch.int32).view(3, length) * 7
    wanted = pages.clone()
    cache_reference.append(wanted, table, first, keys, values, positions, form, CLIPS)
    got = pages.to(device)
    moved = [x.to(device) for x in (table, first, keys, values, positions)]
    assert append(got, *moved[:2], None, *moved[2:], form, CLIPS, Turn()) is None
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strided_states_and_rows_that_are_not_finite(dtype: torch.dtype, device: torch.device) -> None:
    form = PageFormat(2, 64, 4, 4)
    pages, table = pages_for(form, 2, 1)
    fused = states((2, 3, 8, 64), 3, dtype)
    fused[0, 1, 2, 5], fused[1, 0, 3, 0], fused[1, 2, 6, 9] = float("nan"), float("inf"), float("-inf")
    keys, values = fused[:, :, 2:4], fused[:, :, 6:8]
    first = torch.tensor([0, 60], dtype=torch.int32)
    wanted = pages.clone()
    cache_reference.append(wanted, table, first, keys, values, None, form, CLIPS)
    got, on = pages.to(device), fused.to(device)
    append(
        got, table.to(device), first.to(device), None, on[:, :, 2:4], on[:, :, 6:8], None, form, CLIPS, Turn()
    )  # fmt: skip
    for found, expected in zip(form.split(got.cpu()), form.split(wanted), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("style", ["half", "half-once", "interleaved", "interleaved-from-halves"])
@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (96, 32), (128, 128), (80, 80)])
def test_keys_and_queries_are_turned_and_rotated(style: str, head_dim: int, width: int, device: torch.device) -> None:
    # The interpreter cuts bfloat16 off where a device rounds.
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    form, heads = PageFormat(2, head_dim, 4, 4), 6
    pages, table = pages_for(form, 2, 1)
    keys, values = states((2, 4, 2, head_dim), 4, dtype), states((2, 4, 2, head_dim), 5, dtype)
    query = states((2, 4, heads, head_dim), 6, dtype)
    angles = torch.rand(1, 4, width if style != "half-once" else width // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if style == "half" or style == "interleaved-from-halves":
        cos, sin = (torch.cat((x[..., : width // 2],) * 2, -1) for x in (cos, sin))
    elif style == "interleaved":
        cos, sin = (x[..., ::2].repeat_interleave(2, -1) for x in (cos, sin))
    transform = factor_or_fallback(head_dim)
    base = base_matrix(transform)
    exact = reference.rotate_rows(torch.eye(head_dim, dtype=torch.float64), base, transform.blocks)
    norm = float(exact.abs().max())
    first = torch.tensor([0, 60], dtype=torch.int32)

    def rotated(x: Tensor) -> Tensor:
        return reference.rotate_rows(cache_reference.rope(x, cos, sin, style), base.float(), transform.blocks)

    wanted = pages.clone()
    cache_reference.append(wanted, table, first, rotated(keys), values, None, form, CLIPS)
    got = pages.to(device)
    turn = Turn(
        style=style, cos=cos.to(device), sin=sin.to(device),
        rotation=(exact / norm).round().to(device, dtype), norm=norm,
    )  # fmt: skip
    moved = [x.to(device) for x in (table, first, query, keys, values)]
    out = append(got, *moved, None, form, CLIPS, turn)
    assert out is not None
    torch.testing.assert_close(out.cpu(), rotated(query).to(dtype), rtol=2**-7, atol=1e-4)
    # Sums in another order may tip what lies between two codes.
    assert ((got.cpu() ^ wanted) != 0).float().mean() < 1e-4
