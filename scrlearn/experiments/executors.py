"""Where the runs of a sweep are made: on this machine's device, in groups (`processes.py`: by local processes).

An executor takes jobs and gives outcomes as they come; it neither knows the result store nor prints anything. Another
one (a cluster) is one more class with the method `run`, around the function `execute`.
"""

from __future__ import annotations

import gc
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from scrlearn.data import ArrayImages, Dataset, load, shuffled_split
from scrlearn.devices import resolve_device
from scrlearn.engine import most_side_by_side, why_not_graph
from scrlearn.errors import CheckpointError
from scrlearn.experiments.artefacts import collect
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import family_key, kind_key
from scrlearn.experiments.record import Moment
from scrlearn.experiments.result import Result
from scrlearn.experiments.runner import run_together

SWEEP_CHECKPOINT_SECONDS = 60.0
ENOUGH_ALIKE = 8


@dataclass(frozen=True)
class Job:
    """One run to be made: its configuration, the folder it can be stopped in, and what figures need of it."""

    config: RunConfig
    folder: Path
    artefacts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a result and its artefacts, or with an error (a line, and where it came from)."""

    job: Job
    result: Result | None
    artefacts: Mapping[str, bytes] = field(default_factory=dict)
    error: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What runs need that changes no figure: where data lie, whether to fetch them, how often to save."""

    data_root: Path | None = None
    download: bool = False
    checkpoint_seconds: float = SWEEP_CHECKPOINT_SECONDS


Watch = Callable[[Job, Moment], None]


class Executor(Protocol):
    """Makes runs."""

    def run(self, jobs: Iterable[Job], watch: Watch) -> Iterator[Outcome]:
        """Make the runs, in any order, and give each outcome when it is there.

        Jobs are taken when there is room for them, so that some may turn out to be unnecessary by then. A job that
        fails is an outcome; only a stop on request (`KeyboardInterrupt`) ends everything, and then all runs under way
        have been saved.
        """
        ...


def execute(jobs: Sequence[Job], surroundings: Surroundings, watch: Watch) -> list[Outcome]:
    """Make runs of one data set side by side; each that fails is found out, and does not stop the others."""
    try:
        return _together(jobs, surroundings, watch)
    except Exception as error:
        if len(jobs) == 1:
            return [Outcome(jobs[0], None, error=_line(error), trace=traceback.format_exc())]
        if isinstance(error, torch.OutOfMemoryError):
            warnings.warn(f"No memory for {len(jobs)} runs side by side: going on with half of them.", stacklevel=2)
    clear()  # the error and its frames are gone by now, and with them what they held
    half = len(jobs) // 2
    return [outcome for part in (jobs[:half], jobs[half:]) for outcome in execute(part, surroundings, watch)]


def clear() -> None:
    """Give back what finished runs held on the device: learners and their graphs refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _together(jobs: Sequence[Job], surroundings: Surroundings, watch: Watch) -> list[Outcome]:
    configs, folders = [job.config for job in jobs], [job.folder for job in jobs]
    dataset = _dataset(configs[0], surroundings)

    def run(overwrite: bool) -> list[Result]:
        return run_together(
            configs,
            outs=folders,
            resume=not overwrite,
            overwrite=overwrite,
            progress=lambda moment: watch(jobs[moment.run], moment),
            dataset=dataset,
            pictures=False,
            checkpoint_seconds=surroundings.checkpoint_seconds,
        )

    try:
        results = run(overwrite=False)
    except CheckpointError as error:
        if len(jobs) > 1:
            raise
        warnings.warn(f"{error} It starts afresh.", stacklevel=2)
        results = run(overwrite=True)
    return [Outcome(job, one, _artefacts(job, dataset)) for job, one in zip(jobs, results, strict=True)]


def _artefacts(job: Job, dataset: Dataset) -> dict[str, bytes]:
    return collect(job.folder, job.artefacts, job.config.make_stream(dataset)) if job.artefacts else {}


def _dataset(config: RunConfig, where: Surroundings) -> Dataset:
    return _loaded(config.dataset, where.data_root, where.download, config.image_size, config.split)


@lru_cache(maxsize=1)  # runs come data set by data set
def _loaded(name: str, root: Path | None, download: bool, image_size: int | None, split: str) -> Dataset:
    dataset = load(name, root, download=download, image_size=image_size, progress=False)
    return shuffled_split(dataset) if split == "shuffled" else dataset


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


class LocalDevice:
    """Runs in this process: on a CUDA device in groups side by side, on a CPU one after the other.

    Parameters
    ----------
    surroundings
        Where data lie.
    parallel
        Runs side by side on a CUDA device, at most; None: as many as it has room for.
    """

    def __init__(self, surroundings: Surroundings | None = None, parallel: int | None = None) -> None:
        self.surroundings, self.parallel = surroundings or Surroundings(), parallel
        self._shares: dict[str, float] = {}

    def run(self, jobs: Iterable[Job], watch: Watch) -> Iterator[Outcome]:
        """Groups of runs that fit together, in the order of the jobs."""
        for group in self._groups(jobs):
            outcomes = execute(group, self.surroundings, watch)
            clear()  # before anybody asks how much room there is
            yield from outcomes

    def _groups(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Neighbours that may run side by side, as long as there is room for one more.

        Runs that take turns take the same time, whatever their method. So where there are enough of one kind, runs of
        another wait for the next group: then both have times of their own.
        """
        group: list[Job] = []
        taken = 0.0
        for job in jobs:
            share = self._share_or_alone(job)
            if group and (taken + share > 1 + 1e-9 or not may_join(job.config, [one.config for one in group])):
                yield group
                group, taken = [], 0.0
            group.append(job)
            taken += share
            if taken > 1 - 1e-9:  # without looking at the next one, which may turn out to be unnecessary
                yield group
                group, taken = [], 0.0
        if group:
            yield group

    def _share_or_alone(self, job: Job) -> float:
        try:
            return self._share(job.config)
        except Exception:  # whatever is wrong with this run, it is told when it is made
            return 1.0

    def _share(self, config: RunConfig) -> float:
        """How much of the device a run takes."""
        if config.engine == "eager" or resolve_device(config.device).type != "cuda" or config.method == "offline":
            return 1.0  # offline: works on alone for long after the stream
        family = family_key(config)
        if family not in self._shares:
            self._shares[family] = 1 / self._room(config, _dataset(config, self.surroundings))
        return self._shares[family]

    def _room(self, config: RunConfig, dataset: Dataset) -> int:
        learner = config.make_learner(dataset.image_shape, dataset.num_classes)
        if why_not_graph(learner) or not config.drop_last or not isinstance(dataset.train, ArrayImages):
            return 1  # eagerly, one after the other
        return most_side_by_side(learner, self.parallel)


def may_join(config: RunConfig, group: Sequence[RunConfig]) -> bool:
    """Whether a run goes well with those that are together already."""
    if in_common(config) != in_common(group[0]):
        return False
    kinds = Counter(map(kind_key, group))
    return max(kinds.values()) < ENOUGH_ALIKE or kind_key(config) == kind_key(group[-1])


def in_common(config: RunConfig) -> tuple[object, ...]:
    """What runs side by side must have in common."""
    return config.dataset, config.image_size, config.split, config.engine, config.device, config.method == "offline"


def died(exit_code: int | None) -> str:
    """Why a process is gone, in a line."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        guess = " (the machine may have run out of memory)" if name == "SIGKILL" else ""
        return f"The process that ran it was ended by {name}{guess}."
    return f"The process that ran it ended with exit code {exit_code}."
