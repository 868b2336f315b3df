"""A-GEM: never step against the memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.learners.objectives import Objective
from scrlearn.learners.replay import Replay


class AGEM(Replay):
    """Averaged gradient episodic memory: trains on the stream, but takes out of each step what would hurt the memory.

    From the second task on, the gradient of the stream batch is compared with that of a memory batch; where their
    inner product is negative, it is projected to where the loss of the memory batch does not rise.

    Parameters
    ----------
    from_start
        Project from the first images in memory on, without waiting for the end of the first task. For streams where
        nobody calls `end_task`, which would otherwise be learned as by fine-tuning; on in `OnlineClassifier`.
    others
        See `Replay`.

    References
    ----------
    Chaudhry, Ranzato, Rohrbach, Elhoseiny, "Efficient Lifelong Learning with A-GEM", ICLR 2019.

    Examples
    --------
    >>> from scrlearn.learners import make_learner
    >>> learner = make_learner("a-gem", image_shape=(1, 8, 8), memory_size=50)
    >>> for label in range(2):
    ...     loss = learner.learn(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.full((10,), label))
    ...     print(learner.projects)
    ...     learner.end_task()
    False
    True
    """

    def __init__(self, *, objective: Objective, from_start: bool = False, **others: Any) -> None:
        if objective.joint:
            raise InputError(
                f"A-GEM compares the gradient of the stream with that of the memory, and {type(objective).__name__} "
                "here takes both in one batch: use the cross-entropy with joint=False."
            )
        self.from_start, self.needs_task_ends = from_start, not from_start
        super().__init__(objective=objective, **others)

    @property
    def projects(self) -> bool:
        """Whether the next step looks at the memory."""
        return self.memory.size > 0 and (self.from_start or self.tasks > 0)

    @property
    def replays_now(self) -> int:
        """None before the memory is looked at."""
        return super().replays_now if self.projects else 0

    def _separate_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.objective.loss(self, x, y)
        gradient = self.gradient(loss)
        if self.projects:
            memory_x, memory_y = self.retrieve(self, x, y, self.memory_batch, gradient)
            if len(memory_x):
                gradient = projected(gradient, self.gradient(self.objective.loss(self, memory_x, memory_y)))
        self.descend(gradient)
        return loss

    def signature(self, images: int) -> Hashable:
        """Whether the step looks at the memory, too."""
        return super().signature(images), self.projects


def projected(gradient: list[Tensor], reference: list[Tensor]) -> list[Tensor]:
    """Eq. 11: the gradient without what goes against the reference; unchanged where nothing does.

    >>> projected([torch.tensor([1.0, -1.0])], [torch.tensor([0.0, 2.0])])
    [tensor([1., 0.])]
    """
    ours, theirs = (torch.cat([g.flatten() for g in side]) for side in (gradient, reference))
    inner = torch.dot(ours, theirs)
    against = torch.where(inner < 0, inner / torch.dot(theirs, theirs), 0.0)
    return list(torch._foreach_sub(gradient, torch._foreach_mul(reference, against)))
