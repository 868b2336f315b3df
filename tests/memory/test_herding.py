"""Herding: the greedy definition by brute force, and a memory that keeps its promises."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from scrlearn.errors import InputError
from scrlearn.memory import Memory
from scrlearn.memory.herding import Herding, herd

SHAPE = (1, 1, 1)


def distance_with(features, chosen, candidate):
    """How far from the mean of all the mean of the chosen and one more would be."""
    return np.linalg.norm(
        features.mean(0) - (features[candidate] + sum(features[j] for j in chosen)) / (len(chosen) + 1)
    )


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5), st.integers(0, 14))
@settings(max_examples=60, deadline=None)
def test_herding_is_the_greedy_definition(seed, images, length, count):
    """Algorithm 4 of the iCaRL paper, one candidate at a time; of equally near ones any may be taken."""
    features = np.random.default_rng(seed).normal(size=(images, length))
    chosen = herd(torch.from_numpy(features), count).tolist()
    assert len(chosen) == len(set(chosen)) == min(count, images)
    for k, choice in enumerate(chosen):
        left = [j for j in range(images) if j not in chosen[:k]]
        nearest = min(distance_with(features, chosen[:k], j) for j in left)
        assert distance_with(features, chosen[:k], choice) <= nearest + 1e-12


def test_a_shorter_choice_is_the_beginning_of_a_longer_one():
    features = F.normalize(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    assert herd(features, 30)[:7].tolist() == herd(features, 7).tolist()
    assert sorted(herd(features, 99).tolist()) == list(range(30))


def test_the_mean_of_the_chosen_is_nearer_than_that_of_a_random_choice():
    random = torch.Generator().manual_seed(0)
    features = torch.randn(100, 16, generator=random)
    mean = features.mean(0)
    herded = (features[herd(features, 10)].mean(0) - mean).norm()
    others = [(features[torch.randperm(100, generator=random)[:10]].mean(0) - mean).norm() for _ in range(100)]
    assert herded < min(others) / 2


def test_nothing_to_choose():
    assert herd(torch.zeros(0, 3), 5).tolist() == []
    assert herd(torch.zeros(3, 3), 0).tolist() == []
    with pytest.raises(InputError, match="count"):
        herd(torch.zeros(3, 3), -1)


class Owner(SimpleNamespace):
    """As much of a learner as the policy sees; the feature of an image is its number on a circle."""

    def embed(self, x):
        angle = x.flatten().double() / 256 * 3
        return torch.stack([angle.cos(), angle.sin()], 1)


def owner(capacity, seed=0):
    memory = Memory(capacity, SHAPE, "cpu")
    generator = torch.Generator().manual_seed(seed)
    learner = Owner(memory=memory, generator=generator, device=torch.device("cpu"), met=torch.zeros(16))
    policy = Herding()
    policy.attach(learner)
    return learner, policy


def offer(learner, policy, numbers, labels):
    policy(learner, torch.tensor(numbers, dtype=torch.uint8).view(-1, 1, 1, 1), torch.tensor(labels))
    learner.memory.advance(len(numbers))


def held(learner):
    images, labels = learner.memory.contents()
    return list(zip(images.flatten().tolist(), labels.tolist(), strict=True))


def test_fills_in_order_first():
    learner, policy = owner(5)
    offer(learner, policy, [10, 11, 12], [0, 1, 0])
    assert held(learner) == [(10, 0), (11, 1), (12, 0)]
    assert int(learner.memory.filled) == learner.memory.size == 3


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_every_class_keeps_its_share_and_nothing_is_lost_or_invented(seed, capacity, batch):
    learner, policy = owner(capacity, seed)
    random = np.random.default_rng(seed)
    offered = []
    for number in range(12):
        labels = random.integers(0, 1 + number // 3, size=batch).tolist()
        numbers = random.integers(0, 256, size=batch).tolist()
        offer(learner, policy, numbers, labels)
        offered += zip(numbers, labels, strict=True)
        if number % 4 == 3:
            policy.end_task(learner)
        stored = held(learner)
        assert len(stored) == int(learner.memory.filled) == min(capacity, len(offered))
        remaining = list(offered)
        for image in stored:
            remaining.remove(image)  # raises where an image was not offered, or is held twice
        stored_labels = [label for _, label in stored]
        counts = {c: stored_labels.count(c) for _, c in offered}
        passed = {c: sum(label == c for _, label in offered) for c in counts}
        most = max(counts.values())
        # a class holds less than the others only if it had no more to give
        assert all(counts[c] >= most - 1 or counts[c] == passed[c] for c in counts)


def test_an_old_class_gives_way_from_the_end_of_its_herding_order():
    learner, policy = owner(8)
    numbers = [3, 200, 90, 100, 110, 20, 250, 97]
    offer(learner, policy, numbers, [0] * 8)
    policy.end_task(learner)
    images = torch.tensor(numbers)
    ranked = images[herd(learner.embed(images), 8)].tolist()
    for size in (7, 6, 5, 4):
        offer(learner, policy, [60 + size], [1])
        assert sorted(number for number, label in held(learner) if label == 0) == sorted(ranked[:size])


def test_of_the_running_task_a_uniform_sample_is_kept():
    times = np.zeros(20)
    for seed in range(600):
        learner, policy = owner(5, seed)
        for start in range(0, 20, 4):
            offer(learner, policy, list(range(start, start + 4)), [0] * 4)
        times[[number for number, _ in held(learner)]] += 1
    assert times.sum() == 3000
    assert abs(times - 150).max() < 5 * np.sqrt(600 * 0.25 * 0.75)


def test_old_exemplars_are_drawn_first():
    learner, policy = owner(10)
    offer(learner, policy, list(range(6)), [0, 1] * 3)
    policy.end_task(learner)
    offer(learner, policy, [100, 101], [2, 2])
    drawn = learner.memory.read(policy.draw_old(4, learner.generator))[0].flatten().tolist()
    assert len(set(drawn)) == 4
    assert max(drawn) < 6
    everything = learner.memory.read(policy.draw_old(99, learner.generator))[0].flatten().tolist()
    assert sorted(everything) == [0, 1, 2, 3, 4, 5, 100, 101]
    assert set(everything[:6]) == set(range(6))


def test_forgetting_and_going_on():
    learner, policy = owner(6)
    offer(learner, policy, [1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2])
    policy.end_task(learner)
    kept = (learner.memory.contents()[1] != 1).nonzero().flatten()
    places = policy.place[kept].tolist()
    policy.forget(1, kept)
    learner.memory.forget(1)
    assert held(learner) == [(1, 0), (3, 2), (4, 0), (6, 2)]
    assert policy.place[:4].tolist() == places
    offer(learner, policy, [7, 8, 9], [3, 3, 3])
    assert sorted(label for _, label in held(learner)) == [0, 0, 2, 2, 3, 3]


def test_state():
    learner, policy = owner(6)
    offer(learner, policy, list(range(8)), [0, 1] * 4)
    policy.end_task(learner)
    offer(learner, policy, [50], [2])
    other, copied = owner(6)
    other.memory.load_state_dict(learner.memory.state_dict())
    copied.load_state_dict({name: value.clone() for name, value in policy.state_dict().items()})
    other.generator.set_state(learner.generator.get_state())
    for target, rule in ((learner, policy), (other, copied)):
        offer(target, rule, [60, 61, 62], [2, 0, 3])
    assert held(learner) == held(other)
