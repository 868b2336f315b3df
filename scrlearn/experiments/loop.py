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


class ImagesAtHand:
    """The test images as a learner asks for them after every task.

    Those that lie in memory are brought to its device once, for all runs that are measured on them.
    """

    def __init__(self) -> None:
        self._near: tuple[ArrayImages, torch.device, Tensor] | None = None

    def batches(self, images: ImageSet, learner: Learner) -> Iterator[Tensor]:
        """All of them, in order."""
        size = learner.prediction_batch
        if isinstance(images, ArrayImages):
            if self._near is None or self._near[0] is not images or self._near[1] != learner.device:
                self._near = images, learner.device, images.images.to(learner.device)
            return iter(self._near[2].split(size))
        blocks = torch.arange(len(images)).split(size)
        return images.prefetch(blocks) if isinstance(images, Prefetching) else map(images.read, blocks)


@torch.no_grad()
def evaluate(learner: Learner, stream: Stream, test_images: ImagesAtHand | None = None) -> Answers:
    """What each classifier of the learner answers for every test image: dense class indices, in the test set's order.

    The images go through the encoder once, whatever the number of classifiers.
    """
    answers: dict[str, list[Tensor]] = {name: [] for name in learner.classifiers}
    for images in (test_images or ImagesAtHand()).batches(stream.dataset.test, learner):
        features = learner.features(images.to(learner.device))
        for name, parts in answers.items():
            parts.append(learner.scores_from_features(features, name).argmax(1))
    return {name: torch.cat(parts).cpu().numpy() for name, parts in answers.items()}
