"""Whoever joins, leaves, grows, shrinks or forks: every sequence reads back its own tokens."""

from __future__ import annotations

import copy
import ctypes
import random

import pytest
import torch

from rotaquant.errors import RotaquantError
from rotaquant.runtime.pages import LayerPages
from rotaquant.runtime.sequences import Sequences
from tests.runtime.page_world import CPU, PLAIN, STAMPED, World, pages_of, step


@pytest.mark.parametrize(("steps", "reserved"), [(10_000, 0), (3_000, 150)])
def test_every_sequence_reads_its_own_tokens(steps: int, reserved: int) -> None:
    rng = random.Random(steps)
    world = World(batch=3, reserved=reserved)
    for index in range(steps):
        step(world, rng)
        if index % 500 == 250:
            world = copy.deepcopy(world)
        if index == steps // 2:
            assert len(world.slabbed._slabs) > 10
        if index > steps // 2 and index % 500 in (400, 410):  # which leaves one slab
            move = world.slabbed.to_host if index % 500 == 400 else world.slabbed.to_device
            move()
        world.check()
    assert world.made > 10 * steps
    while world.tokens:
        rows = list(range(1, len(world.tokens)))
        world.select(rows, lambda: world.sequences.leave(0))
        world.check()
    assert world.sequences.owned == 0


def test_pages_without_memory_are_not_copied() -> None:
    layer = LayerPages(PLAIN, "cpu")
    layer.ensure(3)
    with pytest.raises(RotaquantError, match=r"page 3 has no memory: call ensure\(4\) before copy"):
        layer.copy([(0, 1), (2, 3)])


# --- memory that moves --------------------------------------------------------------------------------------------


def filled(slabbed: bool) -> tuple[Sequences, LayerPages]:
    sequences, layer = Sequences(2), LayerPages(STAMPED, "cpu", slabbed=slabbed)
    for _ in range(5):
        sequences.extend(40)
        layer.table(sequences)
    for page in range(sequences.total):
        layer._page(page).view(torch.uint8).fill_(page + 1)
    return sequences, layer


def read(sequences: Sequences, layer: LayerPages) -> list[int]:
    """The first and last byte of every page that the table names."""
    held = layer.table(sequences)[:, : pages_of(sequences.longest)]
    starts = [layer.base.data_ptr() + offset for offset in held.flatten().tolist()]
    return [ctypes.c_uint8.from_address(at).value for start in starts for at in (start, start + STAMPED.page_bytes - 1)]


@pytest.mark.parametrize("slabbed", [False, True])
def test_to_the_host_and_back(slabbed: bool) -> None:
    sequences, layer = filled(slabbed)
    assert len(layer._slabs) == (4 if slabbed else 1)
    expected = read(sequences, layer)
    assert expected == [page + 1 for page in sequences.ids(CPU)[:, :4].flatten().tolist() for _ in range(2)]
    nbytes = layer.nbytes
    for move in (layer.to_host, layer.to_host, layer.to_device, layer.to_device):
        move()
        assert len(layer._slabs) == 1
        assert (read(sequences, layer), layer.nbytes) == (expected, nbytes)
    layer.to_host()
    sequences.extend(200)
    layer.table(sequences)
    layer.to_device()
    sequences.extend(64)
    found = read(sequences, layer)
    assert [found[at] for at in (0, 2, 4, 6)] == expected[:8:2]
    assert len(layer._slabs) == (2 if slabbed else 1)


def test_memory_that_is_not_there_can_move_too() -> None:
    sequences, layer = Sequences(1), LayerPages(STAMPED, "cpu", slabbed=True)
    layer.to_host()
    layer.to_device()
    sequences.extend(3)
    assert layer.table(sequences)[0, 0] == 0
    assert layer.base.shape == (1, STAMPED.page_bytes)


@pytest.mark.parametrize("slabbed", [False, True])
def test_a_copy_has_memory_of_its_own(slabbed: bool) -> None:
    first = filled(slabbed)
    expected = read(*first)
    second = copy.deepcopy(first)
    for page in range(first[0].total):
        first[1]._page(page).zero_()
    first[0].extend(64)
    assert read(*second) == expected
    assert read(*first)[:8] == [0] * 8


def test_what_inference_mode_makes_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        sequences, layer = filled(slabbed=True)
        layer.table(sequences)
        twin = copy.deepcopy(layer)
    sequences.select([1, 1])
    for own in (layer, twin):
        own.copy([(0, 1)])
        own.base[0, 0] = 3
        own.table(sequences)
        own.to_host()
        own.base[0, 0] = 4
        assert torch.equal(own.base[1, 1:], own.base[0, 1:])


def test_a_layer_does_not_take_the_table_of_sequences_that_were_before() -> None:
    layer = LayerPages(PLAIN, "cpu")
    for length in (64, 128, 192):
        sequences = Sequences(1)
        sequences.extend(length)
        assert int((layer.table(sequences) > 0).sum()) == pages_of(length) - 1


@pytest.mark.gpu
def test_on_a_device_no_step_waits_for_it() -> None:
    sequences, layer = Sequences(4), LayerPages(STAMPED, "cuda")
    sequences.extend(30)
    layer.table(sequences)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(400):
            if index % 50 == 20:
                sequences.reorder([0, 0, 1, 3])
            pairs = sequences.extend(1)
            layer.ensure(sequences.total)
            for source, _ in pairs:
                layer._page(source).fill_(index)
            layer.copy(pairs)
            table = layer.table(sequences)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(layer._slabs) > 1
    held = sequences.ids(CPU)[:, :7]
    starts = [layer._page(page).data_ptr() - layer.base.data_ptr() for page in held.flatten().tolist()]
    assert table[:, :7].flatten().tolist() == starts
    for page in range(sequences.total):
        layer._page(page).fill_(page)
    layer.copy([(0, 3), (5, 2)])
    expected = [0, 1, 5, 0, *range(4, sequences.total)]
    layer.to_host()
    assert [int(layer._page(page)[0]) for page in range(sequences.total)] == expected
    layer.to_device()
    assert layer.base.device.type == "cuda"
    assert [int(layer._page(page)[-1]) for page in range(sequences.total)] == expected
