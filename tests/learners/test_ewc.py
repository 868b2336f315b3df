"""EWC++: the Fisher information against a loop of plain autograd, and the penalty against its formula."""

import copy

import pytest
import torch
import torch.nn.functional as F
from digit_stream import SHAPE, accuracy, assert_resumes, digits, learn, make, stream

from scrlearn.checkpoint import digest
from scrlearn.errors import InputError


def plain_gradient(learner, x, y):
    """The gradient of the mean cross-entropy, by a copy of the network and `backward`."""
    network = copy.deepcopy(learner.network).train()
    F.cross_entropy(network.head(network.encoder(x.float() / 255)), y).backward()
    return [p.grad.clone() for p in network.parameters()]


def test_fisher_is_the_hand_rolled_running_average():
    learner = make("ewc++", fold_every=3, alpha=0.7, strength=5.0, memory_size=0)
    running = [torch.zeros_like(w) for w in learner.weights]
    collected = [torch.zeros_like(w) for w in learner.weights]
    for task in stream(tasks=2, batches=8):
        for number, (x, y) in enumerate(task, start=1):
            if number % 3 == 0:
                running = [0.3 * r + 0.7 * c / 3 for r, c in zip(running, collected, strict=True)]
                collected = [torch.zeros_like(c) for c in collected]
            learner.reserve(int(y.max()) + 1)
            learner.network.head.meet(y)
            collected = [c + g**2 for c, g in zip(collected, plain_gradient(learner, x, y), strict=True)]
            learner.learn(x, y)
        learner.end_task()
        low, high = min(r.min() for r in running), max(r.max() for r in running)
        for own, theirs, scaled in zip(learner.fisher, running, learner.importance, strict=True):
            torch.testing.assert_close(own, theirs)
            torch.testing.assert_close(scaled, (theirs - low) / (high - low))


def test_a_task_shorter_than_a_folding_still_counts():
    learner = make("ewc++", memory_size=0)
    (x, y), *_ = next(stream())
    learner.network.head.meet(y)
    squares = [g**2 for g in plain_gradient(learner, x, y)]
    learner.learn(x, y)
    learner.end_task()
    for own, square in zip(learner.fisher, squares, strict=True):
        torch.testing.assert_close(own, 0.9 * square)


def test_a_step_minimises_the_linearised_loss_with_the_penalty():
    """θ' = argmin g·θ' + λ Σ F (θ' − θ*)² + ‖θ' − θ‖² / 2η: the exact step, found here by its stationary point."""
    rate, strength = 0.1, 100.0
    learner = make("ewc++", fold_every=2, strength=strength, learning_rate=rate, memory_size=0)
    first, second, *_ = stream(tasks=2)
    for x, y in first:
        learner.learn(x, y)
    learner.end_task()
    learner.learn(*second[0])
    x, y = second[1]
    before = [w.detach().clone() for w in learner.weights]
    gradient = plain_gradient(learner, x, y)
    learner.learn(x, y)
    assert any((b - a).abs().max() > 1e-3 for b, a in zip(before, learner.anchor, strict=True))
    for after, old, g, f, anchor in zip(
        learner.weights, before, gradient, learner.importance, learner.anchor, strict=True
    ):
        stationary = g + 2 * strength * f * (after.detach() - anchor) + (after.detach() - old) / rate
        torch.testing.assert_close(stationary, torch.zeros_like(stationary), atol=2e-4, rtol=0)


def test_without_strength_it_is_fine_tuning():
    ewc, plain = make("ewc++", strength=0.0, memory_size=30), make("fine-tune", memory_size=30)
    learn(ewc, batches=3), learn(plain, batches=3)
    assert digest({"network": ewc.network.state_dict()}) == digest({"network": plain.network.state_dict()})
    assert torch.equal(ewc.memory.contents()[0], plain.memory.contents()[0])


def test_strength_holds_the_weights_that_matter():
    def moved(strength):
        learner = make("ewc++", strength=strength, fold_every=2, memory_size=0)
        first, second = stream(tasks=2, batches=10)
        for x, y in first:
            learner.learn(x, y)
        learner.end_task()
        for x, y in second:
            learner.learn(x, y)
        return sum(
            (f * (w - a) ** 2).sum().item()
            for f, w, a in zip(learner.importance, learner.weights, learner.anchor, strict=True)
        )

    free, held, fast = moved(0.0), moved(100.0), moved(1e6)
    assert fast < held < free / 3


def test_a_head_that_grows_keeps_what_was_known():
    learner = make("ewc++", fold_every=2, memory_size=0)
    x, y = digits(20)
    for part in (slice(0, 10), slice(10, 20)):
        learner.learn(x[part], y[part])
    learner.end_task()
    before = {name: [t.clone() for t in getattr(learner, name)] for name in ("fisher", "importance", "anchor")}
    learner.reserve(17)
    assert learner.network.head.capacity == 32
    for name, old in before.items():
        for was, now, weight in zip(old, getattr(learner, name), learner.weights, strict=True):
            assert now.shape == weight.shape
            assert torch.equal(now[tuple(map(slice, was.shape))], was)
    assert not learner.importance[-2][16:].any()
    assert torch.equal(learner.anchor[-2][16:], learner.weights[-2][16:])
    learner.learn(x[:10], y[:10] + 10)


@pytest.mark.parametrize("place", [(0, 2), (1, 0), (1, 3)])
def test_resumes_in_the_middle_of_a_task(place):
    assert_resumes(lambda: make("ewc++", fold_every=3, memory_size=20, momentum=0.5), *place)


@pytest.mark.filterwarnings("ignore:.*have no image in memory")
@pytest.mark.parametrize("options", [{"memory_size": 0}, {"memory_size": 3}, {"memory_size": 0, "classifier": "ncm"}])
@pytest.mark.parametrize("batch", [1, 10])
def test_survives_small_streams(options, batch):
    learner = learn(make("ewc++", fold_every=2, **options), batches=3, batch=batch)
    assert all(torch.isfinite(w).all() for w in learner.weights)
    learner.end_task()  # a task without images
    x, _ = digits(10)
    for classifier in learner.classifiers:
        assert len(learner.predict(x, classifier)) == 10


def test_a_single_class():
    learner = make("ewc++", memory_size=5)
    learner.learn(torch.zeros(1, *SHAPE, dtype=torch.uint8), torch.tensor([0]))
    learner.end_task()
    learner.learn(torch.zeros(1, *SHAPE, dtype=torch.uint8), torch.tensor([0]))
    assert learner.predict(torch.zeros(2, *SHAPE, dtype=torch.uint8)).tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [{"strength": -1.0}, {"alpha": 0.0}, {"alpha": 1.5}, {"fold_every": 0}])
def test_options_out_of_range(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        make("ewc++", **wrong)


def test_learns_the_task_at_hand():
    learner = learn(make("ewc++", memory_size=100), tasks=1, batches=30)
    assert accuracy(learner) > 0.9
    assert accuracy(learner, "ncm") > 0.9
