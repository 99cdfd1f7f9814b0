"""The roles that modules play in a decoder-only model; the rest of the package knows no model by name.

Paths are dotted names: of a block's parts relative to the block, of all else relative to the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation and the linears that read its output: its gain is folded into them."""

    path: str
    readers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Self-attention: the module, its four projections and its head layout (widths in channels)."""

    path: str
    q: str
    k: str
    v: str
    o: str
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A gated feed-forward part; `width` is the input width of `down`."""

    gate: str
    up: str
    down: str
    width: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """One decoder layer: what reads the residual stream through a norm, and what writes into it."""

    path: str
    norms: tuple[Norm, ...]
    attention: Attention
    mlp: Mlp

    @property
    def readers(self) -> tuple[str, ...]:
        """Linears whose input is the (normalised) residual stream."""
        return tuple(reader for norm in self.norms for reader in norm.readers)

    @property
    def writers(self) -> tuple[str, ...]:
        """Linears whose output is added to the residual stream."""
        return (self.attention.o, self.mlp.down)

    @property
    def sites(self) -> tuple[tuple[str, ...], ...]:
        """Linears grouped by the input they share, in the order of the forward pass."""
        attention, mlp = self.attention, self.mlp
        return ((attention.q, attention.k, attention.v), (attention.o,), (mlp.gate, mlp.up), (mlp.down,))

    @property
    def linears(self) -> tuple[str, ...]:
        """Every linear that is quantized, in the order of the forward pass."""
        return tuple(linear for site in self.sites for linear in site)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Where things are in one model: embedding, blocks, final norm and head."""

    model_type: str
    hidden_size: int
    decoder: str
    embedding: str
    blocks: tuple[Block, ...]
    final_norm: str
    head: str
