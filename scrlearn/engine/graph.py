"""Steps as CUDA graphs: the learner's own code, recorded once and replayed without Python."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

# read when the CUDA context is made: enough queues for many seeds side by side, and reproducible matrix products
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor

from scrlearn.devices import numerics

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner

WARM_UP = 2


class Recording:
    """One captured function with the tensors it reads and writes."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], learner: Learner) -> None:
        self.inputs = tuple(torch.empty_like(value).copy_(value) for value in inputs)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(learner.generator)
        # not the context manager: it collects garbage and empties the cache first, for every lane again
        with numerics(learner.precision):
            self.graph.capture_begin()
            try:
                self.output = function(*self.inputs)
            finally:
                self.graph.capture_end()

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run it again on new inputs. The result is overwritten by the next replay."""
        for own, value in zip(self.inputs, inputs, strict=True):
            own.copy_(value)
        self.graph.replay()
        return self.output


class GraphRunner:
    """Runs a learner's functions as CUDA graphs on a stream of its own.

    A function is run as it is the first times it is met with a given signature (these runs count: they are steps like
    any other, and they let libraries set themselves up); then it is recorded, and from there on replayed. A new
    signature (the memory has filled, a class was added beyond the head's room) means a new recording.

    Parameters
    ----------
    learner
        The learner whose functions are run; graph-safe, on a CUDA device.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.stream = torch.cuda.Stream(learner.device)
        self.recordings: dict[Hashable, Recording] = {}
        self.met: Counter[Hashable] = Counter()

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run a function of the learner on these tensors, after and before what the caller has under way."""
        shapes = tuple((value.shape, value.dtype) for value in inputs)
        key = (function.__qualname__, torch.is_grad_enabled(), self.learner.signature(len(inputs[0])), shapes)
        caller = torch.cuda.current_stream(self.learner.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            output = self.run(key, function, inputs).clone()
        caller.wait_stream(self.stream)
        output.record_stream(caller)
        return output

    def run(self, key: Hashable, function: Callable[..., Tensor], inputs: tuple[Tensor, ...] = ()) -> Tensor:
        """Replay, record or warm up, on the current stream."""
        recording = self.recordings.get(key)
        if recording is None:
            self.met[key] += 1
            if self.met[key] <= WARM_UP:
                with numerics(self.learner.precision):
                    return function(*inputs)
            recording = self.recordings[key] = Recording(function, inputs, self.learner)
        return recording.replay(inputs)


def why_not_graph(learner: Learner) -> str | None:
    """Why this learner's steps cannot be recorded as CUDA graphs; None if they can."""
    if learner.device.type != "cuda":
        return f"graphs need CUDA, and the learner is on {learner.device}"
    if not learner.graph_safe:
        return f"a step of {type(learner).__name__} takes decisions on the host"
    return None
