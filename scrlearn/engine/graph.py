"""Steps as CUDA graphs: the learner's own code, recorded once and replayed without Python."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

# read when the CUDA context is made: enough queues for many seeds side by side, and reproducible matrix products
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor

from scrlearn.devices import numerics
from scrlearn.errors import ScrlearnError

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner

WARM_UP = 2
MOST = 4  # recordings of one function: each holds the memory that its kernels work in
MOST_COUNTED = 1000
Key = tuple[Hashable, ...]


class Recording:
    """One captured function with the tensors it reads and writes."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], learner: Learner) -> None:
        self.inputs = tuple(torch.empty_like(value).copy_(value) for value in inputs)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(learner.generator)
        # not the context manager: it collects garbage and empties the cache first, for every lane again
        with numerics(learner.precision):
            # other threads may go on asking the device for memory meanwhile
            self.graph.capture_begin(capture_error_mode="thread_local")
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
    signature (the memory has filled, a class was added beyond the head's room) means a new recording. Those made with
    less room than there is now can never be replayed and are dropped; of the others the last ones used are kept.

    A copy of it starts without recordings.

    Parameters
    ----------
    learner
        The learner whose functions are run; graph-safe, on a CUDA device.
    prepared
        What this process has recorded already for learners that differ from this one in their seed only; it is recorded
        at once, and what is recorded here joins it. None: nothing yet.
    """

    def __init__(self, learner: Learner, prepared: set[Key] | None = None) -> None:
        prepared = set() if prepared is None else prepared
        self.__setstate__({"learner": learner, "device": learner.device, "prepared": prepared})

    def __getstate__(self) -> dict[str, Any]:
        return {"learner": self.learner, "device": self.device, "prepared": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.learner: Learner = state["learner"]  # in a copy under way it may have nothing in it yet
        self.device: torch.device = state["device"]
        self.stream = torch.cuda.Stream(self.device)
        self.recordings: dict[Key, Recording] = {}
        self.met: Counter[Key] = Counter()
        self.prepared: set[Key] = state["prepared"]
        self.room: Hashable = None

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run a function of the learner on these tensors, after and before what the caller has under way."""
        shapes = tuple((value.shape, value.dtype) for value in inputs)
        key = (function.__qualname__, torch.is_grad_enabled(), self.learner.signature(len(inputs[0])), shapes)
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            output = self.run(key, function, inputs).clone()
        caller.wait_stream(self.stream)
        output.record_stream(caller)
        return output

    def run(self, key: Key, function: Callable[..., Tensor], inputs: tuple[Tensor, ...] = ()) -> Tensor:
        """Replay, record or warm up, on the current stream; a key begins with the name of the function."""
        if self.room != self.learner.room:
            self._drop(list(self.recordings))
            self.room = self.learner.room
        recording = self.recordings.pop(key, None)
        if recording is None:
            self.met[key] += 1
            if self.met[key] <= WARM_UP and key not in self.prepared:
                if len(self.met) > MOST_COUNTED:
                    self.met.clear()
                with numerics(self.learner.precision):
                    return function(*inputs)
            recording = self._record(key, function, inputs)
            self.prepared.add(key)
        self.recordings[key] = recording  # behind those that have not been used for longer
        return recording.replay(inputs)

    def _record(self, key: Key, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Recording:
        same = [other for other in self.recordings if other[0] == key[0]]
        self._drop(same[: max(0, len(same) - MOST + 1)])
        try:
            return Recording(function, inputs, self.learner)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a module from elsewhere may do what cannot be recorded
            raise ScrlearnError(
                f'{function.__qualname__} cannot be recorded as a CUDA graph: {error}. Use engine="eager".'
            ) from error

    def _drop(self, keys: list[Key]) -> None:
        if keys:
            self.stream.synchronize()  # one that still runs must not lose the memory it works in
        for key in keys:
            del self.recordings[key], self.met[key]
            self.prepared.discard(key)


def why_not_graph(learner: Learner) -> str | None:
    """Why this learner's steps cannot be recorded as CUDA graphs; None if they can."""
    if learner.device.type != "cuda":
        return f"graphs need CUDA, and the learner is on {learner.device}"
    if not learner.graph_safe:
        return f"a step of {type(learner).__name__} takes decisions on the host"
    return None
