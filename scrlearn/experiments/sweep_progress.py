"""Showing a sweep under way: a bar for all of it and one for each run at work; elsewhere a line for each run."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from scrlearn.experiments import progress as one_run
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.executors import Outcome
from scrlearn.experiments.identity import describe, run_key
from scrlearn.experiments.record import Moment


class SweepBars:
    """Bars for a sweep.

    Parameters
    ----------
    name
        What runs, in a few words.
    there, wanted
        Runs that are in the store already, and runs asked for.
    console
        Where to show; by default standard error.
    """

    def __init__(self, name: str, there: int, wanted: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal
        # times between runs are long, and their speed is told by many of them
        self.progress = one_run.bars_on(self.console, speed_estimate_period=24 * 3600)
        self.name, self.done, self.wanted, self.failed = name, there, wanted, 0
        self.whole = self.progress.add_task(f"[bold]{name}", total=wanted, completed=there, text="preparing")
        self.bars: dict[str, TaskID] = {}
        self.losses: dict[str, float | None] = {}

    def __enter__(self) -> SweepBars:
        """Show the bars."""
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bars away."""
        self.progress.stop()

    def moment(self, config: RunConfig, moment: Moment) -> None:
        """Show how far a run is."""
        if not self.live:
            return
        key = run_key(config)
        if key not in self.bars:
            self.bars[key] = self.progress.add_task(escape(describe(config)), total=moment.steps, text="")
            self.progress.update(self.whole, text=self._text())
        if moment.loss is not None:
            self.losses[key] = moment.loss
        text = one_run.describe(moment, self.losses.get(key))
        self.progress.update(self.bars[key], total=moment.steps, completed=moment.step, text=text)

    def finished(self, outcome: Outcome) -> None:
        """Take the run's bar away and say what came out."""
        config, result = outcome.job.config, outcome.result
        if (bar := self.bars.pop(run_key(config), None)) is not None:
            self.progress.remove_task(bar)
        if result is None:
            self.failed += 1
            text = f"failed: {outcome.error}"
        else:
            self.done += 1
            figures = {name: values["average_accuracy"] for name, values in sorted(result.by_classifier.items())}
            text = ", ".join(f"{name} {_percent(value)}" for name, value in figures.items())
            text += f", {result.seconds['total']:.0f} s"
        self._say(config, text)

    def passed(self, config: RunConfig) -> None:
        """Say that a run has come in from elsewhere."""
        if (bar := self.bars.pop(run_key(config), None)) is not None:
            self.progress.remove_task(bar)
        self.done += 1
        self._say(config, "made by another sweep")

    def _say(self, config: RunConfig, text: str) -> None:
        self.progress.update(self.whole, completed=self.done, text=self._text())
        line = f"{self.done}/{self.wanted} {describe(config)}: {text}"
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _text(self) -> str:
        """What the bars do not say: how many failed, and that data are read while no run is under way."""
        return f"{self.failed} failed" if self.failed else "" if self.bars else "preparing"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
