"""GSS against gradients computed one at a time and against its rule in plain loops."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_encoder import SHAPE, Small, digits, small
from torch import nn

from scrlearn.checkpoint import digest
from scrlearn.errors import InputError
from scrlearn.learners import make_learner
from scrlearn.memory.gradients import Run
from scrlearn.memory.gss import FIRST_SCORE, GSSUpdate, crowd_of
from scrlearn.models import ReducedResNet18


def make(method="gss", **options):
    options = {
        "memory_size": 40,
        "precision": "fp32",
        "device": "cpu",
        "learning_rate": 0.05,
        "encoder": small(),
    } | options
    return make_learner(method, image_shape=SHAPE, **options)


def learned(method="gss", batches=6, **options):
    learner = make(method, **options)
    for i in range(batches):
        learner.learn(*digits(10 * i, 10 * i + 10))
    return learner


def backward(learner, loss):
    for weight in learner.weights:
        weight.grad = None
    loss.backward()
    found = [torch.zeros_like(w) if w.grad is None else w.grad for w in learner.weights]
    return torch.cat([g.flatten() for g in found])


def gradients(learner, x, y, crowd=None):
    """The gradient of each image's loss, one a row."""
    (found,) = learner.update.gradients(learner, x, y, [Run(len(x), 1)], crowd)
    return torch.cat([g.flatten(1) for g in found], dim=1)


class Normalised(Small):
    """Has weights that only vmap can handle: those of GroupNorm."""

    def __init__(self):
        super().__init__()
        self.layers[1] = nn.GroupNorm(2, 8)


def random_like(learner):
    """A generator that will give the learner's next random numbers."""
    return torch.Generator().manual_seed(0).set_state(learner.generator.get_state())


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("encoder", "at_once"),
    [(small(), True), (ReducedResNet18(1), True), (Normalised(), False)],
    ids=["small", "resnet", "group norm"],
)
def test_gradients_equal_one_backward_pass_an_image(encoder, at_once):
    learner = learned(batches=2, encoder=encoder)
    learner.set_training(False)
    x, y = digits(200, 207)
    rows = gradients(learner, x, y)
    assert learner.update.at_once == at_once
    for i in range(7):
        expected = backward(learner, F.cross_entropy(learner.network.logits(x[i : i + 1]), y[i : i + 1]))
        torch.testing.assert_close(rows[i], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_gradients_with_a_frozen_layer_leave_it_out():
    learner = learned()
    learner.network.encoder.layers[0].weight.requires_grad_(False)
    learner.weights = [p for p in learner.network.parameters() if p.requires_grad]
    learner.set_training(False)
    x, y = digits(200, 203)
    assert gradients(learner, x, y).shape == (3, sum(w.numel() for w in learner.weights))


@pytest.mark.parametrize("encoder", [small(), Normalised()], ids=["at once", "by vmap"])
def test_contrastive_gradients_equal_one_backward_pass_an_image(encoder):
    learner = learned("scr", update="gss", augment=False, memory_batch=10, temperature=0.2, encoder=encoder)
    learner.set_training(False)
    x, y = digits(200, 205)
    y[0] = 14  # a class the crowd does not know: the second view is its only positive
    others, labels = digits(0, 20)
    network = learner.network
    crowd = crowd_of(learner, others, labels)
    rows = gradients(learner, x, y, crowd)
    keys = network.project(network.features(others)).detach()
    for i in range(5):
        anchor, second = network.project(network.features(torch.stack([x[i], x[i]])))
        loss = 0.0
        for one, other in ((anchor, second), (second, anchor)):
            logits = torch.cat([(one @ other)[None], keys @ one]) / 0.2
            positive = torch.cat([torch.tensor([True]), labels == y[i]])
            loss = loss - (logits - logits.logsumexp(0))[positive].mean() / 2
        expected = backward(learner, loss)
        torch.testing.assert_close(rows[i], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_contrastive_groups_see_each_other_and_the_crowd():
    learner = learned("scr", update="gss", augment=False, memory_batch=10, temperature=0.2)
    learner.set_training(False)
    (x, y), (others, labels) = digits(200, 206), digits(0, 20)
    crowd = crowd_of(learner, others, labels)
    found = learner.update.gradients(learner, x, y, [Run(1, 4), Run(1, 2)], crowd)
    rows = [torch.cat([g.flatten() for g in run]) for run in found]
    network, keys = learner.network, learner.network.project(learner.network.features(others)).detach()
    for row, group in zip(rows, (slice(0, 4), slice(4, 6)), strict=True):
        z = network.project(network.features(x[group].repeat_interleave(2, 0)))
        own = y[group].repeat_interleave(2)
        loss = 0.0
        for i in range(len(z)):
            rest = [j for j in range(len(z)) if j != i]
            logits = torch.cat([z[rest], keys]) @ z[i] / 0.2
            positive = torch.cat([own[rest], labels]) == own[i]
            loss = loss - (logits - logits.logsumexp(0))[positive].mean() / len(z)
        expected = backward(learner, loss)
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(("memory_size", "groups", "size"), [(40, 4, 10), (7, 1, 7), (200, 10, 10), (60, 6, 10)])
@pytest.mark.parametrize("encoder", [small(), Normalised()], ids=["at once", "by vmap"])
def test_scores_are_the_largest_cosines(memory_size, groups, size, encoder):
    learner = learned(memory_size=memory_size, batches=12, encoder=encoder)
    x, y = digits(200, 208)
    images, labels = learner.memory.read(learner.memory.sample(groups * size, random_like(learner)))
    scores, batch_score = learner.update.score(learner, x, y)
    assert learner.network.training

    learner.network.eval()
    logits = learner.network.logits
    references = [
        backward(learner, F.cross_entropy(logits(images[i : i + size]), labels[i : i + size]))
        for i in range(0, groups * size, size)
    ]
    whole = backward(learner, F.cross_entropy(logits(x), y))
    assert batch_score.item() == pytest.approx(max(_cosine(whole, r) for r in references), abs=1e-4)
    for i in range(8):
        gradient = backward(learner, F.cross_entropy(logits(x[i : i + 1]), y[i : i + 1]))
        assert scores[i].item() == pytest.approx(max(_cosine(gradient, r) for r in references), abs=1e-4)


def _cosine(a, b):
    a, b = a.double().numpy(), b.double().numpy()
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def test_scoring_changes_nothing_in_the_network():
    learner = learned()
    before = digest(learner.network.state_dict())
    learner.update.score(learner, *digits(100, 110))
    assert digest(learner.network.state_dict()) == before
    assert all(w.grad is None for w in learner.weights)


# ---------------------------------------------------------------- the rule


def test_filling_keeps_everything_in_order_and_drops_what_is_too_much():
    learner = make(memory_size=25)
    learner.learn(*digits(0, 10))
    assert learner.update.scores[:10].tolist() == pytest.approx([FIRST_SCORE] * 10)
    learner.learn(*digits(10, 20))
    scores = learner.update.scores[:20].clone()
    assert (scores[10:].abs() <= 1 + 1e-5).all()
    assert scores[10:].unique().numel() == 10
    learner.learn(*digits(20, 30))
    assert torch.equal(learner.memory.contents()[0], digits(0, 25)[0])
    assert torch.equal(learner.memory.contents()[1], digits(0, 25)[1])
    assert torch.equal(learner.update.scores[:20], scores)
    assert (learner.update.scores[20:25] != 0).all()


def replaced_by_loops(stored, new, batch_score, exponentials, chances):
    """The rule, one candidate after another: {slot: which new image}."""
    if batch_score >= 0:
        return {}
    weights = [s - min(stored) for s in stored]
    if max(weights) == 0:
        weights = [1.0] * len(stored)
    races = sorted(range(len(stored)), key=lambda slot: -weights[slot] / exponentials[slot])
    result = {}
    for i, slot in enumerate(races[: len(new)]):
        yields = (stored[slot] + 1) / (stored[slot] + new[i] + 2) > chances[i]
        if weights[slot] > 0 and yields:
            result[slot] = i
    return result


@pytest.mark.parametrize("capacity", [4, 10, 40])
@pytest.mark.parametrize("alike", [False, True])
def test_replacement_equals_plain_loops(capacity, alike):
    learner = make(memory_size=capacity)
    random = torch.Generator().manual_seed(5)
    replaced = 0
    for _ in range(40):
        learner.update.scores[:capacity] = 0.1 if alike else torch.rand(capacity, generator=random) * 2 - 1
        new = torch.rand(10, generator=random) * 2 - 1
        batch_score = torch.rand((), generator=random) - 0.7
        ahead = random_like(learner)
        exponentials = torch.empty(capacity).exponential_(generator=ahead)
        chances = torch.rand(min(10, capacity), generator=ahead)
        expected = replaced_by_loops(
            *(t.double().tolist() for t in (learner.update.scores[:capacity], new, batch_score, exponentials, chances))
        )
        slots = learner.update.replace(learner, new, batch_score).tolist()
        assert {slot: i for i, slot in enumerate(slots) if slot < capacity} == expected
        assert len(slots) == 10
        replaced += len(expected)
    assert replaced > 40


def test_who_is_drawn_and_who_gives_way_by_chance():
    learner = make(memory_size=4)
    stored = torch.tensor([-0.5, 0.0, 0.25, 0.75])
    learner.update.scores[:4] = stored
    new, rounds, counts = torch.tensor([0.5]), 6000, np.zeros(5)
    for _ in range(rounds):
        counts[learner.update.replace(learner, new, torch.tensor(-0.1)).item()] += 1
    drawn = (stored + 0.5) / (stored + 0.5).sum()
    expected = (drawn * (stored + 1) / (stored + 0.5 + 2)).numpy()
    assert counts[0] == 0  # the least redundant image is never drawn
    np.testing.assert_allclose(counts[:4] / rounds, expected, atol=4 * np.sqrt(0.25 / rounds))


def test_a_batch_like_the_memory_replaces_nothing():
    learner = learned(memory_size=20)
    slots = learner.update.replace(learner, torch.zeros(10), torch.tensor(0.0))
    assert slots.tolist() == [20] * 10


def test_images_and_scores_are_replaced_together(monkeypatch):
    learner = learned(memory_size=20, batches=2)
    before_x, before_scores = learner.memory.contents()[0].clone(), learner.update.scores.clone()
    new = torch.linspace(-0.9, -0.1, 10)
    monkeypatch.setattr(GSSUpdate, "score", lambda *_: (new, torch.tensor(-0.5)))
    x, y = digits(500, 510)
    learner.update(learner, x, y)
    changed = (learner.update.scores != before_scores)[:20]
    assert changed.any()
    for slot in range(20):
        if changed[slot]:
            which = new.tolist().index(learner.update.scores[slot].item())
            assert torch.equal(learner.memory.images[slot], x[which])
            assert learner.memory.labels[slot] == y[which]
        else:
            assert torch.equal(learner.memory.images[slot], before_x[slot])


# ---------------------------------------------------------------- living with it


def test_scores_follow_their_images_when_a_class_is_forgotten():
    learner = learned(memory_size=40)
    owner = {learner.memory.images[i].numpy().tobytes(): learner.update.scores[i].item() for i in range(40)}
    removed = learner.forget(3)
    assert removed > 0
    for i in range(40 - removed):
        assert learner.update.scores[i].item() == owner[learner.memory.images[i].numpy().tobytes()]
    assert not learner.update.scores[40 - removed :].any()
    learner.learn(*digits(700, 710))


@pytest.mark.parametrize(("method", "options"), [("gss", {}), ("scr", {"update": "gss", "memory_batch": 12})])
def test_going_on_from_a_saved_state_gives_the_same_bits(method, options):
    learner = learned(method, 6, **options)
    twin = make(method, **options)
    twin.load_state_dict(copy.deepcopy(learner.state_dict()))
    for i in range(6, 9):
        learner.learn(*digits(10 * i, 10 * i + 10))
        twin.learn(*digits(10 * i, 10 * i + 10))
    assert digest(learner.state_dict()) == digest(twin.state_dict())


@pytest.mark.parametrize(
    ("memory_size", "batch", "single_class"), [(3, 10, False), (1, 10, False), (60, 1, False), (30, 10, True)]
)
@pytest.mark.parametrize(("method", "options"), [("gss", {}), ("scr", {"update": "gss"})])
def test_survives_small_memories_single_classes_and_batches_of_one(method, options, memory_size, batch, single_class):
    learner = make(method, memory_size=memory_size, **options)
    x, y = digits(0, 6 * batch)
    y = torch.zeros_like(y) if single_class else y
    for images, labels in zip(x.split(batch), y.split(batch), strict=True):
        assert torch.isfinite(learner.learn(images, labels))
    assert learner.memory.size == min(memory_size, 6 * batch)
    assert torch.isfinite(learner.update.scores[:-1]).all()
    assert all(torch.isfinite(w).all() for w in learner.weights)


def test_a_class_may_never_get_into_memory():
    learner = make(memory_size=10)
    learner.learn(digits(0, 10)[0], torch.zeros(10, dtype=torch.int64))
    learner.update.replace = lambda learner, scores, batch_score: torch.full((len(scores),), 10)
    learner.learn(digits(10, 20)[0], torch.ones(10, dtype=torch.int64))
    assert set(learner.memory.contents()[1].tolist()) == {0}
    with pytest.warns(UserWarning, match="1 of the classes"):
        assert set(learner.predict(digits(0, 20)[0], "ncm").tolist()) == {0}


def test_new_classes_replace_old_images():
    learner = make(memory_size=30)
    x, y = digits(0, 600)
    for half in (y < 5, y >= 5):
        for images, labels in list(zip(x[half].split(10), y[half].split(10), strict=True))[:20]:
            learner.learn(images, labels)
    assert (learner.memory.contents()[1] >= 5).any()
    assert (learner.memory.contents()[1] < 5).any()


def test_learns_digits():
    learner = learned(batches=40, memory_size=60)
    x, y = digits(1500, 1797)
    assert (learner.predict(x) == y).float().mean() > 0.6


def test_errors_say_what_to_do():
    with pytest.raises(InputError, match="references is 0"):
        GSSUpdate(references=0)
    with pytest.raises(InputError, match="reference_size is -1"):
        GSSUpdate(reference_size=-1)
    with pytest.raises(InputError, match="memory_size is 0"):
        make(memory_size=0)
