"""Hadamard matrices: every one that is claimed exists and is exact, and every width gets a transform."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rotaquant import hadamard as module
from rotaquant.errors import RotaquantError
from rotaquant.hadamard import (
    Factorisation,
    base_matrix,
    factor,
    factor_or_fallback,
    hadamard,
    is_buildable,
    transform_matrix,
)

REQUIRED_ORDERS = [1, 2, 4, 8, 12, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100, 108]
REQUIRED_ORDERS += [116, 140, 148, 156, 172, 180, 284, 344, 924]


def assert_exact(H: torch.Tensor, order: int) -> None:
    """In integers, and not by the module's own check."""
    wide = H.numpy().astype(np.int64)
    assert wide.shape == (order, order)
    assert (abs(wide) == 1).all()
    np.testing.assert_array_equal(wide @ wide.T, order * np.eye(order, dtype=np.int64))


def assert_orthogonal(Q: torch.Tensor) -> None:
    assert Q.dtype == torch.float64
    torch.testing.assert_close(Q @ Q.T, torch.eye(len(Q), dtype=torch.float64), rtol=0, atol=1e-12)


def named(size: int, construction: str, **other: int) -> Factorisation:
    fields = {"blocks": 1, "order": size, "exponent": 0} | other
    return Factorisation(size=size, construction=construction, **fields)


# --- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [n for n in range(1, 201) if is_buildable(n)] + [284, 344, 924])
def test_hadamard_is_exact(order: int) -> None:
    H = hadamard(order)
    assert H.dtype == torch.int8
    assert_exact(H, order)


def test_required_orders_are_buildable() -> None:
    assert [n for n in REQUIRED_ORDERS if not is_buildable(n)] == []


def test_orders_that_are_missing_are_known() -> None:
    # A change here changes what old widths get: it must be made on purpose.
    missing = [n for n in range(4, 401, 4) if not is_buildable(n)]
    assert missing == [188, 236, 260, 268, 292, 324, 356, 372, 376]
    assert not any(is_buildable(n) for n in [-4, 0, 3, 5, 6, 14, 45, 90, 107, 214, 428])


@pytest.mark.parametrize("order", [0, -8, 3, 45, 188, 428])
def test_unbuildable_order_is_named(order: int) -> None:
    with pytest.raises(RotaquantError, match=rf"order {order}\b"):
        hadamard(order)


def test_powers_of_two_are_sylvester_in_natural_order() -> None:
    i = np.arange(64)
    parity = np.array([[int(a & b).bit_count() % 2 for b in i] for a in i])
    np.testing.assert_array_equal(hadamard(64).numpy(), 1 - 2 * parity)


def test_a_hadamard_matrix_need_not_be_symmetric() -> None:
    # Whoever inverts a transform must transpose it.
    H = hadamard(12)
    assert not torch.equal(H, H.T)
    assert torch.equal(H.int() @ H.int().T, 12 * torch.eye(12, dtype=torch.int32))
    assert not torch.equal(H.int() @ H.int(), 12 * torch.eye(12, dtype=torch.int32))


def test_a_caller_cannot_spoil_the_cached_matrix() -> None:
    hadamard(20).zero_()
    assert_exact(hadamard(20), 20)


def test_is_buildable_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(construction: str, order: int) -> None:
        raise AssertionError("a matrix was built")

    monkeypatch.setattr(module, "_build", refuse)
    assert is_buildable(7 * 2**20)
    assert factor_or_fallback(27392).exact_hadamard is False


def test_a_wrong_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kind of fault that a table typed in by hand had: one row off, garbage text afterwards.
    rows = module._WILLIAMSON_ROWS[92]
    monkeypatch.setitem(module._WILLIAMSON_ROWS, 92, (rows[0] ^ 1, *rows[1:]))
    module._checked.cache_clear()
    try:
        with pytest.raises(RotaquantError, match="williamson of order 92 is not a Hadamard matrix"):
            hadamard(92)
    finally:
        module._checked.cache_clear()


# --- finite fields --------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [3, 5, 7, 9, 13, 25, 27, 49, 81, 125, 343])
def test_jacobsthal_matrix_over_a_field(q: int) -> None:
    Q = module._jacobsthal(q).astype(np.int64)
    ones = np.ones((q, q), dtype=np.int64)
    np.testing.assert_array_equal(Q @ Q.T, q * np.eye(q, dtype=np.int64) - ones)
    assert not Q.sum(axis=0).any() and not Q.sum(axis=1).any()
    np.testing.assert_array_equal(Q.T, Q if q % 4 == 1 else -Q)


@pytest.mark.parametrize(("p", "k"), [(2, 4), (3, 2), (3, 4), (5, 2), (5, 4), (7, 2), (7, 3)])
def test_irreducible_polynomial_makes_a_field(p: int, k: int) -> None:
    # The product of two elements that are not zero is not zero.
    modulus = module._irreducible(p, k)
    digits = module._digits(np.arange(1, p**k), p, k)
    for element in digits.T:
        products = np.zeros((2 * k - 1, p**k - 1), dtype=np.int64)
        for i, digit in enumerate(element):
            products[i : i + k] += digit * digits
        assert module._remainder(products % p, modulus, p).any(axis=0).all()


def test_prime_powers() -> None:
    found = {q for q in range(60) if module._prime_power(q)}
    assert found == {
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        11,
        13,
        16,
        17,
        19,
        23,
        25,
        27,
        29,
        31,
        32,
        37,
        41,
        43,
        47,
        49,
        53,
        59,
    }
    assert module._prime_power(343) == (7, 3)


@pytest.mark.parametrize(
    ("order", "construction"),
    [
        (28, "paley-1"),  # GF(27)
        (344, "paley-1"),  # GF(343)
        (20, "paley-2"),  # GF(9)
        (52, "paley-2"),  # GF(25)
        (100, "paley-2"),  # GF(49)
        (252, "paley-2"),  # GF(125)
    ],
)
def test_prime_power_fields_give_hadamard_matrices(order: int, construction: str) -> None:
    base = base_matrix(named(order, construction))
    assert_exact((base * order**0.5).round().to(torch.int8), order)


# --- factorisations (all widths in use: rotation/test_sweep.py) -------------------------------------


@pytest.mark.parametrize(
    ("n", "order", "exponent", "construction"),
    [
        (1, 1, 0, "sylvester"),
        (2, 1, 1, "sylvester"),
        (128, 1, 7, "sylvester"),
        (12, 12, 0, "paley-1"),
        (576, 36, 4, "paley-2"),
        (1536, 12, 7, "paley-1"),
        (344, 172, 1, "williamson"),
        (29568, 924, 5, "paley-2"),
        (11008, 172, 6, "williamson"),
        (117 * 64, 468, 4, "paley-1"),
        (119 * 64, 1904, 2, "paley-1(28) x paley-1(68)"),
    ],
)
def test_smallest_base(n: int, order: int, exponent: int, construction: str) -> None:
    f = factor(n)
    assert f == Factorisation(size=n, blocks=1, order=order, exponent=exponent, construction=construction)


def test_all_candidates_are_searched() -> None:
    # Neither 4 * 103 nor 4 * 65 is buildable; growing the base by two or four leads on.
    assert not is_buildable(412) and is_buildable(824)
    assert not is_buildable(260) and not is_buildable(520) and is_buildable(1040)
    first, second = factor(103 * 32), factor(65 * 32)
    assert first is not None and (first.order, first.exponent) == (824, 2)
    assert second is not None and (second.order, second.exponent) == (1040, 1)


@settings(deadline=None)
@given(st.integers(1, 4096))
def test_factor_finds_the_smallest_order(n: int) -> None:
    orders = [n >> m for m in range(13) if n % 2**m == 0 and is_buildable(n >> m)]
    f = factor(n)
    if f is None:
        assert orders == []
    else:
        assert f.order == min(orders)
        assert f.order * 2**f.exponent == n


@pytest.mark.parametrize("n", [0, -12])
def test_size_must_be_positive(n: int) -> None:
    with pytest.raises(RotaquantError, match=str(n)):
        factor(n)
    with pytest.raises(RotaquantError, match=str(n)):
        factor_or_fallback(n)


# --- fallbacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "blocks", "order", "exponent", "text"),
    [
        (13696, 107, 1, 7, "107 blocks of 2^7"),
        (27392, 107, 1, 8, "107 blocks of 2^8"),
        (428 * 8, 107, 1, 5, "107 blocks of 2^5"),
        # Not 81 blocks of 4 and not 9 of 36: the widest block.
        (324, 3, 108, 0, "3 blocks of 108 (paley-1)"),
        (520, 5, 52, 1, "5 blocks of 52·2^1 (paley-2)"),
    ],
)
def test_block_form(n: int, blocks: int, order: int, exponent: int, text: str) -> None:
    f = factor_or_fallback(n, seed=9)
    assert factor(n) is None
    assert (f.size, f.blocks, f.order, f.exponent, f.seed) == (n, blocks, order, exponent, None)
    assert not f.exact_hadamard
    assert f.describe() == text
    assert Factorisation.model_validate(f.model_dump()) == f


def test_narrow_blocks_give_way_to_a_dense_matrix() -> None:
    # 16 is the widest block in 107 * 16, 32 in 107 * 32.
    assert factor_or_fallback(107 * 16).describe() == "dense 1712"
    assert factor_or_fallback(107 * 32).describe() == "107 blocks of 2^5"


@settings(deadline=None)
@given(st.integers(1, 4096))
def test_every_size_has_a_form(n: int) -> None:
    f = factor_or_fallback(n)
    assert f.size == n == f.blocks * f.order * 2**f.exponent
    if f.blocks > 1:
        wider = [n // b for b in range(1, f.blocks) if n % b == 0]
        assert n // f.blocks >= 32 and not any(is_buildable(width) for width in wider)
    elif not f.exact_hadamard:
        assert not any(n % width == 0 and is_buildable(width) for width in range(32, n + 1))


@pytest.mark.parametrize("n", [7, 45, 90])
def test_dense_form(n: int) -> None:
    f = factor_or_fallback(n, seed=5)
    assert f == Factorisation(size=n, blocks=1, order=n, exponent=0, construction="dense", seed=5)
    assert not f.exact_hadamard
    assert_orthogonal(base_matrix(f))


def test_dense_base_follows_its_seed() -> None:
    one, again, other = (base_matrix(factor_or_fallback(45, seed=s)) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)


def test_dense_base_ignores_global_state() -> None:
    f = factor_or_fallback(7, seed=3)
    before = base_matrix(f)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(base_matrix(f), before)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


# --- matrices and what is stored ------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 12, 45, 64, 96, 172, 324, 376, 520, 576, 924])
def test_transform_is_orthogonal(n: int) -> None:
    Q = transform_matrix(factor_or_fallback(n))
    assert Q.shape == (n, n)
    assert_orthogonal(Q)


def test_transform_is_the_product_that_is_documented() -> None:
    f = named(3 * 12 * 4, "paley-1", blocks=3, order=12, exponent=2)
    block = torch.kron(hadamard(12).double(), hadamard(4).double()) / 48**0.5
    torch.testing.assert_close(transform_matrix(f), torch.block_diag(block, block, block), rtol=0, atol=1e-15)


def test_named_construction_is_honoured() -> None:
    # Order 12 is Paley's first here; a checkpoint that names his second keeps its own matrix.
    first, second = base_matrix(named(12, "paley-1")), base_matrix(named(12, "paley-2"))
    torch.testing.assert_close(first, hadamard(12).double() / 12**0.5, rtol=0, atol=1e-15)
    assert_orthogonal(second)
    assert not torch.equal(first, second)


def test_named_product_is_honoured() -> None:
    product = base_matrix(named(24, "sylvester(2) x paley-1(12)"))
    expected = torch.kron(hadamard(2).double(), hadamard(12).double()) / 24**0.5
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-15)
    assert not torch.equal(product, base_matrix(named(24, "paley-1")))


@pytest.mark.parametrize(
    ("construction", "message"),
    [
        ("goethals-seidel", "'goethals-seidel' .*not known"),
        ("", "not known"),
        ("sylvester", "'sylvester' does not reach order 36"),
        ("williamson", "'williamson' does not reach order 36"),
        ("sylvester(2) x paley-1(20)", "not a product of order 36"),
        ("sylvester x paley-1", "not a product of order 36"),
        ("sylvester(2) x paley-2(18)", "'paley-2' does not reach order 18"),
        ("mystery(2) x paley-1(18)", "'mystery' .*not known"),
    ],
)
def test_bad_construction_is_refused(construction: str, message: str) -> None:
    with pytest.raises(RotaquantError, match=message):
        base_matrix(named(36, construction))


@pytest.mark.parametrize("n", [45, 128, 344, 576, 1904, 13696])
def test_round_trip_through_json(n: int) -> None:
    f = factor_or_fallback(n, seed=11)
    back = Factorisation.model_validate_json(f.model_dump_json())
    assert back == f and hash(back) == hash(f)
    assert torch.equal(base_matrix(back), base_matrix(f))


@pytest.mark.parametrize(
    "change",
    [{"size": 575}, {"blocks": 0}, {"exponent": -1}, {"seed": 1}, {"construction": "dense"}, {"extra": 1}],
)
def test_contradictions_are_refused(change: dict[str, object]) -> None:
    f = factor(576)
    assert f is not None
    with pytest.raises(ValidationError):
        Factorisation.model_validate(f.model_dump() | change)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (1, "2^0"),
        (128, "2^7"),
        (12, "12 (paley-1)"),
        (576, "36·2^4 (paley-2)"),
        (45, "dense 45"),
        (1904, "1904 (paley-1(28) x paley-1(68))"),
    ],
)
def test_description(n: int, text: str) -> None:
    assert factor_or_fallback(n).describe() == text


# The matrices are part of the checkpoint format: these bytes may never change.
@pytest.mark.parametrize(
    ("order", "digest"),
    [
        (12, "db7478025ce74776"),
        (16, "4173cdf0377bf83a"),
        (28, "3ec6c53133760a03"),
        (36, "1a7aed2f42a8c71d"),
        (92, "e34dcbb29774b40a"),
        (100, "89d400ecb6ea82c8"),
        (112, "4a2cf9c35b7d8b27"),
        (116, "8f965b0013666c0a"),
        (156, "5856152126fc6a12"),
        (172, "6b2f4571a9d01956"),
        (344, "14fa999a81e32bda"),
        (924, "43a042d7e9d59369"),
        (1904, "edd65d51f74e6c64"),
    ],
)
def test_bytes_are_pinned(order: int, digest: str) -> None:
    assert sha256(hadamard(order).numpy().tobytes()).hexdigest()[:16] == digest
