"""iCaRL: exemplars by herding, a binary loss for each class, and the old classes taught by the old network."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.learners.base import Learner
from scrlearn.learners.teacher import Teacher
from scrlearn.memory.herding import Herding


class ICaRL(Learner):
    r"""iCaRL, for a stream that is seen once.

    Every class has an output of its own, g = sigmoid(logit). On the stream batch, joined from the second task on by
    exemplars of the tasks before, the loss is the mean over the images of

    .. math::
        \sum_{c \in new} \mathrm{BCE}\big(g_c(x), 1[y = c]\big) + \sum_{c \in old} \mathrm{BCE}\big(g_c(x), q_c(x)\big)

    where the old classes are those met before the task began and q the outputs of the network at that moment. It
    answers by the nearest class mean over the exemplars. As in the paper's released code there is one pass over the
    stream, exemplars drawn for a batch are of earlier tasks, and the stream's images enter the memory as they pass;
    unlike there, where the memory is a reservoir, exemplars are chosen by herding (see `Herding`).

    Parameters
    ----------
    others
        See `Learner`; `memory_size` must be 1 or more.

    References
    ----------
    Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017.

    Examples
    --------
    >>> learner = ICaRL(image_shape=(1, 8, 8), memory_size=4, classifier="ncm", seed=0)
    >>> x = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    >>> for task in range(2):
    ...     _ = learner.learn(x, 2 * task + torch.arange(10) % 2)
    ...     learner.end_task()
    >>> learner.memory.contents()[1].sort().values
    tensor([0, 1, 2, 3])
    """

    needs_task_ends = True  # exemplars and the teacher are those of earlier tasks

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        if self.memory.capacity == 0:
            raise InputError("memory_size is 0, and iCaRL answers and learns by its exemplars: give memory_size ≥ 1.")
        self.teacher = Teacher(self.network)
        self.old = torch.zeros_like(self.met)
        self.exemplars = Herding()
        self.exemplars.attach(self)

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on stream images and old exemplars; then the stream images are offered to the memory."""
        joined_x, joined_y = x, y
        if self.tasks and self.memory.size:
            memory_x, memory_y = self.memory.read(self.exemplars.draw_old(self.memory_batch, self.generator))
            joined_x, joined_y = torch.cat([x, memory_x]), torch.cat([y, memory_y])
        loss = self.loss(joined_x, joined_y)
        self.descend(self.gradient(loss))
        self.exemplars(self, x, y)
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy with the labels of new classes and the teacher's outputs for old ones."""
        logits = self.network.logits(x)
        met = torch.isfinite(logits)
        target = (y[:, None] == torch.arange(logits.shape[1], device=y.device)).to(logits.dtype)
        if self.tasks:
            target = torch.where(self.old, torch.sigmoid(self.teacher.logits(x)), target)
        each = F.binary_cross_entropy_with_logits(logits.masked_fill(~met, 0.0), target, reduction="none")
        return each.masked_fill(~met, 0.0).sum(1).mean()

    def end_task(self) -> None:
        """Herd the exemplars; the network becomes the teacher of the next task."""
        super().end_task()
        self.exemplars.end_task(self)
        self.teacher.copy(self.network)
        self.old.copy_(self.met)
        self._changed()

    def signature(self, images: int) -> Hashable:
        """From the second task on there are a teacher and exemplars."""
        return super().signature(images), self.tasks > 0

    def reserve(self, classes: int) -> None:
        """The mask of old classes grows too."""
        super().reserve(classes)
        if len(self.met) > len(self.old):  # a recorded step reads this very tensor
            self.old = torch.cat([self.old, self.old.new_zeros(len(self.met) - len(self.old))])

    def _after_growth(self) -> None:
        super()._after_growth()
        assert self.network.head is not None
        self.teacher.reserve(self.network.head.capacity)

    def remove(self, label: int) -> int:
        """The teacher and the exemplars' order forget the class too."""
        self.exemplars.forget(label, self.memory.slots_without(label))
        self.teacher.forget(label)
        self.old[label] = False
        return super().remove(label)

    def state_dict(self) -> dict[str, Any]:
        """The teacher and the exemplars' order too."""
        own = {"teacher": self.teacher.state_dict(), "exemplars": self.exemplars.state_dict(), "old": self.old}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The teacher and the exemplars' order too."""
        super().load_state_dict(state)
        self.teacher.load_state_dict(state["teacher"])
        self.exemplars.load_state_dict(state["exemplars"])
        self.old.copy_(state["old"])
