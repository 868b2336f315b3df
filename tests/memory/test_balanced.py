"""Class-balancing reservoir sampling against the same policy in plain loops."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from scrlearn.checkpoint import digest
from scrlearn.learners import make_learner

SHAPE = (1, 1, 2)


class Tiny(nn.Module):
    """These tests are about the memory: the cheapest encoder there is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x.flatten(1))


def make(memory_size=20, **options):
    options = {"update": "balanced", "device": "cpu", "precision": "fp32", "encoder": Tiny()} | options
    return make_learner("er", image_shape=SHAPE, memory_size=memory_size, **options)


def numbered(start, count):
    """Images that carry their number in the stream."""
    numbers = torch.arange(start, start + count)
    return torch.stack([numbers // 256, numbers % 256], dim=1).to(torch.uint8).view(-1, *SHAPE)


def numbers_of(learner):
    pairs = learner.memory.contents()[0].flatten(1).long()
    return (pairs[:, 0] * 256 + pairs[:, 1]).tolist()


def offer(learner, y, start):
    """Offer a batch to the memory alone, as a step would."""
    learner.reserve(int(y.max()) + 1)
    learner.met.index_fill_(0, y, True)
    learner.update(learner, numbered(start, len(y)), y)
    learner.advance(len(y))


class ByLoops:
    """The policy image by image: take in what is below the limit, then give up one after the other."""

    def __init__(self, capacity):
        self.capacity, self.memory, self.limit = capacity, [], Counter()

    def offer(self, numbers, labels, keys):
        for number, label, key in zip(numbers, labels, keys, strict=True):
            if key < self.limit.get(label, 1.0):
                self.memory.append((number, label, key))
        while len(self.memory) > self.capacity:
            stored = Counter(label for _, label, _ in self.memory)
            leaving = max(self.memory, key=lambda item: (stored[item[1]], item[2]))
            self.memory.remove(leaving)
            self.limit[leaving[1]] = leaving[2]


def skewed(images=400, classes=40):
    """Many images of few classes first, rare ones later, and more classes than the first limits have room for."""
    random = np.random.default_rng(3)
    labels = random.permutation(np.minimum(random.geometric(0.3, images) - 1, classes - 1)).astype(np.int64)
    labels[3 * images // 4 :] = random.integers(0, classes, images - 3 * images // 4)
    return torch.from_numpy(labels)


@pytest.mark.parametrize("capacity", [1, 7, 30])
@pytest.mark.parametrize("batch", [1, 10])
def test_equals_plain_loops_with_the_same_random_numbers(capacity, batch):
    learner, loops, labels = make(capacity), ByLoops(capacity), skewed()
    for start in range(0, 400, batch):
        y = labels[start : start + batch]
        ahead = torch.Generator().manual_seed(0).set_state(learner.generator.get_state())
        keys = torch.rand(batch, generator=ahead, dtype=torch.float64).tolist()
        before = dict(enumerate(numbers_of(learner)))
        loops.offer(range(start, start + batch), y.tolist(), keys)
        offer(learner, y, start)
        stored = sorted(zip(numbers_of(learner), learner.memory.contents()[1].tolist(), strict=True))
        assert stored == sorted((number, label) for number, label, _ in loops.memory)
        moved = {slot: n for slot, n in enumerate(numbers_of(learner)) if n < start and before[slot] != n}
        assert not moved  # who stays keeps its slot
    limits = {c: limit for c, limit in enumerate(learner.update.limit.tolist()) if limit < 1}
    assert limits == dict(loops.limit)
    assert len(learner.update.limit) == len(learner.met)


def test_ranks_are_the_order_of_the_keys_in_a_class():
    learner, labels = make(30), skewed()
    for start in range(0, 400, 10):
        offer(learner, labels[start : start + 10], start)
        stored = learner.memory.contents()[1]
        for label in stored.unique():
            mine = (stored == label).nonzero().flatten()
            assert learner.update.rank[mine].tolist() == learner.update.key[mine].argsort().argsort().tolist()


def test_a_class_with_few_images_has_given_up_none():
    learner, labels, found = make(30), skewed(), 0
    for start in range(0, 400, 10):
        offer(learner, labels[start : start + 10], start)
        passed = labels[: start + 10].bincount(minlength=40)
        counts = learner.memory.contents()[1].bincount(minlength=40)
        few = counts < counts.max() - 1
        assert torch.equal(counts[few], passed[few])
        found += int(counts[few].sum())
    assert found > 100


def test_an_imbalanced_stream_gives_a_balanced_memory():
    random = np.random.default_rng(0)
    labels = torch.from_numpy(random.choice(4, 2000, p=[0.9, 0.06, 0.03, 0.01]))
    learner, plain = make(40), make(40, update="reservoir")
    for start in range(0, 2000, 10):
        offer(learner, labels[start : start + 10], start)
        offer(plain, labels[start : start + 10], start)
    passed = labels.bincount().tolist()
    counts = learner.memory.contents()[1].bincount(minlength=4).tolist()
    assert counts == [10, 10, 10, 10]
    assert passed[3] >= 10
    assert plain.memory.contents()[1].bincount(minlength=4).tolist()[0] > 30


def test_each_image_of_a_full_class_is_as_likely_to_stay():
    """The class is cut down, and inside it the reservoir stays uniform."""
    rounds, kept = 120, np.zeros(80)
    labels = torch.tensor([0] * 60 + [1, 0] * 10)
    for seed in range(rounds):
        learner = make(12, seed=seed)
        for start in range(0, 80, 10):
            offer(learner, labels[start : start + 10], start)
        for number in numbers_of(learner):
            kept[number] += 1
    counts = kept[(labels == 0).numpy()]
    early, late = counts[:35].mean() / rounds, counts[35:].mean() / rounds
    assert early == pytest.approx(late, abs=0.025)
    assert early == pytest.approx(6 / 70, abs=0.02)


def test_limits_grow_before_a_step_is_recorded():
    learner = make(10)
    for start in range(0, 30, 2):
        offer(learner, torch.tensor([0, 1]), start)
    before, limits = learner.signature(10), learner.update.limit[:2].tolist()
    assert max(limits) < 1
    learner.reserve(40)
    assert learner.signature(10) != before
    assert len(learner.update.limit) == len(learner.met) >= 40
    assert learner.update.limit[:2].tolist() == limits
    assert (learner.update.limit[2:] == 1).all()


def test_a_forgotten_class_starts_again():
    learner = make(12)
    for start in range(0, 60, 10):
        offer(learner, torch.tensor([0, 1] * 5), start)
    assert (learner.update.limit[:2] < 1).all()
    keys, labels = learner.update.key.tolist(), learner.memory.labels.tolist()
    kept = {n: key for n, key, label in zip(numbers_of(learner), keys, labels, strict=False) if label == 1}
    removed = learner.forget(0)
    assert removed == 6
    assert (learner.update.limit == 1).all()
    assert (
        dict(zip(numbers_of(learner), learner.update.key.tolist(), strict=False)) == kept
    )  # keys went with their images
    for start in range(60, 120, 10):
        offer(learner, torch.tensor([2, 3] * 5), start)
    counts = learner.memory.contents()[1].bincount(minlength=4)
    assert counts.tolist() == [0, 4, 4, 4]


@pytest.mark.parametrize("classes", [2, 30])
def test_going_on_from_a_saved_state_gives_the_same_bits(classes):
    random = np.random.default_rng(1)
    labels = torch.from_numpy(random.integers(0, classes, 120))
    learner = make(15)
    for start in range(0, 60, 10):
        learner.learn(numbered(start, 10), labels[start : start + 10])
    twin = make(15)
    twin.load_state_dict(copy.deepcopy(learner.state_dict()))
    for start in range(60, 120, 10):
        learner.learn(numbered(start, 10), labels[start : start + 10])
        twin.learn(numbered(start, 10), labels[start : start + 10])
    assert digest(learner.state_dict()) == digest(twin.state_dict())


@pytest.mark.parametrize("method", ["scr", "mir", "a-gem", "fine-tune"])
@pytest.mark.parametrize(("memory_size", "batch", "classes"), [(3, 10, 5), (20, 1, 4), (20, 10, 1)])
def test_any_method_can_keep_images_by_it(method, memory_size, batch, classes):
    learner = make_learner(
        method, image_shape=(1, 8, 8), memory_size=memory_size, update="balanced", device="cpu", precision="fp32"
    )
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randint(0, 256, (batch, 1, 8, 8), dtype=torch.uint8, generator=random)
        assert torch.isfinite(learner.learn(x, torch.randint(0, classes, (batch,), generator=random)))
    assert learner.memory.size == min(memory_size, 4 * batch)
