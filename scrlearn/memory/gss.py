"""GSS (greedy): keep images whose gradients point in other directions than those of the memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from scrlearn.errors import InputError
from scrlearn.losses import cross_entropy_loss
from scrlearn.memory.losses import contrastive_losses, temperature_of
from scrlearn.memory.policy import Update
from scrlearn.models.network import Network, to_float

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner
    from scrlearn.learners.objectives import SupervisedContrastive

FIRST_SCORE = 0.1
SMALLEST_NORM = 1e-8


class GSSUpdate(Update):
    """Gradient-based sample selection, the greedy form.

    Each image has a score: the largest cosine between its gradient and some reference gradients, each of them from
    random images of the memory, with the network in evaluation mode. Until the memory is full everything is stored
    (what comes while it is empty with the score 0.1). Then, only if the gradient of the whole batch is unlike all
    references (largest cosine below 0), stored images are drawn with probability proportional to their score above the
    lowest one, and each drawn one gives way to its new image with probability
    (stored score + 1) / (stored score + new score + 2).

    The loss is the cross-entropy. Where the learner is contrastive, it is the supervised contrastive loss of an image's
    two views against the reference images, whose own projections are held fixed: that exists for a single image too.

    Parameters
    ----------
    references
        Reference gradients; fewer while the memory holds too few images for groups without overlap.
    reference_size
        Images behind each of them.

    References
    ----------
    Aljundi, Lin, Goujaud, Bengio, "Gradient based sample selection for online continual learning", NeurIPS 2019.

    Examples
    --------
    >>> from scrlearn.learners import make_learner
    >>> learner = make_learner("er", image_shape=(1, 8, 8), memory_size=15, update=GSSUpdate())
    >>> for label in range(2):
    ...     loss = learner.learn(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.full((10,), label))
    >>> learner.update.scores[:10].unique().tolist() == [FIRST_SCORE], learner.memory.size
    (False, 15)
    """

    scores: Tensor

    def __init__(self, references: int = 10, reference_size: int = 10) -> None:
        for name, value in (("references", references), ("reference_size", reference_size)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more.")
        self.references, self.reference_size = references, reference_size

    def attach(self, learner: Learner) -> None:
        """A score for each slot, and one for the spare slot."""
        self.scores = torch.zeros(learner.memory.capacity + 1, device=learner.device)

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Score the batch, then fill the memory or replace what is redundant in it."""
        memory = learner.memory
        if memory.size == 0:
            scores = torch.full((len(x),), FIRST_SCORE, device=x.device)
        else:
            scores, batch_score = self.score(learner, x, y)
        if memory.full:
            slots = self.replace(learner, scores, batch_score)
        else:
            slots = (memory.filled + torch.arange(len(x), device=x.device)).clamp(max=memory.capacity)
        self.scores.index_copy_(0, slots, scores)
        memory.write(slots, x, y)

    def score(self, learner: Learner, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The largest cosine to a reference: of each image's gradient, and of the batch's."""
        learner.set_training(False)
        slots = learner.memory.sample(self._drawn(learner)[0], learner.generator)
        images, labels = learner.memory.read(slots)
        crowd = crowd_of(learner, images, labels)
        references = self.reference_gradients(learner, images, labels, crowd)
        gradients = gradients_per_image(learner, x, y, crowd)
        learner.set_training(True)
        inner, norms = gradients @ references.T, references.norm(dim=1)
        # in evaluation mode images do not meet, so the batch's gradient is the mean of theirs
        batch = inner.mean(0) / (gradients.mean(0).norm() * norms).clamp(min=SMALLEST_NORM)
        cosines = inner / (gradients.norm(dim=1, keepdim=True) * norms).clamp(min=SMALLEST_NORM)
        return cosines.amax(1), batch.amax()

    def reference_gradients(self, learner: Learner, x: Tensor, y: Tensor, crowd: Crowd | None) -> Tensor:
        """The gradient of each group, one a row."""
        size = self._drawn(learner)[1]
        rows = []
        for views, labels in zip(views_of(learner, x).split(size), y.split(size), strict=True):
            features = learner.network.features(views.flatten(0, 1))
            loss = image_loss(learner.network, features, labels.repeat_interleave(views.shape[1]), crowd)
            rows.append(torch.cat([g.flatten() for g in learner.gradient(loss)]))
        return torch.stack(rows)

    def replace(self, learner: Learner, scores: Tensor, batch_score: Tensor) -> Tensor:
        """The slot each image of the batch takes over; the spare one for those turned away."""
        spare, generator = learner.memory.capacity, learner.generator
        weight = self.scores[:spare] - self.scores[:spare].min()
        weight = torch.where(weight.amax() > 0, weight, 1.0)  # where all are alike, any may go
        # the largest of weight / Exp(1): drawn without replacement, in proportion to the weights
        keys = weight / torch.empty_like(weight).exponential_(generator=generator)
        key, drawn = keys.topk(min(len(scores), spare))
        old, new = self.scores[drawn], scores[: len(drawn)]
        chance = torch.rand(len(drawn), generator=generator, device=scores.device)
        gives_way = (batch_score < 0) & (key > 0) & (chance * (old + new + 2) < old + 1)
        slots = torch.full((len(scores),), spare, device=scores.device)
        slots[: len(drawn)] = torch.where(gives_way, drawn, spare)
        return slots

    def _drawn(self, learner: Learner) -> tuple[int, int]:
        """How many images of the memory stand behind the references, and behind each."""
        size = min(self.reference_size, learner.memory.size)
        return min(self.references, learner.memory.size // max(size, 1)) * size, size

    def signature(self, learner: Learner) -> Hashable:
        """Whether the memory is full, how many images are drawn from it, and the way of drawing them."""
        return learner.memory.full, self._drawn(learner), learner.memory.sampling(self._drawn(learner)[0])

    def forget(self, label: int, kept: Tensor) -> None:
        """The scores move with their images."""
        scores = self.scores[kept]
        self.scores.zero_()
        self.scores[: len(kept)] = scores

    def state_dict(self) -> dict[str, Any]:
        """The scores."""
        return {"scores": self.scores[:-1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scores, in as many slots as there are here."""
        slots = min(len(state["scores"]), len(self.scores) - 1)
        self.scores.zero_()
        self.scores[:slots] = state["scores"][:slots].to(self.scores.device)


class Crowd(NamedTuple):
    """What an image is contrasted with: fixed projections, and their classes."""

    projections: Tensor
    labels: Tensor
    temperature: float


def crowd_of(learner: Learner, x: Tensor, y: Tensor) -> Crowd | None:
    """These images as a crowd; None where the loss is the cross-entropy."""
    if learner.network.projection is None:
        return None
    with torch.no_grad():
        return Crowd(learner.network.project(learner.network.features(x)), y, temperature_of(learner))


def views_of(learner: Learner, x: Tensor) -> Tensor:
    """The images as floats, N×V×C×H×W: one view of each, or the two of the contrastive loss."""
    raw = to_float(x)
    if learner.network.projection is None:
        return raw[:, None]
    augment = cast("SupervisedContrastive", cast(Any, learner).objective).augment
    return torch.stack([raw, augment(raw, learner.generator) if augment else raw], dim=1)


def image_loss(network: Network, features: Tensor, y: Tensor, crowd: Crowd | None) -> Tensor:
    """The loss whose gradients are compared."""
    if crowd is None:
        assert network.head is not None
        return cross_entropy_loss(network.head(features), y)
    z = network.project(features)
    keys, labels = torch.cat([z, crowd.projections]), torch.cat([y, crowd.labels])
    return contrastive_losses(z, y, keys, labels, crowd.temperature).mean()


class ImageLoss(nn.Module):
    """The loss as one module, so that its weights can be given from outside."""

    def __init__(self, network: Network, crowd: Crowd | None) -> None:
        super().__init__()
        self.network, self.crowd = network, crowd

    def forward(self, views: Tensor, y: Tensor) -> Tensor:
        """The loss of one image."""
        # not network.features: neither its memory layout nor bfloat16 BatchNorm exists under vmap
        features = self.network.encoder(views).float()
        return image_loss(self.network, features, y.expand(len(views)), self.crowd)


def gradients_per_image(learner: Learner, x: Tensor, y: Tensor, crowd: Crowd | None = None) -> Tensor:
    """The gradient of each image's loss by all weights, one a row; the network must be in evaluation mode."""
    module = ImageLoss(learner.network, crowd)
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]

    def loss(weights: dict[str, Tensor], views: Tensor, label: Tensor) -> Tensor:
        value: Tensor = functional_call(module, weights, (views, label))
        return value

    weights = dict(zip(names, (w.detach() for w in learner.weights), strict=True))
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(weights, views_of(learner, x), y)
    return torch.cat([gradients[name].flatten(1) for name in names], dim=1)
