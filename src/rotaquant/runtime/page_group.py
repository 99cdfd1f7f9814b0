"""The books of the pages of several layers, changed by the first layer of a step and followed by the others."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.runtime.sequences import Pairs, Sequences

# Changes that a layer may be behind the first one: to begin, to reorder and the like, and to append.
_REMEMBERED = 8


class PageGroup:
    """Layers that cache the same tokens, and whose pages therefore have the same ids.

    transformers changes a cache layer by layer: every layer is told to append, to crop, to reorder. The first that is
    told changes the sequences, the others, which must be told the same, take what came of it.

    `changes` counts what was done to the sequences.
    """

    def __init__(self) -> None:
        self.sequences = Sequences()
        self.changes = 0
        self._recent: deque[tuple[tuple[object, ...], Pairs]] = deque(maxlen=_REMEMBERED)
        self._counts: dict[torch.device, Tensor] = {}
        self._counted: dict[torch.device, int] = {}

    def change(self, seen: int, name: str, *arguments: object) -> Pairs:
        """Do `name` to the sequences, by a layer that took part in the first `seen` changes; pages to copy first.

        `name` is a method of `Sequences`, or "begin" for new ones of so many rows.
        """
        asked = (name, *arguments)
        if seen == self.changes:
            if name == "begin":
                self.sequences = Sequences(*arguments)  # type: ignore[arg-type]
                pairs = None
            else:
                pairs = getattr(self.sequences, name)(*arguments)
            self._recent.append((asked, pairs or []))
            self.changes += 1
            return pairs or []
        behind = self.changes - seen
        if behind > len(self._recent) or self._recent[-behind][0] != asked:
            raise _apart(f"a layer is told to {name} where another was told otherwise")
        return self._recent[-behind][1]

    def require_newest(self, seen: int) -> None:
        """Refuse a layer that took part in `seen` changes, and not in all: its tokens would go elsewhere."""
        if seen != self.changes:
            raise _apart(f"a layer took part in {seen} of {self.changes} changes")

    def counts(self, device: torch.device, new: int) -> Tensor:
        """int32 `[2, batch]` on a device: for every sequence the slot of the first of `new` tokens, and its length.

        Written in place as long as the batch lasts: a captured graph goes on reading the right ones.
        """
        length, batch = self.sequences.longest, self.sequences.batch
        counts = self._counts.get(device)
        if counts is None or counts.shape[1] != batch:
            with torch.inference_mode(False):
                counts = self._counts[device] = torch.empty(2, batch, dtype=torch.int32, device=device)
            self._counted.pop(device, None)
        if self._counted.get(device) != self.changes:
            counts[0].fill_(length - new)
            counts[1].fill_(length)
            self._counted[device] = self.changes
        return counts


def _apart(what: str) -> RotaquantError:
    return RotaquantError(
        f"the cache's layers do not hold the same tokens ({what}): a step was interrupted, or a layer changed by "
        "itself; reset the cache, or make a new one"
    )
