"""The upper bound: what it collects, when it trains, and that a training can be interrupted."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from digit_stream import SHAPE, accuracy, assert_resumes, digits, encoder, learn, make, stream

from scrlearn.checkpoint import digest
from scrlearn.errors import InputError, NotFittedError
from scrlearn.learners.offline import FIRST_ROOM


def small(**options):
    return make("offline", **{"epochs": 3, "batch": 16} | options)


def test_keeps_every_image_in_the_order_it_came():
    x, y = digits()
    learner = small()
    for part in range(0, len(x), 200):
        learner.learn(x[part : part + 200], y[part : part + 200])
    images, labels = learner.memory.contents()
    assert len(x) > FIRST_ROOM
    assert torch.equal(images, x)
    assert torch.equal(labels, y)


def test_training_is_plain_sgd_over_shuffled_epochs():
    """Against a loop with torch's own optimiser; every image is met at most once an epoch, in whole batches."""
    learner = small(epochs=2)
    x, y = digits(50)
    learner.learn(x, y)
    network = learner.network
    reference = torch.nn.Sequential(encoder(), torch.nn.Linear(16, 10))
    reference[1].load_state_dict({"weight": network.head.weight[:10], "bias": network.head.bias[:10]})
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1)
    for epoch in range(2):
        order = learner._order(epoch)
        assert sorted(order.tolist()) == list(range(50))
        for slots in order[:48].split(16):
            optimiser.zero_grad()
            F.cross_entropy(reference(x[slots].float() / 255), y[slots]).backward()
            optimiser.step()
    assert learner._order(0).tolist() != learner._order(1).tolist()
    learner.finish()
    for own, theirs in zip(network.encoder.parameters(), reference[0].parameters(), strict=True):
        torch.testing.assert_close(own, theirs)
    torch.testing.assert_close(network.head.weight[:10], reference[1].weight)


def test_trains_once_at_the_end_of_the_stream():
    learner = small()
    seen = []
    for task in stream():
        for x, y in task:
            assert learner.learn(x, y) == 0
        learner.end_task()
        assert learner.trained == 0
    assert not learner.anytime
    learner.finish(lambda done, steps: seen.append((done, steps)))
    assert seen == [(n, 21) for n in range(1, 22)]  # 120 images: 7 batches of 16, 3 epochs
    learner.finish(lambda done, steps: pytest.fail("it was trained already"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.predict(digits(5)[0])


def test_an_early_question_trains_once_and_says_so():
    learner = small()
    x, y = digits(40)
    learner.learn(x, y)
    with pytest.warns(UserWarning, match="3 epochs on 40 images"):
        first = learner.scores(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(learner.scores(x), first)
        learner.predict(x, "ncm")
    learner.learn(x, y)
    with pytest.warns(UserWarning, match="80 images"):
        learner.predict(x)


def test_training_anew_does_not_depend_on_the_training_before():
    x, y = digits(60)
    direct, detour = small(momentum=0.5, averaging=0.9), small(momentum=0.5, averaging=0.9)
    detour.learn(x[:30], y[:30])
    detour.finish()
    detour.learn(x[30:], y[30:])
    detour.finish()
    direct.learn(x[:30], y[:30])
    direct.learn(x[30:], y[30:])
    direct.finish()
    assert digest(direct.state_dict()) == digest(detour.state_dict())


def test_after_every_task_where_that_is_asked_for():
    learner = small(when="task")
    assert learner.anytime
    for task in stream(tasks=2):
        for x, y in task:
            learner.learn(x, y)
        learner.end_task()
        assert learner.trained == learner.training_steps > 0


class Interrupted(Exception):
    """Somebody pressed a key."""


@pytest.mark.parametrize("stop", [1, 7, 10])
def test_a_training_can_be_interrupted_and_resumed(stop):
    x, y = digits(120)

    def interrupt(done, steps):
        learner.predict(x[:4])  # a look in between changes nothing
        if done == stop:
            raise Interrupted

    learner, whole = small(averaging=0.9), small(averaging=0.9)
    for each in (learner, whole):
        each.learn(x, y)
    whole.finish()
    with pytest.raises(Interrupted):
        learner.finish(interrupt)
    resumed = small(averaging=0.9)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.trained == stop
    resumed.finish()
    assert digest(resumed.state_dict()) == digest(whole.state_dict())


@pytest.mark.parametrize("place", [(0, 2), (1, 0), (2, 3)])
@pytest.mark.parametrize("when", ["end", "task"])
def test_resumes_in_the_middle_of_a_task(when, place):
    assert_resumes(lambda: small(epochs=1, when=when), *place)


def test_resumes_with_more_images_than_there_was_room_for_at_first():
    x, y = digits()
    learner, other = small(epochs=1, memory_size=4), small(epochs=1, memory_size=4)
    learner.learn(x[:100], y[:100])
    other.load_state_dict(learner.state_dict())
    for each in (learner, other):
        each.learn(x[100:150], y[100:150])
        each.finish()
    assert digest(learner.state_dict()) == digest(other.state_dict())


def test_a_forgotten_class_was_never_there():
    x, y = digits(100)
    learner, without = small(), small()
    learner.learn(x, y)
    learner.finish()
    assert learner.forget(3) == int((y == 3).sum())
    without.learn(x[y != 3], y[y != 3])
    for each in (learner, without):
        each.finish()
        assert (each.predict(x) != 3).all()
    assert torch.equal(learner.scores(x), without.scores(x))


def test_is_an_upper_bound():
    learner = learn(make("offline", epochs=10, batch=32), tasks=5, batches=30)
    assert accuracy(learner) > 0.9
    assert accuracy(learner, "ncm") > 0.85


def test_one_image_and_no_image():
    learner = small()
    with pytest.raises(NotFittedError):
        learner.predict(torch.zeros(1, *SHAPE, dtype=torch.uint8))
    learner.finish()
    learner.learn(torch.zeros(1, *SHAPE, dtype=torch.uint8), torch.tensor([0]))
    learner.finish()
    assert learner.trained == 3
    assert learner.predict(torch.zeros(2, *SHAPE, dtype=torch.uint8)).tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"when": "never"}, {"prototypes": "sdc"}])
def test_wrong_options(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        small(**wrong)


def test_defaults_are_the_papers():
    learner = make("offline")
    assert (learner.epochs, learner.batch, learner.learning_rate, learner.momentum) == (50, 128, 0.1, 0.0)
