"""The runs of a sweep by several processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from scrlearn.devices import cores, keep_freed_memory
from scrlearn.errors import InputError
from scrlearn.experiments.executors import Job, Outcome, Surroundings, Watch, died, execute
from scrlearn.experiments.record import Moment
from scrlearn.experiments.stopping import Interrupted, stop_requests

LOOK_SECONDS = 0.5
SAVING_SECONDS = 120.0


class Stopped(KeyboardInterrupt):
    """A sweep was asked to stop, and its runs have saved where they stand."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}.")


class Processes:
    """Several processes, each with its share of the cores, that make one run at a time.

    A process that dies takes the run with it that it was making; another one takes its place.

    Parameters
    ----------
    count
        How many.
    surroundings
        Where data lie.
    threads
        Threads of torch in each; None: its share of the cores, at most what OMP_NUM_THREADS says.
    """

    def __init__(self, count: int, surroundings: Surroundings | None = None, threads: int | None = None) -> None:
        if count < 1:
            raise InputError(f"{count} workers were asked for; expected 1 or more.")
        self.count, self.surroundings = count, surroundings or Surroundings()
        self.threads = threads or _share(count)

    def run(self, jobs: Iterable[Job], watch: Watch) -> Iterator[Outcome]:
        """Hand out the jobs, and give the outcomes as they come in."""
        pending = iter(jobs)
        workers: list[Worker] = []
        with stop_requests(active=True) as stop_request:
            try:
                while True:
                    while len(workers) < self.count and (job := next(pending, None)) is not None:
                        workers.append(Worker(self.surroundings, self.threads, job))
                    if not workers:
                        return
                    for worker in _with_news(workers):
                        outcome = worker.news(watch)
                        if outcome is not None:
                            yield outcome
                            worker.take(next(pending, None) if worker.process.is_alive() else None)
                    workers = [worker for worker in workers if worker.job is not None]
                    if stop_request:
                        warnings.warn("Stopping: the runs under way save where they stand.", stacklevel=2)
                        raise Stopped(stop_request[0])
            finally:
                _end(workers)


def _share(count: int) -> int:
    """Threads for each of so many processes; somebody who asks for fewer (for equal bits, say) gets them."""
    share, asked = max(1, cores() // count), os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) else share


def _with_news(workers: list[Worker]) -> list[Worker]:
    ready = wait([worker.connection for worker in workers], LOOK_SECONDS)
    return [worker for worker in workers if worker.connection in ready]


def _end(workers: list[Worker]) -> None:
    """Ask the processes to save and end, all at once; then wait for them."""
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.join()


class Worker:
    """A process under way with a job."""

    def __init__(self, surroundings: Surroundings, threads: int, job: Job) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, and hang
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, surroundings, threads), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.job: Job | None = None
        self.take(job)

    def take(self, job: Job | None) -> None:
        """Begin with another job; None: there is none, and the process ends."""
        self.job = job
        with contextlib.suppress(OSError):  # it has died; the pipe will tell
            self.connection.send(job)
        if job is None:
            self.join()

    def news(self, watch: Watch) -> Outcome | None:
        """Take what the process has to say; the outcome where that is it."""
        assert self.job is not None
        try:
            message: Any = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return Outcome(self.job, None, error=died(self.process.exitcode))
        if isinstance(message, Moment):
            watch(self.job, message)
        elif isinstance(message, str):
            warnings.warn(message, stacklevel=2)
        elif isinstance(message, Outcome):
            return message
        return None

    def join(self) -> None:
        """Wait until the process has ended; not for ever."""
        self.process.join(SAVING_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _work(connection: Connection, surroundings: Surroundings, threads: int) -> None:
    """What a worker does: jobs come through the pipe, moments, warnings and outcomes go back."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the driver alone, which then asks each worker once
    torch.set_num_threads(threads)
    keep_freed_memory()

    def pass_on(message: Warning | str, *others: Any, **more: Any) -> None:
        connection.send(str(message))

    warnings.showwarning = pass_on
    # the driver may be gone (then the pipe ends), or may have asked for a stop (then the run is saved)
    with contextlib.suppress(EOFError, OSError, Interrupted):
        while (job := connection.recv()) is not None:
            (outcome,) = execute([job], surroundings, lambda _, moment: connection.send(moment))
            connection.send(outcome)
