"""Sweeps: what is there is skipped, what was stopped goes on, what fails stops nobody else."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from result_factory import TINY, made_up, real_result
from rich.console import Console
from sweep_tools import Notes, figures
from typer.testing import CliRunner

from scrlearn.cli import app
from scrlearn.experiments import Result, RunConfig, executors, processes, protocol, runner
from scrlearn.experiments.claims import Claims
from scrlearn.experiments.comparison import compare
from scrlearn.experiments.executors import Job, LocalDevice, Outcome, Surroundings, Watch
from scrlearn.experiments.folders import CHECKPOINT, RESULT
from scrlearn.experiments.identity import describe, run_key
from scrlearn.experiments.processes import Processes
from scrlearn.experiments.protocol import Figure, Split, runs_for
from scrlearn.experiments.record import Moment
from scrlearn.experiments.reproduce import Sweep, SweepStopped, is_done, job_for, side_folder, sweep
from scrlearn.experiments.store import Store
from scrlearn.experiments.sweep_progress import SweepBars
from scrlearn.learners import Learner

EVERY_BATCH = Surroundings(checkpoint_seconds=0)
THREE = [TINY.replace(method=method, seed=seed) for method, seed in (("er", 0), ("er", 1), ("fine-tune", 0))]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command line puts its own in place
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results.db")


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What each of the three runs gives when nothing disturbs it."""
    torch.set_num_threads(1)
    return {run_key(config): runner.run(config).by_classifier for config in THREE}


class Dies(BaseException):
    """As if the process were killed."""


# -------------------------------------------------------------------------------------------------------------- sweeps


def test_what_is_there_is_skipped(store: Store, alone: dict[str, Any]) -> None:
    first, second, notes = Notes(), Notes(), Notes()
    assert sweep(THREE[:1], store, LocalDevice(), [first]).finished == 1
    report = sweep([*THREE, THREE[0].replace(engine="eager")], store, LocalDevice(), [second])
    assert (report.wanted, report.there, report.finished, report.missing) == (3, 1, 2, 0)
    assert figures(store) == alone
    assert [run_key(outcome.job.config) for outcome in second.outcomes] == [run_key(config) for config in THREE[1:]]
    assert {key for key, _ in second.moments} == {run_key(config) for config in THREE[1:]}
    assert sweep(THREE, store, LocalDevice(), [notes]).there == 3
    assert notes.moments == notes.outcomes == []
    assert not side_folder(store).exists()


def test_a_result_is_in_the_store_the_moment_it_is_there(store: Store) -> None:
    class Looks(Notes):
        def finished(self, outcome: Outcome) -> None:
            assert is_done(store, outcome.job.config)
            assert not outcome.job.folder.exists()
            super().finished(outcome)

    looks = Looks()
    sweep(THREE[:2], store, LocalDevice(), [looks])
    assert len(looks.outcomes) == 2


def test_folders_are_kept_on_request(store: Store) -> None:
    sweep(THREE[:1], store, LocalDevice(), keep_folders=True)
    assert Result.load(job_for(store, THREE[0]).folder / RESULT) == store.query()[0].result


def test_killed_in_the_middle_and_gone_on(store: Store, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Kills(Notes):
        def moment(self, config: RunConfig, moment: Moment) -> None:
            if config.seed == 1 and moment.at_task_end:
                raise Dies

    executor = LocalDevice(EVERY_BATCH)
    with pytest.raises(Dies):
        sweep(THREE, store, executor, [Kills()])
    assert len(store) == 1
    (checkpoint,) = side_folder(store).rglob(CHECKPOINT)
    assert checkpoint.parent == job_for(store, THREE[1]).folder
    learned: list[int] = []
    learn = Learner.learn
    monkeypatch.setattr(Learner, "learn", lambda self, x, y: (learned.append(len(x)), learn(self, x, y))[1])
    report = sweep(THREE[:2], store, executor)
    assert (report.there, report.finished) == (1, 1)
    assert figures(store) == {run_key(config): alone[run_key(config)] for config in THREE[:2]}
    assert len(learned) == store.query(seed=1)[0].result.steps // 2  # the first task was not learned again


def test_killed_between_the_end_of_a_run_and_the_store(
    store: Store, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*args: Any, **others: Any) -> None:
        raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", dies)
        with pytest.raises(Dies):
            sweep(THREE[:1], store, LocalDevice())
    monkeypatch.setattr(executors, "_dataset", lambda *args: None)  # nothing needs to be learned
    assert sweep(THREE[:1], store, LocalDevice()).finished == 1
    assert figures(store)[run_key(THREE[0])] == alone[run_key(THREE[0])]


def test_damaged_checkpoint_starts_afresh(store: Store, alone: dict[str, Any]) -> None:
    folder = job_for(store, THREE[0]).folder
    folder.mkdir(parents=True)
    (folder / CHECKPOINT).write_bytes(b"torn")
    with pytest.warns(UserWarning, match="starts afresh"):
        assert sweep(THREE[:1], store, LocalDevice()).finished == 1
    assert figures(store) == {run_key(THREE[0]): alone[run_key(THREE[0])]}


def test_another_engine_has_another_folder(store: Store) -> None:
    """A run that was stopped cannot go on there; its key in the store is the same."""
    config = THREE[0]
    assert job_for(store, config).folder != job_for(store, config.replace(engine="eager")).folder
    assert job_for(store, config).folder.parent == job_for(store, config.replace(engine="eager")).folder.parent


BAD = TINY.replace(seed=5, options={"memory_bach": 3})


@pytest.mark.parametrize("executor", [LocalDevice(), Processes(2, threads=1)], ids=["here", "processes"])
def test_a_failing_run_does_not_stop_the_others(
    store: Store, alone: dict[str, Any], executor: LocalDevice | Processes
) -> None:
    notes, missing = Notes(), TINY.replace(dataset="folder:/nowhere/at/all")
    report = sweep([BAD, THREE[0], missing, *THREE[1:], missing.replace(seed=1)], store, executor, [notes])
    assert (report.finished, report.missing, len(report.failures)) == (3, 3, 3)
    assert figures(store) == alone
    assert {key for key, _ in notes.moments} == set(alone)
    assert {entry.result.machine["threads"] for entry in store.query()} == {1}
    reasons = report.reasons()
    assert len(reasons) == 2  # the missing data set is told once
    assert any("memory_bach" in error and runs == [describe(BAD)] for error, runs in reasons.items())
    assert any("/nowhere/at/all" in error and len(runs) == 2 for error, runs in reasons.items())
    assert all("Traceback" in failure.trace for failure in report.failures)
    assert not multiprocessing.active_children()
    again = sweep([BAD, THREE[0]], store, LocalDevice())  # a failure is no result: it is tried again
    assert (again.there, len(again.failures)) == (1, 1)


def test_made_by_somebody_else_meanwhile(store: Store) -> None:
    class Neighbour(Notes):
        def finished(self, outcome: Outcome) -> None:
            super().finished(outcome)
            store.add(made_up(1))

    notes = Neighbour()
    report = sweep(THREE[:2], store, LocalDevice(), [notes])
    assert (report.there, report.finished, len(notes.outcomes)) == (1, 1, 1)
    assert notes.passed_over == [run_key(THREE[1])]


@pytest.mark.parametrize("finishes", [True, False], ids=["which finishes it", "which gives it up"])
def test_a_run_that_another_sweep_is_at_comes_last(
    store: Store, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch, finishes: bool
) -> None:
    neighbour, notes, key = Claims(side_folder(store)), Notes(), run_key(THREE[0])
    assert neighbour.take(key)

    def wait(seconds: float) -> None:
        assert [run_key(outcome.job.config) for outcome in notes.outcomes] == [run_key(config) for config in THREE[1:]]
        if finishes:
            store.add(runner.run(THREE[0]))
        neighbour.give_back(key)

    monkeypatch.setattr("scrlearn.experiments.reproduce.time.sleep", wait)
    report = sweep(THREE, store, LocalDevice(), [notes])
    assert (report.there, report.finished, report.missing) == ((1, 2, 0) if finishes else (0, 3, 0))
    assert notes.passed_over == ([key] if finishes else [])
    assert figures(store) == alone
    assert not side_folder(store).exists()


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from scrlearn.experiments.claims import Claims; "
        "print(Claims(pathlib.Path(sys.argv[1])).take('run'), flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        ours = Claims(tmp_path)
        assert not ours.take("run")
        process.kill()
    assert ours.take("run")
    ours.give_all_back()
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- groups


class FourAtATime(LocalDevice):
    def _share(self, config: RunConfig) -> float:
        return 0.25


def test_groups_have_one_data_set_and_room_for_all() -> None:
    device = FourAtATime()
    jobs = [
        Job(TINY.replace(seed=seed, dataset=name), Path())
        for name, n in (("digits", 5), ("cifar10", 3))
        for seed in range(n)
    ]
    jobs.append(Job(TINY.replace(dataset="cifar10", engine="eager"), Path()))
    jobs.append(Job(TINY.replace(dataset="cifar10", engine="eager", method="offline"), Path()))
    assert [len(group) for group in device._groups(jobs)] == [4, 1, 3, 1, 1]
    assert [len(group) for group in LocalDevice()._groups(jobs[:3])] == [1, 1, 1]  # a CPU


def test_where_there_are_enough_of_a_kind_nobody_else_joins_them() -> None:
    """Runs that take turns take the same time; so each method has a time of its own."""

    class Roomy(LocalDevice):
        def _share(self, config: RunConfig) -> float:
            return 1 / 16

    def jobs(*counts: int) -> list[Job]:
        """So many of each method, with two memory sizes."""
        return [
            Job(TINY.replace(method=method, memory_size=20 + 10 * (n % 2), seed=n), Path())
            for method, count in zip(("er", "scr", "mir"), counts, strict=False)
            for n in range(count)
        ]

    def groups(*counts: int) -> list[list[str]]:
        return [[job.config.method for job in group] for group in Roomy()._groups(jobs(*counts))]

    assert groups(8, 8) == [["er"] * 8, ["scr"] * 8]
    assert groups(20, 2) == [["er"] * 16, ["er"] * 4 + ["scr"] * 2]
    assert groups(6, 6, 6) == [["er"] * 6 + ["scr"] * 6 + ["mir"] * 4, ["mir"] * 2]  # no kind has a time anyway
    assert groups(3, 3, 12) == [["er"] * 3 + ["scr"] * 3 + ["mir"] * 10, ["mir"] * 2]


def test_different_methods_side_by_side(store: Store, alone: dict[str, Any]) -> None:
    notes = Notes()
    report = sweep(THREE, store, FourAtATime(), [notes])
    assert report.finished == 3
    assert figures(store) == alone
    assert {entry.result.seconds["side_by_side"] for entry in store.query()} == {3}
    alike = [(entry.config.method, entry.result.seconds["alike"]) for entry in store.query()]
    assert sorted(alike) == [("er", 2), ("er", 2), ("fine-tune", 1)]
    assert {key for key, _ in notes.moments} == set(alone)


def test_the_failing_run_of_a_group_is_found(
    store: Store, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    together = executors.run_together

    def counted(configs: list[RunConfig], **others: Any) -> list[Result]:
        sizes.append(len(configs))
        return together(configs, **others)

    monkeypatch.setattr(executors, "run_together", counted)
    report = sweep([*THREE, BAD], store, FourAtATime())
    assert [failure.run for failure in report.failures] == [describe(BAD)]
    assert figures(store) == alone
    assert sizes == [4, 2, 2, 1, 1]


def test_a_group_that_finds_no_room_is_halved(
    store: Store, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = executors.run_together

    def small(configs: list[RunConfig], **others: Any) -> list[Result]:
        if len(configs) > 2:
            raise torch.OutOfMemoryError("no room")
        return together(configs, **others)

    monkeypatch.setattr(executors, "run_together", small)
    with pytest.warns(UserWarning, match="No memory for 3 runs"):
        assert sweep(THREE, store, FourAtATime()).finished == 3
    assert figures(store) == alone


# ----------------------------------------------------------------------------------------------------------- processes


def test_a_worker_that_dies_takes_one_run_with_it(store: Store, alone: dict[str, Any]) -> None:
    class Kills(Notes):
        def moment(self, config: RunConfig, moment: Moment) -> None:
            if config == THREE[0]:
                for child in multiprocessing.active_children():
                    os.kill(child.pid, signal.SIGKILL)  # the only worker there is

    report = sweep(THREE[:2], store, Processes(1, threads=1), [Kills()])
    assert [failure.error for failure in report.failures] == [
        "The process that ran it was ended by SIGKILL (the machine may have run out of memory)."
    ]
    assert figures(store) == {run_key(THREE[1]): alone[run_key(THREE[1])]}


DRIVER = """
import sys
from scrlearn.experiments import RunConfig
from scrlearn.experiments.executors import Surroundings
from scrlearn.experiments.processes import Processes
from scrlearn.experiments.reproduce import SweepStopped, sweep
from scrlearn.experiments.store import Store
import json
if __name__ == "__main__":
    class Says:
        def moment(self, config, moment): print("moment", flush=True)
        def finished(self, outcome): print("finished", flush=True)
        def passed(self, config): print("passed", flush=True)
    configs = [RunConfig.from_dict(values) for values in json.loads(sys.argv[2])]
    try:
        sweep(configs, Store(sys.argv[1]), Processes(1, Surroundings(checkpoint_seconds=0), 1), [Says()])
    except SweepStopped as stopped:
        print(stopped, flush=True)
        sys.exit(128 + stopped.signal_number)
"""


def drive(store: Store, tmp_path: Path) -> subprocess.Popen[str]:
    """A sweep in a process of its own, which has learned the first task of the first run."""
    (tmp_path / "driver.py").write_text(DRIVER)
    configs = json.dumps([config.to_dict() for config in THREE[:2]])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "driver.py", str(store.path), configs], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "moment\n"
    return process


def test_stopped_sweep_saves_and_goes_on(store: Store, alone: dict[str, Any], tmp_path: Path) -> None:
    process = drive(store, tmp_path)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "of 2 runs are in the store. The same command goes on" in said
    assert len(store) + len(list(side_folder(store).rglob(CHECKPOINT))) >= 1
    assert sweep(THREE[:2], store, LocalDevice(EVERY_BATCH)).missing == 0
    assert figures(store) == {run_key(config): alone[run_key(config)] for config in THREE[:2]}


@pytest.mark.slow
def test_killed_driver_leaves_no_workers(store: Store, alone: dict[str, Any], tmp_path: Path) -> None:
    process = drive(store, tmp_path)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert sweep(THREE[:2], store, LocalDevice(EVERY_BATCH)).missing == 0
    assert figures(store) == {run_key(config): alone[run_key(config)] for config in THREE[:2]}


def test_signal_while_runs_are_made_here(store: Store, alone: dict[str, Any]) -> None:
    class Interrupts(Notes):
        def moment(self, config: RunConfig, moment: Moment) -> None:
            if config == THREE[1]:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SweepStopped, match="1 of 3 runs are in the store") as stopped:
        sweep(THREE, store, LocalDevice(), [Interrupts()])
    assert stopped.value.signal_number == signal.SIGINT
    assert sweep(THREE, store, LocalDevice()).missing == 0
    assert figures(store) == alone


# -------------------------------------------------------------------------------------------- an executor of one's own


def test_any_executor_will_do(store: Store) -> None:
    class Instant:
        def run(self, jobs: Iterable[Job], watch: Watch) -> Iterator[Outcome]:
            for job in reversed(list(jobs)):
                yield Outcome(job, made_up(job.config.seed))

    report = sweep([TINY.replace(seed=seed) for seed in range(4)], store, Instant())
    assert report == Sweep(wanted=4, there=0, finished=4, merged=report.merged)
    assert len(store) == 4


# -------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def paper_of_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A paper about digits, with two methods of it: the options that make its runs tiny."""
    for module in ("beyond", "report.docs"):  # these take the real one with them, whoever imports them first
        importlib.import_module(f"scrlearn.experiments.{module}")
    monkeypatch.setattr(protocol, "DATASETS", {"digits": Split("Digits", 2, (20, 30, 40))})
    monkeypatch.setattr(protocol, "STUDY", ("digits", 20))
    figure = Figure(1, "tsne", "Embeddings", ("er",), (("digits", 20),), ("memory", "test"))
    monkeypatch.setattr(protocol, "FIGURES", (figure,))
    monkeypatch.chdir(tmp_path)
    return ["--methods", "er,fine-tune", "--memory", "20", "--limit", "5", "--device", "cpu", "--precision", "fp32"]


def scr(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_reproduce_on_the_command_line(paper_of_digits: list[str]) -> None:
    options = ["--seeds", 2, *paper_of_digits]
    assert "4 runs: 0 done, 4 to do." in scr("reproduce", "table1", "--dry-run", *options).stdout
    assert not Path("results.db").exists()
    first = scr("reproduce", "table1", *options[2:], "--seeds", 1)
    assert "2 runs made, 0 were there already, 0 failed; 2 were asked for." in first.stdout
    assert "1/2 fine-tune on digits, memory 30, classes ahead" in first.stderr
    plan = json.loads(scr("reproduce", "table1", "--dry-run", "--json", *options).stdout)
    assert (plan["wanted"], plan["there"]) == (4, 2)
    assert [run["done"] for run in plan["runs"]] == [True, False, True, False]
    assert RunConfig.from_dict(plan["runs"][0]["config"]).method == "fine-tune"
    second = scr("reproduce", "table1", "--json", *options)
    report = json.loads(second.stdout)
    assert (report["wanted"], report["there"], report["finished"], report["failed"]) == (4, 2, 2, [])
    assert {(line["classifier"], line["seeds"], line["wanted"]) for line in report["figures"]} == {
        ("softmax", 2, 2),
        ("ncm", 2, 2),
    }
    assert scr("reproduce", "table1", "--quiet", *options).output == ""
    assert scr("reproduce", "figures", *options).stdout.count("er on digits") == 2  # one line for each classifier


def test_artefacts_of_the_first_seed_are_in_the_store(paper_of_digits: list[str]) -> None:
    scr("reproduce", "table1", "--quiet", "--seeds", 2, *paper_of_digits)
    entries = Store("results.db").query(method="er")
    assert [list(entry.artefacts) for entry in entries] == [["memory", "test"], []]
    assert entries[0].arrays("memory")["places"].shape == (20, 2)
    unseen = entries[0].arrays("test")
    assert unseen["places"].shape == (len(unseen["labels"]), 2)
    assert set(unseen["labels"].tolist()) == set(range(10))
    assert 0.1 < float(unseen["alike"][0]) <= 1


def test_a_failure_on_the_command_line(paper_of_digits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    together = executors.run_together

    def fails(configs: list[RunConfig], **others: Any) -> list[Result]:
        if configs[0].method == "er":
            raise RuntimeError("a cosmic ray")
        return together(configs, **others)

    monkeypatch.setattr(executors, "run_together", fails)
    result = scr("reproduce", "table1", "--quiet", "--seeds", 2, *paper_of_digits, code=1)
    assert "and 1 more: RuntimeError: a cosmic ray" in " ".join(result.stderr.split())
    assert len(Store("results.db")) == 2
    report = json.loads(scr("reproduce", "table1", "--json", "--seeds", 2, *paper_of_digits, code=1).stdout)
    assert [failure["error"] for failure in report["failed"]] == ["RuntimeError: a cosmic ray"] * 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["table3"], 1, 'Did you mean "table1"'),
        (["table1", "--datasets", "cifar"], 1, "no data set"),
        (["table1", "--memory", "many"], 2, "not all numbers"),
        (["table1", "--order", "backwards"], 2, "neither natural nor shuffled"),
        (["table1", "--precision", "fp64", "--dry-run"], 1, "no precision"),
    ],
)
def test_mistakes_on_the_command_line(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in " ".join(scr("reproduce", *words, code=code).stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_workers_have_no_more_threads_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 8)
    for asked, expected in (("", 4), ("1", 1), ("16", 4), ("some", 4), ("0", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert Processes(2).threads == expected


@pytest.mark.parametrize("width", [40, 60])
def test_keys_are_whole_on_narrow_terminals(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    Store(tmp_path / "results.db").add(made_up())
    assert run_key(TINY)[:8] in scr("results", "list", "--runs", "--store", tmp_path / "results.db").stdout


def test_results_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRLEARN_STORE", str(tmp_path / "here.db"))
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal wraps the table
    here, there = Store(tmp_path / "here.db"), Store(tmp_path / "there.db")
    here.add(made_up(0, 0.25))
    there.add(made_up(0, 0.5))
    there.add(made_up(1, 0.75))
    merged = scr("results", "merge", there.path)
    assert "1 new, 0 there already, 1 there with other figures" in merged.stdout
    assert "other figures: er on digits" in merged.stderr
    assert "2 runs of 1 configurations" in scr("results", "list").stdout
    listed = scr("results", "list", "--runs", "--seed", 1).stdout
    assert run_key(TINY.replace(seed=1))[:8] in listed
    assert "ncm 75.0, softmax 75.0" in listed
    assert len(json.loads(scr("results", "list", "--json").stdout)) == 4
    key = run_key(TINY)
    shown = scr("results", "show", key[:10]).stdout
    assert "seed 0" in shown
    assert key in shown
    assert json.loads(scr("results", "show", key, "--json").stdout)["result"]["seed"] == 0
    assert "2 runs are in" in scr("results", "export", tmp_path / "all.json").stdout
    assert scr("results", "export", tmp_path / "x.csv", "--method", "scr", code=1).stderr.startswith(
        "error: There is no"
    )
    added = scr("results", "add", tmp_path / "all.json", "--store", tmp_path / "new.db", "--json").stdout
    assert json.loads(added)["new"] == 2
    assert "1 run removed" in scr("results", "remove", key).stdout
    assert len(here) == 1


def test_an_accuracy_that_is_not_known_is_no_zero(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal wraps the table
    template = made_up(0)
    for values in template.by_classifier.values():
        values["average_accuracy"] = None
    result = dataclasses.replace(template, average_accuracy=None)
    store.add(result)
    assert "ncm –, softmax –" in scr("results", "list", "--runs", "--store", store.path).stdout
    console = Console(file=io.StringIO(), width=160)
    SweepBars("table1", 0, 1, console).finished(Outcome(Job(TINY, Path()), result))
    assert ": ncm –, softmax –," in console.file.getvalue()  # type: ignore[attr-defined]


def test_runs_that_measured_other_classifiers_stand_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    whole, other = made_up(0, 0.25), made_up(1, 0.75)
    store.add(whole)
    store.add(dataclasses.replace(other, by_classifier={"softmax": other.by_classifier["softmax"]}))
    found = {line.classifier: line.ours for line in compare([TINY, TINY.replace(seed=1)], store)}
    assert {name: (ours.mean, ours.n) for name, ours in found.items() if ours} == {
        "softmax": (0.5, 2),
        "ncm": (0.25, 1),
    }
    listed = [line.split() for line in scr("results", "list", "--store", store.path).stdout.splitlines()]
    assert [line[line.index("ncm") + 1] for line in listed if "ncm" in line] == ["1"]
    assert [line[line.index("softmax") + 1] for line in listed if "softmax" in line] == ["2"]


@pytest.mark.parametrize("command", ["add", "merge"])
@pytest.mark.parametrize("name", ["gone.json", "gone"])
def test_nothing_to_take_in_makes_no_store(command: str, name: str, tmp_path: Path) -> None:
    said = scr("results", command, tmp_path / name, "--store", tmp_path / "new.db", code=1).stderr
    assert "There is no" in said
    assert name in said
    assert list(tmp_path.iterdir()) == []


def test_our_figures_beside_the_papers(store: Store) -> None:
    configs = runs_for("table1", ["cifar100"], ["scr", "lwf"], [2000], 3)
    assert {line.ours for line in compare(configs, store)} == {None}
    for config in configs:
        accuracy = {"lwf": 0.1, "scr": 0.33}[config.method] + 0.001 * config.seed
        store.add(made_up(config.seed, accuracy, **{k: v for k, v in config.to_dict().items() if k != "seed"}))
    found = {
        (line.config.method, line.name.endswith("review"), line.classifier): line for line in compare(configs, store)
    }
    assert len(found) == 6
    assert found["scr", False, "ncm"].verdict == found["scr", True, "ncm"].verdict == "inside"
    assert found["lwf", False, "softmax"].verdict == "below"
    assert found["lwf", False, "ncm"].verdict == ""  # the paper has none
    assert str(found["scr", True, "ncm"].paper) == "32.8 ± 0.7"


# -------------------------------------------------------------------------------------------- what is shown and drawn


def test_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    job = Job(THREE[0], Path())
    with SweepBars("table1", 3, 5, console) as bars:
        bars.progress.refresh()
        assert "preparing" in console.file.getvalue()  # data sets are read before the first run is shown
        bars.moment(THREE[0], Moment(0, 1, 2, 7, 10, 1.5, 900.0, None, False))
        bars.progress.refresh()
        bars.finished(Outcome(job, real_result()))
        bars.finished(Outcome(Job(BAD, Path()), None, error="no [such] option"))
        bars.progress.refresh()
    text = console.file.getvalue()
    assert "task 1/2 · loss 1.50 · 900 images/s" in text
    assert "4/5 er on digits, memory 20" in text
    assert "failed: no [such] option" in text
    assert "1 failed" in text


def test_mean_weights_of_the_head_for_new_and_old_classes(tmp_path: Path) -> None:
    result = runner.run(TINY, out=tmp_path / "run", pictures=False)
    weights = result.by_classifier["softmax"]["head_weights"]
    learner, _ = runner.load_learner(tmp_path / "run" / CHECKPOINT)
    head = learner.network.head
    assert head is not None
    new, old = (head.weight[classes].mean().item() for classes in reversed(result.tasks))
    assert weights == [[weights[0][0], None], pytest.approx([new, old])]


# --------------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_of_a_sweep(paper_of_digits: list[str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scr("reproduce", "table1", "--quiet", "--tensorboard", "board", "--seeds", 1, *paper_of_digits)
    entry = Store("results.db").query(method="er")[0]
    (folder,) = Path("board/digits").glob("er-M20-*/seed-0")
    events = EventAccumulator(str(folder)).Reload()
    after = [event.value for event in events.Scalars("ncm/average_accuracy_after_task")]
    assert after == pytest.approx(entry.result.curve("ncm"))
    assert "training/accuracy_so_far" in events.Tags()["scalars"]
    assert len(list(Path("board/digits").iterdir())) == 2


def test_tensorboard_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tiny = ["--method", "er", "--memory", 20, "--limit", 5, "--tasks", 2, "--device", "cpu"]
    scr("run", *tiny, "--seeds", 2, "--quiet", "--tensorboard", tmp_path)
    assert len(list(tmp_path.glob("digits/*/seed-[01]/events.*"))) == 2


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install tensorboard" in scr("run", "--tensorboard", tmp_path, "--limit", 5, code=1).stderr


# ------------------------------------------------------------------------------------------------------------- a device


@pytest.mark.device
def test_groups_on_a_gpu_give_what_each_gives_alone(store: Store) -> None:
    configs = [
        TINY.replace(method=method, seed=seed, memory_size=size, device="cuda")
        for method, size in (("er", 20), ("scr", 40), ("mir", 20))
        for seed in range(2)
    ]
    alone = {run_key(config): runner.run(config).by_classifier for config in configs}
    assert sweep(configs, store, LocalDevice()).finished == 6
    assert figures(store) == alone
    assert {entry.result.seconds["side_by_side"] for entry in store.query()} == {6}
    assert {entry.result.seconds["alike"] for entry in store.query()} == {2}
