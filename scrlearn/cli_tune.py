"""`scr tune`: choosing settings without looking at the test, on the command line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from scrlearn.cli import (
    BatchSize,
    ClassesAhead,
    ClassOrder,
    DataRoot,
    DatasetName,
    Device,
    Download,
    DropLast,
    Engine,
    ImageSize,
    JsonFlag,
    Limit,
    MethodName,
    Precision,
    QuietFlag,
    SideBySide,
    Split,
    Tasks,
    _console,
    _new_table,
    _print_json,
    _program,
    app,
)
from scrlearn.service.commands import named_values

# torch takes seconds to load, so what needs it is imported by the command, and help and mistakes stay quick
if TYPE_CHECKING:
    from scrlearn.experiments import Moment
    from scrlearn.experiments.tune import Search, Trial

SHOWN = 10
DEFAULT_STUDY = Path("tuning.db")
FIRST_SEED = 1000  # published figures have the seeds from 0 on, which no choice shall have seen


@app.command()
def tune(
    dataset: DatasetName = "digits",
    method: MethodName = "scr",
    memory: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Images kept; of several sizes, the mean counts. (default: the method's)"),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space", metavar="NAME=V1,V2", help="Values to choose from. Repeat it. (default: the method's few)"
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", metavar="NAME=VALUE", help="An option of the method that stays as it is."),
    ] = None,
    classifier: Annotated[
        str | None, typer.Option(help="softmax, ncm, combined, lda: whose accuracy counts. (default: the method's)")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Choices to try, those in the study included.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each trial; their mean counts.")] = 3,
    seed: Annotated[
        int, typer.Option(min=0, help="The first seed: not one that figures are published with.")
    ] = FIRST_SEED,
    tasks: Tasks = None,
    first_tasks: Annotated[
        int | None, typer.Option(min=1, help="Tasks of the stream that are used. (default: a third, at least 2)")
    ] = None,
    holdout: Annotated[float, typer.Option(help="Share of the training images that is held out to test on.")] = 0.1,
    order: ClassOrder = "natural",
    batch_size: BatchSize = 10,
    limit: Limit = None,
    drop_last: DropLast = True,
    split: Split = "given",
    classes_ahead: ClassesAhead = False,
    image_size: ImageSize = None,
    study: Annotated[Path, typer.Option(help="The file that keeps the trials; the same command goes on.")] = (
        DEFAULT_STUDY
    ),
    sampler: Annotated[
        str, typer.Option(help="tpe: look for the best; even: every value equally often, to see what each is worth.")
    ] = "tpe",
    sampler_seed: Annotated[int, typer.Option(min=0, help="Fixes what is proposed.")] = 0,
    prune: Annotated[bool, typer.Option("--prune", help="Give bad trials up after their first seed.")] = False,
    at_once: Annotated[
        int, typer.Option(min=1, help="Trials proposed together, and on a GPU run side by side with all their seeds.")
    ] = 1,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
    parallel: SideBySide = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Search for good settings on the first tasks of a stream; the test images are never looked at.

    Each trial tests on training images that were held out. Trials are kept in a file: stop with Ctrl-C, and the same
    command goes on. At the end comes the `scr run` command with the best values. Needs Optuna: pip install
    "scrlearn\\[tune]".
    """
    if holdout <= 0:
        raise typer.BadParameter("above 0, or there is nothing to test on but the test images", param_hint="--holdout")
    from scrlearn.devices import keep_freed_memory
    from scrlearn.experiments import RunConfig
    from scrlearn.experiments.tune import tune as search

    config = RunConfig(
        dataset=dataset,
        method=method,
        seed=seed,
        tasks=tasks,
        first_tasks=first_tasks,
        holdout=holdout,
        order=order,  # type: ignore[arg-type]  # checked where the stream is made
        batch_size=batch_size,
        limit=limit,
        drop_last=drop_last,
        split=split,
        classifier=classifier,
        options=named_values(option or []),
        image_size=image_size,
        precision=precision,
        device=device,
        classes_ahead=classes_ahead,
        engine=engine,
    )
    sizes = _sizes(memory)
    keep_freed_memory()
    with Bars(f"{method} on {dataset}", trials, seeds * max(1, len(sizes)), quiet) as bars:
        found = search(
            config,
            _space(space) if space else None,
            trials=trials,
            seeds=seeds,
            memory_sizes=sizes,
            study=study,
            sampler=sampler,
            sampler_seed=sampler_seed,
            prune=prune,
            at_once=at_once,
            data_root=data_root,
            download=download,
            parallel=parallel,
            watcher=bars,
        )
    _report(found, _command(found, data_root), as_json, quiet)


def _sizes(given: str | None) -> list[int]:
    """N, or N,N,…"""
    sizes = given.split(",") if given else []
    if not all(size.strip().isdecimal() for size in sizes):
        raise typer.BadParameter(f'"{given}" is neither a number nor several, such as 150,600.', param_hint="--memory")
    return [int(size) for size in sizes]


def _space(given: list[str]) -> dict[str, list[Any]]:
    """NAME=V1,V2,…; each value is JSON where it is JSON, else text."""
    space: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise typer.BadParameter(f'"{text}" is not NAME=V1,V2, such as momentum=0,0.9.', param_hint="--space")
        name = name.replace("-", "_")
        if name in space:
            raise typer.BadParameter(f"{name} was given twice.", param_hint="--space")
        space[name] = [named_values([f"{name}={value}"])[name] for value in values.split(",")]
    return space


class Bars:
    """A bar for the whole search on a terminal, a line for each trial; told by `tune` how it goes.

    Parameters
    ----------
    name
        What is searched, in a few words.
    trials, runs
        How many, and runs of each.
    quiet
        Show nothing.
    console
        Where to show; by default standard error.
    """

    def __init__(self, name: str, trials: int, runs: int, quiet: bool, console: Console | None = None) -> None:
        self.console, self.quiet = console or Console(stderr=True), quiet
        self.trials, self.runs_of_each = trials, runs
        self.done, self.runs, self.best = 0, dict[int, float](), 0.0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        self.bar = Progress(
            *columns,
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
            transient=True,
            speed_estimate_period=24 * 3600,
        )
        self.task = self.bar.add_task(f"[bold]{name}", total=trials, text="")

    def __enter__(self) -> Bars:
        """Show the bar."""
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self.bar.stop()

    def started(self, number: int, values: dict[str, Any]) -> None:
        """A trial begins."""
        self.runs.clear()
        self._show()

    def progress(self, moment: Moment) -> None:
        """A run of the trial is this far."""
        self.runs[moment.run] = moment.step / max(1, moment.steps)
        self._show()

    def ended(self, trial: Trial) -> None:
        """A trial is over."""
        self.done, self.best = self.done + 1, max(self.best, 0.0 if trial.pruned else trial.interval.mean)
        self.runs.clear()
        self._show()
        if not self.quiet:
            given_up = " (given up)" if trial.pruned else ""
            self.console.print(
                f"trial {trial.number + 1} of {self.trials}: {_accuracy(trial)}%{given_up}  {_values(trial)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _show(self) -> None:
        text = f"{self.done}/{self.trials}" + (f", best {100 * self.best:.1f}%" if self.done else "")
        self.bar.update(self.task, completed=self.done + sum(self.runs.values()) / self.runs_of_each, text=text)


def _values(trial: Trial) -> str:
    return " ".join(f"{name}={value}" for name, value in trial.values.items())


def _accuracy(trial: Trial) -> str:
    return trial.interval.format() if len(trial.accuracies) > 1 else f"{100 * trial.interval.mean:.1f}"


def _command(found: Search, data_root: Path | None) -> str:
    """What to paste to run what was chosen: with this program, on data that lie where they lay."""
    from scrlearn.experiments.tune import run_command

    words = [*_program(), *run_command(found.chosen)[1:]]
    if data_root is not None and str(data_root) != os.environ.get("SCRLEARN_DATA"):
        words += ["--data-root", str(data_root)]
    return shlex.join(words)


def _report(found: Search, command: str, as_json: bool, quiet: bool) -> None:
    if as_json:
        trials = [{**vars(trial), "mean": trial.interval.mean} for trial in found.trials]
        best = {"number": found.best.number, "values": found.best.values, "mean": found.best.interval.mean}
        _print_json(
            {
                "best": best,
                "command": command,
                "effects": {name: [[v, mean] for v, mean in values.items()] for name, values in found.effects.items()},
                "trials": trials,
                "config": found.config.to_dict(),
                "memory_sizes": list(found.memory_sizes) or [found.config.memory_size],
                "study": str(found.study),
            }
        )
        return
    if not quiet:
        tasks, share = found.config.first_tasks, f"{found.config.holdout:.0%}"
        title = f"The best of {len(found.trials)} trials, on the first {tasks} tasks with {share} held out"
        table = _new_table("trial", *found.space, title=title)
        table.add_column("accuracy (%)", justify="right")
        for trial in found.ranking[:SHOWN]:
            table.add_row(str(trial.number + 1), *(str(trial.values[name]) for name in found.space), _accuracy(trial))
        _console().print(table)
        worth = _new_table("option", "mean accuracy (%) with each value", title="What the values are worth")
        for name, means in found.effects.items():
            worth.add_row(name, ", ".join(f"{value}: {100 * mean:.1f}" for value, mean in means.items()))
        _console().print(worth)
        typer.echo("The best values on the whole stream, with the test images:")
    typer.echo(command)
