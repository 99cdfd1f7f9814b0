"""Where a source keeps the tensors of a model: checkpoints name and stack them in ways of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, Experts

_EXPERT_TENSOR = re.compile(r"(?P<path>.+)\.(?P<part>gate_up|down)\.(?P<index>\d+)\.(?P<kind>weight|bias)")

# What a text model's tensors are called where it is a part of a model that sees or hears as well.
_TEXT_PARTS = (
    (r"^(model\.)?language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^model\.text_model\.", "model."),
)


@dataclass(frozen=True)
class Place:
    """Where a tensor of the model is stored: under one name, or in several parts that are joined along the rows.

    `entry` is its index in a stack of experts, `transposed` says that the stack holds it `[in, out]`.
    """

    names: tuple[str, ...]
    entry: int | None = None
    transposed: bool = False

    def __str__(self) -> str:
        """The stored names, and which expert of a stack, for messages."""
        return " and ".join(self.names) + ("" if self.entry is None else f" (expert {self.entry})")


class Places:
    """Where a source keeps the tensors of a model: by name, by an older name, tied, or in a stack of experts."""

    def __init__(
        self, stored: frozenset[str], model: PreTrainedModel, architecture: Architecture, *, tied: bool
    ) -> None:
        self._stored = {name: name for name in stored}
        for name in sorted(stored):
            called = name
            for pattern, replacement in (*_TEXT_PARTS, *architecture.renamed):
                called = re.sub(pattern, replacement, called)
            self._stored.setdefault(called, name)
            # A model that was saved without its head.
            self._stored.setdefault(f"{model.base_model_prefix}.{called}", name)
        self._ends = (f"{architecture.head}.weight", f"{architecture.embedding}.weight")
        self._tied = dict((self._ends, self._ends[::-1])) if tied else {}
        self._experts: dict[str, tuple[Experts, bool]] = {}
        for block in architecture.blocks:
            if block.experts is not None:
                path = f"{block.path}.{block.experts.path}"
                module: Any = model.get_submodule(path)
                self._experts[path] = (block.experts, module.is_transposed)

    def find(self, name: str) -> Place | None:
        """Where the source keeps the tensor that the model calls `name`, or `None` where it lacks it."""
        for place in self._candidates(name):
            if all(part in self._stored for part in place.names):
                return Place(tuple(self._stored[part] for part in place.names), place.entry, place.transposed)
        return None

    def stored_ends(self) -> list[str]:
        """What head and embedding are stored as: two names, or one where one weight serves as both."""
        return [self._stored[name] for name in self._ends if name in self._stored]

    def absent(self, name: str) -> str:
        """The stored tensor for want of which `name` is not found."""
        candidates = self._candidates(name)
        nearest = max(candidates, key=lambda place: sum(part in self._stored for part in place.names))
        return next(part for part in nearest.names if part not in self._stored)

    def _candidates(self, name: str) -> list[Place]:
        candidates = [Place((name,))]
        if name in self._tied:
            candidates.append(Place((self._tied[name],)))
        match = _EXPERT_TENSOR.fullmatch(name)
        if match and match["path"] in self._experts:
            experts, transposed = self._experts[match["path"]]
            path, part, index, kind = match.groups()
            suffix = "_bias" if kind == "bias" else ""
            stack = Place((f"{path}.{part}_proj{suffix}",), int(index), transposed and kind == "weight")
            linears = experts.stored_gate_up if part == "gate_up" else (experts.stored_down,)
            apart = Place(tuple(f"{path}.{index}.{linear}.{kind}" for linear in linears))
            stacked = any(f"{path}.{kind}_proj" in self._stored for kind in ("gate_up", "down"))
            candidates = [stack, apart] if stacked else [apart, stack]
        return candidates
