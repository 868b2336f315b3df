"""The bounded store: what is written is there, nothing more than its size ever is, and drawing is fair."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from small_memory import SHAPE, filled, numbered, numbers_of, p_value_of_uniform_subsets

from scrlearn.checkpoint import digest
from scrlearn.errors import InputError
from scrlearn.memory import Memory
from scrlearn.memory.buffer import REJECTION_FACTOR

# ---------------------------------------------------------------- writing and reading


def test_images_stay_bytes_in_room_allocated_once():
    memory = Memory(5, (3, 4, 6), "cpu")
    assert memory.images.shape == (6, 3, 4, 6)  # one more: where images go that are not kept
    assert memory.images.dtype == torch.uint8
    address = memory.images.data_ptr()
    for start in range(0, 20, 4):
        slots = torch.arange(start, start + 4) % 5
        memory.write(slots, torch.full((4, 3, 4, 6), start, dtype=torch.uint8), slots)
        memory.advance(4)
    assert memory.images.data_ptr() == address


def test_what_is_not_kept_goes_to_the_spare_slot_and_is_never_seen():
    learner = filled(3)
    learner.memory.write(torch.tensor([3, 1, 3]), numbered(50, 3), torch.tensor([7, 8, 9]))
    learner.memory.advance(3)
    assert numbers_of(learner.memory.contents()[0]) == [0, 51, 2]
    assert learner.memory.contents()[1].tolist() == [0, 8, 2]
    assert int(learner.memory.seen) == 6
    assert int(learner.memory.filled) == learner.memory.size == 3


def test_of_several_images_for_one_slot_the_last_stays():
    learner = filled(4)
    slots = torch.tensor([2, 0, 2, 4, 2, 0])
    learner.memory.write(slots, numbered(10, 6), torch.arange(10, 16))
    assert numbers_of(learner.memory.contents()[0]) == [15, 1, 14, 3]
    assert learner.memory.contents()[1].tolist() == [15, 1, 14, 3]


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(0, 6),
    batches=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=9), max_size=6),
)
def test_writing_equals_writing_one_by_one_and_never_exceeds_the_size(capacity, batches):
    memory, plain, number = Memory(capacity, SHAPE, "cpu"), {}, 0
    for batch in batches:
        slots = [min(slot, capacity) for slot in batch]
        memory.write(torch.tensor(slots), numbered(number, len(slots)), torch.arange(number, number + len(slots)))
        memory.advance(len(slots))
        plain |= {slot: number + i for i, slot in enumerate(slots) if slot < capacity}
        number += len(slots)
        assert memory.size == int(memory.filled) == min(capacity, number) <= capacity
        assert len(memory.contents()[0]) == len(memory.contents()[1]) == memory.size
        assert memory.full == (memory.size == capacity)
        for slot, held in plain.items():
            assert memory.labels[slot] == held
            assert numbers_of(memory.images[slot : slot + 1]) == [held]
    assert int(memory.seen) == number


def test_read_gives_the_images_of_the_slots():
    images, labels = filled(6).memory.read(torch.tensor([4, 0, 4]))
    assert numbers_of(images) == labels.tolist() == [4, 0, 4]


def test_a_negative_size_is_refused():
    with pytest.raises(InputError, match="memory_size is -1"):
        Memory(-1, SHAPE, "cpu")


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize(("size", "count", "way"), [(40, 10, "sort"), (40, 2, "rejection"), (16, 1, "rejection")])
def test_draws_are_distinct_filled_slots(size, count, way):
    learner = filled(size, capacity=size + 7)
    assert learner.memory.sampling(count) == way
    for _ in range(200):
        slots = learner.memory.sample(count, learner.generator).tolist()
        assert len(set(slots)) == len(slots) == count
        assert set(slots) <= set(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 60), spare=st.integers(0, 9), count=st.integers(0, 70), seed=st.integers(0, 2**32))
def test_draws_of_any_number_never_repeat_and_are_as_many_as_there_are(size, spare, count, seed):
    learner = filled(size, capacity=size + spare, seed=seed)
    slots = learner.memory.sample(count, learner.generator).tolist()
    assert len(slots) == len(set(slots)) == min(count, size)
    assert all(0 <= slot < size for slot in slots)


def test_the_way_of_drawing_changes_at_its_limit_only():
    learner = filled(REJECTION_FACTOR * 3)
    assert [learner.memory.sampling(count) for count in (0, 3, 4)] == ["rejection", "rejection", "sort"]


@pytest.mark.parametrize(("size", "count", "rounds"), [(8, 3, 3000), (48, 3, 3000)])
def test_every_slot_is_drawn_equally_often(size, count, rounds):
    learner, times = filled(size, capacity=size + 3), np.zeros(size)
    for _ in range(rounds):
        times[learner.memory.sample(count, learner.generator).numpy()] += 1
    assert p_value_of_uniform_subsets(times, rounds) > 1e-3


@pytest.mark.parametrize("way", ["sort", "rejection"])
def test_every_ordered_pair_is_drawn_equally_often(way):
    size = 5
    learner, times, rounds = filled(size), dict.fromkeys(itertools.permutations(range(size), 2), 0), 4000
    # five images are few for rejection, whose draws then rarely hold two different ones; none of these does
    draw = learner.memory.sample if way == "sort" else learner.memory._sample_by_rejection
    for _ in range(rounds):
        times[tuple(draw(2, learner.generator).tolist())] += 1
    assert stats.chisquare(list(times.values())).pvalue > 1e-3


def test_a_memory_that_was_forgotten_in_part_draws_from_the_rest():
    learner = filled(40, capacity=50)
    for label in range(0, 40, 2):
        learner.memory.forget(label)
    drawn = set()
    for _ in range(100):
        slots = learner.memory.sample(1, learner.generator)
        drawn |= set(numbers_of(learner.memory.read(slots)[0]))
    assert drawn <= set(range(1, 40, 2))
    assert len(drawn) > 10


# ---------------------------------------------------------------- forgetting


def test_forgetting_moves_the_others_together_and_makes_room():
    memory = Memory(6, SHAPE, "cpu")
    memory.write(torch.arange(6), numbered(0, 6), torch.tensor([0, 1, 0, 2, 1, 0]))
    memory.advance(6)
    memory.seen.fill_(60)
    assert memory.forget(0) == 3
    assert numbers_of(memory.contents()[0]) == [1, 3, 4]
    assert memory.contents()[1].tolist() == [1, 2, 1]
    assert memory.size == int(memory.filled) == 3
    assert int(memory.seen) == 30  # as if its share of the stream had not passed
    assert (memory.labels[3:] == -1).all()
    assert memory.forget(0) == 0
    assert memory.forget(1) == 2
    assert memory.forget(2) == 1
    assert memory.size == int(memory.seen) == 0
    assert memory.forget(2) == 0
    memory.write(torch.tensor([0, 1]), numbered(9, 2), torch.tensor([5, 5]))
    memory.advance(2)
    assert numbers_of(memory.contents()[0]) == [9, 10]


# ---------------------------------------------------------------- state


@pytest.mark.parametrize(("size", "capacity"), [(0, 4), (3, 4), (4, 4), (0, 0)])
def test_state_round_trip(size, capacity):
    memory = filled(size, capacity).memory
    memory.seen.fill_(size * 5)
    other = filled(capacity).memory
    other.load_state_dict(copy.deepcopy(memory.state_dict()))
    assert digest(other.state_dict()) == digest(memory.state_dict())
    assert (other.size, int(other.filled), int(other.seen)) == (size, size, 5 * size)
    assert (other.labels[size:] == -1).all()
    a, b = (twin.sample(2, torch.Generator().manual_seed(1)) for twin in (memory, other))
    assert torch.equal(a, b)


def test_a_smaller_state_fits_into_a_larger_memory_and_not_the_other_way():
    state = filled(4).memory.state_dict()
    larger = Memory(9, SHAPE, "cpu")
    larger.load_state_dict(state)
    assert numbers_of(larger.contents()[0]) == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"holds 4 images of shape \(1, 1, 2\); this one holds 3"):
        Memory(3, SHAPE, "cpu").load_state_dict(state)
    with pytest.raises(InputError, match=r"this one holds 9 of shape \(1, 2, 2\)"):
        Memory(9, (1, 2, 2), "cpu").load_state_dict(state)
