"""Where things are: `describe(model)` maps a transformers model to roles."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from rotaquant.architectures.families import FAMILIES
from rotaquant.architectures.roles import Architecture, Attention, Block, Experts, Mlp, Norm, NormKind, Rope, Rows
from rotaquant.errors import RotaquantError

__all__ = [
    "Architecture",
    "Attention",
    "Block",
    "Experts",
    "Mlp",
    "Norm",
    "NormKind",
    "Rope",
    "Rows",
    "describe",
    "require_supported",
]


def require_supported(model_type: str, text_model_type: str | None = None) -> None:
    """Raise `RotaquantError` naming `model_type` and the supported ones, unless it is one of them.

    `text_model_type` is that of the text part of a model that has others.
    """
    if model_type in FAMILIES:
        return
    if text_model_type in FAMILIES:
        raise RotaquantError(
            f"model_type {model_type!r} has parts that are no text model; its text part ({text_model_type}) alone can "
            "be quantized: ask for it with --text-only (text_only=True), which leaves the other parts out"
        )
    raise RotaquantError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")


def describe(model: PreTrainedModel) -> Architecture:
    """The roles of a model, by its exact `config.model_type`.

    Raises `RotaquantError` for an unknown type, for layers that differ in their head layout, for fewer experts than a
    token chooses, and where a role's module is not there.
    """
    require_supported(model.config.model_type)
    if not getattr(model.config, "num_hidden_layers", 0):
        raise RotaquantError(f"{type(model).__name__} has no layers: there is nothing to quantize")
    try:
        architecture = FAMILIES[model.config.model_type](model)
    except AttributeError as error:
        raise _unfit(model, str(error)) from error
    _require_uniform_heads(architecture)
    _require_enough_experts(model.config, architecture)
    _check_paths(model, architecture)
    return architecture


def _require_uniform_heads(architecture: Architecture) -> None:
    layouts = {
        (block.attention.heads, block.attention.kv_heads, block.attention.head_dim): block.path
        for block in reversed(architecture.blocks)
    }
    if len(layouts) > 1:
        shown = "; ".join(
            f"{path}: {heads} heads, {kv_heads} of keys and values, {width} channels each"
            for (heads, kv_heads, width), path in layouts.items()
        )
        raise RotaquantError(f"layers with different head layouts are not supported ({shown})")


def _require_enough_experts(config: Any, architecture: Architecture) -> None:
    counts = [block.experts.count for block in architecture.blocks if block.experts is not None]
    chosen = getattr(config, "num_experts_per_tok", 1)
    if counts and not 1 <= chosen <= min(counts):
        raise RotaquantError(
            f"the config asks for {chosen} experts per token (num_experts_per_tok) of {min(counts)}: mend the config"
        )


def _check_paths(model: PreTrainedModel, architecture: Architecture) -> None:
    present = {name for name, _ in model.named_modules()}
    wanted = [*architecture.embeddings, architecture.final_norm.path, architecture.head]
    for block in architecture.blocks:
        norms = (*(norm.path for norm in block.norms), *block.post_norms)
        parts = [*block.attention.inputs, block.attention.o, *norms, *block.routers, block.attention.path]
        if block.experts is not None:
            parts.append(block.experts.path)
        stacked = f"{block.experts.path}." if block.experts is not None else None
        for mlp in block.mlps:
            parts.extend(path for path in (*mlp.inputs, mlp.down) if not (stacked and path.startswith(stacked)))
        wanted.extend(f"{block.path}.{part}" for part in parts)
    missing = [path for path in wanted if path not in present]
    if missing:
        raise _unfit(model, f"no module {missing[0]}")


def _unfit(model: Any, what: str) -> RotaquantError:
    return RotaquantError(
        f"{type(model).__name__} does not have the layout of its model_type {model.config.model_type!r}: "
        f"{what} (give a causal language model, of AutoModelForCausalLM)"
    )
