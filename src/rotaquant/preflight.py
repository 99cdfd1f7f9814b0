"""What a run will need, found out before hours are spent: disk for the output, memory for its largest moment."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture
from rotaquant.checkpoint.writer import require_space
from rotaquant.errors import RotaquantError
from rotaquant.memory import available_bytes
from rotaquant.runtime import ModelLayout


def require_resources(
    skeleton: PreTrainedModel,
    architecture: Architecture,
    layout: ModelLayout,
    sequences: Tensor | None,
    device: torch.device,
    output: Path,
) -> None:
    """Raise `RotaquantError` when the disk or the memory of `device` is too small for the run."""
    require_space(output, expected_output_bytes(skeleton, architecture, layout))
    needed = expected_peak_bytes(skeleton, architecture, sequences)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    if free is not None and free < needed:
        smaller = "give fewer --samples or a shorter --sequence-length" if sequences is not None else "free some"
        raise RotaquantError(
            f"the run needs about {needed / 1e9:.1f} GB of memory on {device}, and {free / 1e9:.1f} GB are free: "
            f"{smaller}"
        )


def expected_output_bytes(skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout) -> int:
    """Bytes of the tensors that will be written, without scales and headers."""
    bits = layout.recipe.weights.bits if layout.recipe.weights else 8 * layout.torch_scale_dtype().itemsize
    linears = {f"{block.path}.{path}.weight" for block in architecture.blocks for path in block.linears}
    return sum(
        parameter.numel() * bits // 8 if name in linears else parameter.numel() * parameter.element_size()
        for name, parameter in skeleton.named_parameters()
    )


def expected_peak_bytes(skeleton: PreTrainedModel, architecture: Architecture, sequences: Tensor | None) -> int:
    """Bytes at the largest moment: embedding and head, one block in float64 and again, hidden states twice."""
    ends = sum(
        parameter.numel() * parameter.element_size()
        for path in (architecture.embedding, architecture.head)
        for parameter in skeleton.get_submodule(path).parameters()
    )
    block = sum(parameter.numel() for parameter in skeleton.get_submodule(architecture.blocks[0].path).parameters())
    hidden = 0
    if sequences is not None:
        hidden = sequences.numel() * architecture.hidden_size * skeleton.dtype.itemsize
    hessian = max(architecture.hidden_size, architecture.blocks[0].mlp.width) ** 2
    return ends + 2 * 8 * block + 2 * hidden + (4 + 8) * hessian
