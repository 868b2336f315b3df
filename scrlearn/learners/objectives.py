"""What replay learners minimise: cross-entropy, or the supervised contrastive loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scrlearn.augment import Augment, View, as_augment
from scrlearn.errors import InputError, suggest
from scrlearn.losses import Mixture, Narrow, cross_entropy_loss, distillation_loss, supervised_contrastive_loss
from scrlearn.mixing import cut_mix
from scrlearn.models.network import to_float

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner
    from scrlearn.learners.replay import Replay


FIRST_VIEWS = ("plain", "mirrored", "augmented")
AGAINST = ("all", "stream")
MIRRORED = Augment(scale=(1.0, 1.0), flip=0.5, jitter=0.0, grey=0.0)


class Objective:
    """A loss on a batch of images.

    `joint`: stream and memory images go through the network as one batch; otherwise each has its own forward and the
    gradients add up. `needs_memory`: no step is made while the memory is empty. `distillation_weight`,
    `preservation_weight`: above 0, the learner's averaged weights teach (see `distillation`, `preservation`).
    `mix_after`: above 0, the learner counts how often it has replayed. `has_losses`: whether `losses` is there.
    """

    joint = False
    needs_memory = False
    projection: str | None = None
    has_head = True
    has_losses = False
    distillation_weight = 0.0
    preservation_weight = 0.0
    mix_after = 0.0

    def loss(self, learner: Replay, x: Tensor, y: Tensor) -> Tensor:
        """The loss on one batch (uint8 images)."""
        raise NotImplementedError

    def losses(self, learner: Replay, x: Tensor, y: Tensor, segments: int) -> Tensor:
        """The losses on several batches of one size that follow each other, in one pass with statistics for each."""
        raise NotImplementedError


def distillation(learner: Learner, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    r"""How far the logits are from those of the averaged weights, each image as much as those are right about it.

    .. math::
        \frac{T^2}{n} \sum_i \sigma(t_i)_{y_i} \, \mathrm{KL}\big(\sigma(t_i / T) \,\|\, \sigma(s_i / T)\big),
        \qquad T = 2

    where s are the logits given and t those of the averaged weights. The average lags behind, so of a new class it
    knows little; the weight, its probability of the right class, lets it teach only what it knows.
    """
    assert learner.average is not None
    with torch.no_grad():
        teacher = learner.average.logits(x)
        sure = torch.softmax(teacher, dim=1).gather(1, y[:, None]).squeeze(1)
    return distillation_loss(logits, teacher, weight=sure)


def preservation(learner: Learner, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    r"""How far the logits of stream images are from those of the averaged weights, among all classes but the stream's.

    .. math::
        \frac{T^2}{n} \sum_i \mathrm{KL}\big(\sigma(t'_i / T) \,\|\, \sigma(s'_i / T)\big), \qquad T = 2

    where t' and s' are the logits of the averaged weights and those given, without the classes of this batch. What new
    images have in common with old classes stays as it was, though new images are all that the stream brings.
    """
    assert learner.average is not None
    with torch.no_grad():
        teacher = learner.average.logits(x).index_fill(1, y, -torch.inf)
    return distillation_loss(logits, teacher)


def _check_weight(name: str, value: float) -> None:
    if value < 0:
        raise InputError(f"{name} is {value}; it must be 0 or more.")


class CrossEntropy(Objective):
    """Softmax cross-entropy.

    Parameters
    ----------
    joint
        One forward over stream and memory images together (as ASER does) instead of one each (as ER does).
    distillation_weight
        Weight of a term that draws the outputs towards those of the averaged weights (see `distillation`; needs
        `averaging`); 0: none.
    """

    def __init__(self, joint: bool = False, distillation_weight: float = 0.0) -> None:
        _check_weight("distillation_weight", distillation_weight)
        self.joint, self.distillation_weight = joint, distillation_weight
        self.has_losses = not distillation_weight

    def loss(self, learner: Replay, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of the batch."""
        logits = learner.network.logits(x)
        loss = cross_entropy_loss(logits, y)
        if self.distillation_weight:
            loss = loss + self.distillation_weight * distillation(learner, x, y, logits)
        return loss

    def losses(self, learner: Replay, x: Tensor, y: Tensor, segments: int) -> Tensor:
        """Mean cross-entropy of each batch."""
        each = F.cross_entropy(learner.network.logits(x, segments), y, reduction="none")
        return each.view(segments, -1).mean(1)


class SupervisedContrastive(Objective):
    """The supervised contrastive loss over two views: the images as they are, and augmented.

    Parameters
    ----------
    temperature
        τ of the loss.
    view_weight
        How many times as much an image's other view counts as another image of its class does; 1: the paper's loss.
    projection
        "mlp", "linear" or "none".
    augment
        The second view: True for the paper's augmentation, False or None for a plain copy, or a callable of your own,
        f(x) or f(x, generator) (see `scrlearn.augment.as_augment`).
    first_view
        "plain": the images as they are; "mirrored": each with probability ½ mirrored left to right; "augmented": as the
        second view, drawn anew.
    views
        "joint": both views in one forward; "separate": a forward each, so BatchNorm statistics are per view.
    mix_after
        Replays so far, for each image that is stored, after which half of the augmented views of stored images have a
        piece of another one pasted in (CutMix, see `scrlearn.mixing`); after r replays it is r / (r + mix_after) of
        them. Both losses take such a view for as much of each class as it shows. 0: none has.
    stream_against
        What images of the stream are told from: "all" classes in the batch, as in the paper, or the classes of the
        "stream" batch alone, so that new classes do not push stored images of old ones aside (as ER-ACE does with
        cross-entropy). It holds for the contrastive loss and for cross-entropy.
    feature_weight
        Weight of the same loss on the encoder features themselves, which the nearest class mean compares; 0: none.
    cross_entropy_weight
        Weight of a cross-entropy term on the encoder features beside the contrastive loss; 0: none.
    probe
        Train a softmax head on the features without letting its gradient into the encoder.
    distillation_weight
        Weight of a term that draws the softmax outputs for the images as they are towards those of the averaged weights
        (see `distillation`; needs `averaging` and `cross_entropy_weight`); 0: none.
    preservation_weight
        Weight of a term that holds the softmax outputs of stream images, among all classes but the stream's, where
        those of the averaged weights are (see `preservation`; needs the same); 0: none.
    """

    joint = True
    needs_memory = True

    def __init__(
        self,
        temperature: float = 0.1,
        view_weight: float = 1.0,
        projection: str = "mlp",
        augment: bool | Callable[..., Any] | None = True,
        first_view: str = "plain",
        views: str = "joint",
        mix_after: float = 0.0,
        stream_against: str = "all",
        feature_weight: float = 0.0,
        cross_entropy_weight: float = 0.0,
        probe: bool = False,
        distillation_weight: float = 0.0,
        preservation_weight: float = 0.0,
    ) -> None:
        if temperature <= 0:
            raise InputError(f"temperature is {temperature}; it must be above 0.")
        if views not in ("joint", "separate"):
            raise InputError(f'views is "{views}"; it must be "joint" or "separate".')
        if first_view not in FIRST_VIEWS:
            raise InputError(f'There is no first_view "{first_view}".{suggest(first_view, FIRST_VIEWS)}')
        if stream_against not in AGAINST:
            raise InputError(f'stream_against is "{stream_against}"; it must be "all" or "stream".')
        if view_weight <= 0:
            raise InputError(f"view_weight is {view_weight}; it must be above 0.")
        _check_weight("mix_after", mix_after)
        _check_weight("feature_weight", feature_weight)
        _check_weight("cross_entropy_weight", cross_entropy_weight)
        for name, value in (("distillation_weight", distillation_weight), ("preservation_weight", preservation_weight)):
            _check_weight(name, value)
            if value and not cross_entropy_weight:
                raise InputError(
                    f"{name} is {value}, and what is distilled are the outputs of the softmax layer, which this "
                    "learner does not train: give cross_entropy_weight above 0."
                )
        self.temperature, self.view_weight, self.projection = temperature, view_weight, projection
        self.augment = Augment() if augment is True else as_augment(None if augment is False else augment)
        self.first: View | None = {"plain": None, "mirrored": MIRRORED, "augmented": self.augment}[first_view]
        self.views, self.mix_after, self.feature_weight = views, mix_after, feature_weight
        self.stream_against = stream_against
        self.cross_entropy_weight = cross_entropy_weight
        self.distillation_weight, self.preservation_weight = distillation_weight, preservation_weight
        self.has_head = probe or cross_entropy_weight > 0

    def loss(self, learner: Replay, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 3 over both views of the batch."""
        network = learner.network
        raw = to_float(x)
        second = self.augment(raw, learner.generator)
        first = raw if self.first is None else self.first(raw, learner.generator)
        both, mixture, narrow = torch.cat([y, y]), None, None
        fresh = len(y) - learner.replaying  # the first images are the stream's
        if self.stream_against == "stream" and fresh:
            rows = torch.arange(len(y), device=y.device) < fresh
            narrow = Narrow(torch.cat([rows, rows]), y[:fresh])
        if self.mix_after and learner.replaying:
            replays, probability = learner.replays, torch.zeros(len(y), device=y.device)
            probability[-learner.replaying :] = replays / (replays + self.mix_after)
            second, other, share = cut_mix(second, learner.generator, probability)
            mixture = Mixture(torch.cat([y, y.index_select(0, other)]), torch.cat([torch.zeros_like(share), share]))
        segments = 1 if self.views == "joint" else 2
        features = network.features(torch.cat([first, second]), segments)
        loss = self.contrast(network.project(features), both, mixture, narrow)
        if self.feature_weight:
            loss = loss + self.feature_weight * self.contrast(F.normalize(features, dim=1), both, mixture, narrow)
        if network.head is None:
            return loss
        if not self.cross_entropy_weight:
            return loss + cross_entropy_loss(network.head(features.detach()), both, mixture, narrow)
        logits = network.head(features)
        loss = loss + self.cross_entropy_weight * cross_entropy_loss(logits, both, mixture, narrow)
        if self.distillation_weight:
            loss = loss + self.distillation_weight * distillation(learner, first, y, logits[: len(y)])
        if self.preservation_weight and fresh:
            held = preservation(learner, first[:fresh], y[:fresh], logits[:fresh])
            loss = loss + self.preservation_weight * held
        return loss

    def contrast(self, z: Tensor, y: Tensor, mixture: Mixture | None, narrow: Narrow | None) -> Tensor:
        """The contrastive loss on the first views and then the second ones."""
        return supervised_contrastive_loss(z, y, self.temperature, mixture, self.view_weight, narrow)


OBJECTIVES: dict[str, type[Objective]] = {
    "cross-entropy": CrossEntropy,
    "supervised-contrastive": SupervisedContrastive,
}
