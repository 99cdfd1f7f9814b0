"""The linear layer of a quantized model: rotate its input, quantize it, multiply integers, scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotaquant.hadamard import Factorisation, base_matrix
from rotaquant.ops import packing, reference
from rotaquant.ops.factors import Factors
from rotaquant.quantization.weights import QuantizedWeight
from rotaquant.rotation.plan import HeadMix
from rotaquant.runtime import kernel_path
from rotaquant.runtime.kernel_path import KernelWeight
from rotaquant.runtime.layout import LinearLayout

if TYPE_CHECKING:
    from rotaquant.runtime.shared_input import SharedInput


@dataclass(frozen=True, eq=False)
class _Widened:
    """Codes in more bits than they are stored in, and what they were made of."""

    packed: Tensor
    source: Tensor
    version: int

    @classmethod
    def of(cls, source: Tensor, packed: Tensor) -> _Widened:
        return cls(packed, source, _version(source))

    def renewed(self, packed: Tensor) -> _Widened:
        """The same for what was written to the source, in the same memory: captured graphs read there."""
        self.packed.copy_(packed)
        return _Widened.of(self.source, self.packed)

    def is_of(self, stored: Tensor) -> bool:
        # A traced program cannot ask for the version: it reads what was made when the weight was loaded.
        unchanged = torch.compiler.is_compiling() or self.version == _version(stored)
        return self.source is stored and unchanged


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b by the formats of `layout`; quantized weights are `weight_packed` and `weight_scale`.

    `weight` is an empty tensor that guards the checkpoint: a loader that does not know this format meets a
    shape mismatch there and stops, where it would otherwise run with random or unrotated weights.
    """

    weight: Tensor
    bias: Tensor | None
    rotated_weight: Tensor
    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        layout: LinearLayout,
        *,
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
        bias: bool,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.layout = layout
        self.register_buffer("weight", torch.empty(0, dtype=dtype))
        if layout.weights is None:
            self.register_buffer("rotated_weight", torch.empty(shape, dtype=dtype))
        else:
            words = packing.packed_words(self.in_features, layout.weights.bits)
            groups = self.in_features // (layout.weights.group_size or self.in_features)
            self.register_buffer("weight_packed", torch.zeros(self.out_features, words, dtype=torch.int32))
            self.register_buffer("weight_scale", torch.ones(self.out_features, groups, dtype=scale_dtype))
            self.register_buffer("weight_shape", torch.tensor(shape, dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(self.out_features, dtype=dtype) if bias else None)
        self.shared_input: SharedInput | None = None
        self._transform_matrix: Tensor | None = None
        self._factors: Factors | None = None
        self._factors_are_for: tuple[torch.device, torch.dtype] | None = None
        self._widened: _Widened | None = None

    @classmethod
    def empty_like(cls, linear: nn.Linear, layout: LinearLayout, scale_dtype: torch.dtype) -> QuantizedLinear:
        """A layer of the linear's shape, dtype and device, ready for a checkpoint's tensors."""
        with torch.device(linear.weight.device):
            return cls(
                (linear.out_features, linear.in_features),
                layout,
                dtype=linear.weight.dtype,
                scale_dtype=scale_dtype,
                bias=linear.bias is not None,
            )

    @classmethod
    def from_float(cls, linear: nn.Linear, layout: LinearLayout) -> QuantizedLinear:
        """A float layer of the same weight (shared, not copied) under the rotation of `layout`."""
        shape = (linear.out_features, linear.in_features)
        dtype = linear.weight.dtype
        with torch.device("meta"):
            module = cls(shape, layout, dtype=dtype, scale_dtype=dtype, bias=linear.bias is not None)
        module.weight = torch.empty(0, dtype=dtype, device=linear.weight.device)
        module.rotated_weight = linear.weight.detach()
        if linear.bias is not None:
            module.bias = linear.bias.detach()
        return module

    def store(self, weight: QuantizedWeight, layout: LinearLayout) -> None:
        """Take a quantized weight in place of the float one."""
        assert layout.weights is not None
        device = weight.codes.device
        del self.rotated_weight
        self.layout = layout
        self.shared_input = None
        self.register_buffer("weight_packed", packing.pack_weight(weight.codes, layout.weights.bits))
        self.register_buffer("weight_scale", weight.scale)
        shape = torch.tensor((self.out_features, self.in_features), dtype=torch.int64, device=device)
        self.register_buffer("weight_shape", shape)

    def codes(self) -> Tensor:
        """The weight's codes, int8 `[out, in]`."""
        assert self.layout.weights is not None
        return packing.unpack_weight(self.weight_packed, self.layout.weights.bits, self.in_features)

    def float_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight as it counts in a float product, `[out, in]`."""
        if self.layout.weights is None:
            return self.rotated_weight.to(dtype)
        return reference.dequantize_groups(self.codes(), self.weight_scale, dtype)

    def prepare(self, device: torch.device) -> None:
        """Make the matrices of the online rotation, which are computed and not stored, for `device`."""
        transform = self.layout.transform
        if transform is not None:
            matrix = transform.matrix() if isinstance(transform, HeadMix) else base_matrix(transform)
            self._transform_matrix = matrix.to(device)
            if device.type == "cuda":
                self._make_factors(device, self.weight.dtype)

    def rotate_input(self, x: Tensor) -> Tensor:
        """The input as the product sees it: rotated online (in at least float32) where the layout says so."""
        transform = self.layout.transform
        if transform is None:
            return x
        if self._transform_matrix is None or self._transform_matrix.device != x.device:
            self.prepare(x.device)
        assert self._transform_matrix is not None
        if isinstance(transform, HeadMix):
            return reference.mix_rows(x, self._transform_matrix, transform.shards)
        return reference.rotate_rows(x, self._transform_matrix, transform.blocks)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]` in the dtype of x."""
        # Autocast would turn the exact products into bfloat16 ones.
        with torch.autocast(x.device.type, enabled=False):
            if not self.runs_on_kernels(x):
                return self._forward(x)
            shared = None if self.shared_input is None else self.shared_input.output_of(self, x)
            return self.multiply_on_kernels(x, self.kernel_weight()) if shared is None else shared

    # --- the definition ---

    def _forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        weights, activations = self.layout.weights, self.layout.activations
        if activations is None:
            bias = None if self.bias is None else self.bias.to(dtype)
            return functional.linear(self._rotated(x), self.float_weight(dtype), bias)
        assert isinstance(activations.clip_ratio, float)
        x = self.rotate_input(x)
        codes, scale = reference.quantize_rows(x, activations.bits, activations.clip_ratio, activations.group_size)
        if weights is None:
            bias = None if self.bias is None else self.bias.to(dtype)
            x = reference.dequantize_groups(codes, scale, dtype)
            return functional.linear(x, self.float_weight(dtype), bias)
        out = reference.quantized_matmul(
            codes.flatten(0, -2),
            scale.flatten(0, -2),
            self.codes(),
            self.weight_scale,
            (activations.bits, weights.bits),
        )
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(dtype).unflatten(0, x.shape[:-1])

    def _rotated(self, x: Tensor) -> Tensor:
        """The rotated input in its own dtype, for a float product."""
        factors = self.kernel_factors(x) if kernel_path.kernels_run_on(x) else None
        if factors is None:
            return self.rotate_input(x).to(x.dtype)
        return kernel_path.rotate(x.flatten(0, -2), factors).unflatten(0, x.shape[:-1])

    # --- on kernels ---

    def runs_on_kernels(self, x: Tensor) -> bool:
        """Whether the product with this input does."""
        if not kernel_path.kernels_run_on(x) or not kernel_path.has_product(self.layout, self.in_features):
            return False
        # Floats meet 4-bit weights in half precision.
        return self.layout.activations is not None or x.element_size() == 2

    def multiply_on_kernels(self, x: Tensor, weight: KernelWeight) -> Tensor:
        """The product of an input `[..., in]` with `weight`: its own, or its own and those of others that read x."""
        rows = x.flatten(0, -2)
        if self.layout.transform is None:
            return kernel_path.encode_and_multiply(rows, weight, self.layout).unflatten(0, x.shape[:-1])
        factors = self.kernel_factors(x)
        if factors is None:
            rows = self.rotate_input(rows)
            rows = rows.to(x.dtype) if self.layout.activations is None else rows
        encoded = kernel_path.encode(rows, self.layout, factors)
        return kernel_path.multiply(encoded, weight, self.layout, x.dtype).unflatten(0, x.shape[:-1])

    def gates_on_kernels(self, x: Tensor) -> bool:
        """Whether `forward_gated` takes inputs like x, of its device and dtype."""
        if self.layout.activations is None or not self.runs_on_kernels(x):
            return False
        return self.kernel_factors(x) is not None

    def forward_gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """`forward` of act(gate) * up, both `[..., in]`: gated, rotated and quantized in one go.

        `activation` is "silu", "gelu_tanh" or "gelu". Only where `gates_on_kernels`.
        """
        with torch.autocast(gate.device.type, enabled=False):
            factors = self.kernel_factors(gate)
            assert factors is not None
            rows = gate.flatten(0, -2), up.flatten(0, -2)
            encoded = kernel_path.encode_gated(*rows, activation, self.layout, factors)
            out = kernel_path.multiply(encoded, self.kernel_weight(), self.layout, gate.dtype)
            return out.unflatten(0, gate.shape[:-1])

    def kernel_factors(self, x: Tensor) -> Factors | None:
        """The online rotation as kernels apply it to inputs like x, `None` where there is none or they cannot."""
        if self.layout.transform is None:
            return None
        if self._factors_are_for != (x.device, x.dtype):
            self._make_factors(x.device, x.dtype)
        return self._factors

    def _make_factors(self, device: torch.device, dtype: torch.dtype) -> None:
        assert self.layout.transform is not None
        self._factors = kernel_path.factors_on(self.layout.transform, self.in_features, device, dtype)
        self._factors_are_for = (device, dtype)

    def kernel_weight(self) -> KernelWeight:
        """The weight as kernels read it."""
        return KernelWeight(self.packed_for_kernels(), self.weight_scale, self.bias)

    def packed_for_kernels(self) -> Tensor:
        """The codes in 4 or 8 bits: as stored, or widened once where they have other bits."""
        assert self.layout.weights is not None
        if kernel_path.kernel_bits(self.layout.weights) == self.layout.weights.bits:
            return self.weight_packed
        if self._widened is None or not self._widened.is_of(self.weight_packed):
            self._widened = _Widened.of(self.weight_packed, self._widen())
        return self._widened.packed

    def _widen(self) -> Tensor:
        assert self.layout.weights is not None
        return packing.pack_weight(self.codes(), kernel_path.kernel_bits(self.layout.weights))

    def lay_out(self) -> None:
        """Prepare the weight for kernels, where they run: when it has come to a device, not in a forward pass."""
        if not kernel_path.has_product(self.layout, self.in_features):
            return
        if not kernel_path.device_has_kernels(self.weight_packed.device):
            self._widened = None
        elif self.shared_input is None:
            # What was made in inference mode could not be kept for a gradient.
            with torch.inference_mode(False):
                self.packed_for_kernels()
        if self.shared_input is not None:
            self.shared_input.lay_out()

    def move_weight(self, weight: KernelWeight) -> None:
        """Keep the weight in other memory, which holds the same as `kernel_weight`."""
        assert self.layout.weights is not None
        if kernel_path.kernel_bits(self.layout.weights) == self.layout.weights.bits:
            self.weight_packed = weight.packed
        else:
            self._widened = _Widened.of(self.weight_packed, weight.packed)
        self.weight_scale, self.bias = weight.scale, weight.bias

    # --- as a module ---

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        # Codes were taken against the scales as stored: a cast of the model must not change them.
        stored = self._buffers.get("weight_scale")
        super()._apply(fn, recurse)
        moved = self._buffers.get("weight_scale")
        if stored is not None and moved is not None and moved.dtype != stored.dtype:
            self._buffers["weight_scale"] = stored.to(moved.device)
        # Now, not in the next forward pass: that one may be traced by torch.compile.
        if self._transform_matrix is not None and not self.weight.is_meta:
            self._transform_matrix = self._transform_matrix.to(self.weight.device)
            if self.weight.is_cuda:
                self._make_factors(self.weight.device, self.weight.dtype)
        self.lay_out()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # In inference mode what was written leaves no trace.
        if self._widened is not None and self._widened.source is self.weight_packed:
            with torch.inference_mode(False), torch.no_grad():
                self._widened = self._widened.renewed(self._widen())
        self.lay_out()

    def extra_repr(self) -> str:
        """Formats and transform, for `print(model)`."""
        layout = self.layout
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        for name, fmt in (("weights", layout.weights), ("activations", layout.activations)):
            parts.append(f"{name}={'float' if fmt is None else f'int{fmt.bits}'}")
        if isinstance(layout.transform, Factorisation | HeadMix):
            parts.append(f"transform={layout.transform.describe()}")
        return ", ".join(parts)
