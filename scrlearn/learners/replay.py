"""The one replay loop: stream batch, memory batch, step, memory update (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.learners.base import Learner
from scrlearn.learners.objectives import Objective
from scrlearn.memory import Retrieval, Update
from scrlearn.memory.random import NoRetrieval

REVIEW_BATCH = 100
REVIEW_SCALE = 0.1


class Replay(Learner):
    """A replay method: an objective, a retrieval policy and an update policy around one memory.

    Parameters
    ----------
    objective
        What is minimised.
    retrieve
        Who is replayed.
    update
        Who is kept.
    review
        After each task, one pass over the memory in batches of 100 with a tenth of the gradient, as the paper's
        released configuration does.
    updates_per_batch
        Gradient steps for each stream batch, each with its own memory batch.
    others
        See `Learner`.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        retrieve: Retrieval,
        update: Update,
        review: bool = False,
        updates_per_batch: int = 1,
        **others: Any,
    ) -> None:
        self.objective, self.retrieve, self.update = objective, retrieve, update
        self.projection, self.has_head = objective.projection, objective.has_head
        self.graph_safe = retrieve.graph_safe and update.graph_safe
        super().__init__(**others)
        if updates_per_batch < 1:
            raise InputError(f"updates_per_batch is {updates_per_batch}; it must be 1 or more.")
        if self.memory.capacity == 0 and not isinstance(retrieve, NoRetrieval):
            raise InputError("memory_size is 0, and a replay method lives on its memory: give memory_size ≥ 1.")
        self.review, self.updates_per_batch = review, updates_per_batch
        retrieve.attach(self)
        update.attach(self)

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """Algorithm 1: retrieve, step, update the memory."""
        loss = torch.zeros((), device=self.device)
        if self.memory.size > 0 or not self.objective.needs_memory:
            for _ in range(self.updates_per_batch):
                loss = self._joint_step(x, y) if self.objective.joint else self._separate_step(x, y)
        if self.memory.capacity:
            self.update(self, x, y)
        return loss

    def _joint_step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.memory.size:
            memory_x, memory_y = self.retrieve(self, x, y, self.memory_batch)
            x, y = torch.cat([x, memory_x]), torch.cat([y, memory_y])
        loss = self.objective.loss(self, x, y)
        self.descend(self.gradient(loss))
        return loss

    def _separate_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.objective.loss(self, x, y)
        gradient = self.gradient(loss)
        if self.memory.size:
            memory_x, memory_y = self.retrieve(self, x, y, self.memory_batch, gradient)
            if len(memory_x):
                replayed = self.gradient(self.objective.loss(self, memory_x, memory_y))
                torch._foreach_add_(gradient, replayed)
        self.descend(gradient)
        return loss

    def signature(self, images: int) -> Hashable:
        """The policies' shapes too."""
        return super().signature(images), self.retrieve.signature(self), self.update.signature(self)

    def end_task(self) -> None:
        """Review the memory, where that is asked for."""
        super().end_task()
        if self.review:
            self.set_training(True)
            order = self.memory.sample(self.memory.size, self.generator)
            for slots in order.split(REVIEW_BATCH):
                if len(slots) == REVIEW_BATCH:
                    self.runner(self.review_step, slots)
            self._prototypes = None

    def review_step(self, slots: Tensor) -> Tensor:
        """One shortened step on stored images. Graph-safe."""
        loss = self.objective.loss(self, *self.memory.read(slots))
        self.descend(self.gradient(loss), scale=REVIEW_SCALE)
        if self.average is not None:
            self.average_weights()
        return loss.detach()

    def forget(self, label: int) -> int:
        """The policies forget the class too."""
        images_before = self.memory.labels[: self.memory.size]
        kept = (images_before != label).nonzero().flatten()
        self.retrieve.forget(label, kept)
        self.update.forget(label, kept)
        return super().forget(label)

    def state_dict(self) -> dict[str, Any]:
        """The policies' state too."""
        return super().state_dict() | {"retrieve": self.retrieve.state_dict(), "update": self.update.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The policies' state too."""
        super().load_state_dict(state)
        self.retrieve.load_state_dict(state.get("retrieve", {}))
        self.update.load_state_dict(state.get("update", {}))
