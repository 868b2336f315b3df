"""Asking a saved model about image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from scrlearn.checkpoint import read_meta
from scrlearn.data.images import decode
from scrlearn.errors import InputError, NotFittedError, ScrlearnError
from scrlearn.estimator import OnlineClassifier
from scrlearn.experiments.runner import load_learner
from scrlearn.images import Array, Shape

# what gives probabilities for images, the labels they are of, and the shape of the images
Model: TypeAlias = tuple[Callable[[Tensor], Array], Sequence[Hashable], Shape]


@dataclass(frozen=True)
class Prediction:
    """What a model says about one file."""

    file: Path
    label: Hashable
    probability: float


def predict_files(
    model: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    batch_size: int = 256,
    device: str | torch.device = "auto",
    unreadable: Callable[[ScrlearnError], None] | None = None,
) -> list[Prediction]:
    """The class of each image file, with its probability.

    Parameters
    ----------
    model
        What `OnlineClassifier.save` wrote, or the ``checkpoint.scr`` of a run.
    files
        Image files of any size and kind; they are brought to what the model has learned.
    batch_size
        How many are opened at a time.
    device
        Where to compute; "auto": on the device the model was learned on where this machine has it.
    unreadable
        Told of each file that is no image; the others are answered. None: the first such file is an error.
    """
    paths = [Path(file) for file in files]
    open_model = _from_run if read_meta(model).get("kind") == "run" else _from_classifier
    answer, labels, shape = open_model(model, device)
    if shape[0] not in (1, 3):
        raise InputError(f'The images that "{model}" has learned have {shape[0]} channels; files have 1 or 3.')
    predictions: list[Prediction] = []
    for begin in range(0, len(paths), batch_size):
        batch = [*_read_all(paths[begin : begin + batch_size], shape, unreadable)]
        if not batch:
            continue
        probabilities = answer(torch.from_numpy(np.stack([pixels for _, pixels in batch])))
        for (path, _), row in zip(batch, probabilities, strict=True):
            best = int(row.argmax())
            predictions.append(Prediction(path, labels[best], float(row[best])))
    return predictions


def _from_run(path: str | os.PathLike[str], device: str | torch.device) -> Model:
    learner, names = load_learner(path, device)
    if not learner.num_classes:
        raise NotFittedError(f'The run in "{path}" has learned nothing yet.')
    return lambda x: learner.probabilities(x).float().cpu().numpy(), names, learner.image_shape


def _from_classifier(path: str | os.PathLike[str], device: str | torch.device) -> Model:
    classifier = OnlineClassifier.load(path, device=None if str(device) == "auto" else device)
    # any size is welcome here, whatever the classifier was strict about while it learned
    classifier.set_params(image_size=None)
    return classifier.predict_proba, classifier.classes_.tolist(), classifier.learner_.image_shape


def _read_all(
    paths: Sequence[Path], shape: Shape, unreadable: Callable[[ScrlearnError], None] | None
) -> Iterator[tuple[Path, Array]]:
    for path in paths:
        try:
            yield path, _read(path, shape)
        except ScrlearnError as error:
            if unreadable is None:
                raise
            unreadable(error)


def _read(path: Path, shape: Shape) -> Array:
    """One image file as a model with images of this shape has learned to see it."""
    channels, height, width = shape
    if not path.is_file():
        raise InputError(f'There is no image at "{path}".')
    pixels = decode(path, (height, width))
    if channels == 1:
        return np.asarray(Image.fromarray(pixels.transpose(1, 2, 0)).convert("L"))[None]
    return pixels
