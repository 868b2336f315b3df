"""Learners through their streams: one by one and eagerly, or many side by side on one device as CUDA graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scrlearn.data import Stream
from scrlearn.data.base import ArrayImages
from scrlearn.engine.graph import GraphRunner, Key, why_not_graph
from scrlearn.errors import InputError, suggest
from scrlearn.learners.base import Learner

ENGINES = ("auto", "eager", "graph")
MOST_SIDE_BY_SIDE = 16
TURN = 16  # steps of a lane at a time: changing the stream takes the host as long as a small step


@dataclass(frozen=True, order=True)
class Position:
    """A place in the stream: this many batches of this task have been learned."""

    task: int = 0
    step: int = 0


START = Position()


class Hooks(Protocol):
    """What watches a learner while it learns a stream."""

    def batch_learned(self, position: Position, loss: Tensor) -> None:
        """Called after each batch; the loss is a tensor that nobody has waited for yet."""
        ...

    def task_ended(self, task: int) -> None:
        """Called after the learner was told that a task is over."""
        ...

    def finishing(self, step: int, steps: int) -> None:
        """Called now and then by a learner that still has work to do when the stream is over."""
        ...

    def stream_ended(self) -> None:
        """Called when the stream is over and the learner is ready to answer."""
        ...


def check_engine(engine: str) -> None:
    """Refuse what is no engine."""
    if engine not in ENGINES:
        raise InputError(f'There is no engine "{engine}".{suggest(str(engine), ENGINES)}')


def run(
    learners: Sequence[Learner],
    streams: Sequence[Stream],
    hooks: Sequence[Hooks],
    starts: Sequence[Position] | None = None,
    *,
    engine: str = "auto",
    say: Callable[[str], None] = lambda line: None,
    kinds: Sequence[Hashable] | None = None,
) -> None:
    """Lead each learner through its stream.

    Parameters
    ----------
    learners, streams, hooks
        One of each for every run; learners on one CUDA device run side by side.
    starts
        Where each begins; default: at the start of its stream.
    engine
        "graph": steps as CUDA graphs, all learners side by side; "eager": as plain PyTorch, one after the other;
        "auto": graphs wherever they are possible.
    say
        Called with one line that says why graphs are not used, where they are not.
    kinds
        One for each run; learners of one kind differ in their seed only, and what is set up for one serves all. None:
        each is a kind of its own.
    """
    starts = starts or [START] * len(learners)
    reason = "eager was asked for" if engine == "eager" else _why_not(learners, streams)
    if reason is None:
        side_by_side(learners, streams, hooks, starts, kinds)
        return
    if engine == "graph":
        say(f"Running eagerly: {reason}.")
    for learner, stream, hook, start in zip(learners, streams, hooks, starts, strict=True):
        train(learner, stream, hook, start)


def _why_not(learners: Sequence[Learner], streams: Sequence[Stream]) -> str | None:
    for learner, stream in zip(learners, streams, strict=True):
        if not isinstance(stream.dataset.train, ArrayImages):
            return "the images are read from disk as they come"
        if not stream.drop_last:
            return "the last batch of a task may be smaller"
        if (reason := why_not_graph(learner)) is not None:
            return reason
    return None


def train(learner: Learner, stream: Stream, hooks: Hooks, start: Position = START) -> None:
    """Lead one learner through a stream, from a place in it to its end, a batch at a time.

    This is the contract for every engine: the same batches in the same order, `batch_learned` after each, `end_task`
    and then `task_ended` after each task, `finish` and `stream_ended` at the end. A hook that raises stops the loop.
    """
    for task in stream.tasks[start.task :]:
        first = start.step if task.index == start.task else 0
        for step, (x, y) in enumerate(stream.batches(task, first), first + 1):
            loss = learner.learn(x, y)
            hooks.batch_learned(Position(task.index, step), loss)
        learner.end_task()
        hooks.task_ended(task.index)
    learner.finish(hooks.finishing)
    hooks.stream_ended()


def side_by_side(
    learners: Sequence[Learner],
    streams: Sequence[Stream],
    hooks: Sequence[Hooks],
    starts: Sequence[Position],
    kinds: Sequence[Hashable] | None = None,
) -> None:
    """Lead several learners through their streams in turns, a few steps each, every one on a CUDA stream of its own.

    Each is a lane: nothing that it computes depends on its neighbours.
    """
    images: dict[int, Tensor] = {}
    prepared: defaultdict[Hashable, set[Key]] = defaultdict(set)
    lanes = []
    kinds = range(len(learners)) if kinds is None else kinds
    for learner, stream, hook, start, kind in zip(learners, streams, hooks, starts, kinds, strict=True):
        pixels = stream.dataset.train
        assert isinstance(pixels, ArrayImages)
        if id(pixels) not in images:  # seeds share the data set; it goes to the device once
            images[id(pixels)] = pixels.images.to(learner.device)
        lanes.append(Lane(learner, stream, images[id(pixels)], prepared[kind]).lead(hook, start))
    for ahead, lane in enumerate(lanes):  # a turn apart, so that they are measured one by one while the others learn
        for _ in range(ahead):
            next(lane, None)
    while lanes:
        lanes = [lane for lane in lanes if next(lane, None) is not None]


class Lane:
    """One learner and its stream with everything on the device: images, labels, order, and the place in it.

    A step reads the next row of `order`, gathers its images and learns them, all inside one graph; the host only
    launches it.
    """

    def __init__(self, learner: Learner, stream: Stream, images: Tensor, prepared: set[Key] | None = None) -> None:
        self.learner, self.stream, self.images = learner, stream, images
        self.labels = stream.train_labels.to(learner.device)
        steps = max(stream.steps(task) for task in stream.tasks)
        self.order = torch.zeros((steps, stream.batch_size), dtype=torch.int64, device=learner.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=learner.device)
        self.runner = GraphRunner(learner, prepared)
        learner.runner = self.runner
        learner.reserve(len(stream.class_names))  # room ahead: one graph for all tasks

    def lead(self, hooks: Hooks, start: Position) -> Iterator[bool]:
        """Go through the stream; pauses after a few steps, so that others have their turn."""
        device, learner = self.learner.device, self.learner
        for task in self.stream.tasks[start.task :]:
            first = start.step if task.index == start.task else 0
            order = self.stream.order(task)
            self.order[: len(order)] = order.to(device)
            self.place.fill_(first)
            self.runner.stream.wait_stream(torch.cuda.current_stream(device))
            for begin in range(first, len(order), TURN):
                with torch.cuda.stream(self.runner.stream):
                    for step in range(begin, min(begin + TURN, len(order))):
                        loss = self.step()
                        hooks.batch_learned(Position(task.index, step + 1), loss)
                yield True
            torch.cuda.current_stream(device).wait_stream(self.runner.stream)
            learner.end_task()
            hooks.task_ended(task.index)
            yield True
        learner.finish(hooks.finishing)
        hooks.stream_ended()

    def step(self) -> Tensor:
        """Learn the next batch, on the runner's stream; the loss is overwritten by the next step."""
        self.learner.set_training(True)
        loss = self.runner.run(("stream", self.learner.signature(self.stream.batch_size)), self._learn_next)
        self.learner.advance(self.stream.batch_size)
        return loss

    def _learn_next(self) -> Tensor:
        rows = self.order.index_select(0, self.place).flatten()
        loss = self.learner.step(self.images.index_select(0, rows), self.labels.index_select(0, rows))
        self.place += 1
        return loss


def most_side_by_side(learner: Learner, wanted: int | None = None) -> int:
    """How many such learners the device has room for, by a generous estimate of what one needs."""
    if learner.device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(learner.device)
    height, width = learner.image_shape[1:]
    channels = -(-learner.width // 8) * 8  # the encoder is padded to these
    maps = 2 * (10 + learner.memory_batch) * height * width * channels * 2 * 40
    weights = 8 * 4 * sum(weight.numel() for weight in learner.weights)  # gradients, averages, teachers and the like
    each = maps + weights + learner.memory.images.numel() + 500 * 2**20
    return max(1, min(wanted or MOST_SIDE_BY_SIDE, int(0.8 * free // each)))
