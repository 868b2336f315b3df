"""What figures need beside a result: small arrays, made from a run's last checkpoint.

Stored are the two coordinates that t-SNE gave each image of the memory and not the embeddings: they take a hundredth of
the room, and the figure drawn from them is the same on every machine, which t-SNE's own arithmetic is not.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

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


def memory_map(learner: Learner) -> Arrays:
    """Where the memory's images lie in the embedding space: t-SNE coordinates (`places`) and classes (`labels`).

    No rows where there is nothing to draw: the memory is empty, or the encoder has diverged.
    """
    from scrlearn.experiments.plots import two_dimensions  # matplotlib takes a second to load

    images, labels = learner.memory.contents()
    kept = np.arange(len(labels))
    if len(kept) > MOST_POINTS:
        kept = np.sort(np.random.default_rng(learner.seed).choice(len(kept), size=MOST_POINTS, replace=False))
    embeddings = learner.embed(images[kept]).float().cpu().numpy().astype(np.float64)
    if not np.isfinite(embeddings).all():
        warnings.warn("The encoder has diverged (NaN features), so that its memory cannot be drawn.", stacklevel=2)
        embeddings, kept = embeddings[:0], kept[:0]
    places, _ = two_dimensions(embeddings, learner.seed)
    return {"places": places.astype(np.float32), "labels": labels.cpu().numpy()[kept].astype(np.int32)}


ARTEFACTS = {"memory": memory_map}


def collect(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Artefacts of a finished run, from the checkpoint in its folder; none where there is no checkpoint."""
    names = list(names)
    for name in names:
        if name not in ARTEFACTS:
            raise InputError(f'There is no artefact "{name}".{suggest(name, ARTEFACTS)}')
    if not names or not (folder / CHECKPOINT).is_file():
        return {}
    learner, _ = load_learner(folder / CHECKPOINT)
    return {name: pack(ARTEFACTS[name](learner)) for name in names}
