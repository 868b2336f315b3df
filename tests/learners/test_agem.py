"""A-GEM: the projection, and when it is made."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from scrlearn.checkpoint import digest
from scrlearn.errors import InputError
from scrlearn.learners import make_learner
from scrlearn.learners.agem import projected

SHAPE = (1, 8, 8)


def digits(start, stop):
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy((images[start:stop] * 15).astype(np.uint8)).view(-1, *SHAPE)
    return x, torch.from_numpy(labels[start:stop])


def make(**options):
    options = {"memory_size": 40, "precision": "fp32", "device": "cpu", "learning_rate": 0.05} | options
    return make_learner("a-gem", image_shape=SHAPE, **options)


def two_tasks(learner, batches=3):
    """Digits below five, then the others."""
    x, y = digits(0, 400)
    for half in (y < 5, y >= 5):
        for images, labels in list(zip(x[half].split(10), y[half].split(10), strict=True))[:batches]:
            learner.learn(images, labels)
        learner.end_task()


def flat(gradient):
    return torch.cat([g.double().flatten() for g in gradient])


@given(st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_never_against_the_reference_and_never_changed_without_need(seed):
    random = torch.Generator().manual_seed(seed)
    gradient = [torch.randn(4, 3, generator=random), torch.randn(5, generator=random)]
    reference = [torch.randn(4, 3, generator=random), torch.randn(5, generator=random)]
    result = projected(gradient, reference)
    g, r, p = flat(gradient), flat(reference), flat(result)
    assert p @ r >= -1e-5 * g.norm() * r.norm()
    if g @ r >= 1e-5:
        assert all(torch.equal(a, b) for a, b in zip(result, gradient, strict=True))
    elif g @ r < -1e-5:
        # the nearest of all gradients that do not go against the reference
        torch.testing.assert_close(p, g - (g @ r) / (r @ r) * r, rtol=1e-4, atol=1e-5)
        assert p.norm() < g.norm()


def test_a_reference_of_zeros_changes_nothing():
    gradient = [torch.randn(3)]
    assert torch.equal(projected(gradient, [torch.zeros(3)])[0], gradient[0])


def test_the_first_task_is_fine_tuning():
    learner = make()
    plain = make_learner(
        "fine-tune", image_shape=SHAPE, memory_size=40, precision="fp32", device="cpu", learning_rate=0.05
    )
    for i in range(5):
        learner.learn(*digits(10 * i, 10 * i + 10))
        plain.learn(*digits(10 * i, 10 * i + 10))
    assert digest(learner.network.state_dict()) == digest(plain.network.state_dict())
    before = learner.signature(10)
    learner.end_task()
    plain.end_task()
    assert learner.signature(10) != before
    for i in range(5, 8):
        learner.learn(*digits(10 * i, 10 * i + 10))
        plain.learn(*digits(10 * i, 10 * i + 10))
    assert digest(learner.network.state_dict()) != digest(plain.network.state_dict())


@pytest.mark.parametrize("against", [True, False])
def test_a_step_of_the_second_task_equals_its_formula(against):
    learner = make()
    x, y = digits(0, 400)
    first, second = y < 5, y >= 5
    for images, labels in list(zip(x[first].split(10), y[first].split(10), strict=True))[:6]:
        learner.learn(images, labels)
    learner.end_task()
    # new classes pull against the memory; the memory's own images do not
    x, y = (x[second][:10], y[second][:10]) if against else tuple(t[:10].clone() for t in learner.memory.contents())
    ahead = torch.Generator().manual_seed(0).set_state(learner.generator.get_state())
    memory_x, memory_y = learner.memory.read(learner.memory.sample(10, ahead))
    network = copy.deepcopy(learner.network)
    network.head.meet(y)
    weights = list(network.parameters())
    gradient = flat(torch.autograd.grad(F.cross_entropy(network.logits(x), y), weights))
    reference = flat(torch.autograd.grad(F.cross_entropy(network.logits(memory_x), memory_y), weights))
    assert (gradient @ reference < 0) == against
    if against:
        gradient = gradient - (gradient @ reference) / (reference @ reference) * reference
    expected = flat([w.detach() for w in weights]) - 0.05 * gradient
    learner.learn(x, y)
    torch.testing.assert_close(flat([w.detach() for w in learner.weights]), expected, rtol=1e-4, atol=1e-6)


def test_from_start_needs_no_task():
    learner = make(from_start=True)
    assert not learner.projects
    learner.learn(*digits(0, 10))
    assert learner.projects
    assert learner.tasks == 0


@pytest.mark.parametrize("from_start", [False, True])
def test_going_on_from_a_saved_state_gives_the_same_bits(from_start):
    learner = make(from_start=from_start, momentum=0.5)
    two_tasks(learner)
    twin = make(from_start=from_start, momentum=0.5)
    twin.load_state_dict(copy.deepcopy(learner.state_dict()))
    for i in range(40, 43):
        learner.learn(*digits(10 * i, 10 * i + 10))
        twin.learn(*digits(10 * i, 10 * i + 10))
    assert digest(learner.state_dict()) == digest(twin.state_dict())


@pytest.mark.parametrize(
    ("memory_size", "batch", "single_class"), [(3, 10, False), (1, 10, False), (60, 1, False), (60, 10, True)]
)
def test_survives_small_memories_single_classes_and_batches_of_one(memory_size, batch, single_class):
    learner = make(memory_size=memory_size)
    x, y = digits(0, 6 * batch)
    y = torch.zeros_like(y) if single_class else y
    for images, labels in zip(x.split(batch), y.split(batch), strict=True):
        assert torch.isfinite(learner.learn(images, labels))
        learner.end_task()
    assert learner.memory.size == min(memory_size, 6 * batch)
    assert all(torch.isfinite(w).all() for w in learner.weights)


def test_a_class_may_never_get_into_memory():
    learner = make(memory_size=1)
    for label in range(4):
        learner.learn(digits(10 * label, 10 * label + 10)[0], torch.full((10,), label))
        learner.end_task()
    assert learner.predict(digits(0, 5)[0]).shape == (5,)
    with pytest.warns(UserWarning, match="3 of the classes"):
        assert len(set(learner.predict(digits(0, 20)[0], "ncm").tolist())) == 1


def test_learns_digits():
    learner = make(memory_size=100)
    for i in range(40):
        learner.learn(*digits(10 * i, 10 * i + 10))
        if i == 10:
            learner.end_task()
    x, y = digits(1500, 1797)
    assert (learner.predict(x) == y).float().mean() > 0.5


def test_errors_say_what_to_do():
    with pytest.raises(InputError, match="joint=False"):
        make(joint=True)
    with pytest.raises(InputError, match="memory_size is 0"):
        make(memory_size=0)
    with pytest.raises(InputError, match='Did you mean "from_start"'):
        make(from_begin=True)
