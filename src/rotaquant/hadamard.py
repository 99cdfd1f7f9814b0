"""Hadamard matrices for (almost) every width, built when asked for and checked exactly; no table of matrices.

A width n is split as K * 2**m: a base matrix of order K, Kronecker the Sylvester matrix of order 2**m, which
a fast transform applies in m butterfly steps. K is the smallest order that can be built, and every
K = (odd part of n) * 2**j that divides n is tried.

For one order the constructions are tried in the order of `_CONSTRUCTIONS` (sylvester, paley-1, paley-2,
williamson); where none applies, a Kronecker product whose first factor is the smallest order that one of them
gives, and so on for the rest. This order, and the numbering of the elements of a finite field, decide the
bytes of every matrix. Rotated weights depend on them, so a checkpoint stores the construction's name, and
`base_matrix` obeys that name even if a later version would choose another.

Sources: J. J. Sylvester, 1867; R. E. A. C. Paley, "On orthogonal matrices", 1933; J. Williamson, "Hadamard's
determinant theorem and the sum of four squares", 1944.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from math import isqrt, prod
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rotaquant.errors import RotaquantError

_Ints = npt.NDArray[np.int64]
_Signs = npt.NDArray[np.int8]

# Below this width a block mixes too few channels to spread an outlier; a dense matrix serves better.
_SMALLEST_BLOCK = 32

_DENSE = "dense"
_TIMES = " x "
_FACTOR = re.compile(r"([a-z0-9-]+)\(([1-9][0-9]*)\)")


class Factorisation(BaseModel):
    """An orthogonal transform of `size` channels, I_blocks ⊗ base(order) ⊗ Sylvester(2**exponent).

    `size` = blocks * order * 2**exponent. `construction` says how the base is built: "sylvester", "paley-1",
    "paley-2", "williamson", a product such as "paley-1(28) x paley-1(68)", or "dense" (a random orthogonal
    base drawn from `seed`, which nothing else has). It is plain data, to be stored in checkpoints. Numbers
    that contradict one another raise pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=1)
    blocks: int = Field(ge=1)
    order: int = Field(ge=1)
    exponent: int = Field(ge=0)
    construction: str
    seed: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.size != self.blocks * self.order * 2**self.exponent:
            raise ValueError(f"size {self.size} is not {self.blocks} * {self.order} * 2**{self.exponent}")
        if (self.construction == _DENSE) != (self.seed is not None):
            raise ValueError("a seed belongs to a dense base, and to nothing else")
        return self

    @property
    def exact_hadamard(self) -> bool:
        """Whether the transform is one Hadamard matrix over all of `size`."""
        return self.blocks == 1 and self.construction != _DENSE

    def describe(self) -> str:
        """The transform in a few words: "36·2^4 (paley-1)", "107 blocks of 2^7", "dense 45"."""
        text = f"2^{self.exponent}"
        if self.order > 1:
            text = f"{self.order}·{text}" if self.exponent else f"{self.order}"
            dense = self.construction == _DENSE
            text = f"dense {text}" if dense else f"{text} ({self.construction})"
        return text if self.blocks == 1 else f"{self.blocks} blocks of {text}"


def factor(n: int) -> Factorisation | None:
    """The Hadamard transform of size `n` with the smallest base that can be built, or None if there is none.

    Raises RotaquantError if `n` is not positive.
    """
    if n < 1:
        raise RotaquantError(f"a transform needs a positive size, not {n}")
    power = n & -n
    odd, twos = n // power, power.bit_length() - 1
    for j in range(twos + 1):
        order = odd << j
        construction = _choose(order)
        if construction is not None:
            return Factorisation(size=n, blocks=1, order=order, exponent=twos - j, construction=construction)
    return None


def factor_or_fallback(n: int, seed: int = 0) -> Factorisation:
    """A transform for every size: exact, else block-diagonal, else dense orthogonal.

    The blocks are the widest that have a Hadamard matrix and divide `n`; where these are narrower than 32,
    one orthogonal matrix over all of `n` is drawn from `seed`. Raises RotaquantError if `n` is not positive.
    """
    whole = factor(n)
    if whole is not None:
        return whole
    for blocks in range(2, n // _SMALLEST_BLOCK + 1):
        block = factor(n // blocks) if n % blocks == 0 else None
        if block is not None:
            return block.model_copy(update={"size": n, "blocks": blocks})
    return Factorisation(size=n, blocks=1, order=n, exponent=0, construction=_DENSE, seed=seed)


def is_buildable(order: int) -> bool:
    """Whether `hadamard(order)` exists here; decided by arithmetic on `order`, without building anything."""
    return order >= 1 and _choose(order) is not None


def hadamard(order: int) -> torch.Tensor:
    """The Hadamard matrix of `order`: int8 [order, order] on the CPU, entries ±1, H Hᵀ = order * I.

    Powers of two are Sylvester's, in natural order; most others are not symmetric. Raises RotaquantError if
    no construction reaches `order`.
    """
    construction = _choose(order) if order >= 1 else None
    if construction is None:
        raise RotaquantError(
            f"no construction reaches a Hadamard matrix of order {order}; "
            "factor_or_fallback() gives a transform for every size"
        )
    return torch.from_numpy(_checked(construction, order).copy())


def base_matrix(f: Factorisation) -> torch.Tensor:
    """The orthonormal base of `f`, built by the construction `f` names: float64 [order, order] on the CPU.

    A dense base is the Q of a seeded Gaussian matrix, R having a positive diagonal; its last bits may
    differ between builds of LAPACK. Raises RotaquantError if the construction is unknown, or cannot reach
    the order.
    """
    if f.construction == _DENSE:
        assert f.seed is not None  # the model's own check
        return _random_orthogonal(f.order, f.seed)
    return torch.from_numpy(_checked(f.construction, f.order) / np.sqrt(f.order))


def transform_matrix(f: Factorisation) -> torch.Tensor:
    """The whole transform as one matrix, for tests and reports: float64 [size, size] on the CPU.

    Raises RotaquantError as `base_matrix` does.
    """
    sylvester = _checked("sylvester", 2**f.exponent) / np.sqrt(2**f.exponent)
    block = np.kron(base_matrix(f).numpy(), sylvester)
    return torch.from_numpy(np.kron(np.eye(f.blocks), block))


def _random_orthogonal(n: int, seed: int) -> torch.Tensor:
    # Drawn on the CPU: a GPU's generator gives other numbers from the same seed.
    generator = torch.Generator(device="cpu").manual_seed(seed)
    gaussian = torch.randn(n, n, generator=generator, dtype=torch.float64, device="cpu")
    Q: torch.Tensor
    Q, R = torch.linalg.qr(gaussian)
    # QR is unique only up to the signs of R's diagonal; fixing them removes LAPACK's choice.
    Q[:, R.diagonal() < 0] *= -1
    return Q


# --- which construction, and the check ------------------------------------------------------------


@lru_cache(maxsize=4096)
def _choose(order: int) -> str | None:
    """The name of the construction that this version takes for `order`; None where there is none."""
    name = _direct(order)
    if name is not None or order % 4:
        return name
    for first in range(2, order // 2 + 1):
        if order % first:
            continue
        name = _direct(first)
        rest = _choose(order // first) if name is not None else None
        if rest is not None:
            tail = rest if _TIMES in rest else f"{rest}({order // first})"
            return f"{name}({first}){_TIMES}{tail}"
    return None


def _direct(order: int) -> str | None:
    return next((name for name, c in _CONSTRUCTIONS.items() if c.applies(order)), None)


@lru_cache(maxsize=32)
def _checked(construction: str, order: int) -> _Signs:
    """The matrix of `order` by the named construction, read-only, after the exact check."""
    H = _build(construction, order)
    # BLAS works in floats, yet the check is exact: every partial sum is an integer far below 2**53.
    wide = H.astype(np.float64)
    if not (np.abs(H) == 1).all() or not np.array_equal(wide @ wide.T, order * np.eye(order)):
        raise RotaquantError(f"{construction} of order {order} is not a Hadamard matrix: please report this")
    H.setflags(write=False)
    return H


def _build(construction: str, order: int) -> _Signs:
    if _TIMES not in construction:
        return _build_direct(construction, order)
    factors = [_FACTOR.fullmatch(part) for part in construction.split(_TIMES)]
    parts = [(m[1], int(m[2])) for m in factors if m is not None]
    if len(parts) != len(factors) or prod(n for _, n in parts) != order:
        raise RotaquantError(f"the construction {construction!r} is not a product of order {order}")
    H = np.ones((1, 1), dtype=np.int8)
    for name, n in parts:
        H = np.kron(H, _build_direct(name, n))
    return H


def _build_direct(name: str, order: int) -> _Signs:
    construction = _CONSTRUCTIONS.get(name)
    if construction is None:
        known = ", ".join([*_CONSTRUCTIONS, _DENSE])
        raise RotaquantError(
            f"the construction {name!r} (order {order}) is not known to this version of rotaquant, "
            f"which knows {known} and products of them; a newer version may have written it"
        )
    if not construction.applies(order):
        raise RotaquantError(f"the construction {name!r} does not reach order {order}")
    return construction.build(order)


# --- finite fields --------------------------------------------------------------------------------
# An element of GF(p**k) is the number whose base-p digits are its polynomial's coefficients, lowest first.


@lru_cache(maxsize=4096)
def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) where q = p**k with p prime, else None."""
    if q < 2:
        return None
    p = next((d for d in range(2, isqrt(q) + 1) if q % d == 0), q)
    k = 0
    while q % p == 0:
        q, k = q // p, k + 1
    return (p, k) if q == 1 else None


def _digits(numbers: _Ints, p: int, k: int) -> _Ints:
    """The base-p digits, lowest first: [k, len(numbers)]."""
    return numbers // (p ** np.arange(k))[:, None] % p


def _remainder(f: _Ints, g: _Ints, p: int) -> _Ints:
    """Columns of polynomials `f` [deg f + 1, count] modulo one monic `g` [deg g + 1], over GF(p)."""
    f, degree = f.copy(), len(g) - 1
    for top in range(len(f) - 1, degree - 1, -1):
        f[top - degree : top + 1] -= f[top] * g[:, None]
        f %= p
    return f[:degree]


def _irreducible(p: int, k: int) -> _Ints:
    """The first monic irreducible polynomial of degree k over GF(p), in the numbering above."""

    def monic(number: int, degree: int) -> _Ints:
        return np.append(_digits(np.array([number]), p, degree)[:, 0], 1)

    for number in range(p**k):
        candidate = monic(number, k)
        # A reducible polynomial has a factor of at most half its degree.
        divisors = (monic(d, degree) for degree in range(1, k // 2 + 1) for d in range(p**degree))
        if all(_remainder(candidate[:, None], g, p).any() for g in divisors):
            return candidate
    raise AssertionError(f"GF({p}) has an irreducible polynomial of every degree")


def _jacobsthal(q: int) -> _Signs:
    """Q[a, b] = χ(a - b) over GF(q): 0 on the diagonal, 1 where the difference is a square, else -1."""
    power = _prime_power(q)
    assert power is not None
    p, k = power
    digits = _digits(np.arange(q), p, k)
    squares = np.zeros((2 * k - 1, q), dtype=np.int64)
    for i in range(k):
        squares[i : i + k] += digits[i] * digits
    weights = p ** np.arange(k)
    character = np.full(q, -1, dtype=np.int8)
    character[weights @ _remainder(squares % p, _irreducible(p, k), p)] = 1
    character[0] = 0
    difference = np.zeros((q, q), dtype=np.int64)
    for digit, weight in zip(digits, weights, strict=True):
        difference += weight * ((digit[:, None] - digit[None, :]) % p)
    return character[difference]


# --- the constructions ----------------------------------------------------------------------------


def _sylvester(order: int) -> _Signs:
    H = np.ones((1, 1), dtype=np.int8)
    while len(H) < order:
        H = np.block([[H, H], [H, -H]])
    return H


def _conference(q: int) -> _Signs:
    """The Jacobsthal matrix with a border: S Sᵀ = q I, skew if q ≡ 3 mod 4 and symmetric if q ≡ 1."""
    S = np.ones((q + 1, q + 1), dtype=np.int8)
    S[0, 0] = 0
    S[1:, 0] = -1 if q % 4 == 3 else 1
    S[1:, 1:] = _jacobsthal(q)
    return S


def _paley_1(order: int) -> _Signs:
    return _conference(order - 1) + np.eye(order, dtype=np.int8)


def _paley_2(order: int) -> _Signs:
    half = order // 2
    at_signs = np.array([[1, 1], [1, -1]], dtype=np.int8)
    at_zeros = np.array([[1, -1], [-1, -1]], dtype=np.int8)
    return np.kron(_conference(half - 1), at_signs) + np.kron(np.eye(half, dtype=np.int8), at_zeros)


# Four symmetric ±1 rows a[0..n-1], n a quarter of the order, one integer each: a[0] = 1, and bit i - 1 is
# set where a[i] = a[n - i] = -1, for i up to (n - 1) / 2. Their power spectra add up to 4n at every
# frequency, by which a search finds them. Listed are orders that Paley's constructions miss.
_WILLIAMSON_ROWS = {
    92: (1395, 842, 1031, 1473),
    116: (8235, 6755, 2803, 3908),
    156: (248183, 88569, 512838, 179255),
    172: (913162, 381592, 1468430, 109155),
}


def _williamson(order: int) -> _Signs:
    n = order // 4
    lag = (np.arange(n)[:, None] - np.arange(n)[None, :]) % n
    lag = np.minimum(lag, n - lag)
    A, B, C, D = (
        np.array([1] + [1 - 2 * (row >> i & 1) for i in range(n // 2)], dtype=np.int8)[lag]
        for row in _WILLIAMSON_ROWS[order]
    )
    return np.block([[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]])


class _Construction(NamedTuple):
    applies: Callable[[int], bool]
    build: Callable[[int], _Signs]


_CONSTRUCTIONS = {
    "sylvester": _Construction(lambda n: n >= 1 and n & (n - 1) == 0, _sylvester),
    "paley-1": _Construction(lambda n: n % 4 == 0 and _prime_power(n - 1) is not None, _paley_1),
    "paley-2": _Construction(lambda n: n % 8 == 4 and _prime_power(n // 2 - 1) is not None, _paley_2),
    "williamson": _Construction(lambda n: n in _WILLIAMSON_ROWS, _williamson),
}
