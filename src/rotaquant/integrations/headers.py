"""Compare the tensors that files hold with those that a model wants, by headers alone, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rotaquant.errors import RotaquantError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_SHOWN = 3


def read_headers(files: Iterable[str | Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor name -> shape and dtype tag of every tensor in safetensors files.

    Raises `RotaquantError` naming a file that is missing, truncated or no safetensors file.
    """
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise RotaquantError(f"{path} is missing: the checkpoint is incomplete; copy or quantize it again")
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    tensors[name] = (tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError, ValueError) as error:
            raise RotaquantError(f"{path} is truncated or no safetensors file ({error}); copy it again") from error
    return tensors


def require_matching_tensors(
    model: torch.nn.Module, files: Iterable[str | Path], not_stored: Set[str] = frozenset()
) -> None:
    """Raise `RotaquantError` naming tensors that are missing, unknown, misshapen or of another integer type.

    `not_stored` names tensors of the model that are the same as others, and must not be in the files.
    """
    expected: dict[str, Any] = dict(model.state_dict())
    found = read_headers(files)
    for name in not_stored:
        expected.pop(name, None)
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    if missing:
        raise RotaquantError(f"the checkpoint lacks {_some(missing)}; it is incomplete: copy or quantize it again")
    if unknown:
        raise RotaquantError(f"the checkpoint holds tensors that its config does not explain: {_some(unknown)}")
    for name, wanted in expected.items():
        shape, tag = found[name]
        if shape != tuple(wanted.shape):
            raise RotaquantError(f"tensor {name} has shape {list(shape)}, its config asks for {list(wanted.shape)}")
        dtype = _DTYPES.get(tag)
        exact = not wanted.dtype.is_floating_point or name.endswith(".weight_scale")
        if dtype is None or (exact and dtype != wanted.dtype):
            raise RotaquantError(f"tensor {name} is stored as {tag}, its config asks for {wanted.dtype}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
