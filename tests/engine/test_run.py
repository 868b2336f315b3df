"""The loop over the stream: its contract with hooks, resuming, and how an engine is chosen."""

from types import SimpleNamespace

import pytest
import torch

from scrlearn.checkpoint import digest
from scrlearn.data import class_incremental, load
from scrlearn.engine import START, Position, most_side_by_side, run, train, why_not_graph
from scrlearn.learners import make_learner


class Diary:
    """Hooks that write down what happened; may stop the loop after some batches."""

    def __init__(self, stop_after=None):
        self.events, self.stop_after = [], stop_after

    def batch_learned(self, position, loss):
        assert torch.isfinite(loss)
        self.events.append(position)
        if len(self.events) == self.stop_after:
            raise KeyboardInterrupt

    def task_ended(self, task):
        self.events.append(f"task {task}")

    def finishing(self, step, steps):
        self.events.append("finishing")

    def stream_ended(self):
        self.events.append("end")


@pytest.fixture(scope="module")
def stream():
    return class_incremental(load("digits"), tasks=2, limit=6, batch_size=10)


def learner(seed=0):
    return make_learner("er", image_shape=(1, 8, 8), memory_size=20, device="cpu", precision="fp32", seed=seed)


def test_hooks_see_every_batch_once_and_in_order(stream):
    diary = Diary()
    train(learner(), stream, diary)
    batches = [stream.steps(task) for task in stream.tasks]
    expected = [Position(0, i + 1) for i in range(batches[0])] + ["task 0"]
    expected += [Position(1, i + 1) for i in range(batches[1])] + ["task 1", "end"]
    assert diary.events == expected


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_loop_that_is_stopped_and_started_again_is_the_same_loop(stream, stop_after):
    whole = learner()
    train(whole, stream, Diary())
    stopped, diary = learner(), Diary(stop_after)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, stream, diary)
    place = [event for event in diary.events if isinstance(event, Position)][-1]
    again = learner()
    again.load_state_dict(stopped.state_dict())
    train(again, stream, Diary(), place)
    assert digest(again.state_dict()) == digest(whole.state_dict())


def test_several_learners_give_what_each_gives_alone(stream):
    alone = [learner(seed) for seed in (0, 1)]
    for one in alone:
        train(one, stream, Diary())
    together = [learner(seed) for seed in (0, 1)]
    run(together, [stream] * 2, [Diary(), Diary()], [START, START], engine="auto")
    assert [digest(one.state_dict()) for one in together] == [digest(one.state_dict()) for one in alone]


def test_asking_for_graphs_without_cuda_says_why_and_goes_on(stream):
    lines = []
    diary = Diary()
    run([learner()], [stream], [diary], engine="graph", say=lines.append)
    assert diary.events[-1] == "end"
    assert len(lines) == 1
    assert "graphs need CUDA" in lines[0]


def test_nothing_is_said_where_nothing_was_asked_for(stream):
    lines = []
    run([learner()], [stream], [Diary()], engine="auto", say=lines.append)
    run([learner()], [stream], [Diary()], engine="eager", say=lines.append)
    assert lines == []


def test_why_not_graph_names_the_reason():
    assert "cpu" in why_not_graph(learner())
    assert most_side_by_side(learner()) == 1


def test_a_wide_encoder_leaves_room_for_fewer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2**30, 80 * 2**30))

    def fitting(width, **options):
        made = make_learner("scr", image_shape=(3, 32, 32), device="cpu", width=width, **options)
        shown = {name: getattr(made, name) for name in ("image_shape", "memory_batch", "memory", "width", "weights")}
        return most_side_by_side(SimpleNamespace(device=torch.device("cuda"), **shown))

    assert fitting(20) == 16
    assert fitting(20) == fitting(24)  # 20 channels are padded to 24
    assert 1 <= fitting(64, memory_batch=200) < fitting(24, memory_batch=200)
    assert fitting(64, memory_batch=5000) == 1
