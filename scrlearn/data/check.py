"""Whether a data set on disk is complete and is what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scrlearn.data.base import Dataset, Expected, ImageSet, Source
from scrlearn.data.folder import FolderImages
from scrlearn.data.images import read_ahead
from scrlearn.data.progress import progress_bar
from scrlearn.errors import DataError

_BLOCK = 256
_TOLERANCE = 1e-4
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Report:
    """What ``check`` found.

    Parameters
    ----------
    name, where
        The data set, and where it was looked for (None: part of the package).
    classes, train, test
        Numbers of classes and images.
    train_per_class, test_per_class
        Smallest and largest number of images of a class.
    channel_means, channel_deviations
        Mean and standard deviation of each channel over the pixels of the training images, scaled to [0, 1].
    problems
        One sentence for each thing that is wrong.
    """

    name: str
    where: Path | None
    classes: int = 0
    train: int = 0
    test: int = 0
    train_per_class: tuple[int, int] = (0, 0)
    test_per_class: tuple[int, int] = (0, 0)
    channel_means: tuple[float, ...] = ()
    channel_deviations: tuple[float, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check_source(source: Source, root: Path, image_size: int | None = None, progress: bool = True) -> Report:
    """Read a whole data set and compare it with what is published of it."""
    where = source.where(root)
    try:
        dataset = source.load(root, image_size, progress)
    except DataError as error:
        return Report(source.name, where, problems=(str(error),))
    means, deviations, problems = _survey(dataset.train, f"Checking {source.name}, training images", progress)
    problems += _survey(dataset.test, f"Checking {source.name}, test images", progress)[2]
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"{len(problems) - _MOST_PROBLEMS} more images cannot be read."]
    counts = [torch.bincount(part.labels, minlength=dataset.num_classes) for part in (dataset.train, dataset.test)]
    if source.expected is not None:
        problems += _differences(source.expected, counts, means, dataset)
    return Report(
        name=source.name,
        where=where,
        classes=dataset.num_classes,
        train=len(dataset.train),
        test=len(dataset.test),
        train_per_class=(int(counts[0].min()), int(counts[0].max())),
        test_per_class=(int(counts[1].min()), int(counts[1].max())),
        channel_means=means,
        channel_deviations=deviations,
        problems=tuple(problems),
    )


def _survey(images: ImageSet, text: str, progress: bool) -> tuple[tuple[float, ...], tuple[float, ...], list[str]]:
    """Means and deviations of the channels (of the images that can be read), and what cannot be read."""
    blocks = torch.split(torch.arange(len(images)), _BLOCK)
    workers = images.files.workers if isinstance(images, FolderImages) else 0
    total, count, problems = torch.zeros(2, images.shape[0], dtype=torch.int64), 0, []
    with progress_bar(text, len(images), show=progress) as advance:
        results = read_ahead(lambda block: _survey_block(images, block), blocks, workers)
        for block, (sums, readable, found) in zip(blocks, results, strict=True):
            total += torch.tensor(sums)
            count += readable
            problems += found
            advance(len(block))
    mean, square = total.double() / (max(1, count) * images.shape[1] * images.shape[2])
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    return tuple((mean / 255).tolist()), tuple((deviation / 255).tolist()), problems


def _survey_block(images: ImageSet, block: Tensor) -> tuple[list[list[int]], int, list[str]]:
    """Sums of each channel and of its squares, number of readable images, and what is wrong with the others."""
    try:
        pixels = images.read(block).transpose(0, 1).flatten(1)
        values = torch.arange(256)
        often = torch.stack([torch.bincount(channel, minlength=256) for channel in pixels])
        return [(often * values).sum(1).tolist(), (often * values.square()).sum(1).tolist()], len(block), []
    except DataError as error:
        if len(block) == 1:
            return [[0] * images.shape[0]] * 2, 0, [str(error)]
    one, other = (_survey_block(images, half) for half in block.chunk(2))  # find the damaged ones
    sums = (torch.tensor(one[0]) + torch.tensor(other[0])).tolist()
    return sums, one[1] + other[1], one[2] + other[2]


def _differences(expected: Expected, counts: list[Tensor], means: tuple[float, ...], dataset: Dataset) -> list[str]:
    problems = []
    if dataset.num_classes != expected.classes:
        problems.append(f"{dataset.num_classes} classes were found; {expected.classes} are published.")
    for part, count, per_class in zip(
        ("training", "test"), counts, (expected.train_per_class, expected.test_per_class), strict=True
    ):
        wrong = torch.nonzero(count != per_class).flatten().tolist()
        if wrong:
            first = f"{dataset.class_names[wrong[0]]} has {int(count[wrong[0]])}"
            problems.append(f"{len(wrong)} classes do not have {per_class} {part} images: {first}.")
    if expected.channel_means and means:
        worst = max(abs(a - b) for a, b in zip(means, expected.channel_means, strict=True))
        if worst > _TOLERANCE:
            shown = ", ".join(f"{mean:.4f}" for mean in means)
            published = ", ".join(f"{mean:.4f}" for mean in expected.channel_means)
            problems.append(f"The channel means are {shown}; those of the published images are {published}.")
    return problems
