"""Class-balancing reservoir sampling: a balanced memory from an imbalanced stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scrlearn.memory.buffer import freed_slots, fused_kernels
from scrlearn.memory.policy import Update

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner

LEAVES_FIRST = 2.0**40


class BalancedReservoir(Update):
    """Class-balancing reservoir sampling: rare classes keep their images, common ones share what is left.

    Each image draws a number from [0, 1) when it comes, its key. The memory is filled first. From then on, whenever an
    image is taken in, the class with the most images gives one up, the one with its largest key (of several equally
    large classes the one where that is largest); and a class that gave up a key takes in smaller ones only. So what is
    stored of a class are the images with the smallest keys of all that have passed, a uniform sample of them, and a
    class with at least two images fewer than another has never given up any.

    This keeps what the algorithm of Chrysakis and Moens keeps, where a class that is or was the largest becomes a
    reservoir of its own. Keys let a batch be offered at once: a step has a quarter of the operations.

    Forgetting a class makes room, and from then on every class takes in whatever comes until the memory has filled
    again.

    References
    ----------
    Chrysakis and Moens, "Online Continual Learning from Imbalanced Data", ICML 2020; samples by smallest keys: Cohen
    and Kaplan, "Summarizing Data Using Bottom-k Sketches", PODC 2007.

    Examples
    --------
    >>> from scrlearn.learners import make_learner
    >>> learner = make_learner("er", image_shape=(1, 8, 8), memory_size=20, update=BalancedReservoir())
    >>> y = torch.tensor([0] * 9 + [1])  # nine of one class for each of the other
    >>> for _ in range(20):
    ...     loss = learner.learn(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), y)
    >>> learner.memory.contents()[1].bincount().tolist()
    [10, 10]
    """

    key: Tensor
    rank: Tensor
    limit: Tensor

    def attach(self, learner: Learner) -> None:
        """For each slot the key and its rank in the class; for each class the smallest key it gave up."""
        slots, device = learner.memory.capacity + 1, learner.device
        self.key = torch.zeros(slots, dtype=torch.float64, device=device)
        self.rank = torch.zeros(slots, dtype=torch.int64, device=device)
        self.limit = torch.ones(len(learner.met), dtype=torch.float64, device=device)

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Offer the batch; of memory and batch together, the last ones of the largest classes leave."""
        # float64: two images of a class must not draw the same key
        key = torch.rand(len(y), generator=learner.generator, device=y.device, dtype=torch.float64)
        labels = learner.memory.labels[:-1]
        if (kernels := fused_kernels(key)) is not None:
            slots = kernels.exchange(labels, y, key, self.key, self.rank, self.limit, LEAVES_FIRST)
        else:
            slots = self._exchange(labels, y, key)
        learner.memory.write(slots, x, y)

    def _exchange(self, labels: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """A slot for each new image, the spare one for those that do not stay; keys, ranks and limits move on."""
        taken = key < self.limit[y]
        rank = self._insert(labels, y, key, taken)
        leaving = self._leaving(labels, key, rank, taken)
        self._lower_limits(torch.cat([labels, y])[leaving], torch.cat([self.key[:-1], key])[leaving])
        slots = freed_slots(leaving, len(labels), len(y))
        self.key.index_copy_(0, slots, key)
        self.rank.index_copy_(0, slots, rank)
        return slots

    def _insert(self, labels: Tensor, y: Tensor, key: Tensor, taken: Tensor) -> Tensor:
        """The rank each new image has in its class; stored ones with larger keys move back."""
        same, smaller = y[:, None] == labels, self.key[:-1] < key[:, None]
        self.rank[:-1] += (same & ~smaller & taken[:, None]).sum(0)
        before = (y[:, None] == y) & (key < key[:, None]) & taken
        return (same & smaller).sum(1) + before.sum(1)

    def _leaving(self, labels: Tensor, key: Tensor, rank: Tensor, taken: Tensor) -> Tensor:
        """As many places as there are new images: images not taken in, then empty slots, then the last of a class."""
        order = torch.arange(len(labels), 0, -1, device=labels.device, dtype=torch.float64)
        stored = torch.where(labels < 0, LEAVES_FIRST + order, self.rank[:-1] + self.key[:-1])
        new = torch.where(taken, rank + key, torch.inf)
        return torch.cat([stored, new]).topk(len(key)).indices

    def _lower_limits(self, labels: Tensor, key: Tensor) -> None:
        """Classes take in only keys smaller than all they have given up."""
        classes = torch.arange(len(self.limit), device=labels.device)
        given_up = torch.where(classes[:, None] == labels, key, 1.0).amin(1)
        self.limit.copy_(torch.minimum(self.limit, given_up))

    def reserve(self, learner: Learner) -> None:
        """A limit for each class the learner has room for."""
        missing = len(learner.met) - len(self.limit)
        if missing > 0:
            self.limit = torch.cat([self.limit, self.limit.new_ones(missing)])

    def forget(self, label: int, kept: Tensor) -> None:
        """Keys move with their images, and the memory will fill again."""
        for own in (self.key, self.rank):
            own[: len(kept)] = own[kept]
            own[len(kept) :] = 0
        self.limit.fill_(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Keys, ranks and limits."""
        return {"key": self.key[:-1], "rank": self.rank[:-1], "limit": self.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place: the learner has made room for the classes."""
        for name, own in (("key", self.key[:-1]), ("rank", self.rank[:-1]), ("limit", self.limit)):
            size = min(len(own), len(state[name]))
            own[:size] = state[name][:size].to(own.device)
