"""Which recordings are made, kept and dropped; with recordings that record nothing, so that no GPU is needed."""

import copy
import pickle
from collections import Counter
from typing import ClassVar

import pytest
import torch

from scrlearn.engine import GraphRunner, graph
from scrlearn.errors import ScrlearnError
from scrlearn.learners import make_learner


class FakeStream:
    waits = 0

    def __init__(self, device):
        self.device = device

    def synchronize(self):
        FakeStream.waits += 1


class FakeRecording:
    made: ClassVar[Counter] = Counter()

    def __init__(self, function, inputs, learner):
        FakeRecording.made[len(inputs[0])] += 1
        self.function = function

    def replay(self, inputs):
        return self.function(*inputs)


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(graph, "Recording", FakeRecording)
    FakeRecording.made, FakeStream.waits = Counter(), 0
    return GraphRunner(make_learner("er", image_shape=(1, 8, 8), memory_size=20, device="cpu", precision="fp32"))


def ask(runner, size, function="look"):
    out = runner.run((function, size), lambda x: x + 1, (torch.zeros(size),))
    assert torch.equal(out, torch.ones(size))


def test_a_size_that_comes_again_and_again_is_recorded_once(runner):
    for _ in range(5):
        ask(runner, 10)
    ask(runner, 3)
    assert FakeRecording.made == {10: 1}
    assert FakeStream.waits == 0


def test_what_one_has_recorded_another_like_it_records_at_once(runner):
    prepared = set()
    one, other = GraphRunner(runner.learner, prepared), GraphRunner(runner.learner, prepared)
    for _ in range(3):
        ask(one, 10)
    assert (FakeRecording.made, prepared) == ({10: 1}, {("look", 10)})
    ask(other, 10)
    assert FakeRecording.made == {10: 2}
    ask(runner, 10)  # not one of them
    ask(other, 3)  # new to both
    assert FakeRecording.made == {10: 2}


def test_no_more_than_a_few_are_kept_and_those_used_last(runner):
    for size in range(1, 20):
        for _ in range(3):
            ask(runner, size)
        ask(runner, 1)  # always in use
    assert len(runner.recordings) == graph.MOST
    assert FakeRecording.made[1] == 1
    assert FakeStream.waits > 0  # nothing is taken away from under a step that runs
    ask(runner, 2)  # was dropped: as if it had never been met
    assert FakeRecording.made[2] == 1


def test_functions_do_not_push_each_other_out(runner):
    for _ in range(3):
        ask(runner, 10, "step")
    for size in range(1, 20):
        for _ in range(3):
            ask(runner, size)
    assert [key for key in runner.recordings if key[0] == "step"] == [("step", 10)]


def test_what_the_learner_has_outgrown_is_dropped(runner):
    for _ in range(3):
        ask(runner, 10)
    assert len(runner.recordings) == 1
    runner.learner.reserve(17)  # more than the head had room for
    ask(runner, 10)
    assert len(runner.recordings) == 0
    for _ in range(2):
        ask(runner, 10)
    assert FakeRecording.made == {10: 2}


def test_counts_do_not_grow_without_end(runner, monkeypatch):
    monkeypatch.setattr(graph, "MOST_COUNTED", 50)
    for size in range(1, 200):
        ask(runner, size)
    assert len(runner.met) <= 50


def test_what_cannot_be_recorded_says_what_to_do(runner, monkeypatch):
    def fails(function, inputs, learner):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "Recording", fails)
    for _ in range(2):
        ask(runner, 10)
    with pytest.raises(ScrlearnError, match=r'not permitted.*Use engine="eager"'):
        ask(runner, 10)


def test_a_full_device_is_no_such_case(runner, monkeypatch):
    def fails(function, inputs, learner):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(graph, "Recording", fails)
    for _ in range(2):
        ask(runner, 10)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ask(runner, 10)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
def test_a_copy_of_a_learner_has_a_runner_of_its_own(runner, copied):
    learner = runner.learner
    learner.runner = runner
    for _ in range(3):
        ask(runner, 10)
    twin = copied(learner)
    assert isinstance(twin.runner, GraphRunner)
    assert twin.runner.learner is twin
    assert (len(twin.runner.recordings), len(runner.recordings)) == (0, 1)
