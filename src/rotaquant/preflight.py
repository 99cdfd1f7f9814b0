"""What a run will need, found out before hours are spent: disk for the output, memory for its largest moment."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, Block
from rotaquant.calibration import hessian_bytes, measured_sites, passes
from rotaquant.checkpoint.writer import require_space
from rotaquant.errors import RotaquantError
from rotaquant.memory import available_bytes
from rotaquant.ops.packing import packed_words
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
    needed = expected_peak_bytes(skeleton, architecture, layout, sequences)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    if free is not None and free < needed:
        smaller = "give fewer --samples or a shorter --sequence-length" if sequences is not None else "free some"
        raise RotaquantError(
            f"the run needs about {needed / 1e9:.1f} GB of memory on {device}, and {free / 1e9:.1f} GB are free: "
            f"{smaller}"
        )


def expected_output_bytes(skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout) -> int:
    """Bytes of the tensors that will be written, without headers."""
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in skeleton.named_parameters()}
    if layout.keeps_tied:
        del sizes[f"{architecture.head}.weight"]
    for block in architecture.blocks:
        for path in block.linears:
            sizes[f"{block.path}.{path}.weight"] = sum(weight_bytes(skeleton, block, path, layout))
    return sum(sizes.values())


def note_of_untied_head(
    skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout, *, tied: bool
) -> str | None:
    """What the head's own weight costs a model whose head was `tied`, where that is a quarter of the output or more."""
    head = skeleton.get_submodule(architecture.head).weight
    assert isinstance(head, Tensor)
    own, total = head.numel() * head.element_size(), expected_output_bytes(skeleton, architecture, layout)
    if not tied or layout.keeps_tied or 4 * own < total:
        return None
    return (
        f"the head's own weight is {own / total:.0%} of what is written: "
        "`tied_embeddings: keep` in a recipe shares the embedding's"
    )


def weight_bytes(skeleton: PreTrainedModel, block: Block, path: str, layout: ModelLayout) -> tuple[int, int]:
    """Bytes of a linear's weight or codes, and of their scales."""
    weight = skeleton.get_submodule(f"{block.path}.{path}").weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    fmt = layout.linear(block, path).weights
    item = layout.torch_scale_dtype().itemsize
    if fmt is None:
        return rows * columns * item, 0
    return 4 * rows * packed_words(columns, fmt.bits), rows * (columns // (fmt.group_size or columns)) * item


def expected_peak_bytes(
    skeleton: PreTrainedModel, architecture: Architecture, layout: ModelLayout, sequences: Tensor | None
) -> int:
    """Bytes at the largest moment: the ends, one block in float64 and again, hidden states twice, Hessians."""
    ends = sum(
        parameter.numel() * parameter.element_size()
        for path in (*architecture.embeddings, architecture.head)
        for parameter in skeleton.get_submodule(path).parameters()
    )
    block = max(
        sum(parameter.numel() for parameter in skeleton.get_submodule(block.path).parameters())
        for block in architecture.blocks
    )
    if sequences is None:
        return ends + 2 * 8 * block
    hidden = sequences.numel() * architecture.hidden_size * skeleton.dtype.itemsize
    hessians = 0
    if layout.recipe.gptq is not None:
        hessians = max(_hessian_bytes(skeleton, block, layout) for block in architecture.blocks)
    return ends + 2 * 8 * block + 2 * hidden + hessians


def _hessian_bytes(skeleton: PreTrainedModel, block: Block, layout: ModelLayout) -> int:
    """Bytes of the Hessians of one pass over the data, and of the largest of them in float64 while it is factored."""
    module = skeleton.get_submodule(block.path)
    experts = block.experts.mlps if block.experts is not None else ()
    entrances = {mlp.inputs for mlp in experts}
    most = 0
    for stage in measured_sites(block, layout):
        for part in passes(module, stage):
            sizes = {site: hessian_bytes(module, site) for site in part}
            # Experts that see little share one Hessian more, of all that enters them.
            shared = max((size for site, size in sizes.items() if site in entrances), default=0)
            most = max(most, sum(sizes.values()) + shared + 2 * max(sizes.values()))
    return most
