"""Showing runs under way: a bar for each seed on a terminal, a line for each task elsewhere."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from scrlearn.experiments.record import Moment

LOG = logging.getLogger("scrlearn")


class _Above(logging.Handler):
    """What the package has to say while bars are shown, in lines above them."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), highlight=False, soft_wrap=True, markup=False)


class _Bars(Progress):
    """Bars that let the package speak as long as they are there."""

    def start(self) -> None:
        self.above, self.level = _Above(self.console), LOG.level
        LOG.addHandler(self.above)
        if not LOG.isEnabledFor(logging.INFO):  # who asks for more shall have more
            LOG.setLevel(logging.INFO)
        super().start()

    def stop(self) -> None:
        super().stop()
        if self.above in LOG.handlers:  # bars may be stopped twice
            LOG.removeHandler(self.above)
            LOG.setLevel(self.level)


def bars_on(console: Console, **how: Any) -> Progress:
    """Bars with what is shown of each, on a terminal only; they are gone when all is over."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(compact=True),
    )
    return _Bars(*columns, console=console, disable=not console.is_terminal, transient=True, **how)


class Bars:
    """A bar for each seed; called with each `Moment` of a run.

    Parameters
    ----------
    name
        What runs, in a few words.
    seeds
        The seeds that will run, so that their bars are there from the start.
    console
        Where to show; by default standard error. Where that is no terminal, one line is written after each task.

    Example
    -------
    >>> from scrlearn.experiments import RunConfig, run
    >>> with Bars("er", [0]) as bars:
    ...     result = run(RunConfig(method="er", memory_size=50, limit=10), progress=bars)
    """

    def __init__(self, name: str, seeds: list[int], console: Console | None = None) -> None:
        self.name, self.seeds = name, seeds
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal
        self.progress = bars_on(self.console)
        self.tasks: dict[int, TaskID] = {}
        self.losses: dict[int, float | None] = {}

    def __enter__(self) -> Bars:
        """Show the bars."""
        self.progress.start()
        for seed in self.seeds:
            self.tasks[seed] = self.progress.add_task(self._name(seed), total=None, start=False, text="waiting")
        return self

    def _name(self, seed: int) -> str:
        return f"{self.name}, seed {seed}" if len(self.seeds) > 1 else self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bars away."""
        self.progress.stop()

    def __call__(self, moment: Moment) -> None:
        """Show how far a run is."""
        started = moment.seed in self.losses
        # after a task there is no fresh loss; the last one known stays on the bar
        loss = self.losses.get(moment.seed) if moment.loss is None else moment.loss
        self.losses[moment.seed] = loss
        text = describe(moment, loss)
        if self.live:
            task = self.tasks[moment.seed]
            if not started:
                self.progress.start_task(task)
            self.progress.update(task, total=moment.steps, completed=moment.step, text=text)
        elif moment.at_task_end:
            self.console.print(f"{self._name(moment.seed)}: {text}", highlight=False, soft_wrap=True)


def describe(moment: Moment, loss: float | None) -> str:
    """Task, loss, speed and accuracy so far, as far as they are known.

    >>> describe(Moment(0, 2, 5, 40, 140, None, 950.0, 0.987, False), 1.25)
    'task 2/5 · loss 1.25 · 950 images/s · accuracy 98.7%'
    """
    parts = [f"task {moment.task}/{moment.tasks}"]
    if loss is not None:
        parts.append(f"loss {loss:.2f}")
    if moment.images_per_second is not None:
        parts.append(f"{moment.images_per_second:,.0f} images/s")
    if moment.accuracy is not None:
        parts.append(f"accuracy {moment.accuracy:.1%}")
    return " · ".join(parts)
