"""Gated feed-forward parts on kernels: act(gate) * up, down's rotation and its quantization become one operation.

Whether a stock module gates that way, and with which activation, is found out by trial: the module runs with stand-ins
for its linears, and has to give what the gate of that activation gives, to the bit and in every dtype. So a clamp, a
multiplier or a rounding of its own, of whichever model, keeps a module as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from rotaquant.architectures import Block, Mlp
from rotaquant.ops.reference import ACTIVATIONS
from rotaquant.runtime.linear import QuantizedLinear

_TRIAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRIAL_SHAPE = (64, 96)


def activation_of(gate: Callable[[Tensor], Tensor | None]) -> str | None:
    """The activation, by its name in `reference.ACTIVATIONS`, with which `gate` makes act(gate) * up.

    `gate` takes both side by side, `[n, 2 w]` -> `[n, w]`. `None` where it does anything else.
    """
    trials = [_trial_input(dtype) for dtype in _TRIAL_DTYPES]
    try:
        # Outside inference mode, where a tensor tells whether it was written to.
        with torch.inference_mode(False), torch.no_grad():
            outcomes = [gate(trial.clone()) for trial in trials]
    # A module of whatever family that wants more than stand-ins give it cannot be told; it runs as it is.
    except Exception:
        return None
    for name, activation in ACTIVATIONS.items():
        if all(_is_gated(outcome, trial, activation) for outcome, trial in zip(outcomes, trials, strict=True)):
            return name
    return None


def _trial_input(dtype: torch.dtype) -> Tensor:
    rows, columns = _TRIAL_SHAPE
    # Close together where activations bend; and, where clamps would show, any pair of sizes up to no number at all.
    spread = torch.linspace(-1, 1, rows * columns, device="cpu") ** 3
    near = 60 * spread.view(rows, columns), 80 * spread.view(columns, rows).T
    sizes = torch.logspace(0, math.log10(torch.finfo(dtype).max) - 0.01, (columns - 4) // 2, device="cpu")
    ends = torch.tensor((0.0, torch.inf, -torch.inf, torch.nan), device="cpu")
    far = torch.cat((sizes, -sizes, ends)).expand(columns, columns)
    gate, up = torch.cat((near[0], far)), torch.cat((near[1], far.T))
    return torch.cat((gate, up), dim=-1).to(dtype)


def _is_gated(outcome: Tensor | None, trial: Tensor, activation: Callable[[Tensor], Tensor]) -> bool:
    gate, up = trial.chunk(2, dim=-1)
    expected = activation(gate) * up
    if not isinstance(outcome, Tensor) or outcome.dtype != trial.dtype or outcome.shape != expected.shape:
        return False
    return bool(((outcome == expected) | (outcome.isnan() & expected.isnan())).all())


# --- modules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Gating:
    """How a module gates: its linears by name, its activation's name, and what was so in the trial.

    That are its other modules, and whether it was training: dropout may be one of them.
    """

    inputs: tuple[str, ...]
    down: str
    activation: str
    others: tuple[tuple[str, type, str], ...]
    training: frozenset[bool]


class GatedMlp(nn.Module):
    """What a stock feed-forward module becomes, in place: its forward on kernels where all is as in the trial."""

    gating: Gating

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`[..., hidden]` -> `[..., hidden]`; where anything is out of the ordinary, as the stock module does it."""
        if kwargs or len(args) != 1 or not self._gates_on_kernels(args[0]):
            return super().forward(*args, **kwargs)
        modules: dict[str, Any] = self._modules
        parts = [modules[name](args[0]) for name in self.gating.inputs]
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        return modules[self.gating.down].forward_gated(gate, up, self.gating.activation)

    def _gates_on_kernels(self, x: Tensor) -> bool:
        gating, modules = self.gating, self._modules
        down = modules[gating.down]
        if not isinstance(down, QuantizedLinear) or not down.gates_on_kernels(x):
            return False
        if torch.is_autocast_enabled(x.device.type) or has_hooks(down) or self.training not in gating.training:
            return False
        return all(isinstance(modules[name], QuantizedLinear) for name in gating.inputs) and all(
            type(modules[name]) is kind and _settings(modules[name]) == settings and self._is_as_in_trial(modules[name])
            for name, kind, settings in gating.others
        )

    def _is_as_in_trial(self, other: nn.Module | None) -> bool:
        return other is None or all(part.training == self.training and not has_hooks(part) for part in other.modules())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, where pickle would not find it.
        return _revive, (type(self).__mro__[2],), self.__dict__.copy()


def _settings(module: nn.Module | None) -> str:
    """What a module says of itself, such as which formula of GELU it is."""
    return "" if module is None else module.extra_repr()


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says: hooks, or a forward of its own."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in module.__dict__ or _has_any_global_hook()


@cache
def _gated_class(stock: Any) -> Any:
    return type(stock.__name__, (GatedMlp, stock), {"__doc__": stock.__doc__})


def _revive(stock: Any) -> Any:
    made = _gated_class(stock)
    return made.__new__(made)


def gate_on_kernels(module: nn.Module, block: Block) -> None:
    """Let the feed-forward parts of a block, whose linears are quantized, gate on kernels where they can."""
    for mlp in block.mlps:
        parent, _, down = mlp.down.rpartition(".")
        inputs = tuple(path.removeprefix(f"{parent}.") for path in mlp.inputs)
        owner: Any = module.get_submodule(parent)
        if not parent or any(name not in owner._modules for name in (*inputs, down)) or isinstance(owner, GatedMlp):
            continue
        if not _is_gated_shape(module, mlp):
            continue
        found = {training: _activation_of_module(owner, inputs, down, training) for training in (False, True)}
        activation = found[False] or found[True]
        if activation is not None:
            linears = {*inputs, down}
            others = tuple(
                (name, type(child), _settings(child)) for name, child in owner._modules.items() if name not in linears
            )
            training = frozenset(mode for mode, name in found.items() if name == activation)
            owner.gating = Gating(inputs=inputs, down=down, activation=activation, others=others, training=training)
            owner.__class__ = _gated_class(owner.__class__)


def _is_gated_shape(module: nn.Module, mlp: Mlp) -> bool:
    outputs: list[Any] = [module.get_submodule(path).out_features for path in mlp.inputs]
    return sum(outputs) == 2 * mlp.width and len(outputs) <= 2


def _activation_of_module(owner: nn.Module, inputs: tuple[str, ...], down: str, training: bool) -> str | None:
    """`activation_of` what a module makes of the outputs of `inputs` for `down`, training or not."""
    before = {part: part.training for part in owner.modules()}
    owner.train(training)
    try:
        return activation_of(partial(_run_trial, owner, inputs, down))
    finally:
        for part, mode in before.items():
            part.training = mode


def _run_trial(owner: nn.Module, inputs: tuple[str, ...], down: str, gate_up: Tensor) -> Tensor | None:
    """What `owner` hands to `down` when its input linears give `gate_up`; `None` if it does more than call them.

    Tensors have the three dimensions of a batch of sequences, as in a model.
    """
    gate_up = gate_up.unflatten(0, (2, -1))
    given = (gate_up,) if len(inputs) == 1 else gate_up.chunk(2, dim=-1)
    # Tokens differ from one another, so that what a module makes of them shows.
    x = torch.linspace(-3, 5, 3 * gate_up[..., 0].numel(), device="cpu").to(gate_up.dtype).view(*gate_up.shape[:-1], 3)
    out = x.flip(0).clone()
    held = x.clone(), out.clone()
    stand_ins = {name: _StandIn(part) for name, part in zip((*inputs, down), (*given, out), strict=True)}
    trial = copy.copy(owner)
    # Copies, so that what a module writes down while it runs is not what was tried.
    others = copy.deepcopy({name: child for name, child in owner._modules.items() if name not in stand_ins})
    trial._modules = {**others, **stand_ins}
    trial._buffers = copy.deepcopy(owner._buffers)
    before = _state(trial)
    called_right = trial.forward(x) is out and all(len(one.seen) == 1 for one in stand_ins.values())
    if not called_right or any(stand_ins[name].seen[0] is not x for name in inputs):
        return None
    # Work in place before the linears or after them, or on what the module keeps, is none of the gate's.
    if x._version or out._version or not (torch.equal(x, held[0]) and torch.equal(out, held[1])):
        return None
    return stand_ins[down].seen[0].flatten(0, 1) if _state(trial) == before else None


def _state(module: nn.Module) -> tuple[Any, ...]:
    """What changes when a module writes to its buffers or takes other attributes."""
    buffers = tuple((name, id(buffer), buffer._version) for name, buffer in module.named_buffers())
    return buffers, tuple((name, id(value)) for name, value in vars(module).items())


class _StandIn(nn.Module):
    """In a trial, in place of a linear: gives what it was given, and keeps what it sees."""

    def __init__(self, gives: Tensor) -> None:
        super().__init__()
        self.gives = gives
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Whatever comes, the same goes out."""
        self.seen.append(x)
        return self.gives
