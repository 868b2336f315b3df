"""The parts of scr+, each against an independent computation; and that every method can use those that fit it."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from digit_stream import accuracy, assert_resumes, digits, learn, make, stream
from scipy.special import log_softmax, softmax
from test_stream_methods_graph_safe import NoWaiting

from scrlearn.checkpoint import digest
from scrlearn.classifiers import LinearDiscriminant, NearestClassMean, fit_offsets
from scrlearn.errors import InputError
from scrlearn.learners import METHODS, make_learner
from scrlearn.learners.base import middle
from scrlearn.learners.blends import blends
from scrlearn.learners.objectives import distillation, preservation
from scrlearn.mixing import cut_mix
from scrlearn.models.orthogonal import polynomials
from scrlearn.randomness import generator

PARTS = {
    "averaging": 0.9,
    "centred": True,
    "mirror": True,
    "crops": True,
    "mix_after": 20.0,
    "weight_decay": 0.001,
    "cross_entropy_weight": 1.0,
    "update": "balanced",
    "momentum": 0.9,
    "learning_rate": 0.05,
    "orthogonal": 0.02,
    "calibrated": True,
    "classifier": "combined",
}
REPLAYING = ("er", "mir", "a-gem", "gss", "aser", "fine-tune")


def plus(**options):
    usual = {"memory_size": 30, "memory_batch": 20, "averaging": 0.9, "crops": False, "calibrated": False}
    return make("scr+", **usual | options)


def many_classes(batches=8):
    """Batches whose classes soon outnumber the first room of the head."""
    x, _ = digits(10 * batches)
    return [(x[10 * i : 10 * i + 10], torch.arange(10) % 5 + 5 * i) for i in range(batches)]


# ---------------------------------------------------------------- the preset


def test_the_preset_is_scr_and_its_parts():
    scr, plus_ = METHODS["scr"].parameters(), METHODS["scr+"].parameters()
    assert {name for name in plus_ if plus_[name] != scr[name]} == PARTS.keys()


def test_it_learns():
    learner = learn(plus(memory_size=60), batches=12)
    assert accuracy(learner) > 0.7
    assert accuracy(learner, "softmax") > 0.4
    counts = learner.memory.contents()[1].bincount()
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("place", [(0, 1), (1, 2)])
def test_resumes(place):
    options = {"distillation_weight": 0.5, "review": True, "classifier": "combined", "memory_size": 110}
    assert_resumes(lambda: plus(**options), *place, batches=6)


def test_resumes_while_the_head_grows():
    batches = many_classes()
    whole = plus()
    for x, y in batches[:2]:
        whole.learn(x, y)
    resumed = plus()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for x, y in batches[2:]:
        whole.learn(x, y)
        resumed.learn(x, y)
    assert whole.network.head.capacity > 16
    assert digest(whole.state_dict()) == digest(resumed.state_dict())


def test_room_made_ahead_changes_nothing():
    growing, roomy = plus(), plus()
    roomy.reserve(60)
    for x, y in many_classes():
        growing.learn(x, y)
        roomy.learn(x, y)
    rows = growing.num_classes
    for one, other in ((growing.network, roomy.network), (growing.average, roomy.average)):
        torch.testing.assert_close(one.head.weight[:rows], other.head.weight[:rows])
        torch.testing.assert_close(one.head.bias[:rows], other.head.bias[:rows])
        torch.testing.assert_close(one.encoder.state_dict(), other.encoder.state_dict())


# ---------------------------------------------------------------- averaged weights


class Snapshots:
    """What the network looked like after every step."""

    def __init__(self, learner):
        self.states, step = [copy.deepcopy(learner.network.state_dict())], learner.descend

        def descend(gradient, scale=1.0):
            step(gradient, scale)
            self.states.append(copy.deepcopy(learner.network.state_dict()))

        learner.descend = descend

    def average(self, decay, name):
        value = self.states[0][name].double()
        for t, state in enumerate(self.states[1:], 1):
            share = min(decay, (1 + t) / (10 + t))
            value = share * value + (1 - share) * state[name].double()
        return value


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("er", {}),
        ("scr", {"memory_batch": 20, "updates_per_batch": 2, "cross_entropy_weight": 0.5}),
        ("lwf", {}),
        ("icarl", {}),
        ("er", {"review": True, "memory_size": 110, "classes_ahead": 12}),
    ],
)
def test_the_average_is_the_running_mean_of_every_step(method, options):
    learner = make(method, averaging=0.6, **{"memory_size": 30} | options)
    seen = Snapshots(learner)
    learn(learner, tasks=2, batches=6)
    assert learner.updates.item() == len(seen.states) - 1 > 10
    averaged = learner.average.state_dict()
    for name, tensor in averaged.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), seen.average(0.6, name), rtol=1e-4, atol=1e-5)
        else:  # counters and masks are those of the network
            assert torch.equal(tensor, learner.network.state_dict()[name])
    assert averaged["encoder.1.num_batches_tracked"] > 0
    assert (averaged["encoder.1.running_mean"] != learner.network.state_dict()["encoder.1.running_mean"]).any()


def test_the_average_answers():
    learner = learn(plus())
    x, _ = digits(20)
    answers = {name: learner.scores(x, name) for name in ("softmax", "ncm", "combined", "lda")}
    for weight in learner.weights:
        weight.data.normal_(generator=torch.Generator().manual_seed(0))
    learner._changed()
    for name, scores in answers.items():
        assert torch.equal(learner.scores(x, name), scores), name


def test_a_class_met_before_the_first_step_can_be_answered():
    learner = plus()
    x, y = next(stream())[0]
    learner.learn(x, y)  # only stored: there is no memory to train with yet
    assert learner.updates.item() == 0
    assert learner.scores(x, "softmax")[:, :2].isfinite().all()


def test_a_forgotten_class_is_forgotten_by_the_average_too():
    learner = learn(plus())
    learner.forget(1)
    assert not learner.average.head.active[1]
    assert learner.scores(digits(5)[0], "softmax")[:, 1].eq(-torch.inf).all()


# ---------------------------------------------------------------- mirror images


@pytest.mark.parametrize("averaging", [0.0, 0.9])
def test_mirrored_features_are_the_mean_of_two(averaging):
    mirrored = learn(make("er", memory_size=30, mirror=True, averaging=averaging))
    plain = learn(make("er", memory_size=30, averaging=averaging))
    x, _ = digits(20)
    features = (plain.features(x) + plain.features(x.flip(-1))) / 2
    torch.testing.assert_close(mirrored.features(x), features)
    torch.testing.assert_close(mirrored.features(x), mirrored.features(x.flip(-1)))
    torch.testing.assert_close(mirrored.embed(x), F.normalize(features, dim=1))
    logits = (plain.scores(x, "softmax") + plain.scores(x.flip(-1), "softmax")) / 2
    torch.testing.assert_close(mirrored.scores(x, "softmax"), logits)
    images, labels = plain.memory.contents()
    stored = (plain.features(images) + plain.features(images.flip(-1))) / 2
    expected = NearestClassMean.fit(stored, labels, plain.num_classes).scores(features)
    torch.testing.assert_close(mirrored.scores(x, "ncm"), expected)


# ---------------------------------------------------------------- crops


def bilinear_by_loops(image, height, width):
    """One channel brought to another size; pixels are squares, and what lies beyond the edge is the edge."""

    def along(size, length):
        for i in range(length):
            place = min(max((i + 0.5) * size / length - 0.5, 0.0), size - 1.0)
            low = int(place)
            yield low, min(low + 1, size - 1), place - low

    rows = [
        [(1 - share) * a + share * b for a, b in zip(image[low], image[high], strict=True)]
        for low, high, share in along(len(image), height)
    ]
    columns = list(along(len(image[0]), width))
    return [[(1 - share) * row[low] + share * row[high] for low, high, share in columns] for row in rows]


@pytest.mark.parametrize(
    ("height", "width", "top", "left"), [(8, 8, 1, 1), (32, 32, 4, 4), (7, 16, 1, 2), (84, 84, 10, 10), (1, 3, 0, 0)]
)
def test_the_middle_is_brought_back_to_size(height, width, top, left):
    x = torch.rand(2, 1, height, width, generator=torch.Generator().manual_seed(0))
    found = middle(x, height, width)
    for n in range(2):
        part = [row[left : width - left] for row in x[n, 0].tolist()[top : height - top]]
        torch.testing.assert_close(found[n, 0], torch.tensor(bilinear_by_loops(part, height, width)))
    torch.testing.assert_close(middle(x.flip(-1), height, width), found.flip(-1))  # the same of the mirror image


def test_of_images_that_are_asked_about_the_middle_is_seen_too_and_of_stored_ones_not():
    options = {"memory_size": 30, "mirror": True, "averaging": 0.9}
    plain, cropped = learn(make("er", **options)), learn(make("er", crops=True, **options))
    assert digest(plain.state_dict()) == digest(cropped.state_dict())  # training is not changed
    x, _ = digits(20)
    features = (plain.features(x) + plain.features(middle(x / 255, 8, 8))) / 2
    torch.testing.assert_close(cropped.features(x), features)
    torch.testing.assert_close(cropped.scores(x, "ncm"), plain.prototypes().scores(features))
    torch.testing.assert_close(cropped.prototypes().prototypes, plain.prototypes().prototypes)


# ---------------------------------------------------------------- calibration


@pytest.mark.filterwarnings("ignore:.*have no image in memory")
@pytest.mark.parametrize("classifier", ["softmax", "ncm", "combined", "lda"])
def test_calibrated_scores_have_the_offsets_that_blends_of_the_memory_ask_for(classifier):
    options = {"memory_size": 40, "classifier": "combined"}
    plain, calibrated = learn(make("er", **options)), learn(make("er", calibrated=True, **options))
    assert digest(plain.state_dict()) == digest(calibrated.state_dict())  # training is not changed
    x, _ = digits(60)
    images, labels = plain.memory.contents()
    pairs = blends(images, labels, plain.num_classes, generator(plain.seed, "blends", plain.steps))
    told = plain.scores(pairs.images, classifier)
    offsets = fit_offsets(told, pairs.shares, default=0.1 if classifier == "ncm" else 1.0)
    assert offsets.abs().max() > 0.01
    torch.testing.assert_close(calibrated.scores(x, classifier), plain.scores(x, classifier) + offsets)
    probabilities = calibrated.probabilities(x, classifier)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(60))


@pytest.mark.filterwarnings("ignore:.*have no image in memory")
def test_offsets_are_computed_once_after_each_change(monkeypatch):
    learner = learn(make("er", memory_size=40, calibrated=True))
    asked = []

    def counted(*given):
        asked.append(len(given[0]))
        return blends(*given)

    monkeypatch.setattr("scrlearn.learners.base.blends", counted)
    x, y = digits(30)
    for _ in range(3):
        learner.scores(x, "ncm"), learner.scores(x, "softmax")
    assert asked == [40]
    learner.learn(x[:10], y[:10])
    before = learner.scores(x, "ncm")
    assert asked == [40, 40]
    first = int(before.argmax(1)[0])
    learner.forget(first)
    after = learner.scores(x, "ncm")
    assert len(asked) == 3
    assert not torch.isfinite(after[:, first]).any()


def test_recency_is_taken_back():
    """Fine-tuned on new classes alone, the softmax layer knows no others; blends of stored images tell it."""
    plain = learn(make("er", memory_size=60, learning_rate=0.05), tasks=2, batches=12)
    calibrated = copy.deepcopy(plain)
    calibrated.calibrated = True
    assert accuracy(calibrated, "softmax") > accuracy(plain, "softmax") + 0.05


# ---------------------------------------------------------------- momentum


@pytest.mark.parametrize(("review", "decay"), [(False, 0.0), (True, 0.0), (False, 0.03)])
def test_momentum_and_weight_decay_are_those_of_torch(review, decay):
    """A tenth of the gradient joins the velocity in a review; the velocity itself is not shortened.

    The weights of the head, the last two, do not decay: classes still to come would have other first values.
    """
    learner = make("er", memory_size=110, momentum=0.9, learning_rate=0.02, review=review, weight_decay=decay)
    twin = [w.detach().clone().requires_grad_() for w in learner.weights]
    groups = [{"params": twin[:-2], "weight_decay": decay}, {"params": twin[-2:]}]
    optimiser, step, scales = torch.optim.SGD(groups, lr=0.02, momentum=0.9), learner.descend, []

    def descend(gradient, scale=1.0):
        for weight, g in zip(twin, gradient, strict=True):
            weight.grad = g * scale
        optimiser.step()
        scales.append(scale)
        step(gradient, scale)

    learner.descend = descend
    learn(learner, tasks=2, batches=6)
    assert scales.count(0.1) == (1 if review else 0)  # 120 images, one batch of 100 after the second task
    for ours, theirs in zip(learner.weights, twin, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------- orthogonalised velocities


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_matrices_of_the_encoder_are_turned_and_all_else_descends(momentum):
    """Against one weight at a time, and torch's own gradient descent; with averages, a review and a head that grows."""
    options = {"momentum": momentum, "learning_rate": 0.02, "weight_decay": 0.03, "averaging": 0.9}
    learner = make("er", memory_size=110, review=True, orthogonal=0.05, **options)
    layers = [m for m in learner.network.encoder.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    turned = [id(layer.weight) for layer in layers]
    assert {id(weight) for weight in learner.matrices.weights} == {*turned}
    assert len(turned) >= 2
    lengths = {place: float(w.detach().norm()) for place, w in enumerate(learner.weights) if id(w) in turned}
    velocity, step, checked = {}, learner.descend, []

    def descend(gradient, scale=1.0):
        before = [w.detach().clone() for w in learner.weights]
        own = [0.0 if not momentum else v.clone() for v in learner.velocity] or [0.0] * len(before)
        step(gradient, scale)
        for place, (w, g) in enumerate(zip(before, gradient, strict=True)):
            if place in lengths:
                velocity[place] = momentum * velocity.get(place, 0.0) + scale * g
                ahead = (scale * g + momentum * velocity[place]).flatten(1)
                move = 0.05 * lengths[place] / math.sqrt(min(ahead.shape)) * polynomials([ahead])[0] @ ahead
                expected = math.sqrt(1 - 0.05**2) * w - move.view(w.shape)
            else:
                decay = 0.03 if place < len(before) - 2 else 0.0  # the head's two do not decay
                expected = w - 0.02 * (momentum * own[place] + scale * (g + decay * w))
            torch.testing.assert_close(learner.weights[place].detach(), expected, atol=1e-5, rtol=1e-4)
        checked.append(scale)

    learner.descend = descend
    learn(learner, tasks=2, batches=6)
    assert checked.count(0.1) == 1
    averaged = dict(learner.average.named_parameters())
    assert any((w != averaged[name]).any() for name, w in learner.network.named_parameters())


# ---------------------------------------------------------------- the loss on features too


def test_the_loss_on_features_is_added_with_its_weight():
    """Against the formula in plain loops, on features and on projections."""
    learner = learn(make("scr", memory_size=20, memory_batch=10, feature_weight=0.3, augment=None, precision="fp32"))
    x, y = digits(6)
    y = y % 3

    def by_hand(z):
        total = 0.0
        for i in range(len(z)):
            others = [j for j in range(len(z)) if j != i]
            positives = [j for j in others if both[j] == both[i]]
            below = sum(float(torch.exp(z[i] @ z[j] / 0.1)) for j in others)
            logs = [math.log(float(torch.exp(z[i] @ z[j] / 0.1)) / below) for j in positives]
            total -= sum(logs) / max(1, len(logs))
        return total / len(z)

    learner.set_training(True)
    both = torch.cat([y, y]).tolist()
    with torch.no_grad():
        images = x.double() / 255
        network = copy.deepcopy(learner.network).double()
        features = network.encoder(torch.cat([images, images]))
        expected = by_hand(network.project(features)) + 0.3 * by_hand(F.normalize(features, dim=1))
        found = float(learner.objective.loss(learner, x, y))
    assert found == pytest.approx(expected, rel=1e-3)


# ---------------------------------------------------------------- the two views


def test_half_of_the_first_views_are_mirror_images():
    """What the network is given: the second views as they were drawn, the first mirrored for some images alone."""
    learner = learn(make("scr", memory_size=20, memory_batch=10, first_view="mirrored", augment=None, precision="fp32"))
    x, y = digits(400)
    seen = []

    def watched(images, segments):
        seen.append(images)
        return features(images, segments)

    features, learner.network.features = learner.network.features, watched
    learner.objective.loss(learner, x, y % 3)
    first, second = seen[0].split(400)
    torch.testing.assert_close(second, x / 255)
    mirrored = (first == second.flip(-1)).flatten(1).all(1)
    assert ((first == second).flatten(1).all(1) | mirrored).all()
    assert 150 < int(mirrored.sum()) < 250


def test_both_views_augmented_are_two_draws():
    learner = learn(make("scr", memory_size=20, memory_batch=10, first_view="augmented", precision="fp32"))
    x, y = digits(30)
    seen, features = [], learner.network.features
    learner.network.features = lambda images, segments: seen.append(images) or features(images, segments)
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    learner.objective.loss(learner, x, y)
    draws = [learner.objective.augment(x / 255, generator) for _ in range(2)]
    torch.testing.assert_close(seen[0], torch.cat(draws[::-1]))
    assert not torch.equal(*draws)


def test_the_loss_weighs_the_two_views_of_an_image():
    """With one image of a class its other view is the only positive, so any weight gives the same; with two, not."""
    options = {"memory_size": 20, "memory_batch": 10, "augment": None, "precision": "fp32"}
    learners = [learn(make("scr", **options)), learn(make("scr", **options))]
    learners[1].objective.view_weight = 7.0
    for learner in learners:
        learner.set_training(True)
    x, _ = digits(6)
    alone, paired = torch.arange(6), torch.arange(6) // 2
    losses = [[learner.objective.loss(learner, x, y).item() for y in (alone, paired)] for learner in learners]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert losses[1][1] < losses[0][1]  # plain copies lie in one place, other images of a class do not


def test_stream_images_are_told_from_the_streams_classes_alone():
    """Both losses by hand: rows of the stream see no column, and no other row, of another class than the stream's."""
    options = {"cross_entropy_weight": 0.5, "augment": None, "precision": "fp32", "stream_against": "stream"}
    learner = learn(make("scr", memory_size=20, memory_batch=10, **options))
    x, _ = digits(12)
    y = torch.tensor([0, 1, 0, 1, 2, 3, 0, 2, 1, 3, 0, 2])
    learner.set_training(True)
    learner.replaying = 8  # the first four are the stream's
    with torch.no_grad():
        network = copy.deepcopy(learner.network).double()
        features = network.encoder(torch.cat([x, x]).double() / 255)
        z, logits, both = network.project(features), network.head(features), torch.cat([y, y])
        total = 0.0
        for i in range(24):
            fresh = i % 12 < 4
            others = [j for j in range(24) if j != i and not (fresh and both[j] > 1)]
            logs = torch.log_softmax(z[others] @ z[i] / 0.1, dim=0)
            total -= float(logs[both[others] == both[i]].mean())
            known = logits[i, :2] if fresh else logits[i][torch.isfinite(logits[i])]
            total -= 0.5 * float(torch.log_softmax(known, dim=0)[both[i]])
        found = float(learner.objective.loss(learner, x, y))
        learner.replaying = 12  # a review: none is the stream's
        review = float(learner.objective.loss(learner, x, y))
        learner.objective.stream_against = "all"
        assert float(learner.objective.loss(learner, x, y)) == review != found
    assert found == pytest.approx(total / 24, rel=1e-3)


# ---------------------------------------------------------------- pieces of other images in the second view


def test_views_with_pieces_of_others_are_as_much_of_each_class_as_they_show():
    """Both losses from the classes' shares as vectors, in double precision."""
    options = {"mix_after": 2.0, "cross_entropy_weight": 0.5, "augment": None, "precision": "fp32"}
    learner = learn(make("scr", memory_size=20, memory_batch=10, **options))
    x, y = digits(12)
    y = y % 3
    random = torch.Generator().manual_seed(5)
    learner.generator.manual_seed(5)
    learner.set_training(True)
    learner.replaying = 9  # of the twelve
    images, replays = x / 255, float(learner.replays)
    views = cut_mix(images, random, torch.tensor([0.0] * 3 + [replays / (replays + 2)] * 9))
    classes = F.one_hot(y, 3).double()
    share = views.share.double()[:, None]
    classes = torch.cat([classes, (1 - share) * classes + share * classes[views.other]])
    assert not share[:3].any()
    assert int((share > 0).sum()) > 3
    with torch.no_grad():
        network = copy.deepcopy(learner.network).double()
        features = network.encoder(torch.cat([images, views.images]).double())
        itself = torch.eye(24, dtype=torch.bool)
        z = network.project(features)
        logs = torch.log_softmax((z @ z.T / 0.1).masked_fill(itself, -torch.inf), dim=1).masked_fill(itself, 0.0)
        alike = (classes @ classes.T).masked_fill(itself, 0.0)
        expected = -((alike * logs).sum(1) / alike.sum(1)).mean()
        known = torch.log_softmax(network.head(features), dim=1)[:, :3]
        expected += 0.5 * -(classes * known).sum(1).mean()
        found = learner.objective.loss(learner, x, y)
    assert float(found) == pytest.approx(float(expected), rel=1e-3)


def test_replays_are_counted_and_the_stream_batch_stays_whole(monkeypatch):
    """Ten of twenty stored images at a time: half a replay a step, from the second batch on."""
    asked = []

    def watched(x, generator, probability):
        asked.append(probability.tolist())
        return cut_mix(x, generator, probability)

    monkeypatch.setattr("scrlearn.learners.objectives.cut_mix", watched)
    learner = make("scr", memory_size=20, memory_batch=10, mix_after=3.0, updates_per_batch=2)
    x, y = digits(50)
    for part_x, part_y in zip(x.split(10), y.split(10), strict=True):
        learner.learn(part_x, part_y)
    assert [len(row) for row in asked] == [20] * 8
    assert all(row[:10] == [0.0] * 10 for row in asked)
    replays = [0.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]  # ten are stored at first, then twenty
    assert [row[10] for row in asked] == pytest.approx([r / (r + 3) for r in replays])
    assert float(learner.replays) == 4.0


# ---------------------------------------------------------------- several steps a batch


@pytest.mark.parametrize("method", ["scr", "er"])
def test_a_memory_that_is_known_by_heart_is_replayed_once_a_batch(method):
    """Ten of twenty stored images at a time: three replays of each are made in two batches with three steps each."""
    learner = make(method, memory_size=20, memory_batch=10, updates_per_batch=3, updates_until=3.0)
    x, y = digits(60)
    made, step = [], learner.descend
    learner.descend = lambda *given: (made.append(learner.steps), step(*given))
    for part_x, part_y in zip(x.split(10), y.split(10), strict=True):
        learner.learn(part_x, part_y)
    # 0 or 3 steps without a memory, 30 images drawn from 10, 60 from 20: three times each
    first = 3 if method == "er" else 0
    assert [made.count(batch) for batch in range(6)] == [first, 3, 3, 1, 1, 1]


@pytest.mark.parametrize(("method", "replays"), [("fine-tune", 0), ("a-gem", 0), ("er", 10)])
def test_what_is_not_replayed_does_not_wear_the_memory(method, replays):
    """Fine-tuning never replays, A-GEM not before a task is over."""
    learner = make(method, memory_size=20, memory_batch=10, updates_per_batch=3, updates_until=0.1)
    x, y = digits(40)
    for part_x, part_y in zip(x.split(10), y.split(10), strict=True):
        learner.learn(part_x, part_y)
    assert learner.replays_now == replays
    assert learner.updates_now == (1 if replays else 3)
    learner.end_task()
    assert learner.replays_now == (0 if method == "fine-tune" else 10)


@pytest.mark.parametrize("method", [*REPLAYING, "scr"])
def test_several_steps_but_one_memory_update(method):
    learner = make(method, memory_size=40, memory_batch=10, updates_per_batch=3)
    drawn, offered, retrieve, update = [], [], learner.retrieve, learner.update

    class Watching(type(retrieve)):
        def __call__(self, *arguments, **more):
            images, labels = super().__call__(*arguments, **more)
            drawn.append(images)
            return images, labels

    class Keeping(type(update)):
        def __call__(self, learner, x, y):
            offered.append(len(x))
            super().__call__(learner, x, y)

    retrieve.__class__, update.__class__ = Watching, Keeping
    seen, batches = Snapshots(learner), [batch for task in stream(tasks=1, batches=6) for batch in task]
    learner.end_task()  # A-GEM looks at its memory from the second task on
    for x, y in batches:
        learner.learn(x, y)
    first = 0 if learner.objective.needs_memory else 3
    assert len(seen.states) - 1 == first + 3 * 5
    assert offered == [10] * 6
    assert learner.memory.seen.item() == 60
    if method != "fine-tune":
        assert len(drawn) == 3 * 5
        assert not torch.equal(drawn[-1], drawn[-2])


# ---------------------------------------------------------------- classifiers


@pytest.mark.parametrize("centred", [False, True])
def test_the_combined_classifier_adds_log_probabilities(centred):
    learner = learn(plus(classifier="combined", memory_size=24, centred=centred), tasks=4)
    x, _ = digits(30)
    logits, cosines = learner.scores(x, "softmax").numpy(), learner.scores(x, "ncm").numpy()
    temperature = learner.temperature_of_means()
    expected = log_softmax(logits, axis=1) + log_softmax(cosines / temperature, axis=1)
    np.testing.assert_allclose(learner.scores(x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(learner.probabilities(x), softmax(expected, axis=1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("centred", [False, True])
def test_the_temperature_of_means_makes_stored_images_most_likely(centred):
    """By hand: every stored image against the means of the others; no other temperature does better."""
    learner = learn(plus(classifier="combined", memory_size=40, centred=centred), tasks=3)
    images, labels = learner.memory.contents()
    z = learner.prototypes().directions(learner.features(images)).double()
    rows = []
    for i in range(len(labels)):
        rest = torch.arange(len(labels)) != i
        means = [F.normalize(z[rest & (labels == c)].mean(0), dim=0) for c in range(learner.num_classes)]
        rows.append(torch.stack(means) @ z[i])
    own, right = torch.stack(rows), 1 - 1 / (len(labels) + 2)
    assert torch.isfinite(own).all()

    def loss(temperature):
        logs = torch.log_softmax(own / temperature, dim=1)
        of_right = logs.gather(1, labels[:, None])[:, 0]
        others = (logs.sum(1) - of_right) / (learner.num_classes - 1)
        return -float((right * of_right + (1 - right) * others).mean())

    found = learner.temperature_of_means()
    assert loss(found) < min(loss(found * 1.1), loss(found / 1.1))
    assert learner.temperature_of_means() is found  # once
    learner.learn(images[:10].clone(), labels[:10].clone())
    assert learner.temperature_of_means() != found
    assert learn(make("er", memory_size=20, prototypes="sdc")).temperature_of_means() == 0.1


def test_a_class_that_one_of_the_two_does_not_know_is_not_predicted():
    learner = learn(plus(classifier="combined", update="reservoir", memory_size=3, memory_batch=3), tasks=4)
    missing = [c for c in range(learner.num_classes) if c not in learner.memory.contents()[1]]
    assert missing
    with pytest.warns(UserWarning, match="no image in memory"):
        scores = learner.scores(digits(10)[0])
    assert scores[:, missing].eq(-torch.inf).all()
    assert scores.isfinite().any(1).all()


def test_the_lda_classifier_is_fitted_to_the_memory_once_after_each_change(monkeypatch):
    learner, calls, fit = learn(plus(classifier="lda")), [], LinearDiscriminant.fit
    monkeypatch.setattr(LinearDiscriminant, "fit", lambda *given: calls.append(1) or fit(*given))
    x, y = digits(10)
    images, labels = learner.memory.contents()
    expected = fit(learner.features(images), labels, learner.num_classes).scores(learner.features(x))
    for _ in range(3):
        assert torch.equal(learner.scores(x), expected)
    assert len(calls) == 1
    learner.learn(x, y % 6)
    assert not torch.equal(learner.scores(x), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("centred", [False, True])
def test_the_projection_is_compared_beside_the_features(centred):
    learner = learn(plus(projection_share=0.5, centred=centred))
    x, _ = digits(10)

    def both(images):
        features = learner.features(images)
        return torch.cat([F.normalize(features, dim=1), 0.5 * learner.average.project(features)], dim=1)

    images, labels = learner.memory.contents()
    expected = NearestClassMean.fit(both(images), labels, learner.num_classes, centred).scores(both(x))
    torch.testing.assert_close(learner.scores(x, "ncm"), expected)
    assert not torch.allclose(expected, learn(plus(centred=centred)).scores(x, "ncm"), equal_nan=True)
    # the cosines of both, weighted by the squares of their lengths, where nothing is taken away
    if not centred:
        parts = [(learner.features, 1.0), (lambda x: learner.average.project(learner.features(x)), 0.25)]
        means = [F.normalize(both(images), dim=1)[labels == c].mean(0) for c in range(learner.num_classes)]
        for c, mean in enumerate(means):
            length = learner.feature_length
            halves = (mean[:length], mean[length:])
            by_hand = sum(
                F.normalize(see(x), dim=1) @ half * weight**0.5
                for (see, weight), half in zip(parts, halves, strict=True)
            )
            torch.testing.assert_close(expected[:, c], by_hand / mean.norm() / 1.25**0.5)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("er", {"projection_share": 0.5}, "projection_share is 0.5, but this learner trains no projection"),
        ("scr", {"prototypes": "sdc", "centred": True}, "centred needs class means of stored images"),
        ("scr", {"prototypes": "sdc", "projection_share": 1.0}, "projection_share needs class means of stored images"),
        ("scr", {"projection_share": -1.0}, "projection_share is -1.0"),
    ],
)
def test_what_cannot_be_compared(method, options, said):
    with pytest.raises(InputError, match=said):
        make(method, memory_size=20, **options)


@pytest.mark.parametrize(
    ("method", "classifier", "measured"),
    [
        ("er", "ncm", {"softmax", "ncm"}),
        ("er", "combined", {"softmax", "ncm", "combined", "lda"}),
        ("scr", "ncm", {"ncm"}),
        ("scr", "lda", {"ncm", "lda"}),
        ("scr", "combined", {"softmax", "ncm", "combined", "lda"}),
    ],
)
def test_which_classifiers_are_measured(method, classifier, measured):
    assert set(make(method, classifier=classifier, memory_size=20).classifiers) == measured


@pytest.mark.parametrize(("classifier", "message"), [("lda", "memory_size > 0"), ("combined", "memory_size > 0")])
def test_classifiers_that_need_a_memory_say_so(classifier, message):
    learner = make("fine-tune", memory_size=0, prototypes="memory")
    with pytest.raises(InputError, match=message):
        learner.scores(digits(2)[0], classifier)


def test_without_a_head_there_is_nothing_to_combine():
    with pytest.raises(InputError, match='no softmax head: build it with classifier="combined"'):
        make("scr", memory_size=20).scores(digits(2)[0], "combined")


# ---------------------------------------------------------------- distillation


@pytest.mark.parametrize("method", ["er", "scr+"])
def test_distillation_weighs_images_by_what_the_average_knows(method):
    learner = learn(make(method, memory_size=30, averaging=0.9, mirror=False))
    x, y = next(iter(list(stream())[2]))
    logits = learner.network.logits(x)
    teacher = learner.average.logits(x)[:, :6].detach().double().numpy()
    student = logits[:, :6].detach().double().numpy()
    expected = []
    for t, s, label in zip(teacher, student, y.tolist(), strict=True):
        p, q = softmax(t / 2), softmax(s / 2)
        expected.append(softmax(t)[label] * 4 * sum(p * np.log(p / q)))
    assert distillation(learner, x, y, logits).item() == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize("method", ["er", "aser", "scr+"])
def test_distillation_is_one_term_of_the_loss(method):
    with_it, without = (make(method, memory_size=30, averaging=0.9, distillation_weight=w) for w in (0.7, 0.0))
    for learner in (with_it, without):
        learn(learner, tasks=1, batches=2)
    without.load_state_dict(copy.deepcopy(with_it.state_dict()))
    x, y = next(iter(list(stream())[1]))
    for learner in (with_it, without):
        learner.reserve(4)
        for head in learner._heads():
            head.meet(y)
        learner.set_training(False)
    state = with_it.generator.get_state()
    loss, plain = with_it.objective.loss(with_it, x, y), without.objective.loss(without, x, y)
    term = distillation(with_it, x, y, with_it.network.logits(x))
    assert torch.equal(state, with_it.generator.get_state()) == (method != "scr+")
    torch.testing.assert_close(loss - plain, 0.7 * term, rtol=1e-3, atol=1e-5)
    assert term > 0
    gradient = with_it.gradient(term)
    assert any(g.any() for g in gradient)
    assert not any(w.requires_grad for w in with_it.average.parameters())


# ---------------------------------------------------------------- preservation


def test_preservation_is_about_all_classes_but_the_streams():
    learner = learn(make("scr+", memory_size=30, averaging=0.9))
    x, y = next(iter(list(stream())[2]))
    logits = learner.network.logits(x)
    others = [c for c in range(6) if c not in y.tolist()]
    assert 0 < len(others) < 6
    teacher = learner.average.logits(x)[:, others].detach().double().numpy()
    student = logits[:, others].detach().double().numpy()
    each = [
        4 * sum(p * np.log(p / q))
        for p, q in ((softmax(t / 2), softmax(s / 2)) for t, s in zip(teacher, student, strict=True))
    ]
    term = preservation(learner, x, y, logits)
    assert term.item() == pytest.approx(np.mean(each), rel=1e-4)
    (gradient,) = torch.autograd.grad(term, logits)
    assert not gradient[:, y.unique()].any()
    assert gradient[:, others].any()
    everything = torch.arange(6).repeat(2)[: len(y)]
    assert preservation(learner, x, everything, logits).item() == 0.0  # there is no other class


def test_preservation_is_one_term_of_the_loss_and_about_stream_images_alone():
    learner = learn(make("scr+", memory_size=30, averaging=0.9, augment=None))
    x, y = next(iter(list(stream())[2]))
    learner.set_training(False)
    learner.objective.mix_after = 0.0
    learner.replaying = 4
    plain = learner.objective.loss(learner, x, y)
    learner.objective.preservation_weight = 0.7
    term = preservation(learner, x[:-4], y[:-4], learner.network.logits(x[:-4]))
    found = learner.objective.loss(learner, x, y)
    torch.testing.assert_close(found - plain, 0.7 * term, rtol=1e-3, atol=1e-5)
    learner.replaying = len(x)  # a review
    reviewed = learner.objective.loss(learner, x, y)
    learner.objective.preservation_weight = 0.0
    assert torch.equal(reviewed, learner.objective.loss(learner, x, y))


# ---------------------------------------------------------------- every method


@pytest.mark.filterwarnings("ignore:.*have no image in memory")
@pytest.mark.parametrize("method", [*REPLAYING, "lwf", "ewc++"])
def test_every_method_with_a_memory_takes_the_parts_that_fit_it(method):
    options = {"averaging": 0.9, "mirror": True, "update": "balanced", "momentum": 0.5, "learning_rate": 0.02}
    assert_resumes(lambda: make(method, memory_size=20, **options), 1, 2)
    learner = learn(make(method, memory_size=20, **options))
    counts = learner.memory.contents()[1].bincount()
    assert counts.max() - counts.min() <= 1
    assert learner.average is not None


def test_icarl_takes_averaging_and_mirror():
    assert_resumes(lambda: make("icarl", memory_size=20, averaging=0.9, mirror=True), 1, 2)


@pytest.mark.parametrize("update", ["balanced", "gss", "herding", "aser"])
def test_lwf_keeps_images_by_any_policy(update):
    learner = learn(make("lwf", memory_size=20, update=update))
    assert learner.memory.size == 20
    assert accuracy(learner, "ncm") > 0.3
    removed = (learner.memory.contents()[1] == 0).sum()
    assert learner.forget(0) == removed


# ---------------------------------------------------------------- width


def test_the_wide_encoder_is_the_full_resnet18():
    learner = make_learner("scr+wide", image_shape=(3, 32, 32), memory_size=10, device="cpu")
    assert learner.feature_length == 512
    assert sum(w.numel() for w in learner.network.encoder.parameters()) == 11_168_832  # ResNet18 without its last layer
    usual = make_learner("scr+", image_shape=(3, 32, 32), memory_size=10, device="cpu")
    assert usual.feature_length == 160


def test_an_encoder_of_ones_own_takes_the_place_of_the_wide_one():
    own = {"image_shape": (1, 8, 8), "memory_size": 10, "encoder": torch.nn.Flatten(), "device": "cpu"}
    assert make_learner("scr+wide", **own).feature_length == 64
    with pytest.raises(InputError, match="width is 64"):
        make_learner("scr+wide", width=64, **own)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("er", {"calibrated": True, "memory_size": 0, "retrieve": "none"}, "give memory_size"),
        ("er", {"distillation_weight": 1.0}, "give averaging"),
        ("scr", {"distillation_weight": 1.0, "averaging": 0.9}, "give cross_entropy_weight"),
        ("scr", {"preservation_weight": 1.0, "averaging": 0.9}, "give cross_entropy_weight"),
        ("scr", {"preservation_weight": 1.0, "cross_entropy_weight": 1.0}, "give averaging"),
        ("er", {"distillation_weight": -1.0, "averaging": 0.9}, "distillation_weight is -1.0"),
        ("scr", {"cross_entropy_weight": -0.1}, "cross_entropy_weight is -0.1"),
        ("scr", {"averaging": 1.0}, "averaging is 1.0"),
        ("scr", {"width": 64}, "another one was given"),
        ("scr", {"width": 0, "encoder": None}, "width is 0"),
        ("scr", {"classifier": "ldr"}, 'Did you mean "lda"'),
        ("scr", {"updates_per_batch": 0}, "updates_per_batch is 0"),
    ],
)
def test_mistakes_are_told(method, options, message):
    with pytest.raises(InputError, match=message):
        make(method, **{"memory_size": 20} | options)


# ---------------------------------------------------------------- graphs


def graph_tasks():
    random = torch.Generator().manual_seed(0)
    for task in range(2):
        x = torch.randint(0, 256, (6, 10, 1, 8, 8), dtype=torch.uint8, generator=random)
        y = torch.randint(12 * task, 12 * task + 12, (6, 10), generator=random)  # the head grows on the way
        yield list(zip(x, y, strict=True))


def test_steps_never_wait_for_the_device():
    learner = plus(distillation_weight=1.0, preservation_weight=1.0, stream_against="stream", memory_size=25)
    assert learner.graph_safe
    for task in graph_tasks():
        for x, y in task:
            learner.reserve(int(y.max()) + 1)
            learner.set_training(True)
            learner.signature(len(x))
            with NoWaiting():
                learner.step(x, y)
            learner.advance(len(x))
        learner.end_task()
        learner.set_training(False)
        with NoWaiting(), torch.no_grad():
            learner.look(x)


@pytest.mark.device
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distillation_weight": 1.0, "review": True},
        {"width": 64},
        {"mix_after": 1.0, "updates_until": 3.0},
        {"first_view": "mirrored", "view_weight": 4.0},
        {"stream_against": "stream", "crops": True},
        {"preservation_weight": 1.0},
        {"orthogonal": 0.02, "review": True},
        {"orthogonal": 0.02, "momentum": 0.0, "averaging": 0.0},
    ],
    ids=str,
)
def test_a_recorded_step_gives_the_same_bits(options, precision):
    from scrlearn.engine import GraphRunner

    given = {"memory_size": 110, "memory_batch": 20, "classifier": "combined", "device": "cuda", "precision": precision}
    learners = [make_learner("scr+", image_shape=(1, 8, 8), **given | options) for _ in range(2)]
    learners[1].runner = GraphRunner(learners[1])
    answers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for learner in learners:
            for task in graph_tasks():
                for x, y in task * 3:
                    learner.learn(x, y)
                learner.end_task()
            answers.append({name: learner.scores(x, name) for name in learner.classifiers})
            torch.cuda.synchronize()
    assert digest(learners[0].state_dict()) == digest(learners[1].state_dict())
    assert learners[1].runner.recordings
    assert all(torch.equal(answers[0][name], answers[1][name]) for name in ("softmax", "ncm", "combined", "lda"))
