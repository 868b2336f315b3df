"""Herding: keep the images of a class whose mean stays nearest to the mean of the class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.memory.buffer import freed_slots
from scrlearn.memory.policy import Update

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner

EMPTY = 2**62


def herd(features: Tensor, count: int) -> Tensor:
    r"""Choose images one by one so that the mean of those chosen stays as near as possible to the mean of all.

    .. math:: p_k = \arg\min_x \Big\| \mu - \frac{1}{k} \Big(\varphi(x) + \sum_{j<k} \varphi(p_j)\Big) \Big\|

    where x runs over the images not chosen yet. Any first part of the choice is itself the choice for its length, so a
    class is made smaller by dropping from the end.

    Parameters
    ----------
    features
        φ, one row an image (n × d).
    count
        How many to choose; all of them if there are fewer.

    Returns
    -------
    Tensor
        Their indices, in the order they were chosen.

    References
    ----------
    Welling, "Herding Dynamical Weights to Learn", ICML 2009; Rebuffi et al., "iCaRL", CVPR 2017, Algorithm 4.

    Examples
    --------
    >>> herd(torch.tensor([[0.0], [4.0], [1.0], [7.0]]), 3)  # the mean is 3
    tensor([1, 2, 3])
    """
    if count < 0:
        raise InputError(f"count is {count}; it must be 0 or more.")
    features = features.double()
    mean = features.mean(0)
    total = torch.zeros_like(mean)
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    chosen = []
    for k in range(1, min(count, len(features)) + 1):
        distance = (mean - (total + features) / k).square().sum(1)
        nearest = distance.masked_fill(taken, torch.inf).argmin()
        chosen.append(nearest)
        taken[nearest] = True
        total = total + features[nearest]
    return torch.stack(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=features.device)


class Herding(Update):
    """Exemplars of iCaRL: as many for every class as for any other, in herding order.

    The images of each class stand in an order. When the memory is full, the class with the most images gives up its
    last ones, so each class is left with M / classes as classes arrive. Images of the running task stand in random
    order: what is kept of them is a uniform sample of what has passed. At the task's end the images of its classes are
    put in herding order, by the encoder of that moment, and from then on the class gives way from the end of that
    order. Herding needs the images, and they do not come back: the mean it aims at is that of the images the memory
    holds. The paper herds from all images of the task; a stream with a memory of M images does not have them.

    References
    ----------
    Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017.
    """

    def attach(self, learner: Learner) -> None:
        """A place in its class's order for each image, and whether herding gave it."""
        self.memory = learner.memory
        self.place = torch.zeros(self.memory.capacity + 1, device=learner.device)
        self.herded = torch.zeros(self.memory.capacity + 1, dtype=torch.bool, device=learner.device)

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Offer the batch; of memory and batch together, those furthest back in the fullest classes leave."""
        place = torch.rand(len(x), generator=learner.generator, device=x.device)
        slots = self._slots(place, y, len(learner.met))
        self.memory.write(slots, x, y)
        self.place.index_copy_(0, slots, place)
        self.herded.index_fill_(0, slots, False)

    def _slots(self, place: Tensor, y: Tensor, classes: int) -> Tensor:
        """The slot of each new image; the spare one for those that are not kept."""
        capacity = self.memory.capacity
        labels = torch.cat([self.memory.labels[:capacity], y])
        position = _position(labels, torch.cat([self.place[:capacity], place]))
        # the furthest back leaves first; of two equally far back the one of the older class
        leaves = position * classes + (classes - 1 - labels)
        slot = torch.arange(capacity, device=y.device)
        leaves[:capacity] = torch.where(slot < self.memory.filled, leaves[:capacity], EMPTY - slot)
        return freed_slots(leaves.topk(len(y)).indices, capacity, len(y))

    def draw_old(self, count: int, generator: torch.Generator) -> Tensor:
        """Slots of `count` images stored in earlier tasks, at random; where those run out, images of this one."""
        key = torch.rand(self.memory.capacity, generator=generator, device=self.memory.device)
        key = key + self.herded[:-1]
        empty = torch.arange(len(key), device=key.device) >= self.memory.filled
        return key.masked_fill(empty, -1.0).topk(min(count, self.memory.size)).indices

    def end_task(self, learner: Learner) -> None:
        """Put the classes that got new images in herding order."""
        images, labels = self.memory.contents()
        herded = self.herded[: len(labels)]
        slots = torch.isin(labels, labels[~herded]).nonzero().flatten()
        features = learner.embed(images[slots]) if len(slots) else torch.zeros(0, 1)
        for label in labels[slots].unique().tolist():
            own = (labels[slots] == label).nonzero().flatten()
            order = slots[own[herd(features[own], len(own))]]
            # in (0, 1), as the places of new images are: a class that comes back mixes old and new
            self.place[order] = (torch.arange(len(order), device=order.device) + 0.5) / len(order)
        herded.fill_(True)

    def forget(self, label: int, kept: Tensor) -> None:
        """Move the kept images' places to their new slots."""
        self.place[: len(kept)] = self.place[kept]
        self.herded[: len(kept)] = self.herded[kept]
        self.herded[len(kept) :] = False

    def state_dict(self) -> dict[str, Any]:
        """The order of the images."""
        size = self.memory.size
        return {"place": self.place[:size], "herded": self.herded[:size]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved policy stood."""
        size = len(state["place"])
        self.place[:size] = state["place"].to(self.place.device)
        self.herded[:size] = state["herded"].to(self.herded.device)


def _position(labels: Tensor, place: Tensor) -> Tensor:
    """How many images of the same class stand before each image."""
    order = torch.argsort(place, stable=True)
    order = order[torch.argsort(labels[order], stable=True)]
    ranked = labels[order].contiguous()
    position = torch.arange(len(labels), device=labels.device) - torch.searchsorted(ranked, ranked)
    return torch.empty_like(position).index_copy_(0, order, position)
