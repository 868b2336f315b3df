"""What replay learners minimise: cross-entropy, or the supervised contrastive loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scrlearn.augment import Augment
from scrlearn.errors import InputError
from scrlearn.losses import cross_entropy_loss, supervised_contrastive_loss
from scrlearn.models.network import to_float

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner


class Objective:
    """A loss on a batch of images.

    `joint`: stream and memory images go through the network as one batch; otherwise each has its own forward and the
    gradients add up. `needs_memory`: no step is made while the memory is empty.
    """

    joint = False
    needs_memory = False
    projection: str | None = None
    has_head = True

    def loss(self, learner: Learner, x: Tensor, y: Tensor) -> Tensor:
        """The loss on one batch (uint8 images)."""
        raise NotImplementedError


class CrossEntropy(Objective):
    """Softmax cross-entropy.

    Parameters
    ----------
    joint
        One forward over stream and memory images together (as ASER does) instead of one each (as ER does).
    """

    def __init__(self, joint: bool = False) -> None:
        self.joint = joint

    def loss(self, learner: Learner, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of the batch."""
        return cross_entropy_loss(learner.network.logits(x), y)


class SupervisedContrastive(Objective):
    """The supervised contrastive loss over two views: the images as they are, and augmented.

    Parameters
    ----------
    temperature
        τ of the loss.
    projection
        "mlp", "linear" or "none".
    augment
        The second view: True for the paper's augmentation, False for a plain copy, or a callable of your own.
    views
        "joint": both views in one forward; "separate": a forward each, so BatchNorm statistics are per view.
    cross_entropy_weight
        Weight of a cross-entropy term on the encoder features beside the contrastive loss; 0: none.
    probe
        Train a softmax head on the features without letting its gradient into the encoder.
    """

    joint = True
    needs_memory = True

    def __init__(
        self,
        temperature: float = 0.1,
        projection: str = "mlp",
        augment: bool | Augment = True,
        views: str = "joint",
        cross_entropy_weight: float = 0.0,
        probe: bool = False,
    ) -> None:
        if temperature <= 0:
            raise InputError(f"temperature is {temperature}; it must be above 0.")
        if views not in ("joint", "separate"):
            raise InputError(f'views is "{views}"; it must be "joint" or "separate".')
        self.temperature, self.projection = temperature, projection
        self.augment = Augment() if augment is True else augment
        self.views = views
        self.cross_entropy_weight = cross_entropy_weight
        self.has_head = probe or cross_entropy_weight > 0

    def loss(self, learner: Learner, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 3 over both views of the batch."""
        network = learner.network
        raw = to_float(x)
        second = self.augment(raw, learner.generator) if self.augment else raw
        if self.views == "joint":
            features = network.features(torch.cat([raw, second]))
        else:
            features = torch.cat([network.features(raw), network.features(second)])
        both = torch.cat([y, y])
        loss = supervised_contrastive_loss(network.project(features), both, self.temperature)
        if network.head is None:
            return loss
        if self.cross_entropy_weight:
            return loss + self.cross_entropy_weight * cross_entropy_loss(network.head(features), both)
        return loss + cross_entropy_loss(network.head(features.detach()), both)


OBJECTIVES: dict[str, type[Objective]] = {
    "cross-entropy": CrossEntropy,
    "supervised-contrastive": SupervisedContrastive,
}
