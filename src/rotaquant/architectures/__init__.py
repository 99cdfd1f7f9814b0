"""Where things are: `describe(model)` maps a transformers model to roles."""

from __future__ import annotations

from transformers import PreTrainedModel

from rotaquant.architectures.families import FAMILIES
from rotaquant.architectures.roles import Architecture, Attention, Block, Mlp, Norm
from rotaquant.errors import RotaquantError

__all__ = ["Architecture", "Attention", "Block", "Mlp", "Norm", "describe", "require_supported"]


def require_supported(model_type: str) -> None:
    """Raise `RotaquantError` naming `model_type` and the supported ones, unless it is one of them."""
    if model_type not in FAMILIES:
        raise RotaquantError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")


def describe(model: PreTrainedModel) -> Architecture:
    """The roles of a model, by its exact `config.model_type`.

    Raises `RotaquantError` for an unknown type, and where a role's module is not there.
    """
    require_supported(model.config.model_type)
    architecture = FAMILIES[model.config.model_type](model)
    if not architecture.blocks:
        raise RotaquantError(f"{type(model).__name__} has no layers: there is nothing to quantize")
    _check_paths(model, architecture)
    return architecture


def _check_paths(model: PreTrainedModel, architecture: Architecture) -> None:
    present = {name for name, _ in model.named_modules()}
    wanted = [architecture.embedding, architecture.final_norm, architecture.head]
    for block in architecture.blocks:
        parts = (*block.linears, *(norm.path for norm in block.norms), block.attention.path)
        wanted.extend(f"{block.path}.{part}" for part in parts)
    missing = [path for path in wanted if path not in present]
    if missing:
        raise RotaquantError(
            f"{type(model).__name__} does not have the layout of its model_type {model.config.model_type!r}: "
            f"no module {missing[0]} (pass a causal language model)"
        )
