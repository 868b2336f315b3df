"""The upper bound: keep every image, and train on all of them, many times, in random order."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scrlearn.classifiers import SoftmaxHead
from scrlearn.errors import InputError
from scrlearn.learners.base import Learner, Progress, split_tensors
from scrlearn.losses import cross_entropy_loss
from scrlearn.memory import Memory
from scrlearn.randomness import generator

WHEN = ("end", "task")
FIRST_ROOM = 1024
COLLECT = 512


class Offline(Learner):
    """The iid upper bound: the same network trained for many epochs on all images, shuffled.

    This is no method for a stream. `learn` trains nothing: it stores the images, **all of them**, in a memory that
    grows without bound (on the learner's device, and in every checkpoint). `finish` then trains, from the first
    weights, with batches of `batch` images; a last incomplete batch of an epoch is dropped, as in the paper's released
    code. It can be interrupted, saved and resumed at any step. An answer asked for before that trains first, with a
    warning; more images afterwards make the answer outdated, and the next one trains anew.

    Prototypes of the nearest-class-mean classifier are the means over all images.

    Parameters
    ----------
    epochs
        Passes over all images.
    batch
        Images a step.
    when
        "end": train once, when the stream is over. "task": also at the end of each task, from the first weights on all
        images so far, for the upper bound of every moment, at the price of as many trainings.
    others
        See `Learner`. `memory_size` is only how many images there is room for at first.

    Examples
    --------
    >>> learner = Offline(image_shape=(1, 8, 8), epochs=2, seed=0)
    >>> x = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    >>> _ = learner.learn(x, torch.arange(10) % 2)
    >>> learner.finish(progress=lambda done, steps: print(f"step {done} of {steps}"))
    step 1 of 2
    step 2 of 2
    >>> learner.predict(x).shape
    torch.Size([10])
    """

    def __init__(self, *, epochs: int = 50, batch: int = 128, when: str = "end", **others: Any) -> None:
        for name, value in (("epochs", epochs), ("batch", batch)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more.")
        if when not in WHEN:
            raise InputError(f'when is "{when}"; it must be "end" or "task".')
        if others.get("prototypes") == "sdc":
            raise InputError('prototypes="sdc" is for learners that keep no images; this one keeps all of them.')
        super().__init__(**{**others, "memory_size": others.get("memory_size") or FIRST_ROOM})
        self.epochs, self.batch, self.when = epochs, batch, when
        self.anytime = when == "task"
        self.trained = 0
        self._busy = False
        self.first = {name: value.clone() for name, value in self._body().items()}

    def _body(self) -> dict[str, Any]:
        """The network's state without the head, which makes its first values itself."""
        return {name: value for name, value in self.network.state_dict().items() if not name.startswith("head.")}

    # ---------------------------------------------------------------- collecting

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Store the images. Nothing is trained, so the loss is 0."""
        self._make_room(self.memory.size + len(x))
        return super().learn(x, y)

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """Put the images behind those that are there already."""
        for part_x, part_y in zip(x.split(COLLECT), y.split(COLLECT), strict=True):
            slots = self.memory.filled + torch.arange(len(part_x), device=x.device)
            self.memory.write(slots, part_x, part_y)
        return torch.zeros((), device=x.device)

    def advance(self, images: int) -> None:
        """More images: a training there has been is out of date."""
        super().advance(images)
        self.trained = 0

    def signature(self, images: int) -> Hashable:
        """The room; asked for before a step is recorded, so the memory grows here and not inside a graph."""
        if self.network.training:  # not for images it is asked about
            self._make_room(self.memory.size + images)
        return super().signature(images), self.memory.capacity

    @property
    def room(self) -> Hashable:
        """Room for images too."""
        return super().room, self.memory.capacity

    def _make_room(self, images: int) -> None:
        if images > self.memory.capacity:
            old, self.memory = self.memory, Memory(max(images, 2 * self.memory.capacity), self.image_shape, self.device)
            self.memory.load_state_dict(old.state_dict())

    # ---------------------------------------------------------------- training

    @property
    def training_steps(self) -> int:
        """Steps that `finish` makes in all, for the images collected so far."""
        images = self.memory.size
        return self.epochs * max(1, images // self.batch) if images else 0

    @torch.enable_grad()
    def finish(self, progress: Progress | None = None) -> None:
        """Train on everything collected, or go on where an interrupted training stopped."""
        steps = self.training_steps
        if self.trained == 0 and steps:
            self._restart()
        self._busy = True
        try:
            while self.trained < steps:
                self._train_epoch(steps, progress)
        finally:
            self._busy = False

    def _train_epoch(self, steps: int, progress: Progress | None) -> None:
        """The rest of the epoch that the training stands in."""
        epoch, done = divmod(self.trained, steps // self.epochs)
        for slots in self._order(epoch).split(self.batch)[done : steps // self.epochs]:
            self.set_training(True)  # whoever watches the progress may have asked for an answer
            self.run(self.train_step, *self.memory.read(slots))
            self.trained += 1
            self._changed()
            if progress is not None:
                progress(self.trained, steps)

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of plain training. Graph-safe."""
        loss = cross_entropy_loss(self.network.logits(x), y)
        self.descend(self.gradient(loss))
        return loss.detach()

    def _order(self, epoch: int) -> Tensor:
        """The images of an epoch, shuffled; drawn from the seed and its number, so that a resumed epoch is the same."""
        shuffled = torch.randperm(self.memory.size, generator=generator(self.seed, "offline", epoch))
        return shuffled.to(self.device)

    @torch.no_grad()
    def _restart(self) -> None:
        """Back to the first weights, in place."""
        self.network.load_state_dict(self.first, strict=False)
        head = self.network.head
        assert head is not None
        fresh = SoftmaxHead(head.features, head.seed)
        fresh.reserve(head.capacity)
        head.weight.copy_(fresh.weight[: head.capacity])
        head.bias.copy_(fresh.bias[: head.capacity])
        head.active |= self.met
        for velocity in self.velocity:
            velocity.zero_()
        if self.average is not None:
            for own, new in zip(split_tensors(self.average), split_tensors(self.network), strict=True):
                torch._foreach_copy_(own, new)
            self.updates.zero_()

    def end_task(self) -> None:
        """Train now, where that is asked for."""
        super().end_task()
        if self.when == "task":
            self.finish()

    # ---------------------------------------------------------------- answering

    def features(self, x: Tensor) -> Tensor:
        """Features of the trained network; trains first if nobody has asked for it yet."""
        if self.trained < self.training_steps and not self._busy:
            warnings.warn(
                f"An answer was asked for before finish(): training {self.epochs} epochs on {self.memory.size} images "
                "first. This may take long, and again after every learn().",
                stacklevel=3,
            )
            self.finish()
        return super().features(x)

    def remove(self, label: int) -> int:
        """Remove a class and all its images; the next answer comes from a network that never saw them."""
        self.trained = 0
        return super().remove(label)

    def state_dict(self) -> dict[str, Any]:
        """How far the training is, and the weights it began with."""
        return super().state_dict() | {"trained": self.trained, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand exactly where the saved learner stood."""
        self._make_room(len(state["memory"]["labels"]))
        super().load_state_dict(state)
        self.trained = state["trained"]
        self.first = {name: value.to(self.device) for name, value in state["first"].items()}
