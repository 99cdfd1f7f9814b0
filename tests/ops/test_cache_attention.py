"""Attention over the packed cache by its kernel, against float64 attention over what the pages hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rotaquant.ops import cache_attention_plans, cache_reference
from rotaquant.ops.cache_attention_kernels import attend
from rotaquant.ops.cache_attention_plans import AttentionPlan, choose, fitted, shared_bytes
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat
from rotaquant.ops.device_features import shared_memory_of

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]

# The interpreter cuts bfloat16 off where a device rounds.
TOLERANCE = {"cpu": 0.008, "cuda": 0.004}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, where kernels run in Triton's interpreter, and a GPU."""
    return torch.device(request.param)


@dataclass(frozen=True)
class Case:
    """A batch of sequences of `lengths` tokens, and how its last `queries` tokens attend."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    bits: tuple[int, int] = (4, 4)
    queries: int = 1
    window: int | None = None
    softcap: float | None = None
    masked: bool = False
    sinks: bool = False
    splits: int = 2
    dtype: torch.dtype = torch.bfloat16
    warps: int = 2
    keys: int = 32


CASES = [
    Case((70, 1)),
    Case((64, 128, 63), splits=1),
    Case((0, 65), splits=3),
    Case((300,), splits=5),
    Case((300,), splits=4, keys=64, warps=1),
    Case((130, 70), head_dim=80, queries=3),
    Case((64,), head_dim=96, queries=16, heads=8),
    Case((200, 128), head_dim=128, heads=8, window=20, masked=True, queries=2),
    Case((90,), head_dim=192, heads=2, kv_heads=1, dtype=torch.float16),
    Case((65,), head_dim=256, heads=16, splits=3),
    Case((100, 40), softcap=5.0),
    Case((100, 40), sinks=True, splits=1),
    Case((100, 40), sinks=True, queries=2),
    Case((190,), window=64, splits=1),
    Case((190,), window=1),
    Case((190, 7), window=64, queries=16, heads=2, kv_heads=1),
    Case((80, 66), masked=True, heads=2),
    Case((80, 66), masked=True, splits=1, queries=4),
    Case((70, 33), bits=(2, 4)),
    Case((70, 33), bits=(4, 2), head_dim=128),
    Case((70, 33), bits=(3, 3)),
    Case((70, 33), bits=(8, 8), dtype=torch.float16),
    Case((70, 33), bits=(5, 6), head_dim=80),
    Case((70, 33), bits=(7, 3), head_dim=96),
]


def filled(case: Case, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, PageFormat]:
    """Pages, at random places among others, that hold the case's tokens; what was not written is no number."""
    generator = torch.Generator().manual_seed(seed)
    form = PageFormat(case.kv_heads, case.head_dim, *case.bits)
    columns = max(1, -(-max(case.lengths) // PAGE_TOKENS))
    count = len(case.lengths) * columns + 1
    pages = torch.randint(0, 256, (count, form.page_bytes), dtype=torch.uint8, generator=generator)
    for parameters in form.split(pages)[2:]:
        parameters.fill_(float("nan"))
    table = torch.randperm(count, generator=generator)[: count - 1].view(-1, columns) * form.page_bytes
    for row, length in enumerate(case.lengths):
        x, y = (torch.randn(1, length, case.kv_heads, case.head_dim, generator=generator) for _ in range(2))
        if length:
            first = torch.zeros(1, dtype=torch.int32)
            cache_reference.append(pages, table[row : row + 1], first, x, y + 0.5, None, form, (0.95, 0.95))
    return pages.to(device), table.to(device), form


def expected(case: Case, query: Tensor, pages: Tensor, table: Tensor, form: PageFormat, **options: object) -> Tensor:
    """Float64 attention over what the pages hold."""
    keys, values = cache_reference.read(pages, table, 0, table.shape[1] * PAGE_TOKENS, form, torch.float64)
    lengths = torch.tensor(case.lengths, device=query.device)
    return cache_reference.attend(query.double(), keys, values, lengths, scaling=0.2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_gives_the_attention_over_what_is_stored(case: Case, device: torch.device) -> None:
    pages, table, form = filled(case, device)
    generator = torch.Generator().manual_seed(1)
    shape = (len(case.lengths), case.queries, case.heads, case.head_dim)
    query = torch.randn(shape, generator=generator).to(device, case.dtype)
    slots = table.shape[1] * PAGE_TOKENS
    mask = torch.rand(shape[0], 1, case.queries, slots, generator=generator) > 0.3 if case.masked else None
    mask = None if mask is None else mask.to(device)
    sinks = torch.randn(case.heads, generator=generator).to(device) if case.sinks else None
    options = {"window": case.window, "softcap": case.softcap, "sinks": sinks}
    wanted = expected(case, query, pages, table, form, mask=mask, **options)
    arrivals = torch.zeros(shape[0] * case.kv_heads * 8, dtype=torch.int32, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    plan = AttentionPlan(warps=case.warps, keys=case.keys, stages=3, splits=case.splits)
    for _ in range(2):  # the second finds what the first has left behind
        got = attend(
            query, pages, table, lengths, arrivals, mask, sinks, form,
            longest=max(case.lengths), scaling=0.2, window=case.window, softcap=case.softcap, plan=plan,
        )  # fmt: skip
        assert torch.isfinite(got).all()
        error = (got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-9)
        assert error.max() < 3 * TOLERANCE[device.type]
        assert (got.double() - wanted).norm() < TOLERANCE[device.type] * wanted.norm()
        assert not arrivals.any()


def test_a_mask_may_begin_at_a_later_slot(device: torch.device) -> None:
    """As with sliding windows, whose masks are as long as the window."""
    case = Case((150, 150), queries=2)
    pages, table, form = filled(case, device)
    query = torch.randn(2, 2, 4, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    whole = torch.zeros(2, 1, 2, table.shape[1] * PAGE_TOKENS, dtype=torch.bool, device=device)
    whole[..., 100:149:2] = True
    arrivals = torch.zeros(64, dtype=torch.int32, device=device)
    lengths = torch.full((2,), 150, dtype=torch.int32, device=device)
    got = attend(
        query, pages, table, lengths, arrivals, whole[..., 100:], None, form, longest=150, scaling=0.2, mask_first=100
    )
    wanted = expected(case, query, pages, table, form, mask=whole)
    assert (got.double() - wanted).norm() < TOLERANCE[device.type] * wanted.norm()


def test_uniform_weights_over_many_tokens_keep_their_digits(device: torch.device) -> None:
    """A constant must not grow within the sums: with 128 left in the codes this was wrong by 86 % at 32k tokens."""
    length = 32768 if device.type == "cuda" else 4096
    case = Case((length,), head_dim=64, heads=1, kv_heads=1, splits=3)
    pages, table, form = filled(case, device)
    query = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    wanted = expected(case, query, pages, table, form, mask=None)
    arrivals = torch.zeros(8, dtype=torch.int32, device=device)
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    plan = AttentionPlan(warps=2, keys=64, stages=3, splits=3)
    got = attend(query, pages, table, lengths, arrivals, None, None, form, longest=length, scaling=0.2, plan=plan)
    assert (got.double() - wanted).norm() < 0.01 * wanted.norm()


def test_every_plan_fits_where_there_is_least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also wide heads of 8 bits; how much a program takes is what the compiler said."""
    room = shared_memory_of((8, 6))
    monkeypatch.setattr(cache_attention_plans, "shared_memory", lambda device: room)
    plans = [choose(pairs, tokens, torch.device("cpu")) for pairs in (1, 64, 512, 2048) for tokens in (512, 8192)]
    for plan, head_dim, bits in itertools.product(plans, (64, 80, 128, 256), ((2, 3), (4, 4), (8, 8))):
        form = PageFormat(8, head_dim, *bits)
        smaller = fitted(plan, form, torch.device("cpu"))
        assert shared_bytes(smaller, form) <= room
        if shared_bytes(plan, form) <= room:
            assert smaller == plan


@pytest.mark.parametrize("rows", [1, 8, 128, 512, 4096])
@pytest.mark.parametrize("tokens", [1, 64, 2048, 131072])
def test_every_plan_has_work_for_its_programs(rows: int, tokens: int) -> None:
    plan = choose(rows, tokens, torch.device("cpu"))
    assert PAGE_TOKENS % plan.keys == 0
    assert 1 <= plan.splits <= max(1, -(-tokens // (plan.warps * plan.keys)))
