"""Replace the linears and the attention of a transformers model by quantized ones, from a layout alone."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, describe
from rotaquant.runtime.attention import install_attention
from rotaquant.runtime.layout import ModelLayout, require_consistent
from rotaquant.runtime.linear import QuantizedLinear


def install(model: PreTrainedModel, layout: ModelLayout) -> Architecture:
    """Give the model empty quantized linears, ready for a checkpoint's tensors, and quantized attention."""
    architecture = describe(model)
    require_consistent(architecture, layout)
    for block in architecture.blocks:
        for path in block.linears:
            full = f"{block.path}.{path}"
            linear = model.get_submodule(full)
            assert isinstance(linear, nn.Linear)
            quantized = QuantizedLinear.empty_like(linear, layout.linear(block, path), layout.torch_scale_dtype())
            model.set_submodule(full, quantized)
    install_attention(model, architecture, layout)
    return architecture
