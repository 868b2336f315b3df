"""The bounded store of images."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scrlearn.errors import InputError

# Drawing k of n by rejection needs n well above k; below this factor a random key per image is sorted instead.
REJECTION_FACTOR = 16
MOST_FUSED = 2048


def fused_kernels(numbers: Tensor) -> ModuleType | None:
    """The same as single kernels, for so many numbers on a CUDA device with Triton."""
    if not numbers.is_cuda or not 0 < len(numbers) <= MOST_FUSED:
        return None
    try:
        from scrlearn.memory import fused
    except ImportError:
        return None
    return fused


class Memory:
    """A fixed number of uint8 images with their classes, allocated once.

    Writing is graph-safe: slots are tensors, and an image that is not kept is written to one spare slot behind the
    last. The number of filled slots is known on the host as well (`size`), because every policy fills the memory
    before it replaces anything.

    Parameters
    ----------
    capacity
        M, the most images it holds.
    image_shape
        Channels, height, width.
    device
        Where the images live.

    Examples
    --------
    >>> memory = Memory(2, (1, 2, 2), "cpu")
    >>> memory.write(torch.tensor([0, 1]), torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([3, 4]))
    >>> memory.advance(2)
    >>> memory.contents()[1].tolist()
    [3, 4]
    """

    def __init__(self, capacity: int, image_shape: tuple[int, int, int], device: torch.device | str) -> None:
        if capacity < 0:
            raise InputError(f"memory_size is {capacity}; it must be 0 or more.")
        self.capacity = capacity
        self.image_shape = image_shape
        self.device = torch.device(device)
        self.images = torch.empty((capacity + 1, *image_shape), dtype=torch.uint8, device=device)
        self.labels = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self.size = 0

    @property
    def full(self) -> bool:
        """Whether every slot is taken."""
        return self.size == self.capacity

    def contents(self) -> tuple[Tensor, Tensor]:
        """All stored images and their classes."""
        return self.images[: self.size], self.labels[: self.size]

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The images and classes in these slots."""
        return self.images.index_select(0, slots), self.labels.index_select(0, slots)

    def write(self, slots: Tensor, x: Tensor, y: Tensor) -> None:
        """Store images in slots; slot `capacity` is the spare one. Of two images for one slot the later stays."""
        if (kernels := fused_kernels(slots)) is not None:
            slots = kernels.resolve(slots, self.seen, self.filled, self.capacity)
        else:
            replaced = (slots[:, None] == slots[None, :]).triu(1).any(1)
            slots = torch.where(replaced, self.capacity, slots)
            self.seen += len(x)
            self.filled.copy_((self.filled + len(x)).clamp(max=self.capacity))
        self.images.index_copy_(0, slots, x)
        self.labels.index_copy_(0, slots, y)

    def advance(self, images: int) -> None:
        """Keep the host's count: this many images were offered in a step."""
        self.size = min(self.capacity, self.size + images)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Distinct filled slots, uniformly at random; `count` of them, or all if there are fewer."""
        count = min(count, self.size)
        if self.sampling(count) == "rejection":
            return self._sample_by_rejection(count, generator)
        key = torch.rand(self.capacity, generator=generator, device=self.device)
        empty = torch.arange(self.capacity, device=self.device) >= self.filled
        return key.masked_fill_(empty, -1.0).topk(count).indices

    def sampling(self, count: int) -> str:
        """How `sample` will draw; part of a step's signature."""
        return "rejection" if self.size >= REJECTION_FACTOR * max(count, 1) else "sort"

    def _sample_by_rejection(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw with replacement and keep the first occurrences: exact, at a cost that does not depend on M.

        There are more than twice as many draws as needed, from at least 16 times as many images, so the chance that
        too few of them are distinct is negligible (below 1e-12, far less for larger batches).
        """
        draws = 2 * count + 16
        uniform = torch.rand(draws, generator=generator, device=self.device, dtype=torch.float64)
        if (kernels := fused_kernels(uniform)) is not None:
            return kernels.pick(uniform, self.filled, count)  # type: ignore[no-any-return]
        drawn = (uniform * self.filled).long()
        repeats = (drawn[:, None] == drawn[None, :]).tril(-1).any(1)
        first = torch.argsort(repeats.to(torch.int8), stable=True)[:count]
        return drawn.index_select(0, first)

    def slots_without(self, label: int) -> Tensor:
        """The filled slots that stay when a class is removed."""
        return (self.contents()[1] != label).nonzero().flatten()

    def forget(self, label: int) -> int:
        """Remove all images of a class; says how many there were."""
        keep = self.labels[: self.size] != label
        kept = int(keep.sum())
        removed = self.size - kept
        self.images[:kept] = self.images[: self.size][keep]
        self.labels[:kept] = self.labels[: self.size][keep]
        self.labels[kept:] = -1
        # the reservoir's count as if the class had never passed, estimated by its share of the memory
        self.seen.copy_((self.seen * kept) // max(self.size, 1))
        self.filled.fill_(kept)
        self.size = kept
        return removed

    def state_dict(self) -> dict[str, Any]:
        """Everything the memory holds."""
        images, labels = self.contents()
        return {"images": images, "labels": labels, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved memory stood."""
        size = len(state["labels"])
        if size > self.capacity or tuple(state["images"].shape[1:]) != self.image_shape:
            raise InputError(
                f"The saved memory holds {size} images of shape {tuple(state['images'].shape[1:])}; "
                f"this one holds {self.capacity} of shape {self.image_shape}."
            )
        self.images[:size] = state["images"].to(self.device)
        self.labels.fill_(-1)
        self.labels[:size] = state["labels"].to(self.device)
        self.seen.copy_(state["seen"])
        self.filled.fill_(size)
        self.size = size


def freed_slots(leaving: Tensor, capacity: int, images: int) -> Tensor:
    """The slot of each new image that stays; the spare one for the others. Places from the capacity on are new images.

    >>> freed_slots(torch.tensor([7, 2, 0]), capacity=5, images=3)  # two slots are freed, and the last image leaves
    tensor([2, 0, 5])
    """
    leaves = (leaving[:, None] == capacity + torch.arange(images, device=leaving.device)).any(0)
    slots = leaving[torch.argsort((leaving >= capacity).to(torch.int8), stable=True)]
    number = (~leaves).cumsum(0) - 1
    return torch.where(leaves, capacity, slots[number.clamp(min=0)])
