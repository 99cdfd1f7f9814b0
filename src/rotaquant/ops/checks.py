"""What operations ask of their operands, in the same words on every device and while torch traces them.

Kernels read by the sizes that they are told: what does not fit would give wrong numbers, not an error. Only shapes,
dtypes and devices are looked at, which costs no wait for a device.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops import packing, reference
from rotaquant.ops.factors import left_parts

_FEWEST_BITS, _MOST_BITS = 2, 8


def rows(name: str, x: Tensor) -> None:
    """Refuse what is not a float `[m, n]` with columns."""
    if x.dim() != 2 or not x.is_floating_point() or x.shape[1] == 0:
        _refuse(name, x, "rows of floats [m, n]")


def alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse a tensor that is not of the shape, dtype and device of another."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
        _refuse(name, tensor, f"as {other_name}, {_described(other)}")


def grid(columns: int, bits: int, clip_ratio: float, group_size: int | None, planar: bool) -> None:
    """Refuse bits out of 2 to 8, a range that is none, and groups that do not divide the columns into whole words."""
    if not _FEWEST_BITS <= bits <= _MOST_BITS:
        raise RotaquantError(f"bits is {bits}; it must be from {_FEWEST_BITS} to {_MOST_BITS}")
    if not 0 < clip_ratio < math.inf:
        raise RotaquantError(f"clip_ratio is {clip_ratio}; it must be a number above 0")
    if group_size is None or group_size == columns:
        return
    if group_size < 1 or columns % group_size:
        raise RotaquantError(f"group_size is {group_size}; it must divide the {columns} columns of a row")
    unit, weights = (8, "4-bit") if planar else (4, "8-bit")
    if group_size % unit:
        raise RotaquantError(f"group_size is {group_size}; beside {weights} weights it must be a multiple of {unit}")


def activation(name: str) -> None:
    """Refuse what is no key of `reference.ACTIVATIONS`."""
    if name not in reference.ACTIVATIONS:
        known = ", ".join(reference.ACTIVATIONS)
        raise RotaquantError(f"activation is {name!r}; it must be one of {known}")


def rotation(x: Tensor, left: Tensor, order: int, right: Tensor | None) -> None:
    """Refuse factors (see `Factors`) that do not make up a rotation of the rows of x."""
    columns = x.shape[1]
    if order < 1 or columns % order:
        raise RotaquantError(f"order is {order}; it must divide the {columns} columns of a row")
    padded = sum(left_parts(order))
    if padded < order or left.shape != (padded, padded):
        _refuse("left", left, f"[{padded}, {padded}], which holds a matrix of order {order} and no more than 256")
    _on_device("left", left, x.device)
    if right is None:
        return
    rest, size = columns // order, right.shape[0]
    butterflies = rest // max(size, 1)
    if right.shape != (size, size) or butterflies * size != rest or butterflies & (butterflies - 1):
        _refuse("right", right, f"square, and {rest} columns (those of x over order) a power of two times its size")
    _on_device("right", right, x.device)


def float_product(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
    """Refuse operands of `w4a16_matmul` that do not meet."""
    rows("x", x)
    columns = x.shape[1]
    words = packing.packed_words(columns, 4)
    if weight_packed.dtype != torch.int32 or weight_packed.dim() != 2 or weight_packed.shape[1] != words:
        _refuse("weight_packed", weight_packed, f"int32 [n, {words}] for x of {columns} columns")
    _on_device("weight_packed", weight_packed, x.device)
    outputs = weight_packed.shape[0]
    if not _is_scale(weight_scale, outputs) or columns % weight_scale.shape[1]:
        _refuse("weight_scale", weight_scale, f"floats [{outputs}, groups], whose groups divide {columns} columns")
    _on_device("weight_scale", weight_scale, x.device)
    _bias(bias, outputs, x.device)


def integer_product(
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    dtype: torch.dtype,
) -> None:
    """Refuse operands of the products of codes with weights of 4 or 8 bits that do not meet, and outputs not of floats.

    Groups are of whole words: where the last word of a row is padded, there is but one.
    """
    if not dtype.is_floating_point:
        raise RotaquantError(f"dtype is {dtype}; it must be one of floats")
    planes = 2 if bits == 4 else 1
    if codes.dtype != torch.int8 or codes.dim() != 3 or codes.shape[1] != planes:
        _refuse("codes", codes, f"int8 [m, {planes}, plane] beside weights of {bits} bits")
    tokens, _, plane = codes.shape
    _integer_weight(weight_packed, weight_scale, bias, plane, codes.device)
    if not _is_scale(token_scale, tokens) or token_scale.dtype != reference.compute_dtype(token_scale.dtype):
        _refuse("token_scale", token_scale, f"float32 (or float64) [{tokens}, 1 or groups]")
    _on_device("token_scale", token_scale, codes.device)
    _groups(_groups_of(token_scale.shape[1], weight_scale), plane, 4, "codes of a plane")


def quantizing_product(
    x: Tensor,
    bits: int,
    clip_ratio: float,
    group_size: int | None,
    weight_bits: int,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> None:
    """Refuse operands of `quantize_matmul` that do not meet."""
    rows("x", x)
    if weight_bits not in (4, 8):
        raise RotaquantError(f"weight_bits is {weight_bits}; it must be 4 or 8")
    columns, planar = x.shape[1], weight_bits == 4
    grid(columns, bits, clip_ratio, group_size, planar)
    _integer_weight(weight_packed, weight_scale, bias, packing.plane_columns(columns, planar), x.device)
    _groups(_groups_of(columns // (group_size or columns), weight_scale), columns, 8 if planar else 4, "columns of x")


def _groups_of(token_groups: int, weight_scale: Tensor) -> int:
    """The groups of a product, of which its tokens, its weights or both have scales."""
    outputs, groups = weight_scale.shape
    if token_groups == 1:
        return groups
    if groups not in (1, token_groups):
        wanted = f"[{outputs}, 1 or {token_groups}], {token_groups} being the groups of the tokens"
        _refuse("weight_scale", weight_scale, wanted)
    return token_groups


def _groups(groups: int, length: int, unit: int, what: str) -> None:
    if groups > 1 and length % (groups * unit):
        raise RotaquantError(
            f"scales are of {groups} groups, which must part the {length} {what} in multiples of {unit}"
        )


def _integer_weight(
    weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None, plane: int, device: torch.device
) -> None:
    if weight_packed.dtype != torch.int32 or weight_packed.dim() != 2 or weight_packed.shape[1] * 4 != plane:
        _refuse(
            "weight_packed", weight_packed, f"int32 [n, words] of as many bytes a row as a plane has codes, {plane}"
        )
    _on_device("weight_packed", weight_packed, device)
    outputs = weight_packed.shape[0]
    if not _is_scale(weight_scale, outputs):
        _refuse("weight_scale", weight_scale, f"floats [{outputs}, 1 or groups]")
    _on_device("weight_scale", weight_scale, device)
    _bias(bias, outputs, device)


def _is_scale(scale: Tensor, length: int) -> bool:
    return scale.dim() == 2 and scale.is_floating_point() and scale.shape[0] == length and scale.shape[1] > 0


def _bias(bias: Tensor | None, outputs: int, device: torch.device) -> None:
    if bias is None:
        return
    if bias.shape != (outputs,) or not bias.is_floating_point():
        _refuse("bias", bias, f"floats [{outputs}]")
    _on_device("bias", bias, device)


def _on_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        _refuse(name, tensor, f"on {device}, where the other operands are")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _refuse(name: str, tensor: Tensor, wanted: str) -> NoReturn:
    raise RotaquantError(f"{name} is {_described(tensor)}; it must be {wanted}")
