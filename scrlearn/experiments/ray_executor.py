"""The runs of a sweep on a Ray cluster: each run, or each group of runs that share a GPU, is a task."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import uuid
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scrlearn.cluster import connected, import_ray
from scrlearn.errors import InputError
from scrlearn.experiments.executors import Job, LocalDevice, Outcome, Surroundings, Watch, may_join
from scrlearn.experiments.identity import describe
from scrlearn.experiments.processes import LOOK_SECONDS, SAVING_SECONDS, Stopped
from scrlearn.experiments.record import Moment
from scrlearn.experiments.runner import versions
from scrlearn.experiments.stopping import stop_requests

RETRIES = 3
GROUP = 10  # the seeds of one cell of the paper's table; a GPU with less room takes them in parts
AHEAD = 1  # a task that waits, so that no worker does
OBJECT_STORE = 128 << 20  # results are small
MOST_LETTERS = 10_000
LETTER_SECONDS = 10.0
MARK = ".shared"


class RayTasks:
    """The workers of a Ray cluster, each with its share of CPUs and GPUs.

    A task whose worker or machine is lost is given to another one, and goes on from its last checkpoint where that can
    be read there. Results come back to this process.

    Parameters
    ----------
    address
        "local", or the address of a cluster; see `scrlearn.cluster.connected`.
    surroundings
        Where data lie, on every machine; where that folder is missing, a machine looks where its own SCRLEARN_DATA
        says.
    cpus
        CPUs of a task, and threads of torch in it: the bits of a sum depend on their number.
    gpus
        GPUs of a task, also a part of one; None: one, unless the runs are for the CPU or the cluster has no GPU.
    parallel
        Runs side by side on a GPU, at most; None: as many as it has room for.

    Example
    -------
    >>> RayTasks("local", cpus=0)
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: A task on Ray was given 0 CPUs; expected 1 or more.
    """

    def __init__(
        self,
        address: str = "local",
        surroundings: Surroundings | None = None,
        *,
        cpus: int = 1,
        gpus: float | None = None,
        parallel: int | None = None,
    ) -> None:
        if cpus < 1:
            raise InputError(f"A task on Ray was given {cpus} CPUs; expected 1 or more.")
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus % 1)):
            raise InputError(f"A task on Ray was given {gpus} GPUs; expected a share of one, or a whole number.")
        import_ray()  # say now that it is missing
        self.address, self.cpus, self.gpus, self.parallel = address, cpus, gpus, parallel
        where = surroundings or Surroundings()
        root = None if where.data_root is None else where.data_root.expanduser().absolute()
        self.surroundings = replace(where, data_root=root)

    def run(self, jobs: Iterable[Job], watch: Watch) -> Iterator[Outcome]:
        """Hand out the jobs as tasks, and give the outcomes as they come in."""
        with connected(self.address, OBJECT_STORE) as ray, stop_requests(active=True) as stop_request:
            crew = Crew(ray, self, watch)
            try:
                groups = self._groups(jobs, crew)
                while crew.send(groups):
                    yield from crew.news()
                    if stop_request:
                        warnings.warn("Stopping: the runs under way save where they stand.", stacklevel=2)
                        raise Stopped(stop_request[0])
            finally:
                crew.end()

    def _groups(self, jobs: Iterable[Job], crew: Crew) -> Iterator[list[Job]]:
        """Neighbours that may share a GPU; for a CPU, each alone."""
        group: list[Job] = []
        for job in jobs:
            if group and not may_join(job.config, [one.config for one in group]):
                yield group
                group = []
            group.append(job)
            if len(group) >= (self.parallel or GROUP) or not crew.gpus(job):
                yield group
                group = []
        if group:
            yield group


class Crew:
    """The tasks of a sweep under way, and the post office that their letters come through."""

    def __init__(self, ray: Any, plan: RayTasks, watch: Watch) -> None:
        self.ray, self.plan, self.watch = ray, plan, watch
        self.under_way: dict[Any, dict[int, Job]] = {}
        self.waiting: deque[list[Job]] = deque()
        self.count, self.said, self.side = 0, set[str](), _Side()
        # on the machine of this process, so that no lost machine takes it along
        affinity = import_ray("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = affinity(ray.get_runtime_context().get_node_id(), soft=False)
        self.post = ray.remote(Post).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        self.asked: Any = None
        self.work = ray.remote(_work)

    def gpus(self, job: Job) -> float:
        """GPUs that the task of a job asks for."""
        if self.plan.gpus is not None or job.config.device == "cpu":
            return self.plan.gpus or 0
        return float(job.config.device != "auto" or "GPU" in self.ray.cluster_resources())

    def send(self, groups: Iterator[list[Job]]) -> bool:
        """Start tasks as long as there is room for them; whether any is under way."""
        while group := self.waiting.popleft() if self.waiting else next(groups, None):
            needs = {"num_cpus": self.plan.cpus, "num_gpus": self.gpus(group[0])}
            jobs = {self.count + i: replace(job, folder=job.folder.absolute()) for i, job in enumerate(group)}
            self.count += len(group)
            name = describe(group[0].config, seed=len(group) == 1)
            options = {**needs, "max_retries": RETRIES, "name": name}
            terms = Terms(self.plan.surroundings, self.plan.cpus, self.plan.parallel, self.side.mark(group[0]))
            self.under_way[self.work.options(**options).remote(jobs, terms, versions(), self.post)] = jobs
            if len(self.under_way) >= self._room(needs) + AHEAD:
                break
        return bool(self.under_way)

    def _room(self, needs: dict[str, float]) -> int:
        """Tasks that the cluster, as it is now, can do at once."""
        there = self.ray.cluster_resources()
        room = int(min(there.get(name[4:-1].upper(), 0) / need for name, need in needs.items() if need))
        if room == 0:
            asked = ", ".join(f"{need:g} {name[4:-1].upper()}" for name, need in needs.items() if need)
            self._say(f"The cluster has no {asked} for a run; the runs wait until it has.")
        return room

    def news(self) -> Iterator[Outcome]:
        """Pass on what the tasks tell, and the outcomes of those that have ended."""
        done, _ = self.ray.wait(list(self.under_way), timeout=LOOK_SECONDS)
        self._read_letters()
        for task in done:
            jobs = self.under_way.pop(task)
            try:
                outcomes = self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                if len(jobs) > 1:  # one of them may have done it: each alone
                    self.waiting.extend([job] for job in jobs.values())
                else:
                    yield from (Outcome(job, None, error=_given_up(error), trace=str(error)) for job in jobs.values())
                continue
            yield from (replace(outcome, job=jobs[number]) for number, outcome in outcomes.items())

    def _read_letters(self) -> None:
        running = {number: job for jobs in self.under_way.values() for number, job in jobs.items()}
        self.asked = self.asked or self.post.take.remote()
        if not self.ray.wait([self.asked], timeout=LOOK_SECONDS)[0]:
            return
        letters: list[tuple[int, Moment | str]] = []
        asked, self.asked = self.asked, None
        with contextlib.suppress(self.ray.exceptions.RayError):  # the post office is being started again
            letters = self.ray.get(asked)
        for number, text in letters:
            if isinstance(text, str):
                self._say(text)
            elif number in running:
                self.watch(running[number], text)

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            warnings.warn(text, stacklevel=3)

    def end(self) -> None:
        """Ask the tasks to save and end, and wait for them; not for ever."""
        for force, seconds in ((False, SAVING_SECONDS), (True, LETTER_SECONDS)):
            for task in self.under_way:
                self.ray.cancel(task, force=force)
            tasks = list(self.under_way)
            left = self.ray.wait(tasks, num_returns=len(tasks), timeout=seconds)[1] if tasks else []
            self.under_way = {task: self.under_way[task] for task in left}
        self.ray.kill(self.post)
        self.side.clear()


@dataclass(frozen=True)
class Terms:
    """What every task is told, beside its jobs."""

    surroundings: Surroundings
    threads: int
    parallel: int | None
    mark: str


class _Side:
    """The folder beside the store, with a mark by which a task knows whether it sees the same folder."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.text = ""

    def mark(self, job: Job) -> str:
        if self.file is None:
            self.file = job.folder.absolute().parents[1] / MARK
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError), open(self.file, "x") as file:
                file.write(uuid.uuid4().hex)
            self.text = self.file.read_text()
        return self.text

    def clear(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _given_up(error: BaseException) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"Ray gave it up after {RETRIES} more tries ({type(error).__name__}): {reason}"


class Post:
    """An actor that keeps letters until the driver takes them."""

    def __init__(self) -> None:
        self.letters: deque[tuple[int, Moment | str]] = deque(maxlen=MOST_LETTERS)

    def tell(self, number: int, text: Moment | str) -> None:
        """Leave a letter."""
        self.letters.append((number, text))

    def take(self) -> list[tuple[int, Moment | str]]:
        """All letters, once."""
        letters = list(self.letters)
        self.letters.clear()
        return letters

    def flush(self) -> None:
        """Done when all letters sent before have arrived."""


# ------------------------------------------------------------------------------------------------------ on the workers


def _work(jobs: dict[int, Job], terms: Terms, driver: dict[str, str], post: Any) -> dict[int, Outcome]:
    """What a task does: moments and warnings go to the post office, the outcomes come back."""
    ray = import_ray()
    torch.set_num_threads(terms.threads)
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a task without a GPU shall not take one
    numbers = {_folder(job.folder, terms.mark): number for number, job in jobs.items()}
    own = [replace(jobs[number], folder=folder) for folder, number in numbers.items()]

    def pass_on(message: Warning | str, *others: Any, **more: Any) -> None:
        post.tell.remote(-1, str(message))

    if changed := {name: version for name, version in versions().items() if driver[name] != version}:
        there = ", ".join(f"{name} {version} (here {driver[name]})" for name, version in changed.items())
        pass_on(f"{socket.gethostname()} has {there}; figures may differ.")
    with warnings.catch_warnings():
        warnings.showwarning = pass_on
        device = LocalDevice(_seen_here(terms.surroundings), terms.parallel)
        outcomes = device.run(own, lambda job, moment: post.tell.remote(numbers[job.folder], moment))
        found = {numbers[outcome.job.folder]: outcome for outcome in outcomes}
    for number, outcome in found.items():
        if outcome.result is not None and outcome.job.folder != jobs[number].folder:
            shutil.rmtree(outcome.job.folder.parent, ignore_errors=True)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(post.flush.remote(), timeout=LETTER_SECONDS)  # before the driver hears that all is done
    return found


def _folder(folder: Path, mark: str) -> Path:
    """The driver's folder of a run where this machine sees it; else one in the home of this machine's worker."""
    with contextlib.suppress(OSError):
        if (folder.parents[1] / MARK).read_text() == mark:
            return folder
    return Path("~/.cache/scrlearn/runs").expanduser() / Path(*folder.parts[-2:])


def _seen_here(surroundings: Surroundings) -> Surroundings:
    """With the data folder of this machine, where the driver's is not here."""
    root = surroundings.data_root
    missing = root is not None and not root.exists() and "SCRLEARN_DATA" in os.environ
    return replace(surroundings, data_root=None) if missing else surroundings
