"""The pictures of a run, drawn from its result and its learner."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scrlearn.experiments import plots
from scrlearn.experiments.folders import PICTURES
from scrlearn.experiments.result import Result
from scrlearn.learners import Learner


def draw(result: Result, learner: Learner, folder: Path) -> None:
    """Accuracy over tasks, the confusion matrix and the embeddings of the memory, as PNG files."""
    name = f"{result.method} on {result.dataset}, memory {result.memory_size:,}"
    plots.save(plots.accuracy_over_tasks(_curves([result]), title=name), folder / PICTURES[0])
    confusion = result.by_classifier[result.classifier]["confusion"]
    sizes = [len(task) for task in result.tasks]
    title = f"{name}, {result.classifier}"
    plots.save(plots.confusion(confusion, result.class_names, task_sizes=sizes, title=title), folder / PICTURES[1])
    images, labels = learner.memory.contents()
    if len(labels):
        embeddings = learner.embed(images).float().cpu().numpy()
        if not np.isfinite(embeddings).all():
            warnings.warn("The encoder has diverged (NaN features), so that its memory cannot be drawn.", stacklevel=2)
            return
        picture = plots.memory_tsne(embeddings, labels.cpu().numpy(), result.class_names, result.seed)
        plots.save(picture, folder / PICTURES[2])


def _curves(results: Sequence[Result]) -> dict[str, list[list[float]]]:
    first = results[0]
    return {f"{first.method} ({name})": [result.curve(name) for result in results] for name in first.by_classifier}


def draw_seeds(results: Sequence[Result], folder: Path) -> None:
    """Accuracy over tasks with its interval over the seeds."""
    first = results[0]
    title = f"{first.method} on {first.dataset}, memory {first.memory_size:,}, {len(results)} seeds"
    plots.save(plots.accuracy_over_tasks(_curves(results), title=title), folder / PICTURES[0])
