"""Replace the linears and the attention of a transformers model by quantized ones, from a layout alone."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, describe
from rotaquant.runtime.attention import install_attention
from rotaquant.runtime.experts import unstack_experts
from rotaquant.runtime.gated_mlp import gate_on_kernels
from rotaquant.runtime.layout import ModelLayout, require_consistent
from rotaquant.runtime.linear import QuantizedLinear
from rotaquant.runtime.shared_input import share_inputs
from rotaquant.runtime.structure import reshape_block, reshape_ends, take_key_bias


def install(model: PreTrainedModel, layout: ModelLayout) -> Architecture:
    """Give the model empty quantized linears, ready for a checkpoint's tensors, and quantized attention."""
    architecture = describe(model)
    require_consistent(architecture, layout)
    unstack_experts(model, architecture)
    for block in architecture.blocks:
        module = model.get_submodule(block.path)
        reshape_block(module, block, layout)
        take_key_bias(module, block, layout)
        for path in block.linears:
            linear = module.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            quantized = QuantizedLinear.empty_like(linear, layout.linear(block, path), layout.torch_scale_dtype())
            module.set_submodule(path, quantized)
        for site in block.sites:
            share_inputs(module, site)
        gate_on_kernels(module, block)
    reshape_ends(model, architecture, layout)
    install_attention(model, architecture, layout)
    return architecture
