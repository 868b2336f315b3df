"""Random retrieval: every stored image is as likely to be replayed as any other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor

from scrlearn.memory.policy import Retrieval

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner


class NoRetrieval(Retrieval):
    """Nothing is replayed."""

    def __call__(
        self, learner: Learner, x: Tensor, y: Tensor, count: int, gradient: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """No images."""
        return x[:0], y[:0]


class RandomRetrieval(Retrieval):
    """Images drawn uniformly from memory, without replacement.

    References
    ----------
    Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", ICML-W 2019.
    """

    blind = True

    def __call__(
        self, learner: Learner, x: Tensor, y: Tensor, count: int, gradient: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """A random batch of the memory."""
        return learner.memory.read(learner.memory.sample(count, learner.generator))

    def signature(self, learner: Learner) -> Hashable:
        """The way of drawing."""
        return learner.memory.sampling(learner.memory_batch)
