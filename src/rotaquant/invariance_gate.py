"""The gate before anything is quantized: the rotated model must give the original's logits, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, Block
from rotaquant.calibration import record_block_inputs, run_block
from rotaquant.checkpoint.sources import Source
from rotaquant.rotation.fuse import fold_block_norms, fuse_ends, rotate_block, rotate_residual
from rotaquant.rotation.invariance import exact_arithmetic, require_unchanged
from rotaquant.runtime.attention import block_codec, register_attention, use_attention
from rotaquant.runtime.layout import ModelLayout, float_layout
from rotaquant.runtime.linear import QuantizedLinear

_PROBE_TOKENS = 24
_PROBE_VOCABULARY = 4096


@torch.no_grad()
def require_invariance(
    source: Source, layout: ModelLayout, device: torch.device, on_block: Callable[[int], None]
) -> None:
    """Run a short probe through the original and the rotated form of every block, in float64.

    One block at a time is in memory, and of the vocabulary a few thousand rows. Raises `RotaquantError` naming the
    first block that differs, or a tensor that is missing, misshapen or not finite.
    """
    model, architecture = source.skeleton()
    register_attention()
    probe = _fill_ends(source, model, architecture, device)
    with exact_arithmetic():
        original, arguments = record_block_inputs(model, architecture, probe)
        original_head = _head(model, architecture)
        fuse_ends(model, architecture, layout.rotation)
        rotated, _ = record_block_inputs(model, architecture, probe)
        require_unchanged(rotated, rotate_residual(original, layout.rotation), "the embedding")
        for index, block in enumerate(architecture.blocks):
            on_block(index)
            module = model.get_submodule(block.path)
            source.fill(module, block.path, device=device, dtype=torch.float64)
            original = run_block(module, original, arguments[index])
            _rotate(model, module, block, layout)
            with use_attention(model):
                rotated = run_block(module, rotated, arguments[index])
            require_unchanged(rotated, rotate_residual(original, layout.rotation), f"block {index} ({block.path})")
            model.set_submodule(block.path, nn.Identity())
        require_unchanged(_head(model, architecture)(rotated), original_head(original), "the logits")


def _fill_ends(source: Source, model: PreTrainedModel, architecture: Architecture, device: torch.device) -> Tensor:
    """Fill embedding, final norm and head in float64 from a sample of the vocabulary; return probe ids `[1, n]`."""
    vocabulary = model.get_submodule(architecture.embedding).weight.shape[0]
    size = min(vocabulary, _PROBE_VOCABULARY)
    rows = torch.linspace(0, vocabulary - 1, size).long()
    norm_path = architecture.final_norm
    source.fill(model.get_submodule(norm_path), norm_path, device=device, dtype=torch.float64)
    for path in (architecture.embedding, architecture.head):
        module = model.get_submodule(path)
        source.fill(module, path, device=torch.device("cpu"), dtype=source.dtype)
        weight = module.weight
        assert isinstance(weight, Tensor)
        sample = weight.detach()[rows].to(device=device, dtype=torch.float64)
        module.weight = nn.Parameter(sample, requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (1, _PROBE_TOKENS), generator=generator).to(device)


def _head(model: PreTrainedModel, architecture: Architecture) -> Callable[[Tensor], Tensor]:
    """Final norm and head as they are now (copies of their small float64 weights)."""
    norm = model.get_submodule(architecture.final_norm)
    gain = norm.weight
    weight = model.get_submodule(architecture.head).weight
    assert isinstance(gain, Tensor) and isinstance(weight, Tensor)
    gain, weight = gain.clone(), weight.clone()

    def logits(hidden: Tensor) -> Tensor:
        now = norm.weight
        norm.weight = nn.Parameter(gain, requires_grad=False)
        try:
            normalised = norm(hidden)
        finally:
            norm.weight = now
        return normalised @ weight.T

    return logits


def _rotate(model: PreTrainedModel, module: nn.Module, block: Block, layout: ModelLayout) -> None:
    fold_block_norms(module, block)
    rotate_block(module, block, layout.rotation)
    for path in block.linears:
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        module.set_submodule(path, QuantizedLinear.from_float(linear, float_layout(layout.linear(block, path))))
    floating = layout.model_copy(update={"recipe": layout.recipe.model_copy(update={"keys": None, "values": None})})
    attention: Any = module.get_submodule(block.attention.path)
    attention.kv_codec = block_codec(block, floating)
