"""The one replay loop: stream batch, memory batch, step, memory update (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.learners.keeper import Keeper
from scrlearn.learners.objectives import Objective
from scrlearn.memory import Retrieval
from scrlearn.memory.random import NoRetrieval

REVIEW_BATCH = 100
REVIEW_SCALE = 0.1


class Replay(Keeper):
    """A replay method: an objective, a retrieval policy and an update policy around one memory.

    Parameters
    ----------
    objective
        What is minimised.
    retrieve
        Who is replayed.
    review
        After each task, one pass over the memory in batches of 100 with a tenth of the gradient, as the paper's
        released configuration does.
    updates_per_batch
        Gradient steps for each stream batch, each with a memory batch and views of its own; the memory is updated once,
        after the last.
    updates_until
        Replays so far, for each image that is stored, up to which there are several steps for each batch; from there
        on, one: a memory that has been replayed so often is known by heart. 0: no such end.
    others
        See `Keeper` (who is kept) and `Learner`.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        retrieve: Retrieval,
        review: bool = False,
        updates_per_batch: int = 1,
        updates_until: float = 0.0,
        **others: Any,
    ) -> None:
        self.objective, self.retrieve = objective, retrieve
        self.projection, self.has_head = objective.projection, objective.has_head
        self.graph_safe = retrieve.graph_safe
        if others.get("memory_size", 0) == 0 and not isinstance(retrieve, NoRetrieval):
            raise InputError("memory_size is 0, and a replay method lives on its memory: give memory_size ≥ 1.")
        super().__init__(**others)
        if updates_per_batch < 1:
            raise InputError(f"updates_per_batch is {updates_per_batch}; it must be 1 or more.")
        if updates_until < 0:
            raise InputError(f"updates_until is {updates_until}; it must be 0 or more.")
        for name in ("distillation_weight", "preservation_weight"):
            if getattr(objective, name) and self.average is None:
                raise InputError(
                    f"{name} is {getattr(objective, name)}, but there are no averaged weights that could teach: give "
                    "averaging, such as 0.995."
                )
        self.review, self.updates_per_batch, self.updates_until = review, updates_per_batch, updates_until
        self.trains_on_memory = review or not isinstance(retrieve, NoRetrieval)
        self.replaying = 0  # images of the batch at hand that are from the memory: its last ones
        self.replayed = torch.zeros((), dtype=torch.int64, device=self.device)
        self._replayed = 0  # the same on the host, whatever the objective
        retrieve.attach(self)

    @property
    def replays(self) -> Tensor:
        """Replays so far for each image in memory; counted where the objective asks for it."""
        return self.replayed / self.memory.filled.clamp(min=1)

    @property
    def updates_now(self) -> int:
        """Gradient steps for the next batch."""
        worn = self.updates_until and self._replayed >= self.updates_until * self.memory.size > 0
        return 1 if worn else self.updates_per_batch

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """Algorithm 1: retrieve, step, update the memory."""
        loss = torch.zeros((), device=self.device)
        if self.memory.size > 0 or not self.objective.needs_memory:
            for _ in range(self.updates_now):
                loss = self._joint_step(x, y) if self.objective.joint else self._separate_step(x, y)
        self.keep(x, y)
        return loss

    def _joint_step(self, x: Tensor, y: Tensor) -> Tensor:
        self.replaying = 0
        if self.memory.size:
            memory_x, memory_y = self.retrieve(self, x, y, self.memory_batch)
            x, y, self.replaying = torch.cat([x, memory_x]), torch.cat([y, memory_y]), len(memory_x)
        loss = self.objective.loss(self, x, y)
        self.descend(self.gradient(loss))
        if self.objective.mix_after:
            self.replayed += self.replaying
        return loss

    def _separate_step(self, x: Tensor, y: Tensor) -> Tensor:
        if self._shares_pass(x):
            return self._step_in_one_pass(x, y)
        loss = self.objective.loss(self, x, y)
        gradient = self.gradient(loss)
        if self.memory.size:
            memory_x, memory_y = self.retrieve(self, x, y, self.memory_batch, gradient)
            if len(memory_x):
                replayed = self.gradient(self.objective.loss(self, memory_x, memory_y))
                torch._foreach_add_(gradient, replayed)
        self.descend(gradient)
        return loss

    def _step_in_one_pass(self, x: Tensor, y: Tensor) -> Tensor:
        """The same, stream and memory images side by side, each normalised by their own statistics: fewer kernels."""
        memory_x, memory_y = self.retrieve(self, x, y, self.memory_batch)
        losses = self.objective.losses(self, torch.cat([x, memory_x]), torch.cat([y, memory_y]), segments=2)
        self.descend(self.gradient(losses.sum()))
        return losses[0]

    def _shares_pass(self, x: Tensor) -> bool:
        """Whether one pass can do for both batches: of one size, chosen beforehand, and it is worth it."""
        alike = min(self.memory.size, self.memory_batch) == len(x)
        return alike and self.retrieve.blind and self.objective.has_losses and self.network.takes_segments(x)

    @property
    def replays_now(self) -> int:
        """Images of the memory in each of the next steps."""
        return 0 if isinstance(self.retrieve, NoRetrieval) else min(self.memory.size, self.memory_batch)

    def advance(self, images: int) -> None:
        """How often was replayed, too."""
        self._replayed += self.updates_now * self.replays_now
        super().advance(images)

    def signature(self, images: int) -> Hashable:
        """The number of steps and the retrieval's shapes too."""
        return super().signature(images), self.updates_now, self.retrieve.signature(self)

    def reserve(self, classes: int) -> None:
        """The retrieval makes room too."""
        super().reserve(classes)
        self.retrieve.reserve(self)

    def task_over(self) -> None:
        """Review the memory, where that is asked for; then the policies hear that a task is over."""
        if self.review:
            self.set_training(True)
            order = self.memory.sample(self.memory.size, self.generator)
            for slots in order.split(REVIEW_BATCH):
                if len(slots) == REVIEW_BATCH:
                    self.run(self.review_step, slots)
            self._changed()
        self.retrieve.end_task(self)

    def review_step(self, slots: Tensor) -> Tensor:
        """One shortened step on stored images. Graph-safe."""
        self.replaying = len(slots)
        loss = self.objective.loss(self, *self.memory.read(slots))
        self.descend(self.gradient(loss), scale=REVIEW_SCALE)
        return loss.detach()

    def remove(self, label: int) -> int:
        """The retrieval forgets the class too."""
        self.retrieve.forget(label, self.memory.slots_without(label))
        return super().remove(label)

    def state_dict(self) -> dict[str, Any]:
        """The retrieval's state and the counts of replays too."""
        counts = {"replayed": self.replayed, "replayed_on_host": self._replayed}
        return super().state_dict() | {"retrieve": self.retrieve.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The retrieval's state too."""
        super().load_state_dict(state)
        self.retrieve.load_state_dict(state["retrieve"])
        self.replayed.copy_(state.get("replayed", torch.zeros_like(self.replayed)))
        self._replayed = state.get("replayed_on_host", 0)
