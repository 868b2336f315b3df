"""Class-balancing reservoir sampling: a balanced memory from an imbalanced stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scrlearn.memory.policy import Update

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner


class BalancedReservoir(Update):
    """Class-balancing reservoir sampling (CBRS): rare classes keep their images, common ones share what is left.

    The memory is filled first. From then on a class is called full once it is, or has been, the one with most images
    in memory. An image of a class that is not full replaces a random image of the largest class (of any of them, if
    several are equally large); an image of a full class replaces a random one of its own class with probability
    m / n, where m images of it are stored and n have passed: a reservoir inside the class.

    Forgetting a class makes room, so which classes are full is found out anew when the memory has filled again.

    References
    ----------
    Chrysakis and Moens, "Online Continual Learning from Imbalanced Data", ICML 2020 (Algorithm 1).

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

    seen: Tensor
    full: Tensor

    def attach(self, learner: Learner) -> None:
        """How many images of each class have passed, and which classes are full."""
        self.seen = torch.zeros(len(learner.met), dtype=torch.int64, device=learner.device)
        self.full = torch.zeros(len(learner.met), dtype=torch.bool, device=learner.device)

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Find each image its slot, one image after the other, then write them all."""
        learner.memory.write(self.choose(learner, y), x, y)

    def choose(self, learner: Learner, y: Tensor) -> Tensor:
        """The slot of each image; the spare one for those not kept."""
        spare, generator, images = learner.memory.capacity, learner.generator, len(y)
        key = torch.rand(images, spare, generator=generator, device=y.device)
        chance = torch.rand(images, generator=generator, device=y.device, dtype=torch.float64)
        free = learner.memory.filled + torch.arange(images, device=y.device)
        filling = free < spare
        passed = self.seen[y] + (y[:, None] == y[None, :]).tril().sum(1)
        self.seen.index_add_(0, y, torch.ones_like(y))
        labels, stored, classes = self._stored(learner.memory.labels)
        one, slots = torch.ones_like(y[:1]), []
        for i in range(images):  # each image meets the memory that the one before it has left
            label = y[i : i + 1]
            labels[spare:] = label  # so that an image not kept changes no count
            largest = stored == stored.amax()
            self.full |= largest[:-1] & ~filling[i]
            full = self.full[label]
            pool = torch.where(full, classes == label, largest)
            drawn = torch.where(pool[labels[:spare]], key[i], -1.0).argmax(0, keepdim=True)
            kept = ~full | (chance[i] * passed[i] < stored[label])
            slot = torch.where(filling[i], free[i], torch.where(kept, drawn, spare))
            stored.index_add_(0, labels[slot], one, alpha=-1).index_add_(0, label, one)
            labels.index_copy_(0, slot, label)
            slots.append(slot)
        return torch.cat(slots)

    def _stored(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The class in each slot, the images of each class, and the classes; the last class stands for "empty"."""
        empty = len(self.seen)
        labels = torch.where(labels < 0, empty, labels)
        stored = torch.zeros(empty + 1, dtype=torch.int64, device=labels.device)
        stored.index_add_(0, labels[:-1], torch.ones_like(labels[:-1]))
        stored[empty:].fill_(-1)  # never the largest; filled, not set, which would copy from the host
        return labels, stored, torch.arange(empty + 1, device=labels.device)

    def reserve(self, learner: Learner) -> None:
        """As many counters as the learner has room for classes."""
        missing = len(learner.met) - len(self.seen)
        if missing > 0:
            self.seen = torch.cat([self.seen, self.seen.new_zeros(missing)])
            self.full = torch.cat([self.full, self.full.new_zeros(missing)])

    def forget(self, label: int, kept: Tensor) -> None:
        """Its images have never passed, and the memory will fill again."""
        self.seen[label] = 0
        self.full.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {"seen": self.seen, "full": self.full}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counters, in place: the learner has made room for them."""
        for own, saved in ((self.seen, state["seen"]), (self.full, state["full"])):
            own.zero_()[: len(saved)] = saved.to(own.device)
