"""The roles that modules play in a decoder-only model; the rest of the package knows no model by name.

Paths are dotted names: of a block's parts relative to the block, of all else relative to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

# "rms": y = x/rms · w; "rms-plus-one": y = x/rms · (1 + w); "layer": y = (x - mean)/std · w (+ shift).
NormKind = Literal["rms", "rms-plus-one", "layer"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation of the residual stream and the modules that read its output: its gain is folded into them."""

    path: str
    readers: tuple[str, ...]
    kind: NormKind = "rms"


@dataclass(frozen=True)
class Rows:
    """The outputs of a linear that make one projection: all of them, or a stretch of each of `groups` equal groups.

    Fused projections are several of these on one path: rows q, k and v after one another, or again for every head.
    """

    path: str
    start: int = 0
    stop: int | None = None
    groups: int = 1

    @property
    def whole(self) -> bool:
        """Whether the linear holds nothing else."""
        return self.start == 0 and self.stop is None

    def view(self, tensor: Tensor) -> Tensor:
        """The rows of a weight `[out, in]` or bias `[out]`, as a view `[groups, rows, ...]` to read or write."""
        return tensor.unflatten(0, (self.groups, -1))[:, self.start : self.stop]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of keys: `module` gives (cos, sin), "half" pairs channel i with i + n/2, "interleaved" 2i, 2i+1.

    The module gives each angle once with "half-once", else twice: as the pairs lie or, with "interleaved-from-halves",
    one half after the other. `static` is false where a token's frequencies depend on more than its position (dynamic
    and longrope scaling).
    """

    module: str
    style: Literal["half", "half-once", "interleaved", "interleaved-from-halves"] = "half"
    layer_type: str | None = None
    static: bool = True


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Self-attention: the module, its projections and its head layout (widths in channels).

    `rope` is `None` where keys carry no position, `normalised_keys` says that keys are normalised after their
    projection, `sinks` that a query's weights sum to less than one, `softcap` that scores are bounded before softmax.
    """

    path: str
    q: Rows
    k: Rows
    v: Rows
    o: str
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    normalised_keys: bool = False
    sinks: bool = False
    softcap: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The linears of q, k and v: three, or one where they are fused."""
        return tuple(dict.fromkeys((self.q.path, self.k.path, self.v.path)))

    @property
    def separable_key_bias(self) -> bool:
        """Whether a bias of k reaches the scores as a term of its own that depends on the position alone."""
        return not self.normalised_keys and (self.rope is None or self.rope.static)


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A feed-forward part, or one expert of several; `width` is the input width of `down`."""

    inputs: tuple[str, ...]
    down: str
    width: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A module whose experts are stacked in single parameters, as transformers keeps them in memory.

    It is taken apart into the linears `{path}.gate_up.{i}` and `{path}.down.{i}`. `stored_gate_up` and `stored_down`
    are the names that an expert's linears have in checkpoints which keep them apart, relative to `{path}.{i}`.
    """

    path: str
    count: int
    width: int
    stored_gate_up: tuple[str, ...]
    stored_down: str

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The experts, one feed-forward part each."""
        return tuple(
            Mlp(inputs=(f"{self.path}.gate_up.{index}",), down=f"{self.path}.down.{index}", width=self.width)
            for index in range(self.count)
        )


@dataclass(frozen=True, kw_only=True)
class Block:
    """One decoder layer: what reads the residual stream, through a norm or not, and what writes into it.

    `routers` read the stream and stay in high precision. Under `post_norms`, which normalise what is added to the
    stream, o and down are no writers: the norms are.
    """

    path: str
    norms: tuple[Norm, ...]
    attention: Attention
    mlps: tuple[Mlp, ...]
    post_norms: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    experts: Experts | None = None

    @property
    def readers(self) -> tuple[str, ...]:
        """Modules whose input is the (normalised) residual stream."""
        return (*self.attention.inputs, *self.routers, *(path for mlp in self.mlps for path in mlp.inputs))

    @property
    def writers(self) -> tuple[str, ...]:
        """Linears whose output is added to the residual stream as it is."""
        return () if self.post_norms else (self.attention.o, *(mlp.down for mlp in self.mlps))

    @property
    def sites(self) -> tuple[tuple[str, ...], ...]:
        """Linears grouped by the input they share, in the order of the forward pass."""
        mlps = (*(mlp.inputs for mlp in self.mlps), *((mlp.down,) for mlp in self.mlps))
        return (self.attention.inputs, (self.attention.o,), *mlps)

    @property
    def linears(self) -> tuple[str, ...]:
        """Every linear that is quantized, in the order of the forward pass."""
        return tuple(linear for site in self.sites for linear in site)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Where things are in one model: embeddings, blocks, final norm and head.

    `embeddings` are added to make the first residual stream; the first of them embeds the tokens, and may be tied to
    the head. `renamed` lists what names of tensors in checkpoints are called in the model, as regular expressions and
    their replacements.
    """

    model_type: str
    hidden_size: int
    decoder: str
    embeddings: tuple[str, ...]
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: str
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def embedding(self) -> str:
        """The token embedding."""
        return self.embeddings[0]

    @property
    def centred(self) -> bool:
        """Whether the norms subtract the mean, so that the residual stream may be centred once and for all."""
        return self.final_norm.kind == "layer"

    @property
    def attention(self) -> Attention:
        """The head layout, which all blocks share."""
        return self.blocks[0].attention

    @property
    def down_widths(self) -> tuple[int, ...]:
        """The input widths of all down projections, each once, ascending."""
        return tuple(sorted({mlp.width for block in self.blocks for mlp in block.mlps}))
