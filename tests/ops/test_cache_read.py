"""What comes out of the pages by the kernel, against the definition: the same numbers, and nothing beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops import cache_read_kernels, cache_reference
from rotaquant.ops.cache import cache_read
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POISON = -12345.0
MARGIN = 4096  # numbers around an output, which stay as they were


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, where kernels run in Triton's interpreter, and a GPU."""
    return torch.device(request.param)


def pages_for(form: PageFormat, batch: int, columns: int) -> tuple[Tensor, Tensor]:
    """Pages of random codes, scales and lowest values, and a table of some of them in disorder."""
    generator = torch.Generator().manual_seed(7)
    count = batch * columns + 2
    pages = torch.randint(0, 256, (count, form.page_bytes), dtype=torch.uint8, generator=generator)
    for parameters in form.split(pages)[2:]:
        parameters.copy_(torch.randn(parameters.shape, generator=generator) * 0.3)
    return pages, torch.randperm(count, generator=generator)[: batch * columns].view(batch, columns) * form.page_bytes


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """An output amid what must not change, and all of it."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * MARGIN,), POISON, dtype=dtype, device=device)
    return whole[MARGIN : MARGIN + size].view(shape), whole


def cut(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Float32 in `dtype` as kernels have it: the interpreter cuts bfloat16 off where a device rounds."""
    if dtype == BF16 and device.type == "cpu":
        x = (x.contiguous().view(torch.int32) & -65536).view(F32)
    return x.to(dtype)


def check(
    pages: Tensor,
    table: Tensor,
    slots: tuple[int, int],
    heads: tuple[int, int],
    form: PageFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The kernel's numbers are the definition's, bit by bit, and what lies around them is left alone."""
    kind = dtype if device.type != "cpu" or dtype != BF16 else F32
    wanted = cache_reference.read(pages, table, *slots, form, kind)
    shape = table.shape[0], heads[1] - heads[0], slots[1] - slots[0], form.head_dim
    outputs = [poisoned(shape, dtype, device) for _ in range(2)]
    out = outputs[0][0], outputs[1][0]
    # A row of a wider table, at an odd place.
    wide = torch.full((table.shape[0], table.shape[1] + 3), -1, dtype=torch.int64)
    wide[:, 1:-2] = table
    moved = wide.to(device)[:, 1:-2]
    found = cache_read_kernels.read(pages.to(device), moved, *slots, heads, form, dtype, out)
    assert found[0] is out[0] and found[1] is out[1]
    for (_, whole), one, expected in zip(outputs, found, wanted, strict=True):
        expected = cut(expected[:, heads[0] : heads[1]], dtype, device)
        assert torch.equal(one.cpu().view(torch.int16), expected.contiguous().view(torch.int16))
        assert bool((whole[:MARGIN] == POISON).all() and (whole[-MARGIN:] == POISON).all())


@pytest.mark.parametrize("bits", [(4, 4), (2, 3), (3, 2), (8, 5), (6, 7)])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 192, 256])
def test_the_numbers_are_the_definitions(head_dim: int, bits: tuple[int, int], device: torch.device) -> None:
    """From the middle of a page to the middle of the next, some heads of several, of sequences anywhere in memory."""
    form = PageFormat(3, head_dim, *bits, has_positions=True)
    pages, table = pages_for(form, 2, 2)
    check(pages, table, (37, 101), (1, 3), form, F16, device)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("heads", [(0, 3), (0, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("slots", [(0, 192), (0, 1), (63, 64), (63, 65), (64, 128), (5, 9), (127, 192), (1, 191)])
def test_slots_and_heads_are_those_asked_for(
    slots: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    form = PageFormat(3, 64, 4, 3)
    pages, table = pages_for(form, 2, 3)
    check(pages, table, slots, heads, form, dtype, device)


@pytest.mark.parametrize("has_positions", [False, True])
def test_a_batch_of_many_and_one_of_a_row(has_positions: bool, device: torch.device) -> None:
    """Ragged sequences have offset 0 where they have no page; a slice of a table is one of its rows."""
    form = PageFormat(2, 80, 4, 4, has_positions)
    pages, table = pages_for(form, 5, 3)
    table[1, 1:], table[3, 2:] = 0, 0
    check(pages, table, (0, 150), (0, 2), form, F16, device)
    for row in range(5):
        check(pages, table[row : row + 1], (60, 70), (0, 2), form, F16, device)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_memory_that_was_never_written_is_no_obstacle(device: torch.device) -> None:
    """Any bytes are numbers, infinite or none: the same as the definition's, but for the bits of what is none."""
    form = PageFormat(2, 64, 4, 8)
    pages, table = pages_for(form, 2, 2)
    pages.random_(0, 256, generator=torch.Generator().manual_seed(8))
    wanted = cache_reference.read(pages, table, 3, 128, form, F16)
    assert any(bool(x.isnan().any() and x.isinf().any()) for x in wanted)
    found = cache_read_kernels.read(pages.to(device), table.to(device), 3, 128, (0, 2), form, F16)
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by", ["operation", "kernel"])
def test_a_page_made_by_hand(by: str, device: torch.device) -> None:
    """Every byte of two tokens, written as the layout tells; bits 4 and 3, two heads, of which the second is read."""
    form = PageFormat(2, 8, 4, 3)
    head = PAGE_TOKENS * (4 + 3 + 4 + 4)
    assert form.page_bytes == 2 * head
    pages = torch.zeros(2, form.page_bytes, dtype=torch.uint8)
    page = pages[1, head:]
    keys, values, key_grid, value_grid = page.split([PAGE_TOKENS * size for size in (4, 3, 4, 4)])
    for token, (key, value) in {3: ("76543210", "7654 3210"), 4: ("fedcba98", "0123 4567")}.items():
        keys[4 * token : 4 * token + 4] = torch.tensor([*reversed(bytes.fromhex(key))])
        codes = [int(code) for code in reversed(value.replace(" ", ""))]
        low = sum((code & 3) << (2 * place) for place, code in enumerate(codes))
        high = sum((code >> 2) << place for place, code in enumerate(codes))
        values[3 * token : 3 * token + 3] = torch.tensor([low & 0xFF, low >> 8, high])
    key_grid.view(F16)[6:10] = torch.tensor([2.0, -1.0, 0.5, 3.0])
    value_grid.view(F16)[6:10] = torch.tensor([1.0, 10.0, 4.0, -4.0])
    read: Callable[..., tuple[Tensor, Tensor]] = cache_read if by == "operation" else cache_read_kernels.read
    table = torch.tensor([[0, form.page_bytes]], device=device)
    found = read(pages.to(device), table, 67, 69, (1, 2), form, F16)
    assert found[0].tolist() == [[[[2.0 * i - 1 for i in range(8)], [0.5 * (i + 8) + 3 for i in range(8)]]]]
    assert found[1].tolist() == [[[[i + 10.0 for i in range(8)], [4.0 * (7 - i) - 4 for i in range(8)]]]]


@pytest.mark.gpu
def test_pages_in_other_memory_are_reached_by_their_offsets() -> None:
    """What `pages` does not hold, before it or more than 2 GiB after, is read all the same."""
    form = PageFormat(2, 64, 4, 4)
    on_cpu, table = pages_for(form, 2, 2)
    room = torch.empty((5 << 30) // form.page_bytes, form.page_bytes, dtype=torch.uint8, device="cuda")
    middle = len(room) // 2
    wanted = cache_reference.read(on_cpu, table, 5, 128, form, F16)
    for place in (0, len(room) - len(on_cpu)):
        room[place : place + len(on_cpu)] = on_cpu.cuda()
        moved = table.cuda() + (place - middle) * form.page_bytes
        found = cache_read(room[middle : middle + 1], moved, 5, 128, (0, 2), form, F16)
        assert all(torch.equal(one.cpu(), expected) for one, expected in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_no_range_compiles_the_kernel_anew() -> None:
    form = PageFormat(4, 64, 4, 4)
    pages, table = (x.cuda() for x in pages_for(form, 3, 5))

    def variants() -> int:
        return sum(len(kernels[0]) for kernels in cache_read_kernels._read.device_caches.values())

    cache_read(pages, table, 0, 64, (0, 4), form, BF16)
    before = variants()
    for slots, heads, rows in (((1, 2), (1, 2), (0, 1)), ((16, 320), (0, 3), (1, 2)), ((17, 33), (2, 4), (1, 3))):
        cache_read(pages, table[slice(*rows)], *slots, heads, form, BF16)
    cache_read(pages, table[:, 1:].contiguous(), 0, 16, (0, 1), form, BF16)
    assert variants() == before


@pytest.mark.parametrize("dtype", [F16, BF16, F32, torch.float64])
def test_the_operation_is_its_definition(dtype: torch.dtype, device: torch.device) -> None:
    form = PageFormat(3, 80, 4, 2)
    pages, table = pages_for(form, 2, 2)
    wanted = cache_reference.read(pages, table, 5, 100, form, dtype)
    found = cache_read(pages.to(device), table.to(device), 5, 100, (1, 3), form, dtype)
    for one, expected in zip(found, wanted, strict=True):
        assert one.is_contiguous() and one.device.type == device.type
        assert torch.equal(one.cpu(), expected[:, 1:])


def test_the_definition_takes_a_range_of_heads() -> None:
    form = PageFormat(3, 64, 8, 3, has_positions=True)
    pages, table = pages_for(form, 2, 2)
    whole = cache_reference.read(pages, table, 5, 100, form, F32)
    for heads in ((0, 3), (1, 2), (2, 3), (1, 1)):
        part = cache_reference.read(pages, table, 5, 100, form, F32, heads)
        assert all(torch.equal(one, all_[:, slice(*heads)]) for one, all_ in zip(part, whole, strict=True))


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize(
    ("rows", "slots", "heads", "shape"),
    [
        (2, (7, 7), (0, 3), (2, 3, 0, 64)),
        (2, (128, 128), (0, 3), (2, 3, 0, 64)),
        (0, (0, 9), (0, 3), (0, 3, 9, 64)),
        (2, (0, 9), (3, 3), (2, 0, 9, 64)),
    ],
)
def test_of_nothing_nothing_comes(
    rows: int, slots: tuple[int, int], heads: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    form = PageFormat(3, 64, 4, 4)
    pages, table = (x.to(device) for x in pages_for(form, 2, 2))
    reads: list[Callable[..., tuple[Tensor, Tensor]]] = [cache_read]
    reads += [cache_read_kernels.read] if dtype == F16 else []
    for read in reads:
        for x in read(pages, table[:rows], *slots, heads, form, dtype):
            assert x.shape == shape and x.dtype == dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("slots", [(5, 100), (64, 64)])
def test_schema_and_fake_are_right(slots: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    form = PageFormat(3, 80, 4, 2)
    pages, table = (x.to(device) for x in pages_for(form, 2, 2))
    arguments = pages, table, *slots, 1, 3, form.kv_heads, 4, 2, False, 80, dtype
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(torch.ops.rotaquant.cache_read.default, arguments, test_utils=utilities)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_ranges_that_vary_are_compiled_once_by_torch() -> None:
    form = PageFormat(2, 64, 4, 4)
    pages, table = pages_for(form, 2, 3)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def total(start: int, stop: int) -> Tensor:
        keys, values = cache_read(pages, table, start, stop, (0, 2), form, F32)
        return keys + values

    compiled = torch.compile(total, backend=backend, dynamic=True, fullgraph=True)
    for slots in ((3, 70), (10, 150), (64, 192), (5, 33)):
        assert torch.equal(compiled(*slots), total(*slots))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8; it must be one of torch.float16"),
        ({"dtype": torch.complex64}, "dtype is torch.complex64"),
        ({"start": -1}, "slots -1 to 5 cannot be read; they must be in order, from 0 to 128"),
        ({"start": 6}, "slots 6 to 5 cannot be read"),
        ({"stop": 129}, "slots 0 to 129 cannot be read.*the table has 2 pages of 64 tokens"),
        ({"heads": (0, 3)}, "heads 0 to 3 cannot be read; they must be in order, from 0 to 2"),
        ({"heads": (-1, 2)}, "heads -1 to 2"),
        ({"heads": (2, 1)}, "heads 2 to 1"),
        ({"form": PageFormat(2, 64, 8, 4)}, r"pages is .*it must be uint8 \[n, "),
        ({"form": PageFormat(2, 64, 9, 4)}, "keys have 9 bits"),
        ({"form": PageFormat(2, 60, 4, 4)}, "head_dim is 60"),
        ({"table": torch.zeros(2, 2, dtype=torch.int32)}, "table is torch.int32"),
        ({"table": torch.zeros(2, 4, dtype=torch.int64)[:, ::2]}, "table is .*int64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    form = PageFormat(2, 64, 4, 4)
    pages, table = pages_for(form, 2, 2)
    given = {"table": table, "start": 0, "stop": 5, "heads": (0, 2), "form": form, "dtype": F16} | change
    with pytest.raises(RotaquantError, match=message):
        cache_read(pages, **given)
