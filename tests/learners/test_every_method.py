"""What holds for every method and classifier: same seed same bits, stop and go on, and streams out of shape."""

import random
import warnings

import pytest
import torch
from digit_stream import accuracy, digits, learn, make, stream
from torch import nn

from scrlearn.checkpoint import digest, load_checkpoint, save_checkpoint
from scrlearn.errors import InputError, NotFittedError
from scrlearn.learners import CLASSIFIERS, METHODS
from scrlearn.losses import supervised_contrastive_loss
from scrlearn.memory import RETRIEVALS, UPDATES
from scrlearn.models.network import to_float

pytestmark = pytest.mark.filterwarnings("ignore:.*have no image in memory")

# a learner answers with every classifier it can, whichever is its own, so these two stand for all
BOTH = [pytest.param(m, c, id=f"{m}-{c}") for m in METHODS for c in ("softmax", "ncm")]
ON_MEMORY = [m for m in METHODS if METHODS[m].options.get("retrieve", "none") != "none" or m == "icarl"]
QUICK = {
    "offline": {"epochs": 2, "batch": 16},
    "ewc++": {"fold_every": 3},
    "scr": {"memory_batch": 20},
    "scr+": {"memory_batch": 20},
}
X, _ = digits(40)


def build(method, classifier, **options):
    return make(method, classifier=classifier, **{"memory_size": 20} | QUICK.get(method, {}) | options)


def steps(**options):
    """A stream as a list of what happens: batches, and None where a task ends."""
    return [event for task in stream(**{"batches": 3} | options) for event in (*task, None)]


def follow(learner, events):
    for event in events:
        if event is None:
            learner.end_task()
        else:
            learner.learn(*event)
    return learner


def answering(learner):
    """The classifiers a learner can answer with."""
    stores, head = learner.memory.capacity > 0, learner.network.head is not None
    means = stores or learner.drift is not None
    able = {"softmax": head, "ncm": means, "combined": head and means, "lda": stores}
    assert able.keys() == set(CLASSIFIERS)
    return [name for name in CLASSIFIERS if able[name]]


def answers(learner):
    return {classifier: learner.scores(X, classifier) for classifier in answering(learner)}


def assert_same(a, b):
    assert digest(a.state_dict()) == digest(b.state_dict())
    for (name, left), right in zip(answers(a).items(), answers(b).values(), strict=True):
        assert torch.equal(left, right), name


def assert_sound(learner):
    """Finite weights, no more images than asked for, and answers among the classes met."""
    assert all(w.isfinite().all() for w in learner.network.state_dict().values())
    assert len(learner.memory.contents()[0]) == learner.memory.size <= learner.memory.capacity
    met = set(learner.met.nonzero().flatten().tolist())
    stored = set(learner.memory.contents()[1].tolist())
    for classifier, scores in answers(learner).items():
        by_means = classifier == "lda" or (classifier in ("ncm", "combined") and learner.drift is None)
        known = sorted(met & stored if by_means else met)
        assert set(scores.argmax(1).tolist()) <= set(known)
        assert scores[:, known].isfinite().all()
        torch.testing.assert_close(learner.probabilities(X[:5], classifier).sum(1), torch.ones(5))


# ---------------------------------------------------------------- same seed, same bits


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(method, classifier):
    first = follow(build(method, classifier), steps())
    torch.manual_seed(99)  # whatever ran before has no say
    torch.rand(3)
    again = follow(build(method, classifier), steps())
    other = follow(build(method, classifier, seed=1), steps())
    for learner in (first, again, other):
        learner.finish()
    assert_same(first, again)
    assert digest(first.state_dict()) != digest(other.state_dict())
    only_means = (method, classifier) == ("scr", "ncm")
    assert answering(first) == (["ncm", "lda"] if only_means else list(CLASSIFIERS))
    assert set(first.classifiers) == ({"ncm"} if only_means else {"softmax", "ncm"})


@pytest.mark.parametrize("method", [m for m in METHODS if m != "offline"])
def test_asking_in_between_changes_nothing(method):
    quiet, asked = (build(method, "softmax") for _ in range(2))
    for event in steps(tasks=2):
        follow(quiet, [event])
        follow(asked, [event])
        answers(asked)
        asked.embed(digits(3)[0])
    assert_same(quiet, asked)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "scr"])
def test_the_classifier_that_answers_has_no_part_in_the_training(method):
    first, *others = (follow(build(method, classifier), steps(tasks=2)) for classifier in CLASSIFIERS)
    first.finish()
    for other in others:
        other.finish()
        assert_same(first, other)


# ---------------------------------------------------------------- stopping and going on


def resumed_through_a_file(learner, fresh, path):
    save_checkpoint(path, learner.state_dict(), {"seed": learner.seed})
    state, _ = load_checkpoint(path)
    fresh.load_state_dict(state)
    assert digest(fresh.state_dict()) == digest(learner.state_dict())
    return fresh


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_stopped_anywhere_and_resumed_from_a_file(method, classifier, tmp_path):
    events = steps()
    place = random.Random(f"{method} {classifier}").randrange(len(events) + 1)
    whole = follow(build(method, classifier), events[:place])
    resumed = resumed_through_a_file(whole, build(method, classifier), tmp_path / "a.scr")
    for learner in (whole, resumed):
        follow(learner, events[place:]).finish()
    assert_same(whole, resumed)


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_the_core_is_resumed(method, tmp_path):
    """Momentum, averaged weights, mirrored views, classes ahead, and a head that grows after the stop."""
    options = {"momentum": 0.5, "averaging": 0.9, "mirror": True, "classes_ahead": 2, "learning_rate": 0.05}
    events = steps()
    later = [(x, y + 15) for x, y in filter(None, steps(tasks=2, batches=2))]
    whole = follow(build(method, "softmax", **options), events)
    resumed = resumed_through_a_file(whole, build(method, "softmax", **options), tmp_path / "a.scr")
    for learner in (whole, resumed):
        follow(learner, later).finish()
    assert_same(whole, resumed)


# ---------------------------------------------------------------- streams out of shape


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_a_memory_smaller_than_the_batch_and_classes_that_are_not_in_it(method, classifier):
    learner = build(method, classifier, memory_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn(learner, batches=2)
        assert_sound(learner)
    if method == "offline":  # keeps everything
        return
    assert learner.memory.size == 3
    learner.learn(X[:1], learner.memory.contents()[1][:1].clone())  # so that the means are computed anew
    stored = set(learner.memory.contents()[1].tolist())
    with pytest.warns(UserWarning, match=f"{learner.num_classes - len(stored)} of the classes learned have no image"):
        assert set(learner.predict(X, "ncm").tolist()) <= stored


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_without_a_memory(method, classifier):
    if method in ON_MEMORY:
        with pytest.raises(InputError, match=r"memory_size is 0.*give memory_size ≥ 1"):
            build(method, classifier, memory_size=0)
        return
    learner = learn(build(method, classifier, memory_size=0), batches=2)
    assert classifier in answering(learner)
    assert_sound(learner)
    if method != "offline":
        assert learner.memory.size == 0
        with pytest.raises(InputError, match="memory_size > 0"):
            learner.predict(X, "lda")


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_a_single_class(method, classifier):
    learner = build(method, classifier)
    x, y = digits(300)
    x = x[y == 4]
    for part in (x[:10], x[10:20], x[20:25]):
        assert torch.isfinite(learner.learn(part, torch.full((len(part),), 4)))
    learner.end_task()
    learner.finish()
    assert_sound(learner)
    for each in answering(learner):
        assert learner.predict(X, each).tolist() == [4] * 40


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_batches_of_one(method, classifier):
    assert_sound(learn(build(method, classifier, memory_size=4), batches=4, batch=1))


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_one_with_the_encoder_of_the_paper(method):
    learner = build(method, "ncm", memory_size=4, encoder=None)
    assert_sound(learn(learner, tasks=2, batches=3, batch=1))


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_new_classes_together_with_old_ones_and_far_ahead(method, classifier):
    learner = build(method, classifier)
    x, _ = digits(60)
    labels = ([0] * 10, [0, 1] * 5, [1, 5, 0, 5, 2] * 2, [40] + [0] * 9, [5, 40] * 5)
    for i, batch in enumerate(labels):
        assert torch.isfinite(learner.learn(x[10 * i : 10 * i + 10], torch.tensor(batch)))
        if i == 2:
            learner.end_task()
    learner.finish()
    assert learner.met.nonzero().flatten().tolist() == [0, 1, 2, 5, 40]
    assert_sound(learner)


@pytest.mark.parametrize("method", METHODS)
def test_a_task_without_images_and_batches_of_changing_size(method):
    learner = build(method, "softmax", memory_size=12)
    learner.end_task()
    x, y = digits(60)
    for size in (7, 1, 20, 3):
        learner.learn(x[:size], y[:size] % 3)
        learner.end_task()
    learner.end_task()
    learner.finish()
    assert_sound(learner)


@pytest.mark.parametrize(("method", "classifier"), BOTH)
def test_a_class_is_forgotten_and_comes_back(method, classifier):
    learner = follow(build(method, classifier), steps())
    held = (learner.memory.contents()[1] == 2).sum().item()
    assert learner.forget(2) == held > 0
    learner.finish()
    for scores in answers(learner).values():
        assert (scores[:, 2] == -torch.inf).all()
    learner.learn(X[:20], torch.arange(20) % 4)
    learner.end_task()
    learner.finish()
    assert_sound(learner)


@pytest.mark.parametrize("method", METHODS)
def test_a_question_before_anything_was_learned(method):
    learner = build(method, "ncm")
    for classifier in answering(learner):
        with pytest.raises(NotFittedError, match="Nothing has been learned yet"):
            learner.predict(X, classifier)


def test_every_method_learns():
    """Two classes, a few batches: each method tells them apart with both classifiers."""
    for method in METHODS:
        learner = learn(build(method, "softmax", memory_size=40, learning_rate=0.05), tasks=1, batches=25)
        for classifier in CLASSIFIERS:
            assert accuracy(learner, classifier) > 0.85, (method, classifier)


# ---------------------------------------------------------------- policies in any combination


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("retrieve", [name for name in RETRIEVALS if name != "none"])
@pytest.mark.parametrize("method", ["er", "scr"])
def test_any_retrieval_with_any_update(method, retrieve, update, tmp_path):
    options = {"retrieve": retrieve, "update": update, "memory_batch": 5, "updates_per_batch": 2}
    learners = [build(method, "ncm", **options) for _ in range(2)]
    events = steps(batches=4)
    whole = follow(learners[0], events[:7])
    resumed = resumed_through_a_file(whole, learners[1], tmp_path / "a.scr")
    for learner in (whole, resumed):
        follow(learner, events[7:])
    assert_same(whole, resumed)
    assert_sound(whole)


# ---------------------------------------------------------------- supervised contrastive replay


def scr(**options):
    return build("scr", options.pop("classifier", "ncm"), **options)


def test_the_first_batch_is_only_stored():
    learner = scr()
    before = digest(learner.network.state_dict())
    (first, second, *_), *_ = stream()
    assert learner.learn(*first).item() == 0.0
    assert digest(learner.network.state_dict()) == before
    assert torch.equal(learner.memory.contents()[0], first[0])
    assert learner.learn(*second).item() > 0
    assert digest(learner.network.state_dict()) != before


def by_hand(network, x, y, views, temperature=0.1):
    """The loss on images whose second view is a plain copy, one or two forwards."""
    raw = to_float(x)
    if views == "joint":
        features = network.encoder(torch.cat([raw, raw]))
    else:
        features = torch.cat([network.encoder(raw), network.encoder(raw)])
    projected = nn.functional.normalize(network.projection(features), dim=1)
    return supervised_contrastive_loss(projected, torch.cat([y, y]), temperature)


@pytest.mark.parametrize("views", ["joint", "separate"])
def test_one_step_by_hand(views):
    """Stream batch and memory batch together, two views, one step of plain gradient descent."""
    learner, twin = (scr(views=views, augment=False, memory_size=50, temperature=0.2) for _ in range(2))
    (first, second, *_), *_ = stream()
    for each in (learner, twin):
        each.learn(*first)
    memory_x, memory_y = twin.retrieve(twin, *second, 20)
    x, y = torch.cat([second[0], memory_x]), torch.cat([second[1], memory_y])
    twin.network.train()
    loss = by_hand(twin.network, x, y, views, 0.2)
    gradients = torch.autograd.grad(loss, twin.weights)
    expected = [w.detach() - 0.1 * g for w, g in zip(twin.weights, gradients, strict=True)]
    torch.testing.assert_close(learner.learn(*second), loss.detach())
    for new, by_formula in zip(learner.weights, expected, strict=True):
        torch.testing.assert_close(new.detach(), by_formula)


def test_separate_views_have_their_own_statistics():
    """With an augmentation that changes the brightness the two differ; with a plain copy as second view they agree."""

    def dimmed(x):
        return x * 0.2

    def loss(views, augment):
        learner = scr(views=views, augment=augment, memory_size=50)
        (first, second, *_), *_ = stream()
        learner.learn(*first)
        return learner.learn(*second).item()

    assert loss("joint", False) == pytest.approx(loss("separate", False), abs=1e-4)
    assert loss("joint", dimmed) != pytest.approx(loss("separate", dimmed), abs=1e-3)


@pytest.mark.parametrize("update", ["reservoir", "gss"])
def test_augmentations_of_ones_own(update):
    """f(x), f(x, generator), modules, a plain copy; what cannot be one is refused."""
    calls = []

    def mirrored(x):
        calls.append(len(x))
        return x.flip(3)

    def noisy(x, generator):
        return (x + 0.1 * torch.rand(x.shape, generator=generator)).clamp(0, 1)

    results = {}
    for name, augment in {"one": mirrored, "two": noisy, "module": nn.Identity(), "none": None, "off": False}.items():
        learner = follow(scr(augment=augment, update=update), steps(tasks=2))
        assert_sound(learner)
        results[name] = digest(learner.network.state_dict())
    assert calls
    assert results["module"] == results["none"] == results["off"]
    assert len(set(results.values())) == 3
    for wrong in ("crop", 3, nn.Identity):
        with pytest.raises(InputError, match="augmentation"):
            scr(augment=wrong)


@pytest.mark.parametrize("kind", ["mlp", "linear", "none"])
def test_projections(kind):
    learner = follow(scr(projection=kind), steps())
    parameters = sum(p.numel() for p in learner.network.projection.parameters())
    assert parameters == {"mlp": 16 * 16 + 16 + 16 * 128 + 128, "linear": 16 * 128 + 128, "none": 0}[kind]
    assert learner.embed(digits(2)[0]).shape == (2, 16)  # answers come from the encoder, not from the projection
    assert_sound(learner)
    with pytest.raises(InputError, match="no projection"):
        scr(projection="mpl")


@pytest.mark.parametrize("options", [{}, {"views": "separate"}, {"update": "balanced"}, {"averaging": 0.9}], ids=str)
def test_a_probe_is_trained_beside_and_changes_no_other_bit(options):
    without, beside = (follow(scr(classifier=c, **options), steps()) for c in ("ncm", "softmax"))
    bare = without.network.state_dict()
    assert {name for name in beside.network.state_dict() if not name.startswith("head.")} == bare.keys()
    for name, value in bare.items():
        assert torch.equal(value, beside.network.state_dict()[name]), name
    assert digest(without.memory.state_dict()) == digest(beside.memory.state_dict())
    assert torch.equal(without.generator.get_state(), beside.generator.get_state())
    assert torch.equal(without.scores(X, "ncm"), beside.scores(X, "ncm"))
    untrained = scr(classifier="softmax").network.head
    assert (beside.network.head.weight != untrained.weight).any()
    with pytest.raises(InputError, match="no softmax head"):
        without.predict(X, "softmax")


def test_a_weight_on_the_cross_entropy_does_reach_the_encoder():
    plain, mixed = (follow(scr(classifier="softmax", cross_entropy_weight=w), steps()) for w in (0.0, 0.5))
    assert digest(plain.network.encoder.state_dict()) != digest(mixed.network.encoder.state_dict())


# review


def reviewed(images, **options):
    """A learner with this many images in memory that stands before the end of its task, and what it reviews."""
    learner = scr(memory_size=images, augment=False, review=True, learning_rate=0.05, **options)
    x, y = digits(images)
    for part_x, part_y in zip(x.split(10), y.split(10), strict=True):
        learner.learn(part_x, part_y)
    calls, run = [], learner.run_directly
    learner.runner = lambda function, *inputs: (calls.append((function.__name__, *inputs)), run(function, *inputs))[1]
    return learner, calls


@pytest.mark.parametrize(("images", "batches"), [(99, 0), (100, 1), (230, 2)])
def test_review_is_one_pass_over_the_memory_without_the_incomplete_batch(images, batches):
    learner, calls = reviewed(images)
    learner.end_task()
    assert [name for name, _ in calls] == ["review_step"] * batches
    slots = torch.cat([slots for _, slots in calls] or [torch.zeros(0)]).tolist()
    assert len(set(slots)) == len(slots) == 100 * batches


def test_a_review_step_is_a_tenth_of_a_step():
    learner, calls = reviewed(100)
    before = [w.detach().clone() for w in learner.weights]
    twin, _ = reviewed(100)
    learner.end_task()
    ((_, slots),) = calls
    twin.network.train()
    gradients = torch.autograd.grad(by_hand(twin.network, *twin.memory.read(slots), "joint"), twin.weights)
    for new, old, g in zip(learner.weights, before, gradients, strict=True):
        torch.testing.assert_close(new.detach(), old - 0.05 * 0.1 * g)


def test_without_review_the_end_of_a_task_changes_no_weight():
    learner = scr(memory_size=200)
    x, y = digits(150)
    for part_x, part_y in zip(x.split(10), y.split(10), strict=True):
        learner.learn(part_x, part_y)
    before = digest(learner.network.state_dict())
    learner.end_task()
    assert digest(learner.network.state_dict()) == before


OPTIONS = {
    "momentum": {"momentum": 0.9, "learning_rate": 0.02},
    "weight decay": {"weight_decay": 0.01, "momentum": 0.5},
    "orthogonal": {"orthogonal": 0.02, "momentum": 0.9, "weight_decay": 0.01, "averaging": 0.9},
    "orthogonal without momentum": {"orthogonal": 0.02},
    "averaging": {"averaging": 0.9},
    "mirror": {"mirror": True},
    "crops": {"crops": True},
    "calibrated": {"calibrated": True},
    "centred": {"centred": True},
    "updates": {"updates_per_batch": 3},
    "updates until": {"updates_per_batch": 3, "updates_until": 4.0},
    "balanced": {"update": "balanced"},
    "herding": {"update": "herding"},
    "review": {"review": True, "memory_size": 120, "averaging": 0.9, "momentum": 0.5},
    "separate": {"views": "separate"},
    "mixing": {"mix_after": 0.5, "cross_entropy_weight": 0.5},
    "view weight": {"view_weight": 5.0},
    "first view": {"first_view": "mirrored"},
    "both views": {"first_view": "augmented"},
    "stream against": {"stream_against": "stream", "cross_entropy_weight": 0.5},
    "features too": {"feature_weight": 0.5},
    "cross-entropy": {"classifier": "softmax", "cross_entropy_weight": 0.5},
    "cosine head": {"classifier": "softmax", "cross_entropy_weight": 0.5, "head_temperature": 0.1},
    "aser": {"retrieve": "aser", "update": "aser"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_scr_are_resumed_bit_for_bit(name, tmp_path):
    options = OPTIONS[name]
    events = steps(batches=7 if name == "review" else 3)
    place = random.Random(name).randrange(1, len(events))
    whole = follow(scr(**options), events[:place])
    resumed = resumed_through_a_file(whole, scr(**options), tmp_path / "a.scr")
    for learner in (whole, resumed):
        follow(learner, events[place:])
    assert_same(whole, resumed)
    plain = follow(scr(**{k: v for k, v in options.items() if k in ("classifier", "memory_size")}), events)
    if name in ("mirror", "crops", "centred", "calibrated"):  # in the answers alone
        assert not torch.equal(plain.scores(X), whole.scores(X))
    else:
        assert digest(whole.state_dict()) != digest(plain.state_dict())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"classifier": "nmc"}, 'no classifier "nmc".*"ncm"'),
        ({"memory_size": -1}, "memory_size is -1"),
        ({"memory_batch": 0}, "memory_batch is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"orthogonal": -0.1}, "orthogonal is -0.1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"head_temperature": -1.0}, "head_temperature is -1.0"),
        ({"averaging": -0.1}, "averaging is -0.1"),
        ({"shrinkage": 1.5}, "shrinkage is 1.5"),
        ({"updates_per_batch": 0}, "updates_per_batch is 0"),
        ({"updates_until": -1.0}, "updates_until is -1.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"stream_against": "memory"}, 'stream_against is "memory"'),
        ({"view_weight": 0.0}, "view_weight is 0.0"),
        ({"first_view": "mirored"}, 'no first_view "mirored".*"mirrored"'),
        ({"mix_after": -1.0}, "mix_after is -1.0"),
        ({"feature_weight": -1.0}, "feature_weight is -1.0"),
        ({"views": "both"}, 'views is "both"'),
        ({"retrieve": "randon"}, 'retrieve policy "randon".*"random"'),
        ({"update": "reservoire"}, 'update policy "reservoire".*"reservoir"'),
        ({"precision": "fp16"}, 'no precision "fp16"'),
        ({"device": "gpu"}, '"gpu" is no device'),
        ({"temprature": 1.0}, 'no option "temprature".*"temperature"'),
    ],
    ids=str,
)
def test_options_that_cannot_be(wrong, said):
    with pytest.raises(InputError, match=said):
        scr(**wrong)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_what_was_learned_on_a_gpu_answers_and_goes_on_elsewhere(method, tmp_path):
    options = {"encoder": None, "momentum": 0.5}
    there = follow(build(method, "softmax", device="cuda", **options), steps())
    there.finish()
    save_checkpoint(tmp_path / "a.scr", there.state_dict(), {})
    here = build(method, "softmax", device="cpu", **options)
    state, _ = load_checkpoint(tmp_path / "a.scr")
    generator = here.generator.get_state()
    here.load_state_dict({**state, "generator": generator})  # the two devices' generators differ
    torch.testing.assert_close(here.embed(X), there.embed(X).cpu(), atol=1e-3, rtol=0)
    for classifier in CLASSIFIERS:
        agree = (here.predict(X, classifier) == there.predict(X, classifier).cpu()).float().mean()
        assert agree > 0.95, classifier
    follow(here, [next(stream())[0], None])
    here.finish()
    assert_sound(here)
