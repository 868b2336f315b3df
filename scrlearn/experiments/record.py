"""What a run measures on its way: accuracies, wall time, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from scrlearn.data import Stream
from scrlearn.evaluation import Metrics, accuracy, confusion_matrix, per_class_accuracy
from scrlearn.experiments.loop import Answers


@dataclass
class Record:
    """What was measured so far: for each classifier a row of accuracies per task, and the last confusion matrix."""

    rows: dict[str, list[list[float]]] = field(default_factory=dict)
    confusion: dict[str, list[list[int]]] = field(default_factory=dict)
    per_class: dict[str, list[float | None]] = field(default_factory=dict)
    without_prototype: int = 0
    head_weights: list[list[float | None]] = field(default_factory=list)

    def skip(self, stream: Stream, classifiers: Iterable[str]) -> None:
        """A task has ended without a measurement."""
        for name in classifiers:
            self.rows.setdefault(name, []).append([math.nan] * len(stream.tasks))

    def drop_last(self) -> None:
        """Take the last row away, to measure it again."""
        for rows in self.rows.values():
            rows.pop()

    def add(self, stream: Stream, answers: Answers) -> None:
        """Measure what the classifiers answered after a task."""
        truth, classes = stream.test_labels.numpy(), len(stream.class_names)
        for name, predicted in answers.items():
            row = [accuracy(predicted[task.test.numpy()], truth[task.test.numpy()]) for task in stream.tasks]
            self.rows.setdefault(name, []).append(row)
            self.confusion[name] = confusion_matrix(truth, predicted, classes).tolist()
            shares = per_class_accuracy(truth, predicted, classes).tolist()
            self.per_class[name] = [None if np.isnan(share) else share for share in shares]

    def add_head(self, weight: Tensor, new: Iterable[int], old: Iterable[int]) -> None:
        """Note the softmax layer's mean weight for the classes of a task that has ended, and for those before it."""
        means = [float(weight[list(classes)].mean()) for classes in (new, old)]
        self.head_weights.append([mean if math.isfinite(mean) else None for mean in means])

    def so_far(self, classifier: str) -> float | None:
        """Mean accuracy on the tasks seen, at the last measurement."""
        rows = self.rows.get(classifier, [])
        known = [share for share in rows[-1][: len(rows)] if not np.isnan(share)] if rows else []
        return sum(known) / len(known) if known else None

    def figures(self) -> dict[str, dict[str, Any]]:
        """Everything computed from the finished record, for each classifier."""
        figures = {
            name: Metrics.from_matrix(rows).to_dict()
            | {"per_class_accuracy": self.per_class[name], "confusion": self.confusion[name]}
            for name, rows in self.rows.items()
        }
        if "softmax" in figures and len(self.head_weights) == len(self.rows["softmax"]):
            figures["softmax"]["head_weights"] = self.head_weights  # for each task: of new classes, of old ones
        if "ncm" in figures:
            figures["ncm"]["classes_without_prototype"] = self.without_prototype
        return figures


class Stopwatch:
    """Wall time by kind of work."""

    def __init__(self, spent: dict[str, float] | None = None) -> None:
        self.spent = {"setup": 0.0, "training": 0.0, "evaluation": 0.0, "saving": 0.0} | (spent or {})
        self._kind, self._since = "setup", time.perf_counter()

    def switch(self, kind: str) -> str:
        """From now on time is spent on something else; says what it was spent on."""
        now, before = time.perf_counter(), self._kind
        self.spent[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Time spent on something for a while."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self) -> dict[str, float]:
        """What was spent so far, and the total."""
        self.switch(self._kind)
        spent = {kind: round(value, 3) for kind, value in self.spent.items()}
        return spent | {"total": round(sum(spent.values()), 3)}


@dataclass(frozen=True)
class Moment:
    """How far a run is, for those who watch it.

    Parameters
    ----------
    seed
        Of the run.
    task, tasks
        The task it is in, from 1, and how many there are.
    step, steps
        Batches learned, and batches in the whole stream; of a learner that works on after it, steps of that.
    loss
        Of the last batch; None before the first, and at a task's end.
    images_per_second
        Training images since the last moment; None when there were none.
    accuracy
        Mean accuracy on the tasks seen, as last measured; None before the first task's end.
    at_task_end
        Whether a task has just been finished and measured.
    run
        Which of those that run side by side: its place among the configurations.
    """

    seed: int
    task: int
    tasks: int
    step: int
    steps: int
    loss: float | None
    images_per_second: float | None
    accuracy: float | None
    at_task_end: bool
    run: int = 0


Watch = Callable[[Moment], None]
