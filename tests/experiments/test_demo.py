"""The demonstration and its report."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch
from rich.console import Console

from scrlearn.experiments import demo
from scrlearn.experiments.progress import Bars


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[demo.DemoReport, Path]:
    out = tmp_path_factory.mktemp("demo")
    return demo.run_demo(out, seeds=2, limit=5), out


def test_report_says_what_was_measured(report: tuple[demo.DemoReport, Path]) -> None:
    measured, out = report
    means = {
        method: sum(result.average_accuracy for result in results) / 2 for method, results in measured.results.items()
    }
    points = 100 * (means["scr"] - means["fine-tune"])
    assert measured.points_above_fine_tuning == pytest.approx(points)
    text = (out / demo.REPORT).read_text()
    assert f"SCR ends {abs(points):.1f} points {'above' if points >= 0 else 'below'} fine-tuning" in text
    for method, mean in means.items():
        assert f"| {method} |" in text
        assert f" {100 * mean:.1f} ± " in text
    assert (out / demo.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_table_for_the_terminal(report: tuple[demo.DemoReport, Path]) -> None:
    console = Console(width=120, file=io.StringIO())
    console.print(demo.table(report[0]))
    text = console.file.getvalue()
    assert "over 2 seeds" in text
    for method in demo.METHODS:
        assert method in text


def test_processes_give_the_same(tmp_path: Path) -> None:
    """Two processes, as `scr demo` has them on two cores: a result for each run, and each is what one process gives."""
    threads = torch.get_num_threads()
    seen: list[tuple[str, int]] = []
    shared = demo.run_demo(
        tmp_path, seeds=2, limit=5, processes=2, watch=lambda result: seen.append((result.method, result.seed))
    )
    assert sorted(seen) == sorted((method, seed) for method in demo.METHODS for seed in (0, 1))
    torch.set_num_threads(1)
    try:
        alone = demo.run_demo(tmp_path, seeds=2, limit=5)
    finally:
        torch.set_num_threads(threads)
    for method, results in alone.results.items():
        for one, other in zip(results, shared.results[method], strict=True):
            assert one.by_classifier == other.by_classifier


def test_bars_on_a_terminal() -> None:
    """On a terminal the bars are drawn and taken away; elsewhere a line follows each task."""
    from scrlearn.experiments import RunConfig, run

    config = RunConfig(method="er", memory_size=10, limit=5, tasks=2, seed=7)
    terminal = Console(width=140, force_terminal=True, file=io.StringIO())
    with Bars("er", [7], terminal) as bars:
        run(config, progress=bars)
        assert "task 2/2" in bars.progress.tasks[0].fields["text"]
        assert bars.progress.tasks[0].finished
    plain = Console(width=140, file=io.StringIO())
    with Bars("er", [7, 8], plain) as bars:
        run(config, progress=bars)
    text = plain.file.getvalue()
    assert text.count("er, seed 7: task") == 2
    assert "accuracy" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_the_package_says_stands_above_the_bars(terminal: bool) -> None:
    console = Console(width=140, force_terminal=terminal, file=io.StringIO())
    log = logging.getLogger("scrlearn.kernels")
    level = log.getEffectiveLevel()
    with Bars("er", [7], console):
        log.info("Preparing [kernels].")
    log.info("After them nobody listens.")
    assert "Preparing [kernels]." in console.file.getvalue()
    assert "nobody" not in console.file.getvalue()
    assert log.getEffectiveLevel() == level


@pytest.mark.slow
def test_scr_is_far_above_fine_tuning(tmp_path: Path) -> None:
    assert demo.run_demo(tmp_path, seeds=2).points_above_fine_tuning >= 30
