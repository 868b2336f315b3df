"""Sweeps on a real Ray cluster: machines come and go, and every run is there once, with the figures it has alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from result_factory import TINY
from sweep_tools import Notes, figures
from typer.testing import CliRunner

from scrlearn.cli import app
from scrlearn.cluster import connected
from scrlearn.errors import InputError
from scrlearn.experiments import RunConfig, protocol, ray_executor, runner
from scrlearn.experiments.executors import Job, Surroundings
from scrlearn.experiments.folders import CHECKPOINT
from scrlearn.experiments.identity import describe, run_key
from scrlearn.experiments.protocol import Split
from scrlearn.experiments.ray_executor import MARK, RayTasks
from scrlearn.experiments.record import Moment
from scrlearn.experiments.reproduce import job_for, side_folder, sweep
from scrlearn.experiments.store import Store

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'scrlearn[ray]'"
)
# long enough that a run is under way when something happens to it
LONG = TINY.replace(limit=60)
RUNS = [LONG.replace(method=method, seed=seed) for method in ("er", "fine-tune") for seed in (0, 1)]
EVERY_BATCH = Surroundings(checkpoint_seconds=0)
SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What each of the runs gives without Ray."""
    torch.set_num_threads(1)
    return {run_key(config): runner.run(config).by_classifier for config in RUNS}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results.db")


@pytest.fixture(scope="module")
def cluster(ray_folder: Path) -> Iterator[Any]:
    """A cluster of one small machine, here; it ends with the tests."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


# ---------------------------------------------------------------------------------------------------- on a real cluster


@needs_ray
@pytest.mark.slow
def test_a_machine_is_lost_in_the_middle(
    cluster: Any, store: Store, alone: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Kills(Notes):
        """Takes the second machine away when two runs are under way, one on each."""

        def moment(self, config: RunConfig, moment: Moment) -> None:
            super().moment(config, moment)
            if len({key for key, _ in self.moments}) == 2 and machines:
                cluster.remove_node(machines.pop(), allow_graceful=False)

    kills = Kills()
    with connected(cluster.address):
        machines = [cluster.add_node(**SMALL)]  # now, so that this process belongs to the machine that stays
        report = sweep(RUNS, store, RayTasks(cluster.address, EVERY_BATCH), [kills])
    assert not machines
    said = capsys.readouterr()
    assert said.out == ""  # that is for results
    assert "(raylet)" in said.err
    assert (report.wanted, report.finished, report.failures) == (4, 4, [])
    assert (report.merged.new, report.merged.same, report.merged.conflicts) == (4, 0, [])
    assert sorted(run_key(outcome.job.config) for outcome in kills.outcomes) == sorted(alone)
    assert figures(store) == alone
    assert {entry.result.machine["threads"] for entry in store.query()} == {1}
    assert {key for key, moment in kills.moments if moment.at_task_end} == set(alone)
    assert not side_folder(store).exists()


DRIVER = """
import json, sys
from scrlearn.experiments import RunConfig
from scrlearn.experiments.executors import Surroundings
from scrlearn.experiments.ray_executor import RayTasks
from scrlearn.experiments.reproduce import SweepStopped, sweep
from scrlearn.experiments.store import Store

class Says:
    def moment(self, config, moment): print("moment", flush=True)
    def finished(self, outcome): print("finished", flush=True)
    def passed(self, config): print("passed", flush=True)

configs = [RunConfig.from_dict(values) for values in json.loads(sys.argv[2])]
try:
    sweep(configs, Store(sys.argv[1]), RayTasks(sys.argv[3], Surroundings(checkpoint_seconds=0)), [Says()])
except SweepStopped as stopped:
    print(stopped, flush=True)
    sys.exit(128 + stopped.signal_number)
"""


@needs_ray
@pytest.mark.slow
def test_stopped_killed_and_gone_on(cluster: Any, store: Store, alone: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    configs = json.dumps([config.to_dict() for config in RUNS[:2]])

    def drive() -> subprocess.Popen[str]:
        """A sweep in a process of its own, with a run under way."""
        command = [sys.executable, tmp_path / "driver.py", "results.db", configs, cluster.address]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "moment\n"
        return process

    killed = drive()
    killed.kill()
    killed.wait()
    stopped = drive()
    stopped.send_signal(signal.SIGINT)
    said, _ = stopped.communicate()
    assert stopped.returncode == 128 + signal.SIGINT
    assert "of 2 runs are in the store. The same command goes on" in said
    assert len(store) + len(list(side_folder(store).rglob(CHECKPOINT))) >= 1
    began = Notes()
    report = sweep(RUNS[:2], store, RayTasks(cluster.address, EVERY_BATCH), [began])
    assert (report.missing, report.failures) == (0, [])
    assert began.moments[0][1].step > 1  # not from the beginning
    assert figures(store) == {run_key(config): alone[run_key(config)] for config in RUNS[:2]}


@needs_ray
@pytest.mark.slow
def test_a_run_that_kills_its_worker(
    ray_folder: Path, store: Store, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def dies(jobs: dict[int, Job], *others: Any) -> Any:
        from scrlearn.experiments.ray_executor import _work

        if any(job.config.seed == 1 for job in jobs.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return _work(jobs, *others)

    monkeypatch.setattr(ray_executor, "_work", dies)
    monkeypatch.setattr(ray_executor, "RETRIES", 1)
    bad = TINY.replace(options={"learning_rat": 1})
    ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False, **SMALL)
    try:
        report = sweep([*RUNS[:2], bad], store, RayTasks(gpus=1))  # one group, as if for a GPU
        assert ray.is_initialized()  # it was not the sweep's to end
    finally:
        ray.shutdown()
    failed = {failure.run: failure.error for failure in report.failures}
    assert list(failed) == [describe(bad), describe(RUNS[1])]
    assert failed[describe(RUNS[1])].startswith("Ray gave it up after 1 more tries (WorkerCrashedError)")
    assert "learning_rat" in failed[describe(bad)]
    assert figures(store) == {run_key(RUNS[0]): alone[run_key(RUNS[0])]}


@needs_ray
@pytest.mark.slow
def test_on_the_command_line(ray_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "DATASETS", {"digits": Split("Digits", 2, (20, 30, 40))})
    monkeypatch.chdir(tmp_path)
    words = [
        "reproduce",
        "table1",
        "--methods",
        "er",
        "--memory",
        "20",
        "--limit",
        "5",
        "--seeds",
        "2",
        "--device",
        "cpu",
    ]
    told = CliRunner().invoke(app, [*words, "--ray", "local", "--json"])
    assert told.exit_code == 0, told.output + repr(told.exception)
    report = json.loads(told.stdout)
    assert (report["wanted"], report["finished"], report["failed"]) == (2, 2, [])
    assert "2/2 er on digits, memory 20" in told.stderr
    again = CliRunner().invoke(app, [*words, "--ray", "local"])
    assert "0 runs made, 2 were there already" in again.stdout


# -------------------------------------------------------------------------------------------------------- without one


def test_no_ray_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'scrlearn\[ray\]'"):
        RayTasks("local")


@needs_ray
def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(InputError, match="No Ray cluster answers"), connected(f"127.0.0.1:{port}"):
        pass
    with pytest.raises(InputError, match="cannot be used: Invalid address"), connected("nonsense"):
        pass


def test_workers_or_ray() -> None:
    told = CliRunner().invoke(app, ["reproduce", "table1", "--ray", "local", "--workers", "2"])
    assert told.exit_code == 2
    assert "not by both" in " ".join(told.stderr.replace("│", " ").split())


@needs_ray
@pytest.mark.parametrize("gpus", [-1, 1.5])
def test_shares_that_ray_does_not_know(gpus: float) -> None:
    with pytest.raises(InputError, match="GPUs; expected a share of one, or a whole number"):
        RayTasks(gpus=gpus)


def test_a_machine_that_does_not_see_the_folder_has_its_own(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    job = job_for(store, TINY)
    side = ray_executor._Side()
    mark = side.mark(job)
    assert ray_executor._Side().mark(job) == mark  # a second driver on the same store
    assert ray_executor._folder(job.folder, mark) == job.folder
    other = ray_executor._folder(job.folder, "that of another machine")
    assert other == tmp_path / "home/.cache/scrlearn/runs" / run_key(TINY) / job.folder.name
    side.clear()
    assert not (side_folder(store) / MARK).exists()
    assert ray_executor._folder(job.folder, mark) == other


def test_data_of_the_machine_where_the_drivers_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, missing = Surroundings(tmp_path), Surroundings(tmp_path / "missing")
    monkeypatch.delenv("SCRLEARN_DATA", raising=False)
    assert ray_executor._seen_here(missing) == missing
    monkeypatch.setenv("SCRLEARN_DATA", str(tmp_path))
    assert ray_executor._seen_here(missing).data_root is None
    assert ray_executor._seen_here(there) == there
