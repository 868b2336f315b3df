"""Sweeps: many runs into one store. What is there is skipped, what was stopped goes on, what fails is told last."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scrlearn.devices import resolve_device
from scrlearn.errors import InputError
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.executors import Executor, Job, Outcome
from scrlearn.experiments.identity import describe, digest, run_key
from scrlearn.experiments.protocol import artefacts_for
from scrlearn.experiments.record import Moment
from scrlearn.experiments.store import Merged, Store

SIDE_FOLDER = ".runs"


class Watcher(Protocol):
    """Who is told how a sweep goes."""

    def moment(self, config: RunConfig, moment: Moment) -> None:
        """A run is this far."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """A run has ended, well or badly."""
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
    todo = [config for config in unique.values() if not is_done(store, config)]
    report = Sweep(wanted=len(unique), there=len(unique) - len(todo))

    def watch(job: Job, moment: Moment) -> None:
        for watcher in watchers:
            watcher.moment(job.config, moment)

    outcomes = executor.run(_still_missing(todo, store, report), watch)
    try:
        for outcome in outcomes:
            _take_in(outcome, store, report, keep_folders)
            for watcher in watchers:
                watcher.finished(outcome)
    except KeyboardInterrupt as error:
        raise SweepStopped(report, int(getattr(error, "signal_number", 2))) from error
    finally:
        if isinstance(outcomes, Iterator) and hasattr(outcomes, "close"):
            outcomes.close()  # lets workers save and end, whatever happened here
    with contextlib.suppress(OSError):
        side_folder(store).rmdir()  # if nothing is left in it
    return report


def _still_missing(todo: Sequence[RunConfig], store: Store, report: Sweep) -> Iterator[Job]:
    """Jobs in the order of the configurations; one that somebody else has made in the meantime is passed over."""
    for config in todo:
        if is_done(store, config):
            report.there += 1
        else:
            yield job_for(store, config)


def _take_in(outcome: Outcome, store: Store, report: Sweep, keep_folder: bool) -> None:
    config = outcome.job.config
    if outcome.result is None:
        if is_done(store, config):  # somebody else has made it meanwhile, and cleared its folder away
            report.there += 1
            return
        report.failures.append(Failure(describe(config), outcome.error, outcome.trace))
        return
    report.merged += store.add(outcome.result, outcome.artefacts)
    report.finished += 1
    if not keep_folder:
        shutil.rmtree(outcome.job.folder.parent, ignore_errors=True)
