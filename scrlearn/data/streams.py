"""A data set as a stream: tasks one after the other, in small batches, each image once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from scrlearn.data.base import Dataset, Prefetching, select
from scrlearn.errors import InputError, suggest
from scrlearn.randomness import generator

DEFAULT_TASKS = {"digits": 5, "cifar10": 5, "cifar100": 10, "mini-imagenet": 10}
_FOLDER_TASKS = 5

Order = Literal["natural", "shuffled"]


def default_tasks(dataset: Dataset) -> int:
    """The number of tasks the field uses for this data set; for others five, or one per class if there are fewer."""
    return DEFAULT_TASKS.get(dataset.name, min(_FOLDER_TASKS, dataset.num_classes))


@dataclass(frozen=True, eq=False)
class Task:
    """A stretch of the stream.

    Parameters
    ----------
    index
        Its place in the stream, from 0.
    classes
        The classes it brings, as dense indices. In a blurry stream, a few images of others come too.
    train
        Training images in the order they come, as indices into ``dataset.train``.
    test
        Test images of its classes, as indices into ``dataset.test``.
    """

    index: int
    classes: tuple[int, ...]
    train: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Stream:
    """A data set as a stream of tasks and batches; ``class_incremental`` makes one.

    Classes have *dense indices*: 0, 1, … in the order in which the stream brings them.

    Parameters
    ----------
    dataset
        Where the images come from.
    tasks
        The tasks, in order.
    batch_size
        Images in a batch.
    class_order
        Dense index → label of the data set.
    drop_last
        Leave out the last batch of a task when it is not complete.

    Attributes
    ----------
    train_labels, test_labels
        Dense labels of the whole training set and the whole test set.

    Example
    -------
    >>> from scrlearn.data import load
    >>> stream = class_incremental(load("digits"), tasks=5, batch_size=10)
    >>> images, labels = next(stream.batches(0))
    >>> images.shape, sorted(set(labels.tolist()))
    (torch.Size([10, 1, 8, 8]), [0, 1])
    """

    dataset: Dataset
    tasks: tuple[Task, ...]
    batch_size: int
    class_order: tuple[int, ...]
    drop_last: bool = True
    train_labels: Tensor = field(init=False, repr=False)
    test_labels: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Rank every label once."""
        rank = torch.empty(len(self.class_order), dtype=torch.int64)
        rank[torch.tensor(self.class_order)] = torch.arange(len(self.class_order))
        object.__setattr__(self, "train_labels", rank[self.dataset.train.labels])
        object.__setattr__(self, "test_labels", rank[self.dataset.test.labels])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in dense order."""
        return tuple(self.dataset.class_names[label] for label in self.class_order)

    def _task(self, task: Task | int) -> Task:
        if isinstance(task, Task):
            return task
        if not -len(self.tasks) <= task < len(self.tasks):
            raise InputError(f"There is no task {task}; the stream has {len(self.tasks)}, counted from 0.")
        return self.tasks[task]

    def steps(self, task: Task | int) -> int:
        """Number of batches of a task."""
        images = len(self._task(task).train)
        return images // self.batch_size if self.drop_last else -(-images // self.batch_size)

    def order(self, task: Task | int) -> Tensor:
        """Indices into ``dataset.train`` of every batch of a task, steps × batch size."""
        task = self._task(task)
        steps = self.steps(task)
        if steps * self.batch_size > len(task.train):
            raise InputError(
                f"Task {task.index} ends with an incomplete batch, so that its batches are no rectangle. Use "
                "batches(), or make the stream with drop_last=True."
            )
        return task.train[: steps * self.batch_size].view(steps, self.batch_size)

    def batches(self, task: Task | int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (uint8, on the CPU) and dense labels of every batch of a task, from batch number ``start`` on.

        Images that lie on disk are read ahead by worker processes.
        """
        task = self._task(task)
        steps = self.steps(task)
        if not 0 <= start <= steps:
            raise InputError(f"Task {task.index} has batches 0 to {steps - 1}; it cannot start at number {start}.")
        return self._batches(torch.split(task.train, self.batch_size)[start:steps])

    def first(self, tasks: int) -> Stream:
        """The stream as if it ended after this many tasks: classes of later ones are neither trained nor tested.

        The tasks have the same images in the same order as before; in a blurry stream, those of later classes are left
        out.

        >>> from scrlearn.data import load
        >>> stream = class_incremental(load("digits"), tasks=5).first(2)
        >>> stream.class_names, len(stream.tasks), sorted(set(stream.test_labels.tolist()))
        (('0', '1', '2', '3'), 2, [0, 1, 2, 3])
        """
        if not 1 <= tasks <= len(self.tasks):
            raise InputError(f"The first {tasks} tasks were asked for; the stream has {len(self.tasks)}.")
        classes = sum(len(task.classes) for task in self.tasks[:tasks])
        train, train_place = _only(self.train_labels < classes)
        test, test_place = _only(self.test_labels < classes)
        dataset = dataclasses.replace(
            self.dataset,
            train=select(self.dataset.train, train, self.train_labels[train]),
            test=select(self.dataset.test, test, self.test_labels[test]),
            class_names=self.class_names[:classes],
        )
        kept = [
            Task(
                index=task.index,
                classes=task.classes,
                train=train_place[task.train[self.train_labels[task.train] < classes]],
                test=test_place[task.test],
            )
            for task in self.tasks[:tasks]
        ]
        stream = Stream(dataset, tuple(kept), self.batch_size, tuple(range(classes)), self.drop_last)
        _check_steps(stream)
        return stream

    def _batches(self, batches: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        train = self.dataset.train
        ahead = train.prefetch(batches) if isinstance(train, Prefetching) else map(train.read, batches)
        for indices, images in zip(batches, ahead, strict=True):
            yield images, self.train_labels[indices]


def _only(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the chosen, and for each of those the place it has among them."""
    return chosen.nonzero().flatten(), chosen.cumsum(0) - 1


def class_incremental(
    dataset: Dataset,
    *,
    tasks: int,
    order: Order = "natural",
    seed: int = 0,
    batch_size: int = 10,
    blurry: float = 0.0,
    imbalance: float = 1.0,
    drop_last: bool = True,
    limit: int | None = None,
) -> Stream:
    """Each task brings new classes; each image comes once.

    The stream is a function of the data set and these arguments alone: it draws from generators of its own, one for
    each purpose, so that a seed gives the same stream whatever else is drawn, and the same order of classes with and
    without the other options.

    Parameters
    ----------
    dataset
        The images.
    tasks
        Number of tasks. Classes are spread as evenly as possible: when they cannot be divided, the first tasks get one
        more than the last (10 classes in 4 tasks: 3, 3, 2, 2).
    order
        Order of the classes: ``"natural"`` (the data set's own) or ``"shuffled"`` (by the seed).
    seed
        Shuffles the training images of each task, and decides everything else that is left to chance.
    batch_size
        Images in a batch.
    blurry
        Share of each class's training images that come in other tasks than their own, spread evenly over them; from 0
        to below 1. Test sets do not change.
    imbalance
        How many times as many training images the most frequent class has as the least frequent one, 1 or more. The
        classes, ranked by a shuffle of the seed (not by their order in the stream, which would tie rarity to age),
        keep a share of their images that falls exponentially from 1 to 1 / imbalance, at least one image.
    drop_last
        Leave out the last batch of a task when it is not complete, as the paper's protocol does.
    limit
        At most this many training images of each class, chosen by the seed, before the other options apply.

    Raises
    ------
    InputError
        An option is out of range, or a task would have no batch.

    Example
    -------
    >>> from scrlearn.data import load
    >>> stream = class_incremental(load("digits"), tasks=3, order="shuffled", seed=1, limit=20)
    >>> [len(task.classes) for task in stream.tasks], [len(task.train) for task in stream.tasks]
    ([4, 3, 3], [80, 60, 60])
    """
    _check_options(dataset, tasks, order, seed, batch_size, blurry, imbalance, limit)
    classes = dataset.num_classes
    class_order = _shuffled(classes, seed, "classes") if order == "shuffled" else torch.arange(classes)
    images = _images_by_class(dataset, class_order, seed, limit, imbalance)
    groups = torch.arange(classes).tensor_split(tasks)
    train = _assign(images, groups, seed, blurry)
    stream = Stream(
        dataset=dataset,
        tasks=tuple(
            Task(
                index=index,
                classes=tuple(group.tolist()),
                train=train[index][_shuffled(len(train[index]), seed, "images", index)],
                test=torch.nonzero(torch.isin(dataset.test.labels, class_order[group])).flatten(),
            )
            for index, group in enumerate(groups)
        ),
        batch_size=batch_size,
        class_order=tuple(class_order.tolist()),
        drop_last=drop_last,
    )
    _check_steps(stream)
    return stream


def _shuffled(count: int, seed: int, *purpose: str | int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "stream", *purpose))


def _images_by_class(
    dataset: Dataset, class_order: Tensor, seed: int, limit: int | None, imbalance: float
) -> list[Tensor]:
    """Training images that take part, by dense index, each class in random order."""
    rarity = _shuffled(len(class_order), seed, "imbalance").tolist()
    labels = dataset.train.labels
    counts = torch.bincount(labels, minlength=dataset.num_classes).tolist()
    by_label = torch.split(torch.argsort(labels, stable=True), counts)
    chosen = []
    for dense, label in enumerate(class_order.tolist()):
        members = by_label[label]
        members = members[_shuffled(len(members), seed, "class", label)][:limit]
        share = imbalance ** (-rarity[dense] / max(1, len(class_order) - 1))
        chosen.append(members[: max(1, round(len(members) * share))])
    return chosen


def _assign(images: list[Tensor], groups: tuple[Tensor, ...], seed: int, blurry: float) -> list[Tensor]:
    """Training images of every task: those of its classes, and those that leak into it."""
    parts: list[list[Tensor]] = [[] for _ in groups]
    for own, group in enumerate(groups):
        others = [task for task in range(len(groups)) if task != own]
        for dense in group.tolist():
            leaking = round(len(images[dense]) * blurry)
            parts[own].append(images[dense][leaking:])
            first = int(_shuffled(max(1, len(others)), seed, "blurry", dense)[0])  # or the first task would get more
            for place, task in enumerate(others[first:] + others[:first]):
                parts[task].append(images[dense][:leaking][place :: len(others)])
    return [torch.cat(part) for part in parts]


def _check_options(
    dataset: Dataset,
    tasks: int,
    order: str,
    seed: int,
    batch_size: int,
    blurry: float,
    imbalance: float,
    limit: int | None,
) -> None:
    given: dict[str, Any] = {"tasks": tasks, "seed": seed, "batch_size": batch_size, "limit": limit or 0}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InputError(f"{name} is {value!r}; expected a whole number.")
    given = {"blurry": blurry, "imbalance": imbalance}
    for name, value in given.items():
        if not isinstance(value, Real):
            raise InputError(f"{name} is {value!r}; expected a number.")
    classes = dataset.num_classes
    if not 1 <= tasks <= classes:
        raise InputError(
            f'tasks is {tasks}; "{dataset.name}" has {classes} classes, so that 1 to {classes} tasks are possible.'
        )
    if order not in ("natural", "shuffled"):
        raise InputError(f'There is no class order "{order}".{suggest(order, ["natural", "shuffled"])}')
    if seed < 0:
        raise InputError(f"seed is {seed}; expected 0 or a positive whole number.")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; expected 1 or more.")
    if not 0 <= blurry < 1:
        raise InputError(f"blurry is {blurry}; expected a share from 0 to below 1, such as 0.1.")
    if blurry and tasks == 1:
        raise InputError(f"blurry is {blurry}, but with one task there is no other that images could come in.")
    if not 1 <= imbalance < float("inf"):
        raise InputError(f"imbalance is {imbalance}; expected 1 (balanced) or more, such as 100.")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; expected 1 or more images of each class, or None for all.")


def _check_steps(stream: Stream) -> None:
    for task in stream.tasks:
        if stream.steps(task) == 0:
            raise InputError(
                f"Task {task.index} has {len(task.train)} training images, fewer than one batch of "
                f"{stream.batch_size}. Use a smaller batch_size, fewer tasks, or drop_last=False (--no-drop-last)."
            )
