"""Rotations as the kernels apply them: a row seen as a small matrix, multiplied from both sides by integer matrices.

A row of n values is a tile X `[A, C * B]`, row by row. The rotation is leftᵀ ⊗ H_C ⊗ right,

    Y = norm * left X (H_C ⊗ right),

with `left` `[A, A]` and `right` `[B, B]` of small integers, which 16 bits hold exactly, H_C Sylvester's matrix, and
one constant that makes all of it orthonormal. Products with the matrices run on matrix units; H_C is additions. A mix
of heads has no right side: Y = norm * left X.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rotaquant.hadamard import Factorisation, base_matrix, hadamard

_RIGHT = 64  # wide enough to keep matrix units busy, narrow enough to cost little beside `left`
_BUTTERFLIES = (1, 2, 4)
_LARGEST_LEFT = 256
LARGEST_TILE = 32768  # padded values of one row, which live in one program's registers


@dataclass(frozen=True, eq=False)
class Factors:
    """The matrices of one rotation, in bfloat16, and its constant; `left` is padded with zeros beyond its `order`."""

    left: Tensor
    order: int
    right: Tensor | None
    norm: float

    @classmethod
    def of(cls, left: Tensor, right: Tensor | None, norm: float) -> Factors:
        """From matrices of any dtype, `left` without padding."""
        order = left.shape[0]
        padding = sum(left_parts(order)) - order
        padded = torch.nn.functional.pad(left, (0, padding, 0, padding)).to(torch.bfloat16)
        return cls(padded, order, None if right is None else right.to(torch.bfloat16), norm)

    def to(self, device: torch.device, dtype: torch.dtype) -> Factors:
        """The matrices on `device`, `left` in the 16-bit dtype of the activations that it meets."""
        right = None if self.right is None else self.right.to(device)
        return Factors(self.left.to(device, dtype), self.order, right, self.norm)


def left_parts(order: int) -> tuple[int, int]:
    """The padded rows of a tile, a power of two or two of them one after the other, the second 0 or at least 64."""
    if order <= 128:
        return max(16, 1 << (order - 1).bit_length()), 0
    return 128, 64 if order <= 192 else 128


def _cost(order: int, right: int) -> float:
    """Operations of the matrix units for a value; those on the right take two passes, over halves of float32."""
    padded = sum(left_parts(order))
    return 2 * padded * padded / order + 4 * max(right, 16)


def _idle_rows(order: int, size: int) -> int:
    """Rows by which a tile falls short of what its warps take in one go: 64 for each four of them."""
    return max((128 if size > 8192 else 64) - sum(left_parts(order)), 0)


@lru_cache(maxsize=64)
def rotation_factors(transform: Factorisation) -> Factors | None:
    """The matrices of a Hadamard transform, or `None` where kernels cannot apply it: dense ones, and the widest."""
    if transform.seed is not None or transform.exponent < 4:
        return None
    power = 1 << transform.exponent
    right = min(_RIGHT, power)
    options = []
    for butterflies in _BUTTERFLIES:
        taken = power // (right * butterflies)
        order = transform.blocks * transform.order * taken
        if taken and order <= _LARGEST_LEFT and sum(left_parts(order)) * butterflies * right <= LARGEST_TILE:
            options.append((_idle_rows(order, transform.size), _cost(order, right), taken))
    if not options:
        return None
    taken = min(options)[-1]
    base = (base_matrix(transform) * transform.order**0.5).round()
    left = torch.kron(torch.eye(transform.blocks, dtype=base.dtype), torch.kron(base, hadamard(taken).to(base.dtype)))
    return Factors.of(left.mT, hadamard(right), (transform.order * power) ** -0.5)


def mix_factors(matrix: Tensor, shards: int, columns: int) -> Factors | None:
    """The matrices of a mix of heads over rows of `columns`, `None` where kernels cannot apply it.

    `matrix` `[k, k]` is orthonormal and mixes, within each shard, k stretches of channels at equal position.
    """
    order = matrix.shape[0] * shards
    rest = columns // order
    padded = sum(left_parts(order)) * max(16, 1 << (rest - 1).bit_length())
    # A mix is a Hadamard matrix of order k divided by one of its factor's: entries are integers over the root of k,
    # or over the root of k times the factor's order.
    if order > _LARGEST_LEFT or padded > LARGEST_TILE or rest % 2 or order * rest % 8:
        return None
    integers, norm = _as_integers(matrix.cpu().double())
    if integers is None:
        return None
    left = torch.kron(torch.eye(shards, dtype=integers.dtype), integers)
    return Factors.of(left.mT, None, norm)


def _as_integers(matrix: Tensor) -> tuple[Tensor | None, float]:
    """A matrix as integers below 128 times a constant, or `None` where it is none."""
    smallest = matrix.abs()[matrix.abs() > 1e-9].min()
    for divisor in range(1, 9):
        integers = (matrix / smallest * divisor).round()
        error = (integers * (smallest / divisor) - matrix).abs().max()
        if error < 1e-12 and integers.abs().max() < 128:
            return integers, float(smallest / divisor)
    return None, 0.0
