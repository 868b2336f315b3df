"""Held-out training images in place of the test images: for choosing settings without looking at the test."""

from __future__ import annotations

import torch
from torch import Tensor

from scrlearn.data.base import Dataset, select
from scrlearn.errors import DataError, InputError
from scrlearn.randomness import generator


def holdout(dataset: Dataset, share: float = 0.1, seed: int = 0) -> Dataset:
    """The data set with some of its training images as its test images; the real test images are not in it.

    Of each class a share of the training images, chosen by the seed, is held out: at least one, and never all. Images
    on disk stay there and are read when they are asked for.

    Parameters
    ----------
    dataset
        The data set.
    share
        Share of each class that is held out, above 0 and below 1.
    seed
        Chooses the images; other things that are left to chance do not change them.

    Raises
    ------
    InputError
        The share is out of range.
    DataError
        A class has a single training image, or none.

    Example
    -------
    >>> from scrlearn.data import load
    >>> digits = load("digits")
    >>> held = holdout(digits, 0.25)
    >>> len(digits.train), len(held.train), len(held.test)
    (1442, 1082, 360)
    """
    if not 0 < share < 1:
        raise InputError(f"The share held out is {share}; expected one above 0 and below 1, such as 0.1.")
    labels = dataset.train.labels
    chosen = [_choose(dataset, labels, label, share, seed) for label in range(dataset.num_classes)]
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[torch.cat(chosen)] = False
    train, test = kept.nonzero().flatten(), (~kept).nonzero().flatten()
    sets = [select(dataset.train, indices) for indices in (train, test)]
    return Dataset(dataset.name, sets[0], sets[1], dataset.class_names, held_out=share)


def _choose(dataset: Dataset, labels: Tensor, label: int, share: float, seed: int) -> Tensor:
    """The images of a class that are held out."""
    members = (labels == label).nonzero().flatten()
    if len(members) < 2:
        raise DataError(
            f'The class "{dataset.class_names[label]}" of "{dataset.name}" has {len(members)} training images; to hold '
            "some out and train on the others, two are needed."
        )
    count = min(max(1, round(len(members) * share)), len(members) - 1)
    order = torch.randperm(len(members), generator=generator(seed, "holdout", label))
    return members[order[:count]]
