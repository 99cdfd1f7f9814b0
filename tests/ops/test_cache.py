"""The operations on the paged cache as torch sees them: schemas, fakes, definitions, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rotaquant.errors import RotaquantError
from rotaquant.ops.cache import Scores, Turn, arrivals_for, cache_append, cache_attention
from rotaquant.ops.cache_layout import PAGE_TOKENS, PageFormat, pack_codes, unpack_codes

FORM = PageFormat(2, 64, 4, 4)
CLIPS = (0.95, 0.95)


def empty_cache(form: PageFormat = FORM, batch: int = 2, columns: int = 2) -> tuple[Tensor, Tensor]:
    """Pages, and a table of them in disorder."""
    pages = torch.zeros(batch * columns, form.page_bytes, dtype=torch.uint8)
    return pages, torch.randperm(batch * columns).view(batch, columns) * form.page_bytes


def states(length: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Query of four heads, keys and values of two."""
    return tuple(torch.randn(batch, length, heads, 64, dtype=dtype) for heads in (4, 2, 2))  # type: ignore[return-value]


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_come_back_from_their_bytes(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 2, 80), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape[-1] == (80 * bits // 8 if bits <= 4 else 80)
    assert torch.equal(unpack_codes(packed, bits, 80), codes)


@pytest.mark.parametrize(("bits", "most"), [((4, 4), 0.26563), ((8, 8), 0.516), ((2, 2), 0.141)])
def test_a_page_is_no_larger_than_its_tokens(bits: tuple[int, int], most: float) -> None:
    form = PageFormat(8, 128, *bits)
    assert form.page_bytes / (PAGE_TOKENS * 8 * 128 * 2 * 2) <= most


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_schemas_and_fakes_are_right() -> None:
    pages, table = empty_cache()
    query, keys, values = states(3, torch.float32)
    first, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([3, 8], dtype=torch.int32)
    fields = (2, 4, 4, False)
    tests = ("test_schema", "test_faketensor")
    rotation = torch.eye(64)
    arguments: list[Any] = [pages, table, first, query, keys, values, None, None, None, "none", rotation, 1.0]
    torch.library.opcheck(torch.ops.rotaquant.cache_append.default, (*arguments, *fields, *CLIPS), test_utils=tests)
    arrivals = arrivals_for(2, 2, 2, torch.device("cpu"))
    arguments = [query, pages, table, lengths, arrivals, None, None, *fields, 8, 0.1, None, None, 0]
    torch.library.opcheck(torch.ops.rotaquant.cache_attention.default, tuple(arguments), test_utils=tests)


@pytest.mark.parametrize("bits", [8, 4])
def test_token_by_token_is_all_at_once_and_near_to_float(bits: int) -> None:
    """The same bytes in float64, the same attention; and what 8 bits lose is little."""
    form = PageFormat(2, 64, bits, bits)
    query, keys, values = states(9)
    angles = torch.rand(1, 9, 64, dtype=torch.float64) * 6
    hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    for _ in range(5):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))

    def turn(part: slice) -> Turn:
        cos, sin = (torch.cat((x[:, part, :32],) * 2, -1) for x in (angles.cos(), angles.sin()))
        return Turn(style="half", cos=cos, sin=sin, rotation=hadamard.double(), norm=0.125)

    pages, table = empty_cache(form)
    start = torch.tensor([60, 0], dtype=torch.int32)
    whole, single = pages.clone(), pages.clone()
    turned = cache_append(whole, table, start, (query, keys, values), None, form, CLIPS, turn(slice(None)))
    for step in range(9):
        part = slice(step, step + 1)
        now = query[:, part], keys[:, part], values[:, part]
        one = cache_append(single, table, start + step, now, None, form, CLIPS, turn(part))
        torch.testing.assert_close(one, turned[:, part], rtol=1e-12, atol=1e-12)
    assert torch.equal(whole, single)
    # Of the second sequence, which begins at slot 0.
    lengths, arrivals = torch.tensor([9], dtype=torch.int32), arrivals_for(1, 2, 2, torch.device("cpu"))
    out = cache_attention(turned[1:], whole, table[1:], lengths, arrivals, form, 9, Scores(scaling=0.125))
    for step in range(9):
        part = slice(step, step + 1)
        one = cache_attention(
            turned[1:, part], whole, table[1:], lengths - 8 + step, arrivals, form, step + 1, Scores(scaling=0.125)
        )
        torch.testing.assert_close(one, out[:, part], rtol=1e-12, atol=1e-12)
    # Rotating both sides changes no score.
    plain = [x[1:].transpose(1, 2) for x in (turned, _turned_keys(keys, turn(slice(None))), values)]
    wanted = functional.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert (out - wanted).norm() < {8: 0.03, 4: 0.3}[bits] * wanted.norm()


def _turned_keys(keys: Tensor, turn: Turn) -> Tensor:
    form = PageFormat(2, 64, 8, 8)
    pages, table = empty_cache(form)
    first = torch.zeros(2, dtype=torch.int32)
    return cache_append(pages, table, first, (keys, keys, keys), None, form, CLIPS, turn)


def test_a_window_a_mask_and_padding_see_what_they_should() -> None:
    """What a row may not see does not count, whatever it holds; a row of padding alone gives zeros."""
    query, keys, values = states(70)
    pages, table = empty_cache()
    cache_append(pages, table, torch.zeros(2, dtype=torch.int32), (None, keys, values), None, FORM, CLIPS, Turn())
    changed = pages.clone()
    others = None, keys[:, :60] + 9, values[:, :60] - 9
    cache_append(changed, table, torch.zeros(2, dtype=torch.int32), others, None, FORM, CLIPS, Turn())
    lengths, arrivals = torch.tensor([70, 70], dtype=torch.int32), arrivals_for(2, 2, 2, torch.device("cpu"))
    mask = torch.zeros(2, 1, 1, 70, dtype=torch.bool)
    mask[0, ..., 61:] = True
    for scores in (
        Scores(scaling=0.1, window=10),
        Scores(scaling=0.1, mask=mask),
        Scores(scaling=0.1, mask=mask[..., 60:], mask_first=60),
    ):
        found = [
            cache_attention(query[:, -1:], p, table, lengths, arrivals, FORM, 70, scores) for p in (pages, changed)
        ]
        assert torch.equal(*found)
        assert found[0][0].abs().min() > 0
        assert (found[0][1] == 0).all() == (scores.mask is not None)
    open_scores = Scores(scaling=0.1)
    found = [
        cache_attention(query[:, -1:], p, table, lengths, arrivals, FORM, 70, open_scores) for p in (pages, changed)
    ]
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": PageFormat(2, 64, 8, 4)}, "pages is"),
        ({"longest": 129}, "longest is 129, and the table has 2 pages"),
        ({"queries": 17}, "17 queries; it must be from 1 to 16"),
        ({"arrivals": torch.zeros(3, dtype=torch.int32)}, r"arrivals is .*int32 \[4\]"),
        ({"mask": torch.ones(2, 1, 2, 9, dtype=torch.bool)}, r"mask is .*bool \[2, 1 or 4, 1, n\]"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "do not meet"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    pages, table = empty_cache()
    query = torch.randn(2, change.get("queries", 1), 4, 64)
    lengths = change.get("lengths", torch.ones(2, dtype=torch.int32))
    arrivals = change.get("arrivals", arrivals_for(2, 2, 2, torch.device("cpu")))
    with pytest.raises(RotaquantError, match=message):
        cache_attention(
            query,
            pages,
            table,
            lengths,
            arrivals,
            change.get("form", FORM),
            change.get("longest", 1),
            Scores(scaling=1.0, mask=change.get("mask")),
        )


def test_states_that_do_not_meet_are_refused_and_nothing_is_written() -> None:
    pages, table = empty_cache()
    before = pages.clone()
    query, keys, values = states(3)
    first = torch.zeros(2, dtype=torch.int32)
    for wrong in ((query, keys[:, :2], values), (query[:, :2], keys, values), (None, keys[:1], values[:1])):
        with pytest.raises(RotaquantError, match="meet"):
            cache_append(pages, table, first, wrong, None, FORM, CLIPS, Turn())
    with pytest.raises(RotaquantError, match="needs cos and sin"):
        cache_append(pages, table, first, (query, keys, values), None, FORM, CLIPS, Turn(style="half"))
    with pytest.raises(RotaquantError, match="no style 'halves'"):
        cache_append(pages, table, first, (query, keys, values), None, FORM, CLIPS, Turn(style="halves"))
    with pytest.raises(RotaquantError, match=r"rotation is \[32, 32\]"):
        cache_append(pages, table, first, (query, keys, values), None, FORM, CLIPS, Turn(rotation=torch.eye(32)))
    with pytest.raises(RotaquantError, match=r"first is \[1\]"):
        cache_append(pages, table, first[:1], (query, keys, values), None, FORM, CLIPS, Turn())
    form = PageFormat(2, 64, 4, 4, has_positions=True)
    assert torch.equal(pages, before)
    pages, table = empty_cache(form)
    with pytest.raises(RotaquantError, match="positions must be"):
        cache_append(pages, table, first, (query, keys, values), None, form, CLIPS, Turn())
    assert not pages.any()
