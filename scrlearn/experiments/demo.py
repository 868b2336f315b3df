"""The demonstration: SCR beside ER and fine-tuning on Split Digits, in about a minute on two cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from scrlearn.data import load
from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.progress import Bars
from scrlearn.experiments.result import Result, summary
from scrlearn.experiments.runner import run_seeds
from scrlearn.files import atomic_write

METHODS = ("fine-tune", "er", "scr")
MEMORY_SIZE = 200
SEEDS = 2
PICTURE, REPORT = "picture.png", "report.md"


@dataclass(frozen=True)
class DemoReport:
    """What the demonstration measured: the results of each method, one per seed."""

    results: dict[str, list[Result]]

    def figure(self, method: str, name: str) -> Interval:
        """Mean ± 95% interval of a figure of a method, with the classifier that is its own."""
        results = self.results[method]
        return summary(results)[results[0].classifier][name]

    @property
    def points_above_fine_tuning(self) -> float:
        """By how many percentage points SCR ends above fine-tuning."""
        return 100 * (self.figure("scr", "average_accuracy").mean - self.figure("fine-tune", "average_accuracy").mean)

    @property
    def seconds(self) -> float:
        """Of all runs together."""
        return sum(result.seconds["total"] for results in self.results.values() for result in results)

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        points = self.points_above_fine_tuning
        where = "above" if points >= 0 else "below"
        return f"SCR ends {abs(points):.1f} points {where} fine-tuning ({self.seconds:.0f} s for all runs)."


def run_demo(
    out: str | os.PathLike[str] = "demo",
    *,
    seeds: int = SEEDS,
    limit: int | None = None,
    watch: Callable[[str, list[int]], Bars] | None = None,
) -> DemoReport:
    """Run the three methods, and write a picture and a report.

    Parameters
    ----------
    out
        Folder for ``picture.png`` and ``report.md``, made anew each time.
    seeds
        Runs of each method.
    limit
        At most so many training images of each class; None: all.
    watch
        Makes what shows the progress of a method's runs.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    dataset = load("digits")
    numbers = list(range(seeds))
    results: dict[str, list[Result]] = {}
    for method in METHODS:
        config = RunConfig(method=method, memory_size=MEMORY_SIZE, limit=limit)
        if watch is None:
            results[method] = run_seeds(config, numbers, dataset=dataset)
            continue
        with watch(method, numbers) as bars:
            results[method] = run_seeds(config, numbers, dataset=dataset, progress=bars)
    report = DemoReport(results)
    _draw(report, folder / PICTURE)
    atomic_write(folder / REPORT, markdown(report).encode())
    return report


def _draw(report: DemoReport, path: Path) -> None:
    from scrlearn.experiments import plots  # matplotlib takes a second to load

    matrices = {
        method: [np.array(result.accuracy_matrix, dtype=np.float64) for result in results]
        for method, results in report.results.items()
    }
    title = f"Split Digits, five tasks, one pass, {MEMORY_SIZE} images remembered"
    plots.save(plots.demo_picture(matrices, title=title), path, dpi=110)


def _rows(report: DemoReport) -> list[tuple[str, ...]]:
    """Method, classifier, average accuracy, forgetting, seconds for a run."""
    rows = []
    for method, results in report.results.items():
        seconds = interval([result.seconds["total"] for result in results]).mean
        figures = [report.figure(method, name).format() for name in ("average_accuracy", "forgetting")]
        rows.append((method, results[0].classifier, *figures, f"{seconds:.1f}"))
    return rows


HEADINGS = ("method", "classifier", "average accuracy (%)", "forgetting (%)", "seconds for a run")


def table(report: DemoReport) -> Table:
    """The outcome for a terminal."""
    seeds = len(next(iter(report.results.values())))
    table = Table(title=f"Split Digits, memory {MEMORY_SIZE}, {seeds} seeds: mean ± 95% interval")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:2] else "right")
    for row in _rows(report):
        table.add_row(*row)
    return table


def markdown(report: DemoReport) -> str:
    """The outcome as a page."""
    first = report.results["scr"][0]
    lines = [
        "# Split Digits",
        "",
        f"**{report.verdict}**",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|---|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in _rows(report)),
        "",
        f"Accuracy at the end on all ten digits, which came two at a time in {len(first.tasks)} tasks: each of the "
        f"{first.images:,} training images once, in batches of {first.config['batch_size']}, with {MEMORY_SIZE} images "
        f"remembered. Mean ± 95% Student-t interval over {len(report.results['scr'])} seeds. Fine-tuning remembers "
        "nothing that it trains on.",
        "",
        f"![Accuracy over the tasks, and of each task at the end]({PICTURE})",
        "",
        "Made by `scr demo`; each row also by, for example, "
        f"`scr run --dataset digits --method scr --memory {MEMORY_SIZE} --seeds {len(report.results['scr'])}`.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in first.versions.items()) + ". "
        f"Machine: {first.machine['name']}, {first.machine['device']}, {first.machine['precision']}, "
        f"{first.machine['threads']} threads.",
        "",
    ]
    return "\n".join(lines)
