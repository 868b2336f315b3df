"""What a memory policy is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner


class Policy:
    """What retrieval and update policies share: state to save, and the shape of the next step."""

    graph_safe = True
    """Whether a step with this policy can be captured as a CUDA graph."""

    def attach(self, learner: Learner) -> None:
        """Called once when the learner is built: allocate what the policy keeps between steps."""

    def reserve(self, learner: Learner) -> None:
        """The learner may have made room for more classes (`len(learner.met)`): make it here too."""

    def end_task(self, learner: Learner) -> None:
        """A hint that a task is over."""

    def signature(self, learner: Learner) -> Hashable:
        """What the shapes of the next step depend on, known on the host; a new value means a new graph."""
        return None

    def forget(self, label: int, kept: Tensor) -> None:
        """A class was removed from memory; `kept` are the slots that stay, in their old numbering."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers the policy keeps between steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved policy stood."""


class Retrieval(Policy):
    """Who is replayed: chooses images of the memory to go with a stream batch."""

    blind = False
    """Whether the choice needs neither the network nor a gradient, so that it can be made before the step."""

    def __call__(
        self, learner: Learner, x: Tensor, y: Tensor, count: int, gradient: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Images and classes from memory: `count`, or as many as there are.

        `gradient` is the gradient of the loss on the stream batch, where the step has computed it already.
        """
        raise NotImplementedError


class Update(Policy):
    """Who is kept: writes a stream batch, or a part of it, into the memory."""

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Offer the batch to the memory."""
        raise NotImplementedError
