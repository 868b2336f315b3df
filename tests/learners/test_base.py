"""What every learner does with a batch before and after its step."""

import numpy as np
import pytest
import torch
from digit_stream import digits, make

from scrlearn.errors import InputError
from scrlearn.learners import METHODS


class Sent(torch.Tensor):
    """Labels that have been sent to a device: reading their values would wait for it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function.__name__ not in ("item", "__int__", "__bool__", "tolist", "max", "min"), function.__name__
        return super().__torch_function__(function, types, args, kwargs or {})


class AtHand(torch.Tensor):
    """Labels on the CPU, that become `Sent` on their way to a device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out.as_subclass(Sent) if function.__name__ == "to" else out


@pytest.mark.parametrize("method", METHODS)
def test_labels_are_looked_at_before_they_are_sent(method):
    learner, (x, y) = make(method, memory_size=20), digits(10)
    loss = learner.learn(x, y.as_subclass(AtHand))
    assert learner.num_classes == 10
    assert torch.isfinite(loss.as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 1, 8, 8), torch.arange(2), "torch.float32 of shape"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.arange(2), "N×1×8×8"),
        (torch.zeros(8, 8, dtype=torch.uint8), torch.arange(2), "N×1×8×8"),
        (
            torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
            torch.arange(3),
            r"2 images, and labels torch.int64 of shape \(3,\)",
        ),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2), "labels torch.float32"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int64), "shape"),
        (torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.arange(0), "at least one image"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, -1]), "-1 is below 0"),
    ],
)
def test_a_bad_batch_changes_nothing(x, y, message):
    learner = make("er", memory_size=20)
    before = learner.num_classes, learner.steps, learner.memory.size
    with pytest.raises(InputError, match=message):
        learner.learn(x, y)
    assert (learner.num_classes, learner.steps, learner.memory.size) == before


@pytest.mark.parametrize("ask", ["scores", "predict", "probabilities"])
def test_bad_images_get_no_answer(ask):
    learner = make("er", memory_size=20)
    learner.learn(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2))
    for x in (
        torch.full((2, 1, 8, 8), 200.0),
        torch.zeros(2, 1, 9, 9, dtype=torch.uint8),
        torch.zeros(2, 1, 8, 8).long(),
    ):
        with pytest.raises(InputError, match="N×1×8×8"):
            getattr(learner, ask)(x)


@pytest.mark.parametrize(
    ("method", "options", "trains"),
    [
        ("scr", {}, True),
        ("a-gem", {}, True),
        ("icarl", {}, True),
        ("offline", {}, True),
        ("ewc++", {}, False),
        ("lwf", {}, False),
        ("fine-tune", {}, False),
        ("fine-tune", {"review": True}, True),
    ],
)
def test_who_trains_on_the_memory(method, options, trains):
    assert make(method, memory_size=20, **options).trains_on_memory is trains


@pytest.mark.parametrize("method", ["ewc++", "lwf", "fine-tune"])
def test_who_does_not_train_on_the_memory_is_not_changed_by_what_is_in_it(method):
    """The flag says the truth: other stored images, same weights."""
    ends = []
    for stored in (0, 255):
        learner = make(method, memory_size=20)
        for _ in range(2):
            x, y = digits(20)
            learner.learn(x, y)
            learner.memory.images.fill_(stored)
            learner.learn(x, y)
            learner.end_task()
        ends.append(torch.cat([weight.flatten() for weight in learner.weights]))
    assert torch.equal(*ends)


@pytest.mark.device
def test_learning_does_not_wait_for_the_gpu():
    learner, (x, y) = make("er", memory_size=20, device="cuda", encoder=None), digits(10)
    for _ in range(3):
        learner.learn(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.learn(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- options of a wrong kind


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number, such as 0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"classes_ahead": -3}, "classes_ahead is -3, which is out of range"),
        ({"learning_rate": True}, "learning_rate is True; expected a number"),
        ({"memory_batch": 2.5}, "memory_batch is 2.5; expected a whole number, such as 100"),
        ({"memory_batch": "3"}, "memory_batch is '3'"),
        ({"review": "no"}, "review is 'no'; expected true or false"),
        ({"mirror": 1}, "mirror is 1; expected true or false"),
        ({"retrieve": 5}, "retrieve is 5; expected a name, or a Retrieval"),
        ({"projection": 3}, 'projection is 3; expected a name, such as "mlp"'),
    ],
)
def test_an_option_of_another_kind_is_refused(options, message):
    """Text for a switch would be taken as "on", and a NaN passes most comparisons."""
    with pytest.raises(InputError, match=message):
        make("scr", **options)


def test_numbers_of_numpy_and_whole_numbers_for_others_are_fine():
    learner = make("scr", temperature=np.float32(1), memory_batch=np.int64(3), memory_size=5, learning_rate=1)
    assert (learner.objective.temperature, learner.memory_batch, learner.learning_rate) == (1, 3, 1)


# ---------------------------------------------------------------- hints at unusual moments


@pytest.mark.parametrize("method", METHODS)
def test_a_task_that_ends_before_it_began_and_one_whose_classes_are_gone(method):
    """A teacher that knows no class teaches nothing, and breaks nothing."""
    learner, (x, y) = make(method, memory_size=20, **({"epochs": 1} if method == "offline" else {})), digits(20)
    learner.end_task()
    learner.end_task()
    for _ in range(2):
        assert torch.isfinite(learner.learn(x, y))
    for label in range(10):
        learner.forget(label)
    learner.end_task()
    for _ in range(2):
        assert torch.isfinite(learner.learn(x, y))
    learner.finish()
    assert all(torch.isfinite(weight).all() for weight in learner.weights)
    assert learner.predict(x).shape == (20,)


@pytest.mark.parametrize("method", ["er", "lwf", "icarl", "offline"])
@pytest.mark.parametrize("label", [-1, 2, 17])
def test_a_class_that_is_not_there_cannot_be_forgotten(method, label):
    learner = make(method, memory_size=20)
    learner.learn(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2))
    with pytest.raises(InputError, match=f"There is no class {label} to forget; 2 are known"):
        learner.forget(label)
    assert learner.forget(1) == 1


def test_an_identity_number_is_no_class_index():
    learner = make("er", memory_size=20)
    with pytest.raises(InputError, match=r"1000000001 is too large.*OnlineClassifier takes labels of any kind"):
        learner.learn(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2) + 10**9)
