"""Every method on Split Digits: the order known from the paper, measured on any CPU within minutes.

    python -m scrlearn.experiments.digits_table --out results

writes ``digits.json`` and ``digits.md``.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scrlearn.data import load
from scrlearn.evaluation import Interval
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.result import Result, readable_json, summary
from scrlearn.experiments.runner import run
from scrlearn.files import atomic_write
from scrlearn.learners import METHODS, find_method

MEMORY_SIZE = 200
SEEDS = 5
# from the lower bound to the upper one, all with the paper's encoder: scr+wide is scr+ with a larger one
ROWS = ("fine-tune", "ewc++", "lwf", "a-gem", "er", "mir", "gss", "aser", "icarl", "scr", "scr+", "offline")
# a head on the features that changes no other figure, so that SCR has one for both classifiers
OPTIONS: dict[str, dict[str, Any]] = {"scr": {"probe": True}}
FIGURES = ("average_accuracy", "anytime_accuracy", "forgetting")
JSON, PAGE = "digits.json", "digits.md"

Results = Mapping[str, Sequence[Result]]


def measure(
    methods: Sequence[str] = ROWS,
    seeds: int = SEEDS,
    memory_size: int = MEMORY_SIZE,
    *,
    limit: int | None = None,
    watch: Callable[[Result], None] | None = None,
) -> dict[str, list[Result]]:
    """Run methods on Split Digits on the CPU, in float32, each with seeds 0, 1, ….

    Parameters
    ----------
    methods
        Names of the table of methods.
    seeds
        Runs of each.
    memory_size
        M, for all of them.
    limit
        At most so many training images of each class; None: all.
    watch
        Called with the result of each run.

    Example
    -------
    >>> results = measure(["fine-tune"], seeds=1, memory_size=20, limit=10)
    >>> sorted(results["fine-tune"][0].by_classifier)
    ['ncm', 'softmax']
    """
    for method in methods:
        find_method(method)  # say what is wrong before the first one runs
    dataset, results = load("digits"), dict[str, list[Result]]()
    for method in methods:
        config = RunConfig(
            method=method,
            memory_size=memory_size,
            limit=limit,
            options=OPTIONS.get(method, {}),
            precision="fp32",
            device="cpu",
        )
        for seed in range(seeds):
            results.setdefault(method, []).append(run(config.replace(seed=seed), dataset=dataset, pictures=False))
            if watch is not None:
                watch(results[method][-1])
    return results


def accuracy(results: Results, method: str, classifier: str) -> Interval:
    """Average accuracy at the end of the stream: mean ± 95% interval over the seeds."""
    return summary(results[method])[classifier]["average_accuracy"]


def as_dict(results: Results, command: str) -> dict[str, Any]:
    """All figures, with what they were made by."""
    first = next(iter(results.values()))[0]
    return {
        "dataset": "Split Digits, 5 tasks of 2 classes, one pass, batches of 10",
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": first.versions,
        "machine": {**first.machine, "cores": os.cpu_count()},
        "memory_size": first.memory_size,
        "seeds": [result.seed for result in next(iter(results.values()))],
        "methods": {method: _figures(list(runs)) for method, runs in results.items()},
    }


def _figures(runs: list[Result]) -> dict[str, Any]:
    return {
        "options": runs[0].method_options,
        "memory_use": runs[0].memory_use,
        "by_classifier": {
            classifier: {
                name: {
                    "mean": figures[name].mean,
                    "half_width": figures[name].half_width if len(runs) > 1 else None,
                    "values": [run.by_classifier[classifier][name] for run in runs],
                }
                for name in FIGURES
                if all(run.by_classifier[classifier][name] is not None for run in runs)
            }
            for classifier, figures in summary(runs).items()
        },
    }


def markdown(results: Results, command: str) -> str:
    """The table as a page."""
    about = as_dict(results, command)
    machine, seeds = about["machine"], len(about["seeds"])
    lines = [
        "# Every method on Split Digits",
        "",
        f"Average accuracy at the end on all ten digits, in percent: mean ± 95% Student-t interval over {seeds} seeds, "
        f"with {about['memory_size']} images remembered. {about['dataset']}. Softmax and nearest class mean answer "
        "from the same run; `scr+` answers with both combined.",
        "",
        "| method | softmax | nearest class mean | combined | the memory is |",
        "|---|---:|---:|---:|---|",
        *(_line(method, list(runs)) for method, runs in results.items()),
        "",
        "One class in ten is 10.0; knowing the last task alone, 20.0. The softmax layer of `scr` is a probe: trained "
        "beside the encoder, without a gradient into it. `offline` keeps all images, not only so many.",
        "",
        f"Made on {about['date']} by `{command}`. "
        f"Versions: {', '.join(f'{name} {version}' for name, version in about['versions'].items())}. "
        f"Machine: {machine['name']}, {machine['cores']} cores, threads: {machine['threads']}, {machine['precision']}.",
        "",
    ]
    return "\n".join(lines)


def _line(method: str, runs: list[Result]) -> str:
    cells = [f"`{method}` {METHODS[method].title}"]
    figures = summary(runs)
    for classifier in ("softmax", "ncm", "combined"):
        value = figures[classifier]["average_accuracy"] if classifier in figures else None
        cells.append("" if value is None else value.format() if value.n > 1 else f"{100 * value.mean:.1f}")
    kept = "all images" if method == "offline" else runs[0].memory_use
    return f"| {' | '.join([*cells, kept])} |"


def write(results: Results, folder: str | os.PathLike[str], command: str) -> None:
    """Write the figures as JSON and as a page."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / JSON, (readable_json(as_dict(results, command)) + "\n").encode())
    atomic_write(folder / PAGE, markdown(results, command).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scrlearn.experiments.digits_table", description=__doc__)
    parser.add_argument("--methods", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each method")
    parser.add_argument("--memory", type=int, default=MEMORY_SIZE, help="images remembered")
    parser.add_argument("--limit", type=int, help="at most so many training images of each class")
    parser.add_argument("--out", default="results", help="folder for digits.json and digits.md")
    given = parser.parse_args(arguments)
    command = f"{parser.prog} --seeds {given.seeds} --memory {given.memory} --out {given.out}"

    def watch(result: Result) -> None:
        shares = {name: f"{100 * f['average_accuracy']:.1f}" for name, f in result.by_classifier.items()}
        print(result.method, "seed", result.seed, *(f"{name} {share}" for name, share in shares.items()), flush=True)

    methods = given.methods.split(",")
    if given.limit is not None:
        command += f" --limit {given.limit}"
    if methods != list(ROWS):
        command += f" --methods {given.methods}"
    results = measure(methods, given.seeds, given.memory, limit=given.limit, watch=watch)
    write(results, given.out, command)
    print(markdown(results, command))


if __name__ == "__main__":
    main()
