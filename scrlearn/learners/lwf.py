"""Learning without Forgetting: the network is held to what it answered before the task began."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.learners.keeper import Keeper
from scrlearn.learners.teacher import Teacher
from scrlearn.losses import cross_entropy_loss, distillation_loss


class LwF(Keeper):
    r"""Learning without Forgetting, for a stream.

    The teacher is the network at the end of the previous task. With t tasks behind it, the loss on a batch is

    .. math::
        \frac{1}{t+1} \, \mathrm{CE} + \Big(1 - \frac{1}{t+1}\Big) \, T^2 \,
        \mathrm{KL}\big(\sigma(teacher / T) \,\|\, \sigma(student / T)\big), \qquad T = 2

    The distillation covers the classes the teacher knows; with `classes_ahead` those are all outputs, as in the
    paper's released code. That code minimises the cross-entropy −Σ p_teacher log p_student in place of the divergence:
    the two differ by the teacher's entropy alone, so their gradients are the same. Without `end_task` there is no
    teacher, and this is fine-tuning. Images are stored for the nearest-class-mean classifier only, never trained on.

    Parameters
    ----------
    distillation_temperature
        T: larger values make more of the teacher's small outputs.
    others
        See `Keeper` (who is kept) and `Learner`.

    References
    ----------
    Li and Hoiem, "Learning without Forgetting", ECCV 2016; the weights 1 / (t + 1) are those of Mai et al., 2021.

    Examples
    --------
    >>> learner = LwF(image_shape=(1, 8, 8), seed=0)
    >>> x = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    >>> _ = learner.learn(x, torch.arange(10) % 2)
    >>> learner.end_task()
    >>> _ = learner.learn(x, 2 + torch.arange(10) % 2)
    >>> learner.share.item()
    0.5
    """

    trains_on_memory = False
    needs_task_ends = True

    def __init__(self, *, distillation_temperature: float = 2.0, **others: Any) -> None:
        if distillation_temperature <= 0:
            raise InputError(f"distillation_temperature is {distillation_temperature}; it must be above 0.")
        super().__init__(**others)
        self.distillation_temperature = distillation_temperature
        self.teacher = Teacher(self.network)
        self.share = torch.ones((), device=self.device)

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on the stream batch: learn the new, keep the old answers."""
        loss = self.loss(x, y)
        self.descend(self.gradient(loss))
        self.keep(x, y)
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy and distillation, weighed by the tasks seen."""
        logits = self.network.logits(x)
        new = cross_entropy_loss(logits, y)
        if not self.tasks:
            return new
        old = distillation_loss(logits, self.teacher.logits(x), self.distillation_temperature)
        return self.share * new + (1 - self.share) * old

    def end_task(self) -> None:
        """The network becomes the teacher of the next task."""
        super().end_task()
        self.teacher.copy(self.network)
        self.share.fill_(1 / (self.tasks + 1))

    def signature(self, images: int) -> Hashable:
        """From the second task on there is a teacher; its share is a tensor, so later tasks need no new graph."""
        return super().signature(images), self.tasks > 0

    def _after_growth(self) -> None:
        super()._after_growth()
        assert self.network.head is not None
        self.teacher.reserve(self.network.head.capacity)

    def remove(self, label: int) -> int:
        """The teacher forgets the class too."""
        self.teacher.forget(label)
        return super().remove(label)

    def state_dict(self) -> dict[str, Any]:
        """The teacher too."""
        return super().state_dict() | {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The teacher too."""
        super().load_state_dict(state)
        self.teacher.load_state_dict(state["teacher"])
        self.share.fill_(1 / (self.tasks + 1))
