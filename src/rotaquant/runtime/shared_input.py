"""Linears that read one input, such as q, k and v, on kernels: it is quantized once, and they are one product.

The module paths stay: each linear is called as ever, by the module they belong to, their owner. While the owner runs,
the first one that is called with an input computes the product of all; the others, called with the same tensor, take
their columns of it. Between an owner's calls nothing is kept: what lies in a tensor then is the caller's to change.

Their weights lie one after another in one piece of memory, of which each linear's tensors are views. They are laid out
when they are loaded or moved, as torch moves tensors then; never in a forward pass, where a graph may be captured.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks

from rotaquant.runtime import kernel_path
from rotaquant.runtime.kernel_path import KernelWeight
from rotaquant.runtime.linear import QuantizedLinear

logger = logging.getLogger(__name__)

# So many calls of an owner in a row in which nobody took a second output, and its linears compute for themselves.
_PATIENCE = 3


def share_inputs(module: nn.Module, paths: Sequence[str]) -> None:
    """Make one product of those linears that read the same input in the same way; the rest stay alone.

    `paths` name linears of `module` that read one input. What is in float (skipped by a recipe) or of another format
    has no part in it.
    """
    alike: dict[Any, list[QuantizedLinear]] = {}
    for linear in map(module.get_submodule, paths):
        if isinstance(linear, QuantizedLinear) and kernel_path.has_product(linear.layout, linear.in_features):
            layout, scale = linear.layout, linear.weight_scale
            formats = layout.weights, layout.activations, layout.transform
            alike.setdefault((*formats, linear.in_features, scale.dtype, scale.shape[1]), []).append(linear)
    owner = module.get_submodule(".".join(os.path.commonprefix([path.split(".")[:-1] for path in paths])))
    for members in alike.values():
        if len(members) > 1:
            SharedInput(members).belong_to(owner)


class SharedInput:
    """The linears that read one input, and their weights as one. It holds no result beyond a call of their owner.

    So models can be copied, moved, pickled and saved as if it were not there. A linear whose tensors were replaced by
    others runs alone until the model is moved or loaded the next time.
    """

    def __init__(self, members: Sequence[QuantizedLinear]) -> None:
        self.members = tuple(members)
        self.columns = _columns(members)
        self._layouts = tuple(member.layout for member in members)
        self._joined: KernelWeight | None = None
        self._biased: tuple[bool, ...] = ()
        self._fruitless = 0

    def belong_to(self, owner: nn.Module) -> None:
        """Share while `owner`, which calls the linears, runs."""
        for member in self.members:
            member.shared_input = self
        owner.register_forward_pre_hook(self._enter)
        owner.register_forward_hook(self._leave, always_call=True)
        self.lay_out()

    def lay_out(self) -> None:
        """Put the weights into one memory if they are not, where they lie on one device that has kernels."""
        stored = [
            tensor
            for member in self.members
            for tensor in (member.weight_packed, member.weight_scale, member.bias)
            if tensor is not None
        ]
        device = stored[0].device
        if any(tensor.device != device for tensor in stored) or not kernel_path.device_has_kernels(device):
            self._joined = None
        elif self._lie_joined() is None:
            self._joined = self._join()
            if self._joined is not None and device.type == "cuda":
                # Other streams may be about to read the weights.
                torch.cuda.synchronize(device)

    def _join(self) -> KernelWeight | None:
        scales = [member.weight_scale for member in self.members]
        biases = [member.bias for member in self.members]
        # While a model is cast, its linears are of two dtypes.
        if any(len({tensor.dtype for tensor in part if tensor is not None}) > 1 for part in (scales, biases)):
            return None
        # What is trained stays the tensor that an optimizer holds.
        if any(
            tensor is not None and (tensor.requires_grad or isinstance(tensor, nn.Parameter))
            for tensor in scales + biases
        ):
            return None
        # Tensors made in inference mode could not be written to outside it, as loading a state dict does.
        with torch.inference_mode(False), torch.no_grad():
            packed = torch.cat([member.packed_for_kernels() for member in self.members])
            joined = KernelWeight(packed, torch.cat(scales), self._joined_bias())
            for member, (start, stop) in zip(self.members, self.columns, strict=True):
                bias = None if joined.bias is None or member.bias is None else joined.bias[start:stop]
                member.move_weight(KernelWeight(joined.packed[start:stop], joined.scale[start:stop], bias))
        self._biased = tuple(bias is not None for bias in biases)
        return joined

    def _joined_bias(self) -> Tensor | None:
        """The biases of all in one memory, with zeros where a member has none."""
        given = [member.bias for member in self.members if member.bias is not None]
        if not given:
            return None
        biases = (
            given[0].new_zeros(member.out_features) if member.bias is None else member.bias for member in self.members
        )
        return torch.cat(list(biases))

    def _lie_joined(self) -> KernelWeight | None:
        """The weights as one, `None` if a member's tensors are not the pieces of it that they were."""
        joined = self._joined
        if joined is None:
            return None
        for member, (start, _), biased in zip(self.members, self.columns, self._biased, strict=True):
            # The memory is held, so that no other tensor can have come to lie there.
            if not _lies_at(member.packed_for_kernels(), joined.packed, start):
                return None
            if not _lies_at(member.weight_scale, joined.scale, start) or biased != (member.bias is not None):
                return None
            if member.bias is not None and joined.bias is not None and not _lies_at(member.bias, joined.bias, start):
                return None
        return joined

    def _enter(self, owner: nn.Module, args: Any) -> None:
        # After an interrupt, which calls no hooks, there may be a call of before: it ends here.
        # A traced program must not depend on which tensor an earlier call has seen.
        if not torch.compiler.is_compiling():
            _this_thread.calls[self] = None

    def _leave(self, owner: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = _this_thread.calls.pop(self, None)
        if call is not None:
            self._fruitless = 0 if call.was_shared else self._fruitless + 1
            if self._fruitless == _PATIENCE:
                logger.info("%s gives its linears different inputs: each is a product", type(owner).__name__)

    def output_of(self, member: QuantizedLinear, x: Tensor) -> Tensor | None:
        """`member`'s output `[..., out]` for x, a view of that of all; `None` where it has to compute it alone."""
        # What is learnt with stands for itself: outputs are written to, each with a gradient of its own.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if type(x) not in (Tensor, nn.Parameter) or not _has_memory(x):
            return None
        calls = _this_thread.calls
        if self not in calls or self._fruitless >= _PATIENCE or not self._is_whole(member):
            return None
        call = calls[self]
        if call is not None and call.is_open:
            return call.take(member) if call.is_with(x) else None
        weight = self._lie_joined()
        if weight is None:
            return None
        call = calls[self] = _Call(self, x, self.members[0].multiply_on_kernels(x, weight))
        return call.take(member)

    def _is_whole(self, member: QuantizedLinear) -> bool:
        """Whether the members are still what they were, and `member`, which may be a copy of one, is among them.

        A hook before a member's call may give it another input, or write to the one that all read.
        """
        return (
            any(member is one for one in self.members)
            and not _global_forward_pre_hooks
            and all(
                one.shared_input is self and one.layout is layout and not one._forward_pre_hooks
                for one, layout in zip(self.members, self._layouts, strict=True)
            )
        )


class _Call:
    """One product of several linears: its input, and the outputs that are still to be taken, each once."""

    def __init__(self, group: SharedInput, x: Tensor, output: Tensor) -> None:
        self._mode = _mode(x)
        self._version = _version(x)
        self._taken = 0
        outputs = {
            id(member): output[..., start:stop]
            for member, (start, stop) in zip(group.members, group.columns, strict=True)
        }
        self._outputs = outputs
        # What nobody has taken when the input dies is released with it.
        self._x = weakref.ref(x, lambda _: outputs.clear())

    @property
    def is_open(self) -> bool:
        """Whether there is an output that was not taken."""
        return bool(self._outputs)

    @property
    def was_shared(self) -> bool:
        """Whether more than one output was taken."""
        return self._taken > 1

    def is_with(self, x: Tensor) -> bool:
        """Whether x is the tensor that the product was computed with, and holds what it held."""
        return self._x() is x and self._version == _version(x) and self._mode == _mode(x)

    def take(self, member: QuantizedLinear) -> Tensor | None:
        """The output of `member`; `None` where it was taken before."""
        self._taken += 1
        return self._outputs.pop(id(member), None)


class _ThisThread(threading.local):
    """The owners that run in a thread, by what they share, and the latest product of each."""

    def __init__(self) -> None:
        # After an interrupt an owner's call stays here; it must not keep a model alive.
        self.calls: weakref.WeakKeyDictionary[SharedInput, _Call | None] = weakref.WeakKeyDictionary()


_this_thread = _ThisThread()


def _columns(members: Sequence[QuantizedLinear]) -> list[tuple[int, int]]:
    columns, start = [], 0
    for member in members:
        columns.append((start, start + member.out_features))
        start += member.out_features
    return columns


def _has_memory(x: Tensor) -> bool:
    """Whether x is a tensor of numbers, not one that stands for many, or for its gradient, under `torch.func`."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def _lies_at(part: Tensor, whole: Tensor, row: int) -> bool:
    at = whole.data_ptr() + row * whole.stride(0) * whole.element_size()
    return part.data_ptr() == at and part.dtype == whole.dtype and part.stride() == whole.stride()


def _version(x: Tensor) -> tuple[Any, ...]:
    """What changes when x is written to or becomes another view.

    Writing in inference mode leaves no trace, and no stock owner does it.
    """
    return x.data_ptr(), x.shape, x.stride(), -1 if x.is_inference() else x._version


def _mode(x: Tensor) -> tuple[Any, ...]:
    """Under what a result was computed, and may be used: inference mode, and the stream."""
    modes = (torch.is_inference_mode_enabled(),)
    return (*modes, torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else modes
