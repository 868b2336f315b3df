"""What a data set is: two sets of images with labels, and the names of the classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from scrlearn.errors import DataError, InputError

_RESIZE_BLOCK = 1000  # images resized at once: bounds the extra memory


class ImageSet(Protocol):
    """Images that can be read by number, in memory or on disk, with one label each."""

    @property
    def labels(self) -> Tensor:
        """One label per image: int64, on the CPU, 0 … classes - 1."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of every image."""
        ...

    def __len__(self) -> int:
        """Number of images."""
        ...

    def read(self, indices: Tensor) -> Tensor:
        """The images of these numbers, in this order: uint8, N×C×H×W, on the CPU."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """An image set that reads ahead in the background, because reading takes time."""

    def prefetch(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of each batch of numbers, in order, the next ones being read meanwhile."""
        ...


class ArrayImages(ImageSet):
    """An image set that lies in memory as one tensor.

    Parameters
    ----------
    images
        uint8, N×C×H×W, on the CPU.
    labels
        N integers, 0 … classes - 1.

    Example
    -------
    >>> import torch
    >>> images = ArrayImages(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]))
    >>> len(images), images.shape
    (4, (3, 8, 8))
    >>> images.read(torch.tensor([3, 0])).shape
    torch.Size([2, 3, 8, 8])
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise InputError(
                f"The images are {images.dtype} of shape {tuple(images.shape)}; expected torch.uint8 of shape "
                "(N, channels, height, width). Scale floats in [0, 1] by 255 and convert them."
            )
        if labels.ndim != 1 or len(labels) != len(images) or labels.dtype.is_floating_point:
            raise InputError(
                f"{len(images)} images came with labels of shape {tuple(labels.shape)} and type {labels.dtype}; "
                "expected one integer per image."
            )
        self.images = images.cpu().contiguous()
        self._labels = labels.to("cpu", torch.int64)

    @property
    def labels(self) -> Tensor:
        """One label per image."""
        return self._labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of every image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def read(self, indices: Tensor) -> Tensor:
        """The images of these numbers, in this order."""
        return self.images[indices]

    def resized(self, size: int) -> ArrayImages:
        """The same images at ``size`` × ``size`` pixels (bilinear, with antialiasing); itself if they have it."""
        if self.shape[1:] == (size, size):
            return self
        out = torch.empty(len(self), self.shape[0], size, size, dtype=torch.uint8)
        for begin in range(0, len(self), _RESIZE_BLOCK):
            block = self.images[begin : begin + _RESIZE_BLOCK].float()
            block = functional.interpolate(block, (size, size), mode="bilinear", antialias=True)
            out[begin : begin + len(block)] = block.round_().clamp_(0, 255).to(torch.uint8)
        return ArrayImages(out, self.labels)


class SelectedImages(ImageSet):
    """Some images of another set, with labels of their own; each is read when it is asked for.

    Parameters
    ----------
    images
        The other set.
    indices
        Numbers of the images in it.
    labels
        One label per chosen image; by default those they have there.

    Example
    -------
    >>> import torch
    >>> pixels = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1)
    >>> chosen = SelectedImages(ArrayImages(pixels, torch.tensor([7, 8, 9])), torch.tensor([2, 0]))
    >>> chosen.labels.tolist(), chosen.read(torch.tensor([1, 0])).flatten().tolist()
    ([9, 7], [0, 2])
    """

    def __init__(self, images: ImageSet, indices: Tensor, labels: Tensor | None = None) -> None:
        self.images, self.indices = images, indices
        self._labels = images.labels[indices] if labels is None else labels

    @property
    def labels(self) -> Tensor:
        """One label per image."""
        return self._labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of every image."""
        return self.images.shape

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    def read(self, indices: Tensor) -> Tensor:
        """The images of these numbers, in this order."""
        return self.images.read(self.indices[indices])

    def prefetch(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of each batch in order, read ahead where the other set does so."""
        there = [self.indices[batch] for batch in batches]
        images = self.images
        return images.prefetch(there) if isinstance(images, Prefetching) else map(images.read, there)


def select(images: ImageSet, indices: Tensor, labels: Tensor | None = None) -> ImageSet:
    """Some images of a set, with labels of their own: in memory where the set is, otherwise still on disk."""
    chosen = SelectedImages(images, indices, labels)
    return ArrayImages(images.images[indices], chosen.labels) if isinstance(images, ArrayImages) else chosen


@dataclass(frozen=True)
class Dataset:
    """A data set: training images, test images, and the names of the classes.

    Parameters
    ----------
    name
        The name it is asked for by, such as ``"cifar10"`` or ``"folder:/photos"``.
    train, test
        The two image sets. Their images have the same shape, and a label is a position in ``class_names``.
    class_names
        One name per class.
    held_out
        The share of the training images that stand in for the test images; 0: these are the real ones. See `holdout`.
    split
        "given": training and test images are those that came as such; "shuffled": drawn anew. See `shuffled_split`.

    Example
    -------
    >>> from scrlearn.data import load
    >>> digits = load("digits")
    >>> digits.num_classes, digits.image_shape
    (10, (1, 8, 8))
    """

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    held_out: float = 0.0
    split: str = "given"

    def __post_init__(self) -> None:
        """Refuse sets that do not belong together."""
        if not len(self.train) or not len(self.test):
            raise DataError(
                f'The data set "{self.name}" has {len(self.train)} training and {len(self.test)} test images; '
                "at least one of each is needed."
            )
        if self.train.shape != self.test.shape:
            raise DataError(
                f'The training images of "{self.name}" have shape {self.train.shape} and its test images '
                f"{self.test.shape}; they must be equal."
            )
        for part, images in (("training", self.train), ("test", self.test)):
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f'The {part} labels of "{self.name}" go from {low} to {high}, but it has {self.num_classes} '
                    f"class names, so that labels from 0 to {self.num_classes - 1} are expected."
                )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width of every image."""
        return self.train.shape


@dataclass(frozen=True)
class Expected:
    """What a complete copy of a published data set contains; ``check`` compares with it."""

    train_per_class: int
    test_per_class: int
    classes: int
    channel_means: tuple[float, ...] | None = None  # of the training images, scaled to [0, 1]


@dataclass(frozen=True)
class Source:
    """A place where a data set comes from; each file of this room that reads one defines one.

    Parameters
    ----------
    name, description
        The name people ask for, and one line about it.
    where
        Data root → the path the data set is looked for at; None when it is part of the package.
    present
        Data root → whether all its files are there (their content is not read).
    load
        Data root, image size or None, whether to show progress → the data set.
    fetch
        Data root, whether to show progress → None, after which it is present; None when it cannot be downloaded.
    expected
        What a complete copy contains, where that is published.
    """

    name: str
    description: str
    where: Callable[[Path], Path | None]
    present: Callable[[Path], bool]
    load: Callable[[Path, int | None, bool], Dataset]
    fetch: Callable[[Path, bool], None] | None = None
    expected: Expected | None = None


def resize_dataset(dataset: Dataset, image_size: int | None) -> Dataset:
    """The data set with images of ``image_size`` × ``image_size``; as it is when that is None."""
    if image_size is None:
        return dataset
    train, test = dataset.train, dataset.test
    if not isinstance(train, ArrayImages) or not isinstance(test, ArrayImages):
        raise InputError(f'"{dataset.name}" is read from disk and is resized while reading, not afterwards.')
    return Dataset(dataset.name, train.resized(image_size), test.resized(image_size), dataset.class_names)
