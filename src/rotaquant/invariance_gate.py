"""The gate before anything is quantized: the rotated model must give the original's logits, block by block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture
from rotaquant.calibration import record_block_inputs, run_block
from rotaquant.checkpoint.configs import naming_the_config
from rotaquant.checkpoint.sources import Source
from rotaquant.rotation.fuse import centre, fuse_ends, rotate_residual
from rotaquant.rotation.invariance import exact_arithmetic, require_unchanged
from rotaquant.runtime.attention import attach_codec, register_attention, use_attention
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.structure import reshape_ends, rotate_in_place, take_key_bias

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
    model, architecture = source.skeleton(device)
    register_attention()
    probe = _fill_ends(source, model, architecture, device)

    def moved(hidden: Tensor) -> Tensor:
        return rotate_residual(centre(hidden) if architecture.centred else hidden, layout.rotation)

    with exact_arithmetic():
        with naming_the_config(source.name):
            original, arguments = record_block_inputs(model, architecture, probe)
        original_end = [copy.deepcopy(module) for module in _end(model, architecture)]
        fuse_ends(model, architecture, layout.rotation, keep_tied=layout.keeps_tied)
        reshape_ends(model, architecture, layout)
        rotated, _ = record_block_inputs(model, architecture, probe)
        require_unchanged(rotated, moved(original), "the embedding")
        for index, block in enumerate(architecture.blocks):
            on_block(index)
            module = model.get_submodule(block.path)
            source.fill(module, block.path, device=device, dtype=torch.float64)
            with naming_the_config(source.name):
                original = run_block(module, original, arguments[index])
            rotate_in_place(module, block, architecture, layout)
            take_key_bias(module, block, layout)
            attach_codec(model, module, block, layout, keys=None, values=None)
            with use_attention(model):
                rotated = run_block(module, rotated, arguments[index])
            require_unchanged(rotated, moved(original), f"block {index} ({block.path})")
            model.set_submodule(block.path, nn.Identity())
        norm, head = _end(model, architecture)
        require_unchanged(head(norm(rotated)), original_end[1](original_end[0](original)), "the logits")


def _end(model: PreTrainedModel, architecture: Architecture) -> tuple[nn.Module, nn.Module]:
    return model.get_submodule(architecture.final_norm.path), model.get_submodule(architecture.head)


def _fill_ends(source: Source, model: PreTrainedModel, architecture: Architecture, device: torch.device) -> Tensor:
    """Fill what is not in the blocks in float64, of the vocabulary a sample; return probe ids `[1, n]`."""
    embedding: Any = model.get_submodule(architecture.embedding)
    vocabulary = embedding.weight.shape[0]
    size = min(vocabulary, _PROBE_VOCABULARY)
    rows = torch.linspace(0, vocabulary - 1, size).long()
    for path in (architecture.final_norm.path, *architecture.embeddings[1:]):
        source.fill(model.get_submodule(path), path, device=device, dtype=torch.float64)
    for path in (architecture.embedding, architecture.head):
        module = model.get_submodule(path)
        source.fill(module, path, device=torch.device("cpu"), dtype=source.dtype)
        for name, parameter in list(module.named_parameters()):
            sample = parameter.detach()[rows].to(device=device, dtype=torch.float64)
            setattr(module, name, nn.Parameter(sample, requires_grad=False))
    embedding.padding_idx = None  # it may lie outside the sample, and serves training alone
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (1, _PROBE_TOKENS), generator=generator).to(device)
