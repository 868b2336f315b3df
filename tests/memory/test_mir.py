"""MIR against a copied network that is stepped for real."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_encoder import SHAPE, digits, small

from scrlearn.checkpoint import digest
from scrlearn.errors import InputError
from scrlearn.learners import make_learner
from scrlearn.losses import supervised_contrastive_loss
from scrlearn.memory.losses import contrastive_losses, losses_per_image
from scrlearn.memory.mir import MIRRetrieval, interference


def learned(method="mir", batches=8, **options):
    options = {
        "memory_size": 60,
        "precision": "fp32",
        "device": "cpu",
        "learning_rate": 0.05,
        "encoder": small(),
    } | options
    learner = make_learner(method, image_shape=SHAPE, **options)
    for i in range(batches):
        learner.learn(*digits(10 * i, 10 * i + 10))
    return learner


def contrastive_by_loops(z, y, temperature):
    """Eq. 3 of the paper, anchor by anchor, in plain Python."""
    z, y = z.double().numpy(), y.numpy()
    losses = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        total = sum(np.exp(z[i] @ z[j] / temperature) for j in others)
        terms = [-np.log(np.exp(z[i] @ z[p] / temperature) / total) for p in positives]
        losses.append(sum(terms) / len(terms) if terms else 0.0)
    return torch.tensor(losses)


def candidates_of(learner, count):
    """The candidates the next retrieval will draw."""
    generator = torch.Generator().manual_seed(0)
    generator.set_state(learner.generator.get_state())
    return learner.memory.read(learner.memory.sample(count, generator))


@pytest.mark.parametrize("encoder", [small(), None])
def test_ranking_equals_a_copy_stepped_for_real(encoder):
    learner = learned(encoder=encoder)
    x, y = digits(200, 210)
    candidates_x, candidates_y = candidates_of(learner, 50)
    stepped = copy.deepcopy(learner.network)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.05)
    with torch.no_grad():
        before = F.cross_entropy(stepped.logits(candidates_x), candidates_y, reduction="none")
    F.cross_entropy(stepped.logits(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        after = F.cross_entropy(stepped.logits(candidates_x), candidates_y, reduction="none")
    rise = after - before
    best = rise.argsort(descending=True)[:10]
    assert rise[best[-1]] - rise.sort(descending=True).values[10] > 1e-4  # the choice is no tie

    gradient = learner.gradient(learner.objective.loss(learner, x, y))
    found_x, found_y = learner.retrieve(learner, x, y, 10, gradient)
    assert torch.equal(found_x, candidates_x[best])
    assert torch.equal(found_y, candidates_y[best])


def test_ranking_for_scr_uses_the_contrastive_terms_of_the_candidates():
    learner = learned("scr", retrieve="mir", candidates=40, memory_batch=10, augment=False, temperature=0.3)
    x, y = digits(300, 310)
    candidates_x, candidates_y = candidates_of(learner, 40)

    def losses(network):
        with torch.no_grad():
            return contrastive_by_loops(network.project(network.features(candidates_x)), candidates_y, 0.3)

    stepped = copy.deepcopy(learner.network)
    before = losses(stepped)
    z = stepped.project(stepped.features(torch.cat([x, x])))
    supervised_contrastive_loss(z, torch.cat([y, y]), 0.3).backward()
    torch.optim.SGD(stepped.parameters(), lr=0.05).step()
    best = (losses(stepped) - before).argsort(descending=True)[:10]
    found_x, _ = learner.retrieve(learner, x, y, 10)
    assert torch.equal(found_x, candidates_x[best])


def test_nothing_of_the_virtual_step_stays():
    learner = learned()
    x, y = digits(200, 210)
    gradient = [torch.full_like(w, 0.3) for w in learner.weights]
    expected = copy.deepcopy(learner.network)
    with torch.no_grad():
        expected.logits(x)  # the look before the step counts in the running statistics, the other one does not
    interference(learner, x, y, gradient)
    assert digest(learner.network.state_dict()) == digest(expected.state_dict())


def test_the_virtual_step_is_undone_even_after_an_error(monkeypatch):
    learner = learned()
    before = digest(learner.network.state_dict())
    calls = []

    def fail_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return torch.zeros(10)

    monkeypatch.setattr("scrlearn.memory.mir.losses_per_image", fail_second)
    with pytest.raises(KeyboardInterrupt):
        interference(learner, *digits(0, 10), [torch.ones_like(w) for w in learner.weights])
    assert digest(learner.network.state_dict()) == before


def test_a_given_gradient_is_used_and_no_other_is_computed(monkeypatch):
    learner = learned()
    x, y = digits(200, 210)
    gradient = learner.gradient(learner.objective.loss(learner, x, y))
    kept = [g.clone() for g in gradient]
    monkeypatch.setattr(learner, "gradient", lambda loss: pytest.fail("a second backward pass"))
    learner.retrieve(learner, x, y, 10, gradient)
    assert all(torch.equal(a, b) for a, b in zip(gradient, kept, strict=True))


def test_no_step_no_interference():
    learner = learned()
    x, y = digits(0, 10)
    assert interference(learner, x, y, [torch.zeros_like(w) for w in learner.weights]).tolist() == [0.0] * 10


def test_contrastive_terms_are_those_of_the_loss():
    z = F.normalize(torch.randn(12, 5, generator=torch.Generator().manual_seed(1)), dim=1)
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4])  # class 3 has no positive
    terms = contrastive_losses(z, y, z, y, 0.2)
    torch.testing.assert_close(terms.double(), contrastive_by_loops(z, y, 0.2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms.mean(), supervised_contrastive_loss(z, y, 0.2))


def test_a_probe_does_not_change_what_is_replayed():
    plain = learned("scr", retrieve="mir", candidates=30, memory_batch=10)
    probed = learned("scr", retrieve="mir", candidates=30, memory_batch=10, classifier="softmax")
    x, y = digits(100, 110)
    torch.testing.assert_close(losses_per_image(plain, x, y), losses_per_image(probed, x, y))
    assert torch.equal(plain.memory.contents()[0], probed.memory.contents()[0])


@pytest.mark.parametrize(("method", "options"), [("mir", {}), ("scr", {"retrieve": "mir", "memory_batch": 12})])
def test_going_on_from_a_saved_state_gives_the_same_bits(method, options):
    learner = learned(method, 4, **options)
    twin = learned(method, 0, **options)
    twin.load_state_dict(copy.deepcopy(learner.state_dict()))
    for i in range(4, 7):
        learner.learn(*digits(10 * i, 10 * i + 10))
        twin.learn(*digits(10 * i, 10 * i + 10))
    assert digest(learner.state_dict()) == digest(twin.state_dict())


@pytest.mark.parametrize(
    ("memory_size", "batch", "single_class"), [(3, 10, False), (1, 10, False), (60, 1, False), (60, 10, True)]
)
@pytest.mark.parametrize(("method", "options"), [("mir", {}), ("scr", {"retrieve": "mir"})])
def test_survives_small_memories_single_classes_and_batches_of_one(method, options, memory_size, batch, single_class):
    learner = make_learner(
        method, image_shape=SHAPE, memory_size=memory_size, precision="fp32", device="cpu", **options
    )
    x, y = digits(0, 6 * batch)
    y = torch.zeros_like(y) if single_class else y
    for images, labels in zip(x.split(batch), y.split(batch), strict=True):
        assert torch.isfinite(learner.learn(images, labels))
    assert learner.memory.size == min(memory_size, 6 * batch)
    assert all(torch.isfinite(w).all() for w in learner.weights)


def test_learns_digits():
    learner = learned("mir", 30, memory_size=200, encoder=None)
    x, y = digits(1500, 1797)
    assert (learner.predict(x) == y).float().mean() > 0.5


def test_errors_say_what_to_do():
    with pytest.raises(InputError, match="candidates is 0"):
        MIRRetrieval(candidates=0)
    with pytest.raises(InputError, match="at least as many candidates"):
        make_learner("mir", image_shape=SHAPE, candidates=5)
    with pytest.raises(InputError, match="memory_size is 0"):
        make_learner("mir", image_shape=SHAPE, memory_size=0)


def test_signature_changes_with_the_number_of_candidates():
    learner = make_learner("mir", image_shape=SHAPE, memory_size=100, device="cpu")
    signatures = set()
    for i in range(7):
        learner.learn(*digits(10 * i, 10 * i + 10))
        signatures.add(learner.signature(10))
    assert len(signatures) == 5  # 10, 20, 30, 40 and, from 50 on, the same
