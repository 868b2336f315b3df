"""A step in one pass over stream and memory images against one with a pass for each."""

import pytest
import torch

from scrlearn.learners import make_learner
from scrlearn.learners.replay import Replay
from scrlearn.losses import cross_entropy_loss
from scrlearn.models import Network

SHAPE = (3, 16, 16)


def batches(count, images=10, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randint(0, 256, (images, *SHAPE), generator=numbers, dtype=torch.uint8)
        yield x, torch.randint(0, 4, (images,), generator=numbers)


def er(**options):
    return make_learner("er", image_shape=SHAPE, memory_size=30, device="cpu", seed=1, precision="fp32", **options)


@pytest.fixture
def together(monkeypatch):
    """Segments go through the encoder at once, as they do on CUDA with Triton."""
    monkeypatch.setattr(Network, "takes_segments", lambda self, x: True)


def plain_step(learner, x, y):
    """Experience replay as the paper writes it down: a forward and a backward for each of the two batches."""
    loss = cross_entropy_loss(learner.network.logits(x), y)
    gradient = torch.autograd.grad(loss, learner.weights)
    if learner.memory.size:
        slots = learner.memory.sample(learner.memory_batch, learner.generator)
        memory_x, memory_y = learner.memory.images[slots], learner.memory.labels[slots]
        replayed = torch.autograd.grad(cross_entropy_loss(learner.network.logits(memory_x), memory_y), learner.weights)
        gradient = [a + b for a, b in zip(gradient, replayed, strict=True)]
    with torch.no_grad():
        for weight, g in zip(learner.weights, gradient, strict=True):
            weight.add_(g, alpha=-learner.learning_rate)
    return loss


def state(learner):
    values = learner.network.state_dict()
    return [*values.values(), learner.memory.images[:20], learner.memory.labels[:20], learner.generator.get_state()]


def test_on_a_cpu_a_step_has_the_bits_of_two_passes(monkeypatch):
    ours, plain = er(), er()
    losses = [ours.learn(x, y) for x, y in batches(4)]
    monkeypatch.setattr(Replay, "_separate_step", plain_step)
    assert losses == [plain.learn(x, y) for x, y in batches(4)]
    for a, b in zip(state(ours), state(plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("together")
def test_one_pass_gives_what_two_give(monkeypatch):
    merged, plain = er(), er()
    seen = []
    forward = merged.network.encoder.forward
    merged.network.encoder.forward = lambda x, segments=1: seen.append((len(x), segments)) or forward(x, segments)
    losses = [merged.learn(x, y).item() for x, y in batches(3)]
    assert seen == [(10, 1), (20, 2), (20, 2)]
    monkeypatch.setattr(Replay, "_separate_step", plain_step)
    assert losses == pytest.approx([plain.learn(x, y).item() for x, y in batches(3)], rel=1e-3)  # of the stream alone
    for a, b in zip(state(merged), state(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(merged.generator.get_state(), plain.generator.get_state())


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    ("method", "options", "shares"),
    [
        ("er", {}, True),
        ("gss", {}, True),
        ("er", {"memory_batch": 7}, False),
        ("er", {"averaging": 0.9, "distillation_weight": 1.0}, False),
        ("er", {"retrieve": "aser"}, False),
        ("mir", {}, False),
        ("fine-tune", {}, False),
    ],
    ids=str,
)
def test_who_shares_a_pass(method, options, shares):
    learner = make_learner(method, image_shape=SHAPE, memory_size=30, device="cpu", **options)
    first, second = batches(2)
    assert not learner._shares_pass(first[0])  # there is nothing to replay
    learner.learn(*first)
    assert learner._shares_pass(second[0]) == shares
    assert learner.learn(*second).isfinite()


def test_separate_views_have_the_bits_of_two_forwards():
    learner = make_learner("scr", image_shape=SHAPE, device="cpu", views="separate", seed=1)
    other = make_learner("scr", image_shape=SHAPE, device="cpu", views="separate", seed=1)
    x = torch.cat([x for x, _ in batches(2)]).float() / 255
    found = learner.network.train().features(x, segments=2)
    assert torch.equal(found, torch.cat([other.network.train().features(part) for part in x.chunk(2)]))
    for a, b in zip(learner.network.buffers(), other.network.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"cross_entropy_weight": 1.0}], ids=str)
def test_separate_views_in_one_pass(monkeypatch, options):
    losses = []
    for at_once in (False, True):
        monkeypatch.setattr(Network, "takes_segments", lambda self, x, at_once=at_once: at_once)
        learner = make_learner(
            "scr", image_shape=SHAPE, memory_batch=20, device="cpu", views="separate", precision="fp32", **options
        )
        losses.append([learner.learn(x, y).item() for x, y in batches(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][1] > 0
