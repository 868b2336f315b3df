"""A learner whose memory is kept by an update policy, whether it is replayed or only asked for class means."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from scrlearn.learners.base import Learner
from scrlearn.memory import Update
from scrlearn.memory.reservoir import Reservoir


class Keeper(Learner):
    """What learners with an update policy share: the policy grows, forgets, is saved and resumed with them.

    Parameters
    ----------
    update
        Who is kept.
    others
        See `Learner`.
    """

    def __init__(self, *, update: Update | None = None, **others: Any) -> None:
        self.update = Reservoir() if update is None else update
        self.graph_safe = self.graph_safe and self.update.graph_safe
        super().__init__(**others)
        self.update.attach(self)

    def keep(self, x: Tensor, y: Tensor) -> None:
        """Offer a batch to the memory, where there is one. Graph-safe where the policy is."""
        if self.memory.capacity:
            self.update(self, x, y)

    def signature(self, images: int) -> Hashable:
        """The policy's shapes too."""
        return super().signature(images), self.update.signature(self)

    def reserve(self, classes: int) -> None:
        """The policy makes room too."""
        super().reserve(classes)
        self.update.reserve(self)

    def end_task(self) -> None:
        """The policy hears of it, after whatever the learner does with the memory."""
        super().end_task()
        self.task_over()
        self.update.end_task(self)

    def task_over(self) -> None:
        """What is done with the memory at a task's end; most learners: nothing."""

    def remove(self, label: int) -> int:
        """The policy forgets the class too."""
        self.update.forget(label, self.memory.slots_without(label))
        return super().remove(label)

    def state_dict(self) -> dict[str, Any]:
        """The policy's state too."""
        return super().state_dict() | {"update": self.update.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The policy's state too."""
        super().load_state_dict(state)
        self.update.load_state_dict(state["update"])
