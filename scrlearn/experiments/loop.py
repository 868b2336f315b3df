"""The one pass over the test images; the loop over the stream is the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scrlearn.data import ImageSet, Stream
from scrlearn.data.base import ArrayImages, Prefetching
from scrlearn.evaluation import NO_ANSWER
from scrlearn.learners import Learner

Answers = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


class ImagesAtHand:
    """The test images as a learner asks for them after every task.

    Those that lie in memory are brought to its device once, for all runs that are measured on them.
    """

    def __init__(self) -> None:
        self._near: tuple[ArrayImages, torch.device, Tensor] | None = None

    def batches(self, images: ImageSet, blocks: Sequence[Tensor], learner: Learner) -> Iterator[Tensor]:
        """Those at these places, block by block."""
        if isinstance(images, ArrayImages):
            if self._near is None or self._near[0] is not images or self._near[1] != learner.device:
                self._near = images, learner.device, images.images.to(learner.device)
            near = self._near[2]
            return (near[block.to(near.device)] for block in blocks)
        return images.prefetch(blocks) if isinstance(images, Prefetching) else map(images.read, blocks)


@torch.no_grad()
def evaluate(learner: Learner, stream: Stream, test_images: ImagesAtHand | None = None) -> Answers:
    """What each classifier of the learner answers for every test image: dense class indices, in the test set's order.

    The images go through the encoder once, whatever the number of classifiers. Those of classes that the learner has
    not met are not shown to it: it could not name them, and `NO_ANSWER` is as wrong as any other.
    """
    met = learner.met[: learner.num_classes].nonzero().flatten().cpu()
    rows = torch.isin(stream.test_labels, met).nonzero().flatten()
    answers = {name: [met[:0].to(learner.device)] for name in learner.classifiers}  # nothing, where nothing is asked
    blocks = rows.split(learner.prediction_batch) if len(rows) else ()
    for images in (test_images or ImagesAtHand()).batches(stream.dataset.test, blocks, learner):
        features = learner.features(images.to(learner.device))
        for name, parts in answers.items():
            parts.append(learner.scores_from_features(features, name).argmax(1))
    return {name: _in_place(torch.cat(parts), rows, len(stream.dataset.test)) for name, parts in answers.items()}


def _in_place(answers: Tensor, rows: Tensor, images: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    everywhere = np.full(images, NO_ANSWER)
    everywhere[rows.numpy()] = answers.cpu().numpy()
    return everywhere
