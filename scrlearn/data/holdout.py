"""Other test images than those that came with a data set: held-out training images, or a split drawn anew."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from scrlearn.data.base import ArrayImages, Dataset, select
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
    return dataclasses.replace(dataset, train=sets[0], test=sets[1], held_out=share)


def shuffled_split(dataset: Dataset, seed: int = 0) -> Dataset:
    """The data set with its training and test images drawn anew: of each class as many as before, at random.

    For data whose published figures have such a split: the released code of the paper draws 100 of the 600 images of
    each class of Mini-ImageNet to test on, once for all runs. Test images that were chosen otherwise (the last files of
    each class, say) can be harder or easier.

    Parameters
    ----------
    dataset
        The data set, in memory.
    seed
        Chooses the images; other things that are left to chance do not change them.

    Raises
    ------
    InputError
        The images are read from disk as they come.

    Example
    -------
    >>> from scrlearn.data import load
    >>> digits = load("digits")
    >>> anew = shuffled_split(digits)
    >>> len(anew.train) == len(digits.train), anew.test.labels.bincount().equal(digits.test.labels.bincount())
    (True, True)
    """
    train, test = dataset.train, dataset.test
    if not isinstance(train, ArrayImages) or not isinstance(test, ArrayImages):
        raise InputError(
            f'"{dataset.name}" is read from disk as it comes: move files between train/ and test/ instead.'
        )
    images, labels = torch.cat([train.images, test.images]), torch.cat([train.labels, test.labels])
    for_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(dataset.num_classes):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator(seed, "split", label))
        for_test[members[order[: int((test.labels == label).sum())]]] = True
    sets = [ArrayImages(images[chosen], labels[chosen]) for chosen in (~for_test, for_test)]
    return dataclasses.replace(dataset, train=sets[0], test=sets[1], split="shuffled")


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
