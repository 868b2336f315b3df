"""Sweeps: many runs into one store. What is there is skipped, what was stopped goes on, what fails is told last."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol

from scrlearn.devices import resolve_device
from scrlearn.errors import InputError
from scrlearn.experiments.claims import Claims
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.executors import Executor, Job, Outcome
from scrlearn.experiments.identity import describe, digest, run_key
from scrlearn.experiments.protocol import artefacts_for
from scrlearn.experiments.record import Moment
from scrlearn.experiments.store import Merged, Store

SIDE_FOLDER = ".runs"
LOOK_SECONDS = 1.0


class Watcher(Protocol):
    """Who is told how a sweep goes."""

    def moment(self, config: RunConfig, moment: Moment) -> None:
        """A run is this far."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """A run has ended, well or badly."""
        ...

    def passed(self, config: RunConfig) -> None:
        """A run is in the store that somebody else has made meanwhile."""
        ...


@dataclass(frozen=True)
class Failure:
    """A run that did not work, and why."""

    run: str
    error: str
    trace: str = ""


@dataclass
class Sweep:
    """What a sweep did.

    Parameters
    ----------
    wanted
        Runs that were asked for.
    there
        Of those, runs that were in the store before.
    finished
        Runs that were made and put into the store.
    failures
        Runs that did not work.
    merged
        What the store said to the new runs.
    """

    wanted: int
    there: int
    finished: int = 0
    failures: list[Failure] = field(default_factory=list)
    merged: Merged = field(default_factory=Merged)

    @property
    def missing(self) -> int:
        """Runs that the store still has not."""
        return self.wanted - self.there - self.finished

    def reasons(self) -> dict[str, list[str]]:
        """The runs that failed, by error: a data set that is missing fails all its runs in the same way."""
        found: dict[str, list[str]] = {}
        for failure in self.failures:
            found.setdefault(failure.error, []).append(failure.run)
        return found


class SweepStopped(KeyboardInterrupt):
    """A sweep was asked to stop; everything it has done is kept."""

    def __init__(self, sweep: Sweep, signal_number: int) -> None:
        self.sweep, self.signal_number = sweep, signal_number
        there = sweep.there + sweep.finished
        super().__init__(
            f"Stopped: {there} of {sweep.wanted} runs are in the store. The same command goes on from here."
        )


def is_done(store: Store, config: RunConfig) -> bool:
    """Whether a run is in the store, with all that figures need of it."""
    return store.has(config, artefacts_for(config))


def side_folder(store: Store) -> Path:
    """Where the runs under way have their checkpoints, beside the store."""
    return store.path.with_name(store.path.name + SIDE_FOLDER)


def job_for(store: Store, config: RunConfig) -> Job:
    """A run, and its own folder: another one for another device or engine, because there it cannot go on."""
    device = "none"
    with contextlib.suppress(InputError):  # a device that is not here is told when the run is made
        device = resolve_device(config.device).type
    place = digest({**config.to_dict(), "device": [config.device, device]})[:8]
    return Job(config, side_folder(store) / run_key(config) / place, artefacts_for(config))


def sweep(
    configs: Sequence[RunConfig],
    store: Store,
    executor: Executor,
    watchers: Sequence[Watcher] = (),
    *,
    keep_folders: bool = False,
) -> Sweep:
    """Make all runs that the store does not have.

    Several sweeps may work on one store: each makes what no other is at, and waits for the others at the end.

    Parameters
    ----------
    configs
        What to run; the same run twice counts once.
    store
        Where results go, each the moment it is there. Checkpoints of runs under way lie in a folder beside it.
    executor
        Where runs are made.
    watchers
        Told how it goes.
    keep_folders
        Keep the folder of a run (with its last checkpoint) when its result is in the store.

    Raises
    ------
    SweepStopped
        SIGINT or SIGTERM came. The same call goes on.

    Example
    -------
    >>> import tempfile
    >>> from scrlearn.experiments.executors import LocalDevice
    >>> store = Store(Path(tempfile.mkdtemp()) / "results.db")
    >>> configs = [RunConfig(method="er", memory_size=20, limit=5, seed=seed) for seed in range(2)]
    >>> sweep(configs[:1], store, LocalDevice()).finished, sweep(configs, store, LocalDevice()).finished
    (1, 1)
    """
    unique = {run_key(config): config for config in configs}
    todo = {key: config for key, config in unique.items() if not is_done(store, config)}
    report = Sweep(wanted=len(unique), there=len(unique) - len(todo))
    under_way = _UnderWay(store, report, watchers, keep_folders)
    try:
        while left := {key: config for key, config in todo.items() if key not in under_way.settled}:
            jobs = under_way.claimed(left)
            if (first := next(jobs, None)) is not None:
                _run(chain([first], jobs), executor, under_way)
            elif not left.keys() & under_way.settled:  # all that is left is being made by others
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt as error:
        raise SweepStopped(report, int(getattr(error, "signal_number", 2))) from error
    finally:
        under_way.claims.give_all_back()
        with contextlib.suppress(OSError):
            side_folder(store).rmdir()  # if nothing is left in it
    return report


def _run(jobs: Iterator[Job], executor: Executor, under_way: _UnderWay) -> None:
    outcomes = executor.run(jobs, under_way.moment)
    try:
        for outcome in outcomes:
            under_way.take_in(outcome)
    finally:
        if isinstance(outcomes, Iterator) and hasattr(outcomes, "close"):
            outcomes.close()  # lets workers save and end, whatever happened here


class _UnderWay:
    """The runs of a sweep: which are ours to make, what came out, and who is told."""

    def __init__(self, store: Store, report: Sweep, watchers: Sequence[Watcher], keep_folders: bool) -> None:
        self.store, self.report, self.watchers, self.keep_folders = store, report, watchers, keep_folders
        self.claims = Claims(side_folder(store))
        self.settled: set[str] = set()  # ours, or found in the store

    def claimed(self, left: Mapping[str, RunConfig]) -> Iterator[Job]:
        """Jobs that no other sweep is at; one that somebody else has made in the meantime is passed over."""
        for key, config in left.items():
            if not self.claims.take(key):
                continue
            self.settled.add(key)
            if is_done(self.store, config):
                self._pass(config)
            else:
                yield job_for(self.store, config)

    def _pass(self, config: RunConfig) -> None:
        self.report.there += 1
        self.claims.give_back(run_key(config))
        for watcher in self.watchers:
            watcher.passed(config)

    def moment(self, job: Job, moment: Moment) -> None:
        """Tell how far a run is."""
        for watcher in self.watchers:
            watcher.moment(job.config, moment)

    def take_in(self, outcome: Outcome) -> None:
        """Put a result into the store, or note a failure."""
        config = outcome.job.config
        if outcome.result is not None:
            self.report.merged += self.store.add(outcome.result, outcome.artefacts)
            self.report.finished += 1
            if not self.keep_folders:
                shutil.rmtree(outcome.job.folder.parent, ignore_errors=True)
        elif is_done(self.store, config):  # by somebody who knows no claims, and has cleared its folder away
            self._pass(config)
            return
        else:
            self.report.failures.append(Failure(describe(config), outcome.error, outcome.trace))
        self.claims.give_back(run_key(config))
        for watcher in self.watchers:
            watcher.finished(outcome)
