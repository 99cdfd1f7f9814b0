"""Which device to work on."""

from __future__ import annotations

import torch

from rotaquant.errors import RotaquantError


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU; raises for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise RotaquantError(f"device {str(device)!r} is not known to torch; use auto, cpu or cuda") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise RotaquantError("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if resolved.type not in {"cpu", "cuda"}:
        raise RotaquantError(f"device {resolved.type!r} is not supported; use auto, cpu or cuda")
    return resolved
