"""What a run found: every figure, with all that is needed to make it again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrlearn.errors import CheckpointError, InputError
from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.config import RunConfig
from scrlearn.files import atomic_write

FORMAT = 1
SUMMARISED = ("average_accuracy", "anytime_accuracy", "forgetting", "backward_transfer", "forward_transfer")


@dataclass(frozen=True)
class Result:
    """What one run found, as it stands in ``result.json``.

    Two runs of one configuration on one machine give equal results but for `seconds`, the only field with times.
    Accuracies are fractions. None stands for what cannot be computed, such as the accuracy on a task without test
    images.

    Parameters
    ----------
    method, classifier, dataset, memory_size, seed
        What ran. `classifier` is the one whose figures stand here; those of every classifier are in `by_classifier`.
    review
        Whether the memory was reviewed after each task.
    memory_use
        "replayed": training used the stored images. "prototypes only": they were stored for the nearest-class-mean
        classifier and never trained on. "none": nothing was stored.
    average_accuracy, anytime_accuracy, forgetting, backward_transfer, forward_transfer
        See `scrlearn.evaluation`.
    accuracy_matrix
        Row i: after task i; column j: on the test images of task j.
    by_classifier
        For each classifier all of these figures, its accuracy on every class and its confusion matrix (rows: true
        classes) at the end.
    class_names
        In the order in which the stream brought them, which is the order of every list of classes here.
    tasks
        The classes of each task, as places in `class_names`.
    images, steps
        Training images and batches learned.
    config
        The configuration as it was given.
    method_options
        Every option of the method, chosen or default.
    machine
        Where it ran: device, precision, threads.
    versions
        Of this package and of those that compute.
    seconds
        Wall time by kind of work, and in total; how many runs were side by side on the device, and how many of these
        were of this kind (see `kind_key`): runs that take turns take the same time, whatever they do in it.
    """

    method: str
    classifier: str
    dataset: str
    memory_size: int
    seed: int
    review: bool
    memory_use: str
    average_accuracy: float | None
    anytime_accuracy: float | None
    forgetting: float | None
    backward_transfer: float | None
    forward_transfer: float | None
    accuracy_matrix: list[list[float | None]]
    by_classifier: dict[str, dict[str, Any]]
    class_names: list[str]
    tasks: list[list[int]]
    images: int
    steps: int
    config: dict[str, Any]
    method_options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    seconds: dict[str, float]
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """The result with these values."""
        if values.get("format", 0) > FORMAT:
            raise CheckpointError(
                f"The result has format {values['format']}; this version of scrlearn reads up to {FORMAT}. Install a "
                "newer one."
            )
        names = {f.name for f in dataclasses.fields(cls)}
        if missing := sorted(names - values.keys()):
            raise CheckpointError(
                f"The result lacks {', '.join(missing)}: it was not written by scrlearn, or is damaged."
            )
        return cls(**{name: values[name] for name in names})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON, whole or not at all."""
        return atomic_write(path, (readable_json(self.to_dict()) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read a ``result.json``."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f'There is no result at "{path}".') from error
        except ValueError as error:
            raise CheckpointError(f'"{path}" is no JSON: {error}.') from error
        if not isinstance(values, dict):
            raise CheckpointError(f'"{path}" holds no result: expected a JSON object.')
        return cls.from_dict(values)

    def run_config(self) -> RunConfig:
        """The configuration, ready to run again; options whose defaults have changed since are named."""
        return RunConfig.from_dict(self.config).as_made(self.method_options)

    def curve(self, classifier: str | None = None) -> list[float]:
        """Mean accuracy on the tasks seen so far, after each task; NaN where it cannot be computed."""
        values = self.by_classifier[classifier or self.classifier]["average_over_time"]
        return [math.nan if value is None else value for value in values]


def summary(results: Sequence[Result]) -> dict[str, dict[str, Interval]]:
    """Mean ± 95% interval over seeds of every figure, for each classifier.

    Parameters
    ----------
    results
        Runs that differ in their seed alone.
    """
    if not results:
        raise InputError("A summary needs at least one result.")
    first = results[0].run_config()
    for result in results[1:]:
        if differences := first.replace(seed=result.seed).differences(result.run_config()):
            raise InputError(f"These runs differ in more than their seed: {'; '.join(differences)}.")
    return {
        classifier: {
            name: interval([_number(result.by_classifier[classifier][name]) for result in results])
            for name in SUMMARISED
        }
        for classifier in results[0].by_classifier
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def readable_json(value: Any, indent: str = "") -> str:
    """JSON for people: one line for a flat list, one line for each row of a matrix.

    >>> print(readable_json({"a": [[1, 2], [3, 4]], "b": None}))
    {
      "a": [
        [1, 2],
        [3, 4]
      ],
      "b": null
    }
    """
    deeper = indent + "  "
    if isinstance(value, Mapping) and value:
        items = [f"{json.dumps(str(key))}: {readable_json(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + item for item in items) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple | Mapping) for item in value):
        return "[\n" + ",\n".join(deeper + readable_json(item, deeper) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def summary_dict(results: Sequence[Result]) -> dict[str, Any]:
    """The summary as plain values, ready for JSON."""
    return {
        "seeds": [result.seed for result in results],
        "by_classifier": {
            classifier: {
                name: {
                    "mean": _plain(value.mean),
                    "half_width": _plain(value.half_width),
                    "n": value.n,
                }
                for name, value in figures.items()
            }
            for classifier, figures in summary(results).items()
        },
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
