"""Linears that read one input, such as q, k and v, on kernels: it is quantized once, and they are one product.

The module paths stay: each linear is called as ever. The first one that is called with an input computes the product of
all; the others, called with the same tensor, take their columns of it. Their weights lie one after another in one piece
of memory, of which each linear's tensors are views.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rotaquant.runtime import kernel_path
from rotaquant.runtime.kernel_path import KernelWeight
from rotaquant.runtime.linear import QuantizedLinear

Stamp = tuple[tuple[int, int] | None, ...]


def share_inputs(linears: Iterable[nn.Module]) -> None:
    """Make one product of those linears that read the same input in the same way; the rest stay alone.

    `linears` read one input. What is in float (skipped by a recipe) or of another format has no part in it.
    """
    alike: dict[Any, list[QuantizedLinear]] = {}
    for linear in linears:
        if isinstance(linear, QuantizedLinear) and kernel_path.has_product(linear.layout, linear.in_features):
            layout, scale = linear.layout, linear.weight_scale
            formats = layout.weights, layout.activations, layout.transform
            alike.setdefault((*formats, linear.in_features, scale.dtype, scale.shape[1]), []).append(linear)
    for members in alike.values():
        if len(members) > 1:
            shared = SharedInput(members)
            for member in members:
                member.shared_input = shared


class SharedInput:
    """The linears that read one input. It holds no result and no memory of its own but the small biases'.

    So models can be copied, moved, pickled and saved as if it were not there: where weights no longer lie together, the
    next call lays them out anew.
    """

    def __init__(self, members: Sequence[QuantizedLinear]) -> None:
        self.members = tuple(members)
        self.columns = _columns(members)
        self._layouts = tuple(member.layout for member in members)
        self._bias: tuple[tuple[Tensor | None, ...], Stamp, Tensor | None] | None = None

    def output_of(self, member: QuantizedLinear, x: Tensor) -> Tensor | None:
        """`member`'s output `[..., out]` for x, a view of that of all; `None` where it has to compute it alone."""
        # A traced program must not depend on which tensor an earlier call has seen.
        if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter) or not self._is_whole(member):
            return None
        call = _this_thread.call
        if call is not None and call.is_open and call.group() is self and call.is_with(x):
            return call.take(member)
        weight = self._weight(x)
        if weight is None:
            return None
        call = _Call(self, x, self.members[0].multiply_on_kernels(x, weight))
        _this_thread.call = call
        return call.take(member)

    def _is_whole(self, member: QuantizedLinear) -> bool:
        """Whether the members are still what they were, and `member`, which may be a copy of one, is among them."""
        return any(member is one for one in self.members) and all(
            one.shared_input is self and one.layout is layout
            for one, layout in zip(self.members, self._layouts, strict=True)
        )

    def _weight(self, x: Tensor) -> KernelWeight | None:
        """The weights of all members as one, laid out if they are not, or `None` where that cannot be done now."""
        packed = _joined([member.packed_for_kernels() for member in self.members])
        scale = _joined([member.weight_scale for member in self.members])
        if packed is not None and scale is not None and self._bias is not None and self._bias_is_current():
            return KernelWeight(packed, scale, self._bias[2])
        # What a graph captures is computed when it is replayed: weights must not move in it.
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        return self._lay_out(x.device)

    def _bias_is_current(self) -> bool:
        assert self._bias is not None
        sources, stamp, _ = self._bias
        # The sources are held, so that no other tensor can have come to lie where one of them lay.
        current = [member.bias for member in self.members]
        return all(one is source for one, source in zip(current, sources, strict=True)) and _stamp(current) == stamp

    def _lay_out(self, device: torch.device) -> KernelWeight | None:
        members = self.members
        packed = [member.packed_for_kernels() for member in members]
        scales = [member.weight_scale for member in members]
        biases = [member.bias for member in members]
        given = [bias for bias in biases if bias is not None]
        on_device = all(tensor.device == device for tensor in (*packed, *scales, *given))
        if not on_device or len({tensor.dtype for tensor in scales}) > 1 or len({bias.dtype for bias in given}) > 1:
            return None
        # Tensors made in inference mode could not be written to outside it, as loading a state dict does.
        with _laying_out, torch.inference_mode(False), torch.no_grad():
            joined = KernelWeight(torch.cat(packed), torch.cat(scales), _stacked_bias(members) if given else None)
            if device.type == "cuda":
                # Other streams may read the weights where they were, and are about to where they will be.
                torch.cuda.synchronize(device)
            for member, (start, stop) in zip(members, self.columns, strict=True):
                member.move_weight(joined.packed[start:stop], joined.scale[start:stop])
            self._bias = tuple(biases), _stamp(biases), joined.bias
        return joined


class _Call:
    """One product of several linears: its input, and the outputs that are still to be taken, each once."""

    def __init__(self, group: SharedInput, x: Tensor, output: Tensor) -> None:
        self.group = weakref.ref(group)
        self._mode = _mode(x)
        self._input = _stamp([x])
        outputs: dict[int, tuple[Stamp, Tensor]] = {}
        for member, (start, stop) in zip(group.members, group.columns, strict=True):
            outputs[id(member)] = _weight_stamp(member), output[..., start:stop]
        self._outputs = outputs
        # What nobody has taken when the input dies is released with it.
        self._x = weakref.ref(x, lambda _: outputs.clear())

    @property
    def is_open(self) -> bool:
        """Whether there is an output that was not taken."""
        return bool(self._outputs)

    def is_with(self, x: Tensor) -> bool:
        """Whether x is the tensor that the product was computed with, and holds what it held."""
        return self._x() is x and self._input == _stamp([x]) and self._mode == _mode(x)

    def take(self, member: QuantizedLinear) -> Tensor | None:
        """The output of `member`; `None` where it was taken before, or the weight has changed since."""
        stamp, output = self._outputs.pop(id(member), (None, None))
        return output if stamp == _weight_stamp(member) else None


class _ThisThread(threading.local):
    """The latest product of a thread. Neither models nor their parts hold it: both may be copied or shared."""

    call: _Call | None = None


_this_thread = _ThisThread()
_laying_out = threading.Lock()


def _columns(members: Sequence[QuantizedLinear]) -> list[tuple[int, int]]:
    columns, start = [], 0
    for member in members:
        columns.append((start, start + member.out_features))
        start += member.out_features
    return columns


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors `[n_i, columns]` that lie one after another in one storage as one, `None` where they do not."""
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        lies_next = part.data_ptr() == end and part.untyped_storage().data_ptr() == storage
        if not lies_next or part.dtype != first.dtype or not part.is_contiguous():
            return None
        end += part.nbytes
    shape = (sum(part.shape[0] for part in parts), first.shape[1])
    return first.as_strided(shape, (first.shape[1], 1), first.storage_offset())


def _stacked_bias(members: Sequence[QuantizedLinear]) -> Tensor:
    """The biases of all, zeros where a member has none. A copy: with such gaps they cannot lie in one memory."""
    like = next(member.bias for member in members if member.bias is not None)
    return torch.cat(
        [like.new_zeros(member.out_features) if member.bias is None else member.bias for member in members]
    )


def _stamp(tensors: Sequence[Tensor | None]) -> Stamp:
    """What changes when one of the tensors is replaced or written to; writing in inference mode leaves no trace."""
    return tuple(
        None if tensor is None else (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
        for tensor in tensors
    )


def _weight_stamp(member: QuantizedLinear) -> Stamp:
    return _stamp([member.packed_for_kernels(), member.weight_scale, member.bias])


def _mode(x: Tensor) -> tuple[Any, ...]:
    """Under what a result was computed, and may be used: stream and capture, and the modes of autograd."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if not x.is_cuda:
        return modes
    return *modes, torch.cuda.current_stream(x.device).cuda_stream, torch.cuda.is_current_stream_capturing()
