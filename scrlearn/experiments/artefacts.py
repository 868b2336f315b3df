"""What figures need beside a result: small arrays, made from a run's last checkpoint.

Stored are the two coordinates that t-SNE gave each image and not the embeddings: they take a hundredth of the room, and
the figure drawn from them is the same on every machine, which t-SNE's own arithmetic is not.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor

from scrlearn.data import Stream
from scrlearn.errors import InputError, suggest
from scrlearn.experiments.folders import CHECKPOINT
from scrlearn.experiments.runner import load_learner
from scrlearn.learners import Learner

Arrays = dict[str, NDArray[Any]]
MOST_POINTS = 2000


def pack(arrays: Arrays) -> bytes:
    """Arrays as bytes; nothing in them is ever executed.

    >>> unpack(pack({"labels": np.arange(3)}))
    {'labels': array([0, 1, 2])}
    """
    return zlib.compress(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}), 9)


def unpack(data: bytes) -> Arrays:
    """The arrays that `pack` took."""
    return load(zlib.decompress(data))


def memory_map(learner: Learner, stream: Stream | None = None) -> Arrays:
    """Where the memory's images lie in the embedding space, see `_map`."""
    return _map(learner, *learner.memory.contents())


def unseen_map(learner: Learner, stream: Stream) -> Arrays:
    """Where test images lie in the embedding space, see `_map`."""
    chosen = _some(len(stream.test_labels), learner.seed)
    return _map(learner, stream.dataset.test.read(chosen), stream.test_labels[chosen])


def _map(learner: Learner, images: Tensor, labels: Tensor) -> Arrays:
    """t-SNE coordinates (`places`), classes (`labels`), and which share has a nearest image of its own class (`alike`).

    The nearest image is that by the embeddings themselves. No rows where there is nothing to draw: there are no images,
    or the encoder has diverged.
    """
    from scrlearn.experiments.plots import two_dimensions  # matplotlib takes a second to load

    kept = _some(len(labels), learner.seed)
    embeddings = learner.embed(images[kept]).float().cpu().numpy().astype(np.float64)
    if not np.isfinite(embeddings).all():
        warnings.warn("The encoder has diverged (NaN features), so that its images cannot be drawn.", stacklevel=2)
        embeddings, kept = embeddings[:0], kept[:0]
    y = labels.cpu().numpy()[kept].astype(np.int32)
    places, _ = two_dimensions(embeddings, learner.seed)
    return {"places": places.astype(np.float32), "labels": y, "alike": np.array([alike(embeddings, y)], np.float32)}


def _some(count: int, seed: int) -> Tensor:
    """Numbers of the images that are drawn: all, or as many as a figure can show."""
    if count <= MOST_POINTS:
        return torch.arange(count)
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(count, size=MOST_POINTS, replace=False)))


def alike(embeddings: NDArray[Any], labels: NDArray[Any]) -> float:
    """The share of vectors of length 1 whose nearest other one has the same label; NaN where there are none.

    >>> alike(np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), np.array([0, 0, 1]))
    0.6666666666666666
    """
    if len(labels) < 2:
        return float("nan")
    near = embeddings @ embeddings.T
    np.fill_diagonal(near, -np.inf)
    return float((labels[near.argmax(1)] == labels).mean())


ARTEFACTS: dict[str, Callable[[Learner, Any], Arrays]] = {"memory": memory_map, "test": unseen_map}
NEED_STREAM = ("test",)


def collect(folder: Path, names: Iterable[str], stream: Stream | None = None) -> dict[str, bytes]:
    """Artefacts of a finished run, from the checkpoint in its folder; none where there is no checkpoint.

    Those that are made from test images are left out where the stream is not given.
    """
    names = list(names)
    for name in names:
        if name not in ARTEFACTS:
            raise InputError(f'There is no artefact "{name}".{suggest(name, ARTEFACTS)}')
    if not names or not (folder / CHECKPOINT).is_file():
        return {}
    learner, _ = load_learner(folder / CHECKPOINT)
    possible = [name for name in names if stream is not None or name not in NEED_STREAM]
    return {name: pack(ARTEFACTS[name](learner, stream)) for name in possible}
