"""Every width and head layout in use: each transform is what it claims, and its online half undoes its fused half.

The widths are hidden and intermediate sizes of published models. What is compared is computed here in another way:
integers, dense products, or single rows by the rule for Sylvester's entries.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rotaquant.architectures import Architecture, Attention, Block, Mlp, Norm, Rows
from rotaquant.hadamard import Factorisation, base_matrix, factor, factor_or_fallback, transform_matrix
from rotaquant.ops.reference import rotate_rows
from rotaquant.recipe import Recipe, Rotations
from rotaquant.rotation.fuse import mix_heads, rotate, rotate_block
from rotaquant.rotation.plan import HeadMix, plan_head_mix, plan_rotations
from rotaquant.runtime.layout import LinearLayout
from rotaquant.runtime.linear import QuantizedLinear

WIDTHS = [576, 640, 896, 960, 1152, 1408, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 4608, 4864]
WIDTHS += [5120, 5376, 5632, 6144, 6912, 8192, 8960, 9216, 9728, 10240, 11008, 12288, 13696, 13824, 14336]
WIDTHS += [15360, 16384, 17408, 18432, 18944, 20480, 21504, 22016, 24576, 25600, 27392, 27648, 28672, 29568]
WIDTHS += [32768, 36864, 53248]
BLOCK_WIDTHS = {13696: 107, 27392: 107}
# A dense matrix beyond this width takes gigabytes.
DENSE_LIMIT = 4096

HEADS = [9, 12, 14, 15, 16, 20, 24, 25, 28, 32, 40, 48, 56, 64, 71, 72, 80, 96, 128]
HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]
# Here the mix is a matrix of over a thousand rows, seconds each.
WIDE_MIXES = {(71, 80), (71, 96), (71, 112), (71, 192)}
HEAD_LAYOUTS = [
    pytest.param(heads, head_dim, marks=[pytest.mark.slow] if (heads, head_dim) in WIDE_MIXES else [])
    for heads in HEADS
    for head_dim in HEAD_DIMS
]


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def fast(x: Tensor, transform: Factorisation, *, inverse: bool = False) -> Tensor:
    """The transform as it runs; Sylvester's part is its own inverse, the base is inverted by transposing it."""
    base = base_matrix(transform)
    return rotate_rows(x, base.mT if inverse else base, transform.blocks)


def sylvester_row(index: int, size: int) -> Tensor:
    """Row `index` of Sylvester's matrix in natural order, by its rule: (-1)^popcount(row & column)."""
    return torch.tensor([1.0 - 2 * ((index & column).bit_count() % 2) for column in range(size)], dtype=torch.float64)


# --- widths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_width_is_one_exact_hadamard_but_for_two(width: int) -> None:
    transform = factor_or_fallback(width)
    blocks = BLOCK_WIDTHS.get(width, 1)
    assert factor(width) == (transform if blocks == 1 else None)
    assert transform.exact_hadamard == (blocks == 1)
    assert transform.blocks == blocks and transform.construction != "dense"
    assert transform.size == width == blocks * transform.order * 2**transform.exponent


@pytest.mark.parametrize("order", sorted({factor_or_fallback(width).order for width in WIDTHS}))
def test_base_matrix_is_hadamard_in_integers(order: int) -> None:
    transform = next(f for f in map(factor_or_fallback, WIDTHS) if f.order == order)
    base = base_matrix(transform) * order**0.5
    signs = base.round().to(torch.int32)
    assert_close(base, signs.double())
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert torch.equal(signs @ signs.T, order * torch.eye(order, dtype=torch.int32))


@pytest.mark.parametrize("width", [width for width in WIDTHS if width <= DENSE_LIMIT])
def test_fast_transform_is_the_dense_product(width: int) -> None:
    transform = factor_or_fallback(width)
    dense = transform_matrix(transform)
    for shape in ((width,), (1, width), (3, 5, width)):
        x = random_rows(*shape)
        assert_close(fast(x, transform), x @ dense)


@pytest.mark.parametrize("width", [width for width in WIDTHS if width > DENSE_LIMIT])
def test_rows_of_a_wide_transform_are_those_of_its_factors(width: int) -> None:
    transform = factor_or_fallback(width)
    base, short = base_matrix(transform), 2**transform.exponent
    for channel in (0, width - 1, *random.Random(width).sample(range(width), 3)):
        block, rest = divmod(channel, transform.order * short)
        row, column = divmod(rest, short)
        expected = torch.zeros(transform.blocks, transform.order * short, dtype=torch.float64)
        expected[block] = torch.kron(base[row], sylvester_row(column, short)) / short**0.5
        unit = torch.zeros(width, dtype=torch.float64)
        unit[channel] = 1
        assert_close(fast(unit, transform), expected.flatten())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_transposed_base_undoes_the_transform(width: int) -> None:
    transform = factor_or_fallback(width)
    x = random_rows(5, width)
    turned = fast(x, transform)
    assert_close(fast(turned, transform, inverse=True), x)
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert (turned - x).norm() > x.norm()  # that it turns at all


# --- heads ------------------------------------------------------------------------------------------------------


def mix_of(heads: int, head_dim: int, shards: int = 1) -> HeadMix:
    mix = plan_head_mix(heads, factor_or_fallback(head_dim), shards)
    assert mix is not None
    return mix


def turned_heads(x: Tensor, head_dim: int, mix: HeadMix) -> Tensor:
    """x `[..., heads * head_dim]` as o sees it: every head's values rotated (fused in v), then mixed (online)."""
    values = rotate(x.unflatten(-1, (mix.heads, head_dim)), factor_or_fallback(head_dim)).flatten(-2)
    return mix_heads(values, mix)


@pytest.mark.parametrize(("heads", "head_dim"), HEAD_LAYOUTS)
def test_values_and_mix_are_one_flat_hadamard(heads: int, head_dim: int) -> None:
    """A row of the matrix for every row of M (64 of many), at random among the channels that M treats alike."""
    mix, width = mix_of(heads, head_dim), heads * head_dim
    stream, alike = random.Random(width), width // mix.flat.size
    rows = stream.sample(range(mix.flat.size), min(64, mix.flat.size))
    units = torch.zeros(len(rows), width, dtype=torch.float64)
    for position, row in enumerate(rows):
        units[position, row * alike + stream.randrange(alike)] = 1
    flat = turned_heads(units, head_dim, mix) * width**0.5
    assert_close(flat.abs(), torch.ones_like(flat))
    assert torch.equal(flat.round() @ flat.round().T, width * torch.eye(len(rows), dtype=torch.float64))


@pytest.mark.parametrize(("heads", "head_dim"), HEAD_LAYOUTS)
def test_the_fused_inverse_undoes_values_and_mix(heads: int, head_dim: int) -> None:
    mix = mix_of(heads, head_dim)
    x, weight = random_rows(3, heads * head_dim), random_rows(5, heads * head_dim, seed=1)
    out = turned_heads(x, head_dim, mix) @ turned_heads(weight, head_dim, mix).T
    torch.testing.assert_close(out, x @ weight.T, rtol=0, atol=1e-9)
    assert not torch.allclose(out, x @ turned_heads(weight, head_dim, mix).T)


@pytest.mark.parametrize(
    ("heads", "head_dim", "largest"), [(71, 64, 284), (71, 128, 284), (25, 112, 700), (9, 80, 180), (16, 96, 16)]
)
def test_a_mix_is_as_narrow_as_an_order_allows(heads: int, head_dim: int, largest: int) -> None:
    assert mix_of(heads, head_dim).matrix().shape == (largest, largest)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (47, 8), (5, 6), (9, 107 * 32)])
def test_heads_without_a_mix(heads: int, head_dim: int) -> None:
    """A single head; no order of Hadamard matrices divides as it should; heads that take the block form."""
    assert plan_head_mix(heads, factor_or_fallback(head_dim)) is None


# --- shards -----------------------------------------------------------------------------------------------------

SHARDED_HEADS = [
    (heads, head_dim, shards)
    for heads, head_dim in [(9, 64), (12, 128), (14, 64), (15, 64), (24, 80), (25, 64), (28, 128), (40, 96), (56, 112)]
    for shards in (2, 3, 4, 5, 7, 8)
    if heads % shards == 0
]


@pytest.mark.parametrize(("heads", "head_dim", "shards"), SHARDED_HEADS)
def test_a_shard_of_heads_is_mixed_by_itself(heads: int, head_dim: int, shards: int) -> None:
    mix = mix_of(heads, head_dim, shards)
    assert_shards_apart(lambda x: mix_heads(x, mix), heads * head_dim, shards)
    x, weight = random_rows(3, heads * head_dim), random_rows(5, heads * head_dim, seed=1)
    out = turned_heads(x, head_dim, mix) @ turned_heads(weight, head_dim, mix).T
    torch.testing.assert_close(out, x @ weight.T, rtol=0, atol=1e-9)
    # Within a shard the matrix is flat, as that of a model of so many heads is.
    part = heads * head_dim // shards
    units = torch.eye(7, heads * head_dim, dtype=torch.float64)
    flat = turned_heads(units, head_dim, mix)[:, :part]
    assert_close(flat.abs(), torch.full_like(flat, part**-0.5))


def test_a_shard_of_one_head_has_nothing_to_mix() -> None:
    assert plan_head_mix(8, factor_or_fallback(64), 8) is None


SHARDED_WIDTHS = [
    # 13696 / 8 is 107 * 16, which takes a dense matrix of 1712 rows: seconds to draw.
    pytest.param(width, shards, marks=[pytest.mark.slow] if (width, shards) == (13696, 8) else [])
    for width in WIDTHS
    if width <= 29568
    for shards in (2, 4, 8)
]


@pytest.mark.parametrize(("width", "shards"), SHARDED_WIDTHS)
def test_a_shard_of_the_down_input_is_rotated_by_itself(width: int, shards: int) -> None:
    plan = plan_rotations(
        architecture_of(heads=8, kv_heads=8, head_dim=4, width=width), Recipe(tensor_parallel=shards), 0
    )
    down = plan.down(width)
    assert down is not None and down.size == width and down.blocks % shards == 0
    assert_shards_apart(lambda x: fast(x, down), width, shards)
    x = random_rows(3, width)
    assert_close(fast(fast(x, down), down, inverse=True), x)
    # A shard takes what a model of that width takes.
    part = width // shards
    assert_close(fast(x, down)[:, :part], fast(x[:, :part], factor_or_fallback(part)))


def assert_shards_apart(transform: Callable[[Tensor], Tensor], width: int, shards: int) -> None:
    """What enters a shard changes something there and nothing, to the bit, in the others."""

    def by_shard(x: Tensor) -> Tensor:
        return transform(x).unflatten(-1, (shards, -1))

    x = random_rows(3, width)
    before = by_shard(x)
    for shard in range(shards):
        other = x.clone()
        other.unflatten(-1, (shards, -1))[:, shard] += 1
        changed = (by_shard(other) != before).any(dim=-1).all(dim=0)
        assert changed.tolist() == [index == shard for index in range(shards)]


# --- a whole block ----------------------------------------------------------------------------------------------


def architecture_of(*, heads: int, kv_heads: int, head_dim: int, width: int, hidden: int = 8) -> Architecture:
    """One block of these widths."""
    q, k, v = (Rows(name) for name in "qkv")
    attention = Attention(
        path="attention", q=q, k=k, v=v, o="o", heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=None
    )
    block = Block(path="block", norms=(), attention=attention, mlps=(Mlp(inputs=("up",), down="down", width=width),))
    return Architecture(
        model_type="none",
        hidden_size=hidden,
        decoder="",
        embeddings=("embedding",),
        blocks=(block,),
        final_norm=Norm(path="norm", readers=("head",)),
        head="head",
    )


def block_of(architecture: Architecture) -> nn.ModuleDict:
    """Random linears in float64 for the one block of `architecture`; values have a bias."""
    attention, hidden, width = architecture.attention, architecture.hidden_size, architecture.down_widths[0]
    inner, kept = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes = {"q": (hidden, inner), "k": (hidden, kept), "v": (hidden, kept), "o": (inner, hidden)}
    shapes |= {"up": (hidden, width), "down": (width, hidden)}
    linears = {
        name: nn.Linear(*shape, bias=name == "v", dtype=torch.float64).requires_grad_(False)
        for name, shape in shapes.items()
    }
    return nn.ModuleDict(linears)


def attended(module: nn.ModuleDict, attention: Attention, x: Tensor) -> Tensor:
    """What enters o where every token attends to itself alone: the values, once for every head of their group."""
    values = module["v"](x).unflatten(-1, (attention.kv_heads, attention.head_dim))
    return values.repeat_interleave(attention.heads // attention.kv_heads, dim=-2).flatten(-2)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "width"),
    [(8, 8, 64, 1408), (14, 2, 64, 4864), (20, 4, 80, 1152), (28, 4, 128, 3584), (24, 8, 112, 13696), (64, 8, 96, 576)],
)
def test_a_rotated_block_computes_what_it_did(
    heads: int, kv_heads: int, head_dim: int, width: int, shards: int
) -> None:
    """o and down with their online rotations, as they run, on the outputs of the fused v and of up."""
    rotations = Rotations(residual=False, query_key=False)
    architecture = architecture_of(heads=heads, kv_heads=kv_heads, head_dim=head_dim, width=width)
    plan = plan_rotations(architecture, Recipe(rotations=rotations, tensor_parallel=shards), seed=0)
    module, block = block_of(architecture), architecture.blocks[0]
    x = random_rows(3, architecture.hidden_size)
    inner, wide = attended(module, block.attention, x), module["up"](x)
    expected = module["o"](inner), module["down"](wide)
    rotate_block(module, block, plan, centred=False)
    o = running(module["o"], LinearLayout(transform=plan.head_mix))
    down = running(module["down"], LinearLayout(transform=plan.down(width)))
    turned = attended(module, block.attention, x)
    torch.testing.assert_close(o(turned), expected[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(down(wide), expected[1], rtol=0, atol=1e-11)
    # Neither half does it alone.
    assert not torch.allclose(o(inner), expected[0])
    assert not torch.allclose(module["o"](turned), expected[0])
    assert not torch.allclose(module["down"](wide), expected[1])


def running(linear: nn.Module, layout: LinearLayout) -> QuantizedLinear:
    assert isinstance(linear, nn.Linear)
    return QuantizedLinear.from_float(linear, layout)
