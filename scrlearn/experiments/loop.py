"""The one pass over the test images; the loop over the stream is the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scrlearn.data import ImageSet, Stream
from scrlearn.data.base import ArrayImages, Prefetching
from scrlearn.learners import Learner

Answers = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


@torch.no_grad()
def evaluate(learner: Learner, stream: Stream) -> Answers:
    """What each classifier of the learner answers for every test image: dense class indices, in the test set's order.

    The images go through the encoder once, whatever the number of classifiers.
    """
    answers: dict[str, list[Tensor]] = {name: [] for name in learner.classifiers}
    for images in _all_images(stream.dataset.test, learner):
        features = learner.features(images.to(learner.device))
        for name, parts in answers.items():
            parts.append(learner.scores_from_features(features, name).argmax(1))
    return {name: torch.cat(parts).cpu().numpy() for name, parts in answers.items()}


def _all_images(images: ImageSet, learner: Learner) -> Iterator[Tensor]:
    if isinstance(images, ArrayImages):  # one copy to the device is much faster than many
        return iter(images.images.to(learner.device).split(learner.prediction_batch))
    blocks = torch.arange(len(images)).split(learner.prediction_batch)
    return images.prefetch(blocks) if isinstance(images, Prefetching) else map(images.read, blocks)
