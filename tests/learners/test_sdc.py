"""Semantic drift compensation: the formula on hand-made drift, and prototypes without a memory."""

import copy
import math

import numpy as np
import pytest
import torch
from digit_stream import SHAPE, accuracy, assert_resumes, digits, learn, make, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from scrlearn.errors import InputError
from scrlearn.learners.sdc import DriftCompensation, drift


def by_loops(prototypes, before, after, width):
    """The formula, written out."""
    moved = np.zeros_like(prototypes)
    for c, mean in enumerate(prototypes):
        weights = [math.exp(-np.sum((z - mean) ** 2) / (2 * width**2)) for z in before]
        for weight, old, new in zip(weights, before, after, strict=True):
            moved[c] += weight * (new - old) / sum(weights)
    return moved


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 8), st.floats(0.2, 2.0))
@settings(max_examples=40, deadline=None)
def test_drift_is_the_formula(seed, classes, images, width):
    random = np.random.default_rng(seed)
    prototypes, before, after = (random.normal(size=(n, 4)) * 0.5 for n in (classes, images, images))
    found = drift(*(torch.from_numpy(a) for a in (prototypes, before, after)), width)
    np.testing.assert_allclose(found.numpy(), by_loops(prototypes, before, after, width), atol=1e-9)


def test_a_shift_of_everything_moves_every_prototype_by_it():
    random = torch.Generator().manual_seed(0)
    prototypes, before = torch.randn(5, 8, generator=random), torch.randn(9, 8, generator=random)
    shift = torch.randn(8, generator=random)
    torch.testing.assert_close(drift(prototypes, before, before + shift), shift.expand(5, 8))


def test_far_images_do_not_leave_the_weights_undefined():
    moved = drift(torch.zeros(1, 2), torch.full((3, 2), 100.0), torch.full((3, 2), 101.0))
    torch.testing.assert_close(moved, torch.ones(1, 2))


def test_means_of_the_running_task_are_plain_means_at_first():
    store = DriftCompensation(features=3, classes=4)
    z = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1] * 6)
    for part in range(0, 12, 4):
        store.observe(z[part : part + 4], y[part : part + 4])
    torch.testing.assert_close(store.means[0], z[0::2].mean(0))
    torch.testing.assert_close(store.means[1], z[1::2].mean(0))
    assert store.counts.tolist() == [6, 6, 0, 0]
    assert store.classifier(4).present.tolist() == [True, True, False, False]


def test_old_features_are_forgotten_in_the_running_mean():
    store = DriftCompensation(features=1, classes=1)
    for value in [0.0] * 200 + [1.0] * 60:
        store.observe(torch.tensor([[value]]), torch.tensor([0]))
    assert store.means.item() == pytest.approx(1 - 0.95**60, abs=1e-4)


def test_earlier_prototypes_stand_at_their_origin_plus_the_averaged_drift():
    random = torch.Generator().manual_seed(0)
    store = DriftCompensation(features=4, classes=3, width=0.5)
    store.observe(torch.rand(6, 4, generator=random), torch.tensor([0, 1, 0, 1, 0, 1]))
    origin = store.means.clone()
    store.end_task()
    average = np.zeros((3, 4))
    for number in range(1, 15):
        before, after = torch.rand(5, 4, generator=random), torch.rand(5, 4, generator=random)
        store.compensate(before, after)
        store.observe(after, torch.full((5,), 2))
        found = by_loops(origin.numpy(), before.numpy(), after.numpy(), 0.5)
        average += max(0.1, 1 / number) * (found - average)
        np.testing.assert_allclose(store.means[:2].numpy(), (origin.numpy() + average)[:2], atol=1e-5)
    assert not np.allclose(store.means[2].numpy(), average[2], atol=1e-2)  # the running class is not compensated


def test_a_class_that_comes_back_is_running_again():
    store = DriftCompensation(features=2, classes=1)
    store.observe(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    store.end_task()
    before, after = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    for _ in range(200):
        store.compensate(before, after)
        store.observe(torch.tensor([[-1.0, 0.0]]), torch.tensor([0]))
    torch.testing.assert_close(store.means, torch.tensor([[-1.0, 0.0]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", ["fine-tune", "ewc++", "lwf"])
def test_ncm_without_any_stored_image(method):
    learner = learn(make(method, memory_size=0, classifier="ncm"), tasks=1, batches=30)
    assert learner.classifiers == ("softmax", "ncm")
    assert learner.memory.size == 0
    assert accuracy(learner, "ncm") > 0.9


def test_the_learner_compares_with_its_encoder_of_the_task_before():
    learner = make("lwf", memory_size=0, classifier="ncm", mirror=True)
    first, second = stream(tasks=2)
    for x, y in first:
        learner.learn(x, y)
    learner.end_task()
    old, origin = copy.deepcopy(learner), learner.drift.means.clone()
    x, y = second[0]
    learner.learn(x, y)
    expected = origin[:2] + drift(origin[:2], old.embed(x), learner.embed(x))
    torch.testing.assert_close(learner.drift.means[:2], expected)


def test_compensation_helps_where_the_encoder_is_held():
    """LwF on digits: prototypes that follow beat prototypes that stay."""
    following, staying = (make("lwf", memory_size=0, classifier="ncm", classes_ahead=10) for _ in range(2))
    staying.drift.compensate = lambda before, after: None
    figures = [accuracy(learn(learner, tasks=3, batches=30), "ncm") for learner in (following, staying)]
    assert figures[0] > figures[1]


def test_beside_a_memory():
    learner = learn(make("er", memory_size=30, prototypes="sdc"), tasks=2)
    assert learner.prototypes().present.tolist() == [True] * 4
    assert torch.equal(learner.prototypes().prototypes, learner.drift.classifier(4).prototypes)


def test_only_where_it_is_wanted():
    assert make("lwf", memory_size=10, classifier="ncm").drift is None
    softmax = make("lwf", memory_size=0)
    assert softmax.drift is None
    assert softmax.classifiers == ("softmax",)
    with pytest.raises(InputError, match="prototypes"):
        learn(softmax, tasks=1).predict(digits(5)[0], "ncm")


def test_many_classes_and_forgetting_one():
    learner = make("fine-tune", memory_size=0, classifier="ncm")
    x, y = digits(20)
    learner.learn(x, y)
    learner.learn(x, y + 20)
    learner.end_task()
    learner.learn(x, y)
    assert len(learner.drift.means) == len(learner.met) == 32
    assert learner.predict(x).max() < 30
    learner.forget(3)
    assert not learner.prototypes().present[3]
    assert (learner.predict(x) != 3).all()


@pytest.mark.parametrize("place", [(0, 2), (1, 0), (2, 3)])
@pytest.mark.parametrize("method", ["fine-tune", "lwf"])
def test_resumes_in_the_middle_of_a_task(method, place):
    assert_resumes(lambda: make(method, memory_size=0, classifier="ncm", averaging=0.9), *place)


def test_a_single_class_and_batches_of_one():
    learner = make("fine-tune", memory_size=0, classifier="ncm")
    for _ in range(3):
        learner.learn(torch.full((1, *SHAPE), 9, dtype=torch.uint8), torch.tensor([0]))
        learner.end_task()
    assert learner.predict(torch.zeros(2, *SHAPE, dtype=torch.uint8)).tolist() == [0, 0]


def test_wrong_options():
    with pytest.raises(InputError, match='Did you mean "sdc"'):
        make("fine-tune", prototypes="sdcc")
    with pytest.raises(InputError, match="drift_width"):
        make("fine-tune", prototypes="sdc", drift_width=0.0)
