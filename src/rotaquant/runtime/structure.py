"""How the modules of a rotated model differ from the stock ones: biases that moved, norms that changed, hooks.

Each function does to a stock module, filled or empty, what folding and rotating imply for its structure; the pipeline
calls them on weights, the loader on the empty model before it reads a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rotaquant.architectures import Architecture, Attention, Block
from rotaquant.rotation.fuse import fold_block, has_separable_value_bias, rotate_block
from rotaquant.runtime.layout import ModelLayout, float_layout
from rotaquant.runtime.linear import QuantizedLinear
from rotaquant.runtime.residual import enter_rotated, leave_rotated, rms_norm_of

KEY_BIAS = "k_bias"


def rotate_in_place(module: nn.Module, block: Block, architecture: Architecture, layout: ModelLayout) -> None:
    """Fold and rotate a float64 block and give it float linears that rotate their inputs online."""
    fold_block(module, block, value_bias_apart=layout.value_bias_apart)
    rotate_block(module, block, layout.rotation, centred=architecture.centred)
    reshape_block(module, block, layout)
    for path in block.linears:
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        module.set_submodule(path, QuantizedLinear.from_float(linear, float_layout(layout.linear(block, path))))


def reshape_block(module: nn.Module, block: Block, layout: ModelLayout) -> None:
    """Give a stock block the biases, norms and hooks of a folded and rotated one."""
    for norm in block.norms:
        if norm.kind == "layer":
            stock = module.get_submodule(norm.path)
            if getattr(stock, "bias", None) is not None:
                for reader in norm.readers:
                    _ensure_bias(module.get_submodule(reader))
            module.set_submodule(norm.path, rms_norm_of(stock))
    attention = block.attention
    if layout.value_bias_apart and has_separable_value_bias(module, attention):
        _ensure_bias(module.get_submodule(attention.o))
        if attention.v.whole:
            _drop_bias(module.get_submodule(attention.v.path))
    for path in block.post_norms:
        enter_rotated(module.get_submodule(path), layout.rotation)


def reshape_ends(model: nn.Module, architecture: Architecture, layout: ModelLayout) -> None:
    """Give a stock model the final norm, head and hooks of a folded and rotated one."""
    final_norm = architecture.final_norm
    stock = model.get_submodule(final_norm.path)
    if layout.keeps_tied:
        enter_rotated(model.get_submodule(architecture.embedding), layout.rotation, centred=architecture.centred)
        leave_rotated(stock, layout.rotation)
    elif final_norm.kind == "layer":
        if getattr(stock, "bias", None) is not None:
            _ensure_bias(model.get_submodule(architecture.head))
        model.set_submodule(final_norm.path, rms_norm_of(stock))


def take_key_bias(module: nn.Module, block: Block, layout: ModelLayout) -> None:
    """Move the bias of the keys, where it can be separated, from its linear to the attention module."""
    attention = block.attention
    k: Any = module.get_submodule(attention.k.path)
    if not (layout.key_bias_apart and attention.separable_key_bias) or k.bias is None:
        return
    rows = attention.k.view(k.bias.detach())
    module.get_submodule(attention.path).register_buffer(KEY_BIAS, rows.flatten().clone())
    if attention.k.whole:
        _drop_bias(k)
    else:
        rows.zero_()


def return_key_bias(module: nn.Module, attention: Attention) -> None:
    """Undo `take_key_bias`, for running the block with keys as its stock attention wants them."""
    holder: Any = module.get_submodule(attention.path)
    taken = getattr(holder, KEY_BIAS, None)
    if taken is None:
        return
    k: Any = module.get_submodule(attention.k.path)
    if k.bias is None:
        k.bias = torch.zeros(k.out_features, dtype=taken.dtype, device=taken.device)
    rows = attention.k.view(k.bias)
    rows.copy_(taken.view_as(rows))
    delattr(holder, KEY_BIAS)


def key_bias(module: nn.Module) -> Tensor | None:
    """The key bias that an attention module holds apart, `[kv_heads * head_dim]`, before positions and rotation."""
    return getattr(module, KEY_BIAS, None)


def _ensure_bias(linear: nn.Module) -> None:
    if getattr(linear, "bias", None) is None:
        weight = linear.weight
        assert isinstance(weight, Tensor)
        linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=False)


def _drop_bias(linear: Any) -> None:
    linear.bias = None
