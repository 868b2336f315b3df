"""Random retrieval: distinct images of the memory, all equally likely, and all of them where there are too few."""

import numpy as np
import pytest
import torch
from small_memory import filled, numbered, numbers_of, p_value_of_uniform_subsets

from scrlearn.memory import RETRIEVALS
from scrlearn.memory.random import NoRetrieval, RandomRetrieval

X, Y = numbered(900, 4), torch.arange(4)


@pytest.mark.parametrize("size", [3, 10, 40, 400])
@pytest.mark.parametrize("count", [1, 10, 25])
def test_no_image_twice_in_a_batch_and_each_with_its_class(size, count):
    learner = filled(size, capacity=size + 5)
    for _ in range(50):
        images, labels = RandomRetrieval()(learner, X, Y, count)
        numbers = numbers_of(images)
        assert numbers == labels.tolist()
        assert len(set(numbers)) == len(numbers) == min(size, count)
        assert set(numbers) <= set(range(size))


@pytest.mark.parametrize(("size", "count"), [(12, 5), (96, 5)])
def test_every_image_is_replayed_equally_often(size, count):
    learner, times, rounds = filled(size), np.zeros(size), 2500
    for _ in range(rounds):
        times[RandomRetrieval()(learner, X, Y, count)[1].numpy()] += 1
    assert p_value_of_uniform_subsets(times, rounds) > 1e-3


def test_the_learners_generator_alone_decides():
    batches = []
    for _ in range(2):
        learner = filled(30, seed=5)
        torch.rand(7)  # the global generator has nothing to do with it
        batches.append([RandomRetrieval()(learner, X, Y, 6)[1].tolist() for _ in range(3)])
    assert batches[0] == batches[1]
    assert batches[0][0] != batches[0][1]


def test_an_empty_memory_gives_an_empty_batch():
    images, labels = RandomRetrieval()(filled(0, capacity=5), X, Y, 10)
    assert images.shape == (0, 1, 1, 2)
    assert labels.shape == (0,)


def test_the_signature_changes_with_the_way_of_drawing():
    signatures = {RandomRetrieval().signature(filled(size)) for size in (1, 20, 159)}
    assert len(signatures) == 1
    assert RandomRetrieval().signature(filled(160)) not in signatures


def test_no_retrieval_gives_nothing_and_draws_nothing():
    learner = filled(20)
    before = learner.generator.get_state()
    images, labels = NoRetrieval()(learner, X, Y, 10)
    assert len(images) == len(labels) == 0
    assert images.dtype == torch.uint8
    assert torch.equal(learner.generator.get_state(), before)
    assert (RETRIEVALS["none"], RETRIEVALS["random"]) == (NoRetrieval, RandomRetrieval)
