"""Fold norm gains and fuse rotations into weights, exactly: every function expects float64 modules.

Legend: x is a row vector of the residual stream, Q the residual rotation (x' = x Q), W a weight `[out, in]`. Readers
become W diag(gain) Q, writers Qᵀ W (arXiv 2404.00456, stages 1a to 1d).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rotaquant.architectures import Architecture, Block
from rotaquant.hadamard import Factorisation, base_matrix
from rotaquant.ops import reference
from rotaquant.rotation.plan import HeadMix, RotationPlan, residual_signs

_ROWS_AT_A_TIME = 8192


def rotate(x: Tensor, factorisation: Factorisation) -> Tensor:
    """x T over the last axis, where T is the transform of `factorisation`."""
    base = base_matrix(factorisation).to(x.device)
    return reference.rotate_rows(x, base, factorisation.blocks)


def mix_heads(x: Tensor, mix: HeadMix) -> Tensor:
    """x (M (x) I) over the last axis: heads mixed at equal channel."""
    return reference.mix_rows(x, mix.matrix().to(x.device))


def fold_block_norms(module: nn.Module, block: Block) -> None:
    """Move every norm's gain into the linears that read it; the norm's own gain becomes one."""
    for norm in block.norms:
        _fold(module.get_submodule(norm.path), [module.get_submodule(reader) for reader in norm.readers])


def _fold(norm: nn.Module, readers: list[nn.Module]) -> None:
    gain = _parameter(norm, "weight")
    for reader in readers:
        _parameter(reader, "weight").mul_(gain)
    gain.fill_(1.0)


def rotate_block(module: nn.Module, block: Block, plan: RotationPlan) -> None:
    """Fuse every rotation of `plan` into a block whose norms are folded."""
    if plan.residual is not None:
        for reader in block.readers:
            _rotate_input_by_residual(module.get_submodule(reader), plan)
        for writer in block.writers:
            _rotate_output_by_residual(module.get_submodule(writer), plan)
    attention = block.attention
    o = _parameter(module.get_submodule(attention.o), "weight")
    if plan.value_head is not None:
        _rotate_values(module.get_submodule(attention.v), attention.head_dim, plan.value_head)
        o.copy_(rotate(o.unflatten(-1, (-1, attention.head_dim)), plan.value_head).flatten(-2))
    if plan.head_mix is not None:
        o.copy_(mix_heads(o, plan.head_mix))
    if plan.down_input is not None:
        down = _parameter(module.get_submodule(block.mlp.down), "weight")
        down.copy_(rotate(down, plan.down_input))


def fuse_ends(model: nn.Module, architecture: Architecture, plan: RotationPlan) -> None:
    """Fold the final norm into the (untied) head and rotate embedding and head; any dtype, float64 inside.

    Rows are independent, so they are taken a stretch at a time: a vocabulary in float64 would dwarf the model.
    """
    gain = model.get_submodule(architecture.final_norm).weight
    assert isinstance(gain, Tensor)
    embedding = model.get_submodule(architecture.embedding).weight
    head = model.get_submodule(architecture.head).weight
    assert isinstance(embedding, Tensor) and isinstance(head, Tensor)
    for rows in embedding.detach().split(_ROWS_AT_A_TIME):
        rows.copy_(rotate_residual(rows.double(), plan))
    for rows in head.detach().split(_ROWS_AT_A_TIME):
        rows.copy_(rotate_residual(rows.double() * gain.detach().double(), plan))
    gain.detach().fill_(1.0)


def rotate_residual(x: Tensor, plan: RotationPlan) -> Tensor:
    """x Q: what the residual stream of the rotated model holds where the original's holds x."""
    if plan.residual is None:
        return x
    signs = residual_signs(plan).to(device=x.device, dtype=x.dtype)
    return rotate(x * signs, plan.residual)


def _rotate_input_by_residual(module: nn.Module, plan: RotationPlan) -> None:
    weight = _parameter(module, "weight")
    weight.copy_(rotate_residual(weight, plan))


def _rotate_output_by_residual(module: nn.Module, plan: RotationPlan) -> None:
    weight = _parameter(module, "weight")
    weight.copy_(rotate_residual(weight.T.contiguous(), plan).T)
    if getattr(module, "bias", None) is not None:
        bias = _parameter(module, "bias")
        bias.copy_(rotate_residual(bias, plan))


def _rotate_values(v: nn.Module, head_dim: int, per_head: Factorisation) -> None:
    weight = _parameter(v, "weight")
    by_head = weight.T.unflatten(-1, (-1, head_dim))
    weight.copy_(rotate(by_head, per_head).flatten(-2).T)
    if getattr(v, "bias", None) is not None:
        bias = _parameter(v, "bias")
        bias.copy_(rotate(bias.unflatten(-1, (-1, head_dim)), per_head).flatten(-2))


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, Tensor)
    if parameter.dtype != torch.float64:
        raise TypeError(f"rotations are fused in float64, got {parameter.dtype}")
    return parameter.detach()
