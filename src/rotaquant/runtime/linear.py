"""The linear layer of a quantized model: rotate its input, quantize it, multiply integers, scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotaquant.hadamard import Factorisation, base_matrix
from rotaquant.ops import int4_matmul, int8_matmul, packing, quantize_rows, reference
from rotaquant.ops.library import triton_missing
from rotaquant.quantization.weights import QuantizedWeight
from rotaquant.rotation.plan import HeadMix
from rotaquant.runtime.layout import LinearLayout


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
        self._transform_matrix: Tensor | None = None
        self._widened: Tensor | None = None

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
        """Make the matrix of the online rotation, which is computed and not stored, for `device`."""
        transform = self.layout.transform
        if transform is not None:
            matrix = transform.matrix() if isinstance(transform, HeadMix) else base_matrix(transform)
            self._transform_matrix = matrix.to(device)

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
            return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        x = self.rotate_input(x)
        weights, activations = self.layout.weights, self.layout.activations
        if activations is None:
            return functional.linear(x.to(dtype), self.float_weight(dtype), bias)
        assert isinstance(activations.clip_ratio, float)
        if weights is not None and self._has_kernel(x, dtype):
            out = self._product_by_kernel(x.flatten(0, -2), dtype)
            return out.unflatten(0, x.shape[:-1])
        codes, scale = reference.quantize_rows(x, activations.bits, activations.clip_ratio, activations.group_size)
        if weights is None:
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

    def _has_kernel(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether the integer product of this input runs on a kernel; float64 is for checking, on the definition."""
        if not x.is_cuda or dtype == torch.float64 or x.numel() == 0 or triton_missing() is not None:
            return False
        weights, activations = self.layout.weights, self.layout.activations
        assert weights is not None and activations is not None
        sizes = {fmt.group_size for fmt in (weights, activations) if fmt.group_size}
        # Planes of groups lie side by side only where groups are whole words of packed weights.
        return all(size % 8 == 0 for size in sizes) and self.in_features <= 65536

    def _product_by_kernel(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        weights, activations = self.layout.weights, self.layout.activations
        assert weights is not None and activations is not None and isinstance(activations.clip_ratio, float)
        planar = weights.bits <= 4
        codes, scale = quantize_rows(x, activations.bits, activations.clip_ratio, activations.group_size, planar)
        matmul = int4_matmul if planar else int8_matmul
        return matmul(codes, scale, self._packed_for_kernel(), self.weight_scale, self.bias, dtype)

    def _packed_for_kernel(self) -> Tensor:
        """The weight in the 4 or 8 bits that kernels read: as stored, or widened once where it has other bits."""
        assert self.layout.weights is not None
        bits = self.layout.weights.bits
        if bits in {4, 8}:
            return self.weight_packed
        if self._widened is None or self._widened.device != self.weight_packed.device:
            self._widened = packing.pack_weight(self.codes(), 4 if bits < 4 else 8)
        return self._widened

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        # Codes were taken against the scales as stored: a cast of the model must not change them.
        stored = self._buffers.get("weight_scale")
        super()._apply(fn, recurse)
        moved = self._buffers.get("weight_scale")
        if stored is not None and moved is not None and moved.dtype != stored.dtype:
            self._buffers["weight_scale"] = stored.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Formats and transform, for `print(model)`."""
        layout = self.layout
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        for name, fmt in (("weights", layout.weights), ("activations", layout.activations)):
            parts.append(f"{name}={'float' if fmt is None else f'int{fmt.bits}'}")
        if isinstance(layout.transform, Factorisation | HeadMix):
            parts.append(f"transform={layout.transform.describe()}")
        return ", ".join(parts)
