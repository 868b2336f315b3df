"""Reservoir sampling against Algorithm R in plain loops, and every image's chance to stay."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_memory import numbers_of, offer, owner, p_value_of_uniform_subsets

from scrlearn.memory.reservoir import Reservoir

ROUNDS = 1500


def algorithm_r(memory, capacity, number, uniform):
    """Vitter's Algorithm R for one image, the n-th of the stream (from 1)."""
    if len(memory) < capacity:
        memory.append(number)
    else:
        slot = int(uniform * (number + 1))
        if slot < capacity:
            memory[slot] = number


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 12),
    batches=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    seed=st.integers(0, 2**32),
)
def test_equals_algorithm_r_image_by_image_with_the_same_random_numbers(capacity, batches, seed):
    learner, update, plain, start = owner(capacity, seed), Reservoir(), [], 0
    for batch in batches:
        ahead = torch.Generator().manual_seed(0).set_state(learner.generator.get_state())
        uniform = torch.rand(batch, generator=ahead, dtype=torch.float64).tolist()
        for i in range(batch):
            algorithm_r(plain, capacity, start + i, uniform[i])
        offer(learner, update, start, range(start, start + batch))
        start += batch
        images, labels = learner.memory.contents()
        assert numbers_of(images) == labels.tolist() == plain
        assert learner.memory.size == len(plain) <= capacity
        assert int(learner.memory.seen) == start


def test_in_one_batch_the_later_of_two_images_for_a_slot_wins(monkeypatch):
    learner, update = owner(4), Reservoir()
    offer(learner, update, 0, [0] * 4)
    # numbers that send images 4, 5, 7 to slot 2 and image 6 nowhere
    numbers = [2.5 / 5, 2.5 / 6, 6.5 / 7, 2.5 / 8]
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(numbers, dtype=torch.float64))
    offer(learner, update, 4, [1] * 4)
    assert numbers_of(learner.memory.contents()[0]) == [0, 1, 7, 3]


@pytest.mark.parametrize(
    ("capacity", "batches"),
    [(3, [1] * 8), (5, [7, 1, 12]), (5, [20]), (5, [5, 15]), (3, [10, 10]), (1, [4, 8])],
    ids=str,
)
def test_every_image_of_the_stream_is_as_likely_to_be_kept(capacity, batches):
    learner, update, times = owner(capacity), Reservoir(), np.zeros(sum(batches))
    empty = copy.deepcopy(learner.memory.state_dict())
    for _ in range(ROUNDS):
        learner.memory.load_state_dict(empty)
        start = 0
        for batch in batches:
            offer(learner, update, start, [0] * batch)
            start += batch
        times[numbers_of(learner.memory.contents()[0])] += 1
    assert times.sum() == ROUNDS * capacity
    assert p_value_of_uniform_subsets(times, ROUNDS) > 1e-3


def test_the_statistic_notices_a_small_bias():
    """What the tests above would say if the later half of the stream were kept a seventh more often than the other."""
    times = np.array([ROUNDS / 4 * 0.93] * 10 + [ROUNDS / 4 * 1.07] * 10)
    assert p_value_of_uniform_subsets(times, ROUNDS) < 1e-3
    assert p_value_of_uniform_subsets(np.full(20, ROUNDS / 4), ROUNDS) == 1.0


def test_late_in_a_long_stream_every_slot_can_still_be_drawn():
    """With float32 the product of a random number and ten million would skip slots."""
    learner, update = owner(2**12), Reservoir()
    offer(learner, update, 0, [0] * 2**12)
    learner.memory.seen.fill_(2**40)
    offer(learner, update, 0, [1] * 100)
    assert not (learner.memory.contents()[1] == 1).any()  # one in 2^28 would be
    learner.memory.seen.fill_(2**13)
    for _ in range(400):
        offer(learner, update, 0, [1] * 100)
        learner.memory.seen.fill_(2**13)
    kept = (learner.memory.contents()[1] == 1).float().mean().item()
    assert kept == pytest.approx(1 - np.exp(-40_000 / 2**13), abs=0.02)


def test_after_a_class_was_forgotten_the_memory_fills_again_before_anything_is_replaced():
    learner, update = owner(6), Reservoir()
    offer(learner, update, 0, [0, 1, 0, 1, 2, 2])
    offer(learner, update, 6, [2] * 6)
    images, labels = learner.memory.contents()
    kept = numbers_of(images[labels != 0])
    learner.memory.forget(0)
    room = 6 - learner.memory.size
    offer(learner, update, 100, [3] * room)
    assert numbers_of(learner.memory.contents()[0]) == kept + list(range(100, 100 + room))
    assert learner.memory.full


def test_going_on_from_a_saved_state_keeps_the_same_images():
    learner, update = owner(5), Reservoir()
    offer(learner, update, 0, [0] * 13)
    twin = owner(5)
    twin.memory.load_state_dict(copy.deepcopy(learner.memory.state_dict()))
    twin.generator.set_state(learner.generator.get_state())
    for other in (learner, twin):
        offer(other, update, 13, [1] * 20)
    assert numbers_of(learner.memory.contents()[0]) == numbers_of(twin.memory.contents()[0])
    assert update.state_dict() == {}
