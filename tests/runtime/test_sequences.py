"""Which pages are taken and given back, and what is refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rotaquant.errors import RotaquantError
from rotaquant.runtime.pages import LayerPages
from rotaquant.runtime.sequences import Sequences
from tests.runtime.page_world import CPU, PLAIN, World, pages_of

# --- what pages are taken and given back --------------------------------------------------------------------------


def test_a_page_is_taken_when_its_first_token_comes() -> None:
    sequences = Sequences(2)
    epoch = sequences.epoch
    sequences.extend(64)
    assert (sequences.owned, sequences.total) == (2, 2)
    assert sequences.epoch > epoch
    sequences.extend(1)
    assert sequences.owned == 4
    epoch = sequences.epoch
    sequences.extend(62)
    sequences.extend_each([1, 0])
    sequences.crop_each([63, 62])
    assert (sequences.owned, sequences.epoch, sequences.lengths) == (4, epoch, [65, 65])
    sequences.crop(1)
    assert sequences.owned == 2
    assert sequences.epoch > epoch


def test_the_least_free_ids_are_taken_first() -> None:
    sequences = Sequences(3)
    sequences.extend(130)
    assert sequences.ids(CPU)[:, :4].tolist() == [[0, 1, 2, 0], [3, 4, 5, 0], [6, 7, 8, 0]]
    sequences.leave(1)
    sequences.extend_each([0, 64])
    assert sequences.join(64 + 64) == 2
    assert sequences.ids(CPU)[:, :4].tolist() == [[0, 1, 2, 0], [6, 7, 8, 3], [4, 5, 0, 0]]
    assert sequences.total == 9


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_memory_is_what_is_needed_and_a_sixty_fourth(batch: int) -> None:
    sequences, layer = Sequences(batch), LayerPages(PLAIN, "cpu", slabbed=True)
    base = None
    for count in [1] * 200 + [100] * 200:
        sequences.extend(count)
        layer.table(sequences)
        need = batch * pages_of(sequences.longest)
        assert sequences.owned == need
        assert need <= sequences.total <= need * 65 / 64
        assert layer.nbytes == sequences.total * PLAIN.page_bytes
        base = base or layer.base.data_ptr()
        assert layer.base.data_ptr() == base
    assert len(layer._slabs) < 64 + 64 * 2.5  # 315 pages a sequence, by steps of one at first and of a 64th then


def test_a_window_shorter_than_a_page_holds_two_pages() -> None:
    world = World(batch=2)
    for _ in range(300):
        world.extend([1, 1])
        world.drop_before([max(0, len(own) - 10) for own in world.tokens])
        world.check()
        assert world.sequences.owned <= 4
    assert world.sequences.total == 4
    world.crop([300 - 256] * 2)  # to the first slot that is left
    world.extend([70, 1])
    world.check()
    world.crop([326, 0])  # all of one: it starts anew
    world.extend([70, 70])
    world.check()
    assert world.dropped == [0, 4]


def test_one_slot_for_all_drops_from_those_that_still_have_what_is_before() -> None:
    world = World(batch=2)
    world.extend([200, 200])
    world.drop_before([130, 10])
    world.drop_before([70, 70])
    assert world.dropped == [2, 1]
    assert world.sequences.owned == 2 + 3
    world.check()


def test_ids_that_were_given_out_stay_as_they_are() -> None:
    sequences = Sequences(2)
    sequences.extend(64)
    before = sequences.ids(CPU)
    assert sequences.ids(CPU) is before
    sequences.extend(1)
    assert before[:, :2].tolist() == [[0, 0], [1, 0]]
    assert sequences.ids(CPU)[:, :2].tolist() == [[0, 2], [1, 3]]


def test_no_sequence_and_empty_sequences() -> None:
    sequences, layer = Sequences(), LayerPages(PLAIN, "cpu", slabbed=True)
    assert sequences.extend(70) == []
    sequences.crop(0)
    sequences.drop_before(0)
    assert (sequences.lengths, sequences.longest, sequences.shortest, sequences.total) == ([], 0, 0, 0)
    assert layer.table(sequences).shape[0] == 0
    assert (sequences.join(), sequences.join()) == (0, 1)
    assert not layer.table(sequences).any()
    assert layer.base.shape == (1, PLAIN.page_bytes)  # what offset 0 names is there
    sequences.extend(0)
    assert (sequences.lengths, sequences.owned) == ([0, 0], 0)
    sequences.repeat(3)
    sequences.extend_each([0, 1, 0, 65, 0, 0])
    assert (sequences.shortest, sequences.owned) == (0, 3)


# --- forks --------------------------------------------------------------------------------------------------------


def test_forks_copy_the_last_page_alone_and_not_before_they_differ() -> None:
    world = World(batch=1)
    world.extend([130])
    world.select([0] * 4, lambda: world.sequences.repeat(4))
    assert world.sequences.owned == 3
    assert world.extend([0, 0, 1, 0]) == [(2, 3)]
    assert world.extend([1] * 4) == [(2, 4), (2, 5)]
    assert world.extend([1] * 4) == []
    assert world.sequences.owned == 6
    world.check()


def test_forks_at_the_end_of_a_page_and_forks_of_which_one_is_left_copy_nothing() -> None:
    world = World(batch=2)
    world.extend([64, 64])
    world.select([0, 0], lambda: world.sequences.reorder([0, 0]))
    assert world.extend([3, 3]) == []
    world.select([1, 1, 1], lambda: world.sequences.select([1, 1, 1]))
    world.select([2], lambda: world.sequences.select([2]))
    assert world.extend([1]) == []
    world.check()


def test_an_order_that_is_the_old_one_changes_nothing() -> None:
    sequences = Sequences(3)
    sequences.extend(5)
    epoch = sequences.epoch
    sequences.reorder([0, 1, 2])
    sequences.repeat(1)
    assert sequences.epoch == epoch
    sequences.reorder([0, 2, 1])
    assert sequences.epoch > epoch


# --- short steps --------------------------------------------------------------------------------------------------


def calls(do: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called on the way."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event) if event.endswith("call") else None)
    try:
        do()
    finally:
        sys.setprofile(None)
    return len(seen)


@pytest.mark.parametrize("batch", [1, 64])
def test_steps_within_a_page_look_at_no_sequence(batch: int) -> None:
    sequences, layer = Sequences(batch), LayerPages(PLAIN, "cpu")
    sequences.extend(100)
    table, epoch = layer.table(sequences), sequences.epoch
    idle = calls(lambda: None)
    for _ in range(28):
        assert calls(lambda: sequences.extend(1)) == idle + 1
        assert calls(lambda: sequences.drop_before(30)) <= idle + 4  # itself, isinstance, shortest
        assert layer.table(sequences) is table
        assert calls(lambda: layer.table(sequences)) == idle + 1
    assert (sequences.longest, sequences.epoch) == (128, epoch)
    assert calls(lambda: sequences.extend(1)) > idle + 1


def test_reserved_pages_stay_where_they_are() -> None:
    world = World(batch=3, reserved=200)
    layer, epoch = world.slabbed, world.sequences.epoch
    table = layer.table(world.sequences)
    assert world.sequences.owned == world.sequences.total == 12
    for count in (64, 1, 63, 20, 108):
        assert world.extend([count] * 3) == []
        world.drop_before([len(world.tokens[0]) - 5] * 3)
    world.crop([250] * 3)
    world.crop([6, 0, 3])
    world.extend([1, 2, 3])
    world.check()
    assert world.sequences.epoch == epoch
    assert layer.table(world.sequences) is table
    before = table.clone()
    world.extend([250] * 3)
    assert world.sequences.epoch > epoch
    assert layer.table(world.sequences) is table  # for captured graphs
    assert not torch.equal(table, before)
    world.check()
    world.join(0)
    assert world.sequences.owned == (4 + 5 + 4) + 4


def test_forks_of_reserved_pages_write_pages_of_their_own() -> None:
    world = World(batch=2, reserved=200)
    world.extend([130, 130])
    world.select([1, 1, 1], lambda: world.sequences.select([1, 1, 1]))
    assert world.sequences.owned == 3 + 3  # three pages shared, and a fourth for each
    world.check()
    world.crop([100, 0, 70])
    assert world.sequences.owned == 1 + 3 * 3  # only the first page is begun in more than one
    world.extend([90, 90, 90])
    world.check()


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda s: s.extend(-1), "extend: -1 is below zero; give 0 or more"),
        (lambda s: s.extend_each([1, -2]), "extend_each: -2 is below zero"),
        (lambda s: s.extend_each([1]), "extend_each: 1 numbers for 2 sequences; give one per sequence"),
        (lambda s: s.crop(-3), "crop: -3 is below zero"),
        (
            lambda s: s.crop_each([0, 151]),
            "crop by 151 tokens: sequence 1 has 150, of which the first 0 are dropped; crop f",
        ),
        (lambda s: s.crop_each([150, 0]), "crop by 150 tokens: sequence 0 has 200, of which the first 64 are dropped"),
        (lambda s: s.crop_each([1, 2, 3]), "3 numbers for 2 sequences"),
        (lambda s: s.select([0, 2]), "sequence 2 is not there: give a row from 0 on, below 2"),
        (lambda s: s.select([1, -1]), "sequence -1 is not there"),
        (lambda s: s.reorder([0]), "reorder: 1 indices for 2 sequences; use select"),
        (lambda s: s.repeat(0), "repeat: 0 is below 1; use leave"),
        (lambda s: s.join(-1), "join: -1 is below zero"),
        (lambda s: s.leave(2), "sequence 2 is not there"),
        (lambda s: s.drop_before(151), "slot 151 of sequence 1, which has 150 tokens; give at most the length"),
        (lambda s: s.drop_before([-1, 0]), "drop_before: -1 is below zero"),
        (lambda s: s.drop_before(-1), "drop_before: -1 is below zero"),
        (lambda s: s.reserve(-1), "reserve: -1 is below zero"),
        (lambda s: Sequences(-1), "a batch: -1 is below zero"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_changes(do: Callable[[Sequences], Any], message: str) -> None:
    sequences = Sequences(2)
    sequences.extend_each([199, 149])
    sequences.extend(1)
    sequences.drop_before([100, 10])
    before = copy.deepcopy(sequences)
    with pytest.raises(RotaquantError, match=message):
        do(sequences)
    assert (sequences.lengths, sequences.epoch, sequences.owned) == (before.lengths, before.epoch, before.owned)
    assert torch.equal(sequences.ids(CPU), before.ids(CPU))
    assert (sequences.extend(9), sequences.total) == (before.extend(9), before.total)
