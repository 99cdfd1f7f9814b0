"""Fold norms and biases and fuse rotations into weights, exactly: every function expects float64 modules.

Legend: x is a row vector of the residual stream, Q the residual rotation (x' = x Q), W a weight `[out, in]`. Readers
become W diag(gain) Q, writers Qᵀ W (arXiv 2404.00456, stages 1a to 1d). Where norms subtract the mean, C is the
projection that does it for the whole stream at once: writers become C W, and the norms no longer need to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rotaquant.architectures import Architecture, Attention, Block, Norm, NormKind
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
    return reference.mix_rows(x, mix.matrix().to(x.device), mix.shards)


def centre(x: Tensor) -> Tensor:
    """x C: each row less its mean."""
    return x - x.mean(dim=-1, keepdim=True)


def rotate_residual(x: Tensor, plan: RotationPlan) -> Tensor:
    """x Q: what the residual stream of the rotated model holds where the original's holds x."""
    if plan.residual is None:
        return x
    signs = residual_signs(plan).to(device=x.device, dtype=x.dtype)
    return rotate(x * signs, plan.residual)


# --- fold -------------------------------------------------------------------------------------------------------


def fold_block(module: nn.Module, block: Block, *, value_bias_apart: bool) -> None:
    """Move every norm's gain and shift into its readers and, if asked, the bias of the values into that of o.

    The norms' own gains become neutral. Softmax rows sum to one, so a bias of all values is a bias of o's input.
    """
    for norm in block.norms:
        _fold(module.get_submodule(norm.path), [module.get_submodule(reader) for reader in norm.readers], norm.kind)
    if value_bias_apart:
        _fold_value_bias(module, block.attention)


def _fold(norm: nn.Module, readers: list[nn.Module], kind: NormKind) -> None:
    weight = _parameter(norm, "weight")
    shift = _shift(norm)
    gain = gain_of(weight, kind)
    for reader in readers:
        matrix = _parameter(reader, "weight")
        if shift is not None:
            _bias(reader).add_(matrix @ shift)
        matrix.mul_(gain)
    weight.fill_(0.0 if kind == "rms-plus-one" else 1.0)
    if shift is not None:
        shift.zero_()


def gain_of(weight: Tensor, kind: NormKind) -> Tensor:
    """What a norm multiplies by."""
    return 1 + weight if kind == "rms-plus-one" else weight


def _shift(norm: nn.Module) -> Tensor | None:
    shift = getattr(norm, "bias", None)
    return shift.detach() if isinstance(shift, Tensor) else None


def has_separable_value_bias(module: nn.Module, attention: Attention) -> bool:
    """Whether v has a bias that o can take over: not where sinks take a part of the attention."""
    return not attention.sinks and getattr(module.get_submodule(attention.v.path), "bias", None) is not None


def _fold_value_bias(module: nn.Module, attention: Attention) -> None:
    if not has_separable_value_bias(module, attention):
        return
    v, o = module.get_submodule(attention.v.path), module.get_submodule(attention.o)
    bias = attention.v.view(_parameter(v, "bias"))
    by_head = bias.reshape(attention.kv_heads, -1).repeat_interleave(attention.heads // attention.kv_heads, dim=0)
    _bias(o).add_(_parameter(o, "weight") @ by_head.flatten())
    bias.zero_()


# --- rotate -----------------------------------------------------------------------------------------------------


def rotate_block(module: nn.Module, block: Block, plan: RotationPlan, *, centred: bool) -> None:
    """Fuse every rotation of `plan` into a folded block; `centred` for a stream whose norms subtract the mean."""
    if plan.residual is not None:
        for reader in block.readers:
            weight = _parameter(module.get_submodule(reader), "weight")
            weight.copy_(rotate_residual(weight, plan))
    for writer in block.writers:
        _write_rotated(module.get_submodule(writer), plan, centred=centred)
    attention = block.attention
    o = _parameter(module.get_submodule(attention.o), "weight")
    if plan.value_head is not None:
        _rotate_values(module, attention, plan.value_head)
        o.copy_(rotate(o.unflatten(-1, (-1, attention.head_dim)), plan.value_head).flatten(-2))
    if plan.head_mix is not None:
        o.copy_(mix_heads(o, plan.head_mix))
    for mlp in block.mlps:
        transform = plan.down(mlp.width)
        if transform is not None:
            down = _parameter(module.get_submodule(mlp.down), "weight")
            down.copy_(rotate(down, transform))


def _write_rotated(writer: nn.Module, plan: RotationPlan, *, centred: bool) -> None:
    def moved(output: Tensor) -> Tensor:
        return rotate_residual(centre(output) if centred else output, plan)

    weight = _parameter(writer, "weight")
    weight.copy_(moved(weight.T.contiguous()).T)
    if getattr(writer, "bias", None) is not None:
        bias = _parameter(writer, "bias")
        bias.copy_(moved(bias))


def _rotate_values(module: nn.Module, attention: Attention, per_head: Factorisation) -> None:
    v = module.get_submodule(attention.v.path)
    weight = attention.v.view(_parameter(v, "weight"))
    heads = weight.flatten(0, 1).unflatten(0, (attention.kv_heads, attention.head_dim))
    weight.copy_(rotate(heads.mT, per_head).mT.reshape(weight.shape))
    if getattr(v, "bias", None) is not None:
        bias = attention.v.view(_parameter(v, "bias"))
        bias.copy_(rotate(bias.reshape(attention.kv_heads, attention.head_dim), per_head).reshape(bias.shape))


# --- the ends of the model --------------------------------------------------------------------------------------


def fuse_ends(model: nn.Module, architecture: Architecture, plan: RotationPlan, *, keep_tied: bool) -> None:
    """Rotate the embeddings, and fold and rotate the (untied) head; any dtype, float64 inside.

    With `keep_tied` the token embedding, the final norm and the head stay as they are: the stream is rotated online.
    Rows are independent, so they are taken a stretch at a time: a vocabulary in float64 would dwarf the model.
    """
    for path in architecture.embeddings[1 if keep_tied else 0 :]:
        for rows in _weight(model, path).split(_ROWS_AT_A_TIME):
            wide = rows.double()
            rows.copy_(rotate_residual(centre(wide) if architecture.centred else wide, plan))
    if not keep_tied:
        _fuse_head(model.get_submodule(architecture.head), model, architecture.final_norm, plan)


def _fuse_head(head: nn.Module, model: nn.Module, final_norm: Norm, plan: RotationPlan) -> None:
    norm = model.get_submodule(final_norm.path)
    weight = _weight(model, final_norm.path)
    gain = gain_of(weight.double(), final_norm.kind)
    shift = _shift(norm)
    bias = _bias(head) if shift is not None else None
    matrix = _weight(model, final_norm.readers[0])
    for start in range(0, matrix.shape[0], _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        wide = matrix[part].double()
        if bias is not None and shift is not None:
            bias[part] += (wide @ shift.double()).to(bias.dtype)
        matrix[part] = rotate_residual(wide * gain, plan).to(matrix.dtype)
    weight.fill_(0.0 if final_norm.kind == "rms-plus-one" else 1.0)
    if shift is not None:
        shift.zero_()


def _weight(model: nn.Module, path: str) -> Tensor:
    weight = model.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _bias(linear: nn.Module) -> Tensor:
    """The bias of a linear, to write to; one of zeros is made where there is none."""
    if getattr(linear, "bias", None) is None:
        weight = linear.weight
        assert isinstance(weight, Tensor)
        linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=False)
    bias = linear.bias
    assert isinstance(bias, Tensor)
    return bias.detach()


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, Tensor)
    if parameter.dtype != torch.float64:
        raise TypeError(f"rotations are fused in float64, got {parameter.dtype}")
    return parameter.detach()
