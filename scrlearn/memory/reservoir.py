"""Reservoir sampling: at any moment the memory is a uniform sample of everything that has passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scrlearn.memory.buffer import Memory, fused_kernels
from scrlearn.memory.policy import Update

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner


class Reservoir(Update):
    """Reservoir sampling: image number n takes a random slot with probability M / n.

    References
    ----------
    Vitter, "Random Sampling with a Reservoir", 1985 (Algorithm R).
    """

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Fill the free slots, then replace at random."""
        memory = learner.memory
        # float64: with float32 a slot of a long stream could never be drawn
        uniform = torch.rand(len(x), generator=learner.generator, device=x.device, dtype=torch.float64)
        memory.write(self._slots(memory, uniform), x, y)

    @staticmethod
    def _slots(memory: Memory, uniform: Tensor) -> Tensor:
        """A slot for each image: a free one, then one at random of all that would hold the whole stream."""
        if (kernels := fused_kernels(uniform)) is not None:
            return kernels.draw_slots(uniform, memory.seen, memory.filled, memory.capacity)  # type: ignore[no-any-return]
        offset = torch.arange(len(uniform), device=uniform.device)
        free = memory.filled + offset
        drawn = (uniform * (memory.seen + offset + 1)).long()
        return torch.where(free < memory.capacity, free, drawn.clamp(max=memory.capacity))
