"""The demonstration: SCR beside ER and fine-tuning on Split Digits, in less than a minute on two cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from scrlearn.data import load
from scrlearn.data.images import default_workers
from scrlearn.devices import keep_freed_memory
from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.result import Result, summary
from scrlearn.experiments.runner import run
from scrlearn.files import atomic_write

METHODS = ("fine-tune", "er", "scr")
MEMORY_SIZE = 200
SEEDS = 3
MOST_PROCESSES = 4  # each holds torch in memory
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
    def verdict(self) -> str:
        """The outcome in a sentence."""
        points = self.points_above_fine_tuning
        where = "above" if points >= 0 else "below"
        return f"SCR ends {abs(points):.1f} points {where} fine-tuning."


def run_demo(
    out: str | os.PathLike[str] = "demo",
    *,
    seeds: int = SEEDS,
    limit: int | None = None,
    processes: int = 0,
    watch: Callable[[Result], None] | None = None,
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
    processes
        Processes that share the runs, each on one core; 0: one run after the other in this one.
    watch
        Called with the result of each run.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    configs = [  # the longest first, so that no core waits for another at the end
        RunConfig(method=method, memory_size=MEMORY_SIZE, seed=seed, limit=limit)
        for method in reversed(METHODS)
        for seed in range(seeds)
    ]
    results: dict[str, list[Result]] = {method: [] for method in METHODS}
    for result in _run_all(configs, processes):
        results[result.method].append(result)
        if watch is not None:
            watch(result)
    report = DemoReport(results)
    _draw(report, folder / PICTURE)
    atomic_write(folder / REPORT, markdown(report).encode())
    return report


def _run_all(configs: list[RunConfig], processes: int) -> Iterator[Result]:
    """Results in the order of the configurations."""
    if not processes:
        dataset = load("digits")
        yield from (run(config, dataset=dataset) for config in configs)
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, and hang
    with ProcessPoolExecutor(min(processes, len(configs)), context, _prepare_worker) as pool:
        yield from pool.map(run, configs)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a word
    torch.set_num_threads(1)  # such small images gain next to nothing from a second thread
    keep_freed_memory()


def processes_here() -> int:
    """How many processes suit this machine: one a core; none beside this one where a GPU does the work."""
    return 0 if torch.cuda.is_available() else min(default_workers(), MOST_PROCESSES)


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
        figures = [report.figure(method, name) for name in ("average_accuracy", "forgetting")]
        shown = [f.format() if f.n > 1 else f"{100 * f.mean:.1f}" for f in figures]
        rows.append((method, results[0].classifier, *shown, f"{seconds:.1f}"))
    return rows


def _seeds(report: DemoReport) -> str:
    count = len(report.results["scr"])
    return "one seed" if count == 1 else f"mean ± 95% Student-t interval over {count} seeds"


HEADINGS = ("method", "classifier", "average accuracy (%)", "forgetting (%)", "seconds for a run")


def table(report: DemoReport) -> Table:
    """The outcome for a terminal."""
    table = Table(title=f"Split Digits, memory {MEMORY_SIZE}: {_seeds(report)}")
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
        f"remembered ({_seeds(report)}). Fine-tuning remembers nothing that it trains on.",
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
