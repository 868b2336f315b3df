"""GSS (greedy): keep images whose gradients point in other directions than those of the memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from scrlearn.errors import InputError
from scrlearn.memory.gradients import Run, gradients_by_vmap, gram, group_gradients
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

    All gradients come from one forward and one backward (`group_gradients`) where the encoder's weights are those of
    convolutions, linear layers and BatchNorm; for any other encoder they come from `torch.func.vmap`, which is slower.

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
        self.at_once = True

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
        count, size = self._drawn(learner)
        images, labels = learner.memory.read(learner.memory.sample(count, learner.generator))
        crowd = crowd_of(learner, images, labels)
        runs = (Run(len(x), 1), Run(count // size, size))
        gradients = self.gradients(learner, torch.cat([x, images]), torch.cat([y, labels]), runs, crowd)
        learner.set_training(True)
        products = gram(gradients)
        norms, inner = products.diagonal().sqrt(), products[: len(x), len(x) :]
        # in evaluation mode images do not meet, so the batch's gradient is the mean of theirs
        norm = products[: len(x), : len(x)].mean().clamp(min=0).sqrt()
        batch = inner.mean(0) / (norm * norms[len(x) :]).clamp(min=SMALLEST_NORM)
        cosines = inner / (norms[: len(x), None] * norms[len(x) :]).clamp(min=SMALLEST_NORM)
        return cosines.amax(1), batch.amax()

    def gradients(
        self, learner: Learner, x: Tensor, y: Tensor, runs: Sequence[Run], crowd: Crowd | None = None
    ) -> list[list[Tensor]]:
        """For each run and weight, the gradients of groups of images; the network must be in evaluation mode."""
        views = views_of(learner, x)
        loss = GroupLoss(learner.network, crowd)
        if self.at_once:
            rows = [Run(groups, size * views.shape[1]) for groups, size in runs]
            labels = y.repeat_interleave(views.shape[1])
            found = group_gradients(lambda: loss.total(views.flatten(0, 1), labels, rows), learner.weights, rows)
            if found is not None:
                return found
            self.at_once = False  # and from now on: what an encoder is made of does not change
        sizes = [groups * size for groups, size in runs]
        return [
            gradients_by_vmap(loss, learner.weights, of_run.unflatten(0, run), labels.unflatten(0, run))
            for run, of_run, labels in zip(runs, views.split(sizes), y.split(sizes), strict=True)
        ]

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
    return torch.stack([raw, augment(raw, learner.generator)], dim=1)


class GroupLoss(nn.Module):
    """The mean loss of a group of images: what is differentiated.

    Parameters
    ----------
    network
        In evaluation mode.
    crowd
        What images are contrasted with; None for the cross-entropy.
    """

    def __init__(self, network: Network, crowd: Crowd | None) -> None:
        super().__init__()
        self.network, self.crowd = network, crowd

    def forward(self, views: Tensor, y: Tensor) -> Tensor:
        """The loss of one group: its images' views (N×V×C×H×W) and classes."""
        # not network.features: neither its memory layout nor bfloat16 BatchNorm exists under vmap
        features = self.network.encoder(views.flatten(0, 1)).float()
        return self.losses(features, y[:, None].expand(views.shape[:2]).flatten(), [Run(1, len(features))]).mean()

    def total(self, x: Tensor, y: Tensor, runs: Sequence[Run]) -> Tensor:
        """The sum of the losses of many groups, in one forward."""
        losses = self.losses(self.network.features(x), y, runs).split([groups * size for groups, size in runs])
        return torch.stack([part.sum() / run.size for part, run in zip(losses, runs, strict=True)]).sum()

    def losses(self, features: Tensor, y: Tensor, runs: Sequence[Run]) -> Tensor:
        """The loss of each view; contrastive ones see their group and the crowd."""
        if self.crowd is None:
            assert self.network.head is not None
            return F.cross_entropy(self.network.head(features), y, reduction="none")
        z, sizes = self.network.project(features), [groups * size for groups, size in runs]
        terms = vmap(self._contrasted)
        parts = zip(runs, z.split(sizes), y.split(sizes), strict=True)
        return torch.cat([terms(a.unflatten(0, run), b.unflatten(0, run)).flatten() for run, a, b in parts])

    def _contrasted(self, z: Tensor, y: Tensor) -> Tensor:
        assert self.crowd is not None
        keys, labels = torch.cat([z, self.crowd.projections]), torch.cat([y, self.crowd.labels])
        return contrastive_losses(z, y, keys, labels, self.crowd.temperature)
