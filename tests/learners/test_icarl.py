"""iCaRL: its loss written out, its exemplars, its state."""

import copy
import math

import pytest
import torch
from digit_stream import SHAPE, accuracy, assert_resumes, digits, learn, make, stream

from scrlearn.errors import InputError


def written_out(student, teacher, y, old, new):
    """The sum of binary cross-entropies of each image, averaged, by loops."""
    total = 0.0
    for row, label in enumerate(y.tolist()):
        for c in old + new:
            g = 1 / (1 + math.exp(-student[row, c]))
            target = 1 / (1 + math.exp(-teacher[row, c])) if c in old else float(label == c)
            total -= target * math.log(g) + (1 - target) * math.log(1 - g)
    return total / len(y)


def logits(network, x):
    return copy.deepcopy(network).train().logits(x).detach()


def test_first_task_is_plain_binary_cross_entropy():
    learner = make("icarl", memory_size=20)
    for x, y in next(stream()):
        learner.network.head.meet(y)
        student = logits(learner.network, x)
        assert learner.learn(x, y).item() == pytest.approx(written_out(student, student, y, [], [0, 1]), rel=1e-4)


@pytest.mark.parametrize(("ahead", "memory_size", "only_old"), [(0, 30, True), (10, 30, True), (0, 12, False)])
def test_loss_is_the_formula(ahead, memory_size, only_old):
    learner = learn(make("icarl", memory_size=memory_size, classes_ahead=ahead), tasks=2)
    teacher = copy.deepcopy(learner.network)
    task = list(stream(tasks=3))[2]
    learner.learn(*task[0])  # so that student and teacher differ
    x, y = task[1]
    slots = learner.exemplars.draw_old(10, torch.Generator().set_state(learner.generator.get_state()))
    memory_x, memory_y = learner.memory.read(slots)
    assert bool((memory_y < 4).all()) == only_old  # where old ones run out, images of this task fill the batch
    x_all, y_all = torch.cat([x, memory_x]), torch.cat([y, memory_y])
    new = list(range(4, ahead)) if ahead else [4, 5]
    expected = written_out(logits(learner.network, x_all), logits(teacher, x_all), y_all, [0, 1, 2, 3], new)
    assert learner.learn(x, y).item() == pytest.approx(expected, rel=1e-4)


def test_exemplars_are_shared_evenly():
    learner = learn(make("icarl", memory_size=13), tasks=3, batches=5)
    assert sorted(learner.memory.contents()[1].bincount().tolist()) == [2, 2, 2, 2, 2, 3]
    assert learner.exemplars.herded[:13].all()


def test_answers_by_the_exemplars():
    learner = learn(make("icarl", memory_size=60), tasks=3, batches=30)
    assert learner.classifier == "ncm"
    assert accuracy(learner) > 0.8
    assert accuracy(learner) > accuracy(learner, "softmax") - 0.05


def test_a_class_that_comes_back_and_one_forgotten():
    learner = learn(make("icarl", memory_size=10), tasks=2)
    for x, y in next(stream()):
        assert torch.isfinite(learner.learn(x, y))
    learner.end_task()
    learner.forget(1)
    assert 1 not in learner.memory.contents()[1].tolist()
    x, y = list(stream(tasks=3))[2][0]
    assert torch.isfinite(learner.learn(x, y))
    assert (learner.predict(x) != 1).all()


def test_a_head_that_grows():
    learner = learn(make("icarl", memory_size=30), tasks=2)
    x, y = digits(20)
    assert torch.isfinite(learner.learn(x, y + 20))
    learner.end_task()
    assert torch.isfinite(learner.learn(x, y + 40))
    assert len(learner.old) == len(learner.met) == learner.network.head.capacity == 64
    assert learner.old.sum() == 14


@pytest.mark.parametrize("place", [(0, 2), (1, 0), (2, 3)])
def test_resumes_in_the_middle_of_a_task(place):
    assert_resumes(lambda: make("icarl", memory_size=11, momentum=0.5), *place)


@pytest.mark.filterwarnings("ignore:.*have no image in memory")
@pytest.mark.parametrize("memory_size", [1, 3, 40])
@pytest.mark.parametrize("batch", [1, 10])
def test_survives_small_streams(memory_size, batch):
    learner = learn(make("icarl", memory_size=memory_size), batches=3, batch=batch)
    assert all(torch.isfinite(w).all() for w in learner.weights)
    assert learner.memory.size == min(memory_size, 9 * batch)
    learner.end_task()  # a task without images
    x, _ = digits(10)
    for classifier in learner.classifiers:
        assert len(learner.predict(x, classifier)) == 10


def test_a_single_class():
    learner = make("icarl", memory_size=2)
    for _ in range(3):
        learner.learn(torch.zeros(1, *SHAPE, dtype=torch.uint8), torch.tensor([0]))
        learner.end_task()
    assert learner.predict(torch.zeros(2, *SHAPE, dtype=torch.uint8)).tolist() == [0, 0]


def test_without_a_memory():
    with pytest.raises(InputError, match="memory_size"):
        make("icarl", memory_size=0)
