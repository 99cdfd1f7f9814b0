"""The residual stream where its rotation cannot be fused: norms without mean or gain, and the rotation online."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rotaquant.hadamard import base_matrix
from rotaquant.ops import reference
from rotaquant.rotation.fuse import centre
from rotaquant.rotation.plan import RotationPlan, residual_signs


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps): what is left of a LayerNorm on a centred stream once its gain and shift are folded."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> the same shape and dtype; computed in at least float32."""
        wide = x.to(reference.compute_dtype(x.dtype))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """The epsilon, for `print(model)`."""
        return f"eps={self.eps}"


def rms_norm_of(norm: nn.Module) -> RmsNorm:
    """The `RmsNorm` with the epsilon of a LayerNorm."""
    eps: Any = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return RmsNorm(float(eps))


class OnlineResidual:
    """Hooks that take the residual stream into the rotated frame (x Q, centred first if asked) and out of it (x Qᵀ)."""

    def __init__(self, plan: RotationPlan, *, centred: bool = False) -> None:
        self._plan = plan
        self._centred = centred
        self._matrices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def prepare(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The base matrix and the signs of the rotation on `device`, made once."""
        assert self._plan.residual is not None
        if device not in self._matrices:
            base = base_matrix(self._plan.residual)
            self._matrices[device] = (base.to(device), residual_signs(self._plan).to(device))
        return self._matrices[device]

    def enter(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook: the module's output in the rotated frame."""
        x = output.to(reference.compute_dtype(output.dtype))
        if self._centred:
            x = centre(x)
        if self._plan.residual is not None:
            base, signs = self.prepare(x.device)
            x = reference.rotate_rows(x * signs.to(x.dtype), base, self._plan.residual.blocks)
        return x.to(output.dtype)

    def leave(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """A forward pre-hook: the module's input in the original frame."""
        if self._plan.residual is None:
            return None
        x = args[0]
        base, signs = self.prepare(x.device)
        # The Sylvester part is symmetric, so transposing the base inverts the whole.
        back = reference.rotate_rows(x, base.mT, self._plan.residual.blocks)
        return ((back * signs.to(back.dtype)).to(x.dtype), *args[1:])


def enter_rotated(module: nn.Module, plan: RotationPlan, *, centred: bool = False) -> None:
    """From now on the output of `module` comes in the rotated frame."""
    if plan.residual is not None or centred:
        module.register_forward_hook(OnlineResidual(plan, centred=centred).enter)


def leave_rotated(module: nn.Module, plan: RotationPlan) -> None:
    """From now on `module` sees its input in the original frame."""
    if plan.residual is not None:
        module.register_forward_pre_hook(OnlineResidual(plan).leave)
