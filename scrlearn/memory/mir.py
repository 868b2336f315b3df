"""MIR: replay what the coming step would harm most."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.memory.losses import losses_per_image
from scrlearn.memory.policy import Retrieval

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner
    from scrlearn.learners.replay import Replay

CANDIDATES_PER_IMAGE = 5


class MIRRetrieval(Retrieval):
    """Maximally interfered retrieval: of random candidates, those whose loss a step on the stream batch raises most.

    The step is only imagined: plain gradient descent with the learner's learning rate (no momentum), undone bit for
    bit. Both looks at the candidates are in training mode, as in the released code: BatchNorm uses the candidates' own
    statistics, and the look before the step counts in its running ones. Where the learner is contrastive, a candidate's
    loss is its term of the supervised contrastive loss over the candidates, without augmentation.

    Parameters
    ----------
    candidates
        Random images of the memory to choose from. None: five for each image replayed, which is the paper's 50 for 10.

    References
    ----------
    Aljundi et al., "Online Continual Learning with Maximally Interfered Retrieval", NeurIPS 2019.

    Examples
    --------
    >>> from scrlearn.learners import make_learner
    >>> learner = make_learner("er", image_shape=(1, 8, 8), memory_size=50, retrieve=MIRRetrieval(candidates=20))
    >>> images, labels = torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10)
    >>> for _ in range(3):
    ...     loss = learner.learn(images, labels)
    >>> learner.retrieve(learner, images, labels, count=5)[0].shape
    torch.Size([5, 1, 8, 8])
    """

    def __init__(self, candidates: int | None = None) -> None:
        if candidates is not None and candidates < 1:
            raise InputError(f"candidates is {candidates}; it must be 1 or more, or None for 5 per image replayed.")
        self.candidates = candidates

    def attach(self, learner: Learner) -> None:
        """Refuse fewer candidates than are replayed: nothing could be chosen."""
        if self.candidates is not None and self.candidates < learner.memory_batch:
            raise InputError(
                f"candidates is {self.candidates} and memory_batch is {learner.memory_batch}: MIR chooses memory_batch "
                "images out of the candidates, so give at least as many candidates (the paper: 5 times as many)."
            )

    def __call__(
        self, learner: Learner, x: Tensor, y: Tensor, count: int, gradient: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The candidates that lose most."""
        if gradient is None:
            replay = cast("Replay", learner)
            gradient = learner.gradient(replay.objective.loss(replay, x, y))
        memory = learner.memory
        memory_x, memory_y = memory.read(memory.sample(self._drawn(count), learner.generator))
        harm = interference(learner, memory_x, memory_y, gradient)
        worst = harm.topk(min(count, len(harm))).indices
        return memory_x.index_select(0, worst), memory_y.index_select(0, worst)

    def _drawn(self, count: int) -> int:
        return self.candidates or CANDIDATES_PER_IMAGE * count

    def signature(self, learner: Learner) -> Hashable:
        """How many candidates there are, and the way of drawing them."""
        drawn = self._drawn(learner.memory_batch)
        return min(drawn, learner.memory.size), learner.memory.sampling(min(drawn, learner.memory.size))


@torch.no_grad()
def interference(learner: Learner, x: Tensor, y: Tensor, gradient: list[Tensor]) -> Tensor:
    """How much the loss of each image rises by a step along this gradient."""
    before = losses_per_image(learner, x, y)
    with virtual_step(learner, gradient):
        after = losses_per_image(learner, x, y)
    return after - before


@contextlib.contextmanager
def virtual_step(learner: Learner, gradient: list[Tensor]) -> Iterator[None]:
    """One step further for a while; then weights and BatchNorm statistics are what they were, bit for bit."""
    further, buffers = _copies(learner.weights), list(learner.network.buffers())
    torch._foreach_add_(further, gradient, alpha=-learner.learning_rate)
    own, others = [*learner.weights, *buffers], [*further, *_copies(buffers)]
    _exchange(own, others)
    try:
        yield
    finally:
        _exchange(own, others)


def _exchange(some: list[Tensor], others: list[Tensor]) -> None:
    """Each gets the other's values, and nothing is copied."""
    for one, other in zip(some, others, strict=True):
        one.data, other.data = other.data, one.data


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in few kernels."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies
