"""scikit-learn's handwritten digits: 1,797 grey images of 8×8 pixels, part of the package, nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from scrlearn.data.base import ArrayImages, Dataset, Source, resize_dataset

_BRIGHTEST = 16  # scikit-learn counts ink from 0 to 16
_EVERY = 5  # every fifth image of a class is a test image


def load_digits(root: Path | None = None, image_size: int | None = None, progress: bool = True) -> Dataset:
    """Split Digits: of each class, images 5, 10, 15, … are test images, the others training images.

    References
    ----------
    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.

    Example
    -------
    >>> digits = load_digits()
    >>> len(digits.train), len(digits.test), digits.class_names[:3]
    (1442, 355, ('0', '1', '2'))
    """
    from sklearn.datasets import load_digits as embedded  # here, because it takes half a second

    bunch = embedded()
    pixels = np.rint(bunch.images * (255 / _BRIGHTEST)).astype(np.uint8)
    images, labels = torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(bunch.target).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = torch.nonzero(labels == label).squeeze(1)
        test[members[_EVERY - 1 :: _EVERY]] = True
    train_set, test_set = ArrayImages(images[~test], labels[~test]), ArrayImages(images[test], labels[test])
    return resize_dataset(Dataset("digits", train_set, test_set, tuple(map(str, range(10)))), image_size)


SOURCE = Source(
    name="digits",
    description="scikit-learn's handwritten digits, 10 classes, 8×8 grey, embedded",
    where=lambda root: None,
    present=lambda root: True,
    load=load_digits,
)
