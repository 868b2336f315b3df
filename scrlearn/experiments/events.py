"""TensorBoard event files: how runs go, while they go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from scrlearn.errors import InputError
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.executors import Outcome
from scrlearn.experiments.identity import run_key, variant
from scrlearn.experiments.record import Moment, Watch
from scrlearn.experiments.result import Result


class Events:
    """Writes event files for TensorBoard, in a folder of its own for each run.

    While a run goes: loss, images per second and the accuracy so far, by step. At its end: for each classifier the
    average accuracy after every task, that of each task at the end, and the run's settings as hyper-parameters.

    Parameters
    ----------
    folder
        Where the runs' folders lie: ``tensorboard --logdir FOLDER`` shows them together.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        except ImportError as error:
            raise InputError(
                "TensorBoard files need the package tensorboard, which is not installed: `pip install tensorboard`, "
                "or leave out --tensorboard."
            ) from error
        self.folder = Path(folder)
        self._make: Any = SummaryWriter
        self._hyperparameters: Any = hparams
        self.writers: dict[str, Any] = {}

    def __enter__(self) -> Events:
        """Nothing is open yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files of runs that have not ended."""
        for writer in self.writers.values():
            writer.close()
        self.writers.clear()

    def place(self, config: RunConfig) -> Path:
        """The folder of a run: data set, then method and what is special about it, then the seed."""
        words = [config.method, f"M{config.memory_size}" if config.memory_size else "", *variant(config)]
        name = "-".join(word.replace(" ", "-").replace("/", "-") for word in words if word)
        return self.folder / config.dataset.replace("/", "-").replace(":", "-") / name / f"seed-{config.seed}"

    def _writer(self, config: RunConfig) -> Any:
        key = run_key(config)
        if key not in self.writers:
            self.writers[key] = self._make(str(self.place(config)))
        return self.writers[key]

    def moment(self, config: RunConfig, moment: Moment) -> None:
        """Note how far a run is."""
        writer = self._writer(config)
        for name, value in (
            ("training/loss", moment.loss),
            ("training/images_per_second", moment.images_per_second),
            ("training/accuracy_so_far", moment.accuracy if moment.at_task_end else None),
        ):
            if value is not None:
                writer.add_scalar(name, value, moment.step)

    def finished(self, outcome: Outcome) -> None:
        """Note what came out, and close the run's file."""
        if outcome.result is not None:
            self.result(outcome.job.config, outcome.result)
        if (writer := self.writers.pop(run_key(outcome.job.config), None)) is not None:
            writer.close()

    def passed(self, config: RunConfig) -> None:
        """A run that somebody else has made is in their event files."""

    def result(self, config: RunConfig, result: Result) -> None:
        """Note the figures of a finished run."""
        writer = self._writer(config)
        final: dict[str, float] = {}
        for classifier, figures in result.by_classifier.items():
            for task, value in enumerate(figures["average_over_time"], 1):
                if value is not None:
                    writer.add_scalar(f"{classifier}/average_accuracy_after_task", value, task)
            for task, value in enumerate(figures["accuracy_matrix"][-1], 1):
                if value is not None:
                    writer.add_scalar(f"{classifier}/accuracy_of_task_at_the_end", value, task)
            for name in ("average_accuracy", "anytime_accuracy", "forgetting"):
                if figures[name] is not None:
                    final[f"{classifier}/{name}"] = figures[name]
        settings = {"dataset": result.dataset, "method": result.method, "seed": result.seed, **result.method_options}
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        for name, value in final.items():
            writer.add_scalar(name, value)
        for summary in self._hyperparameters(plain, final):
            writer.file_writer.add_summary(summary)


def watch_with_events(
    work: Callable[[Watch | None], list[Result]], config: RunConfig, watch: Watch | None, folder: Path | None
) -> list[Result]:
    """Run the seeds of one configuration, and write event files beside what is shown; without a folder, none.

    Parameters
    ----------
    work
        Makes the runs, given who watches them.
    config
        Of the runs, whatever their seed.
    watch
        Who watches them anyway.
    folder
        See `Events`.
    """
    if folder is None:
        return work(watch)
    with Events(folder) as events:

        def both(moment: Moment) -> None:
            events.moment(config.replace(seed=moment.seed), moment)
            if watch is not None:
                watch(moment)

        results = work(both)
        for result in results:
            events.result(config.replace(seed=result.seed), result)
        return results
