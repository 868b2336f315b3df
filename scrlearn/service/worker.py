"""The thread that learns: it follows the journal batch by batch, publishes copies that answer, and writes snapshots."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import torch

from scrlearn.service.journal import Batch, Item, Journal
from scrlearn.service.model import Replica, ServedClassifier
from scrlearn.service.settings import Limits, ModelConfig
from scrlearn.service.state import KEPT, Loaded, Progress, Snapshot, StateFolder

log = logging.getLogger("scrlearn.service")
RETRY_SECONDS = 1.0


class Worker:
    """Learns what is in the journal, in its order and in its batches, and nothing else.

    After a crash it goes on from a snapshot and does the same again, so it comes to the same bits. Only this thread
    touches the model; everyone else sees `replica`, a copy that is exchanged as a whole.

    Parameters
    ----------
    loaded, fresh
        The newest good snapshot, and a model that has learned nothing for the case that there is none.
    journal, folder
        Where to learn from, and where to write snapshots.
    config, limits
        Settings.
    """

    def __init__(
        self,
        loaded: Loaded[ServedClassifier],
        fresh: ServedClassifier,
        journal: Journal,
        folder: StateFolder,
        config: ModelConfig,
        limits: Limits,
    ) -> None:
        model, progress = fresh if loaded.model is None else loaded.model, loaded.progress
        self._model, self._journal, self._folder = model, journal, folder
        self._config, self._limits = config, limits
        self.learned, self.images = progress.sequence, progress.images
        self.counts = dict(progress.counts)
        self.replica, self.published = Replica(model, self.learned, limits.quantile), self.learned
        self.snapshots = loaded.snapshots[:KEPT]
        # a crash may have come between a forgotten class's new snapshot and the end of what was before it
        self._must_erase = journal.forgets(self.learned)
        self.erased = journal.begin if self._must_erase else self.learned
        self.lost = 0
        self.troubles: dict[str, str] = {}
        self.failed = False
        self.speed = 0.0
        self.recent: deque[bool] = deque(maxlen=limits.recent)
        self._snapshot_images, self._snapshot_time = self.images, time.monotonic()
        self._published_at, self._publish_seconds = time.monotonic(), 0.0
        self._waiters: list[tuple[Callable[[], bool], Future[bool]]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._tidied = 0
        self._thread = threading.Thread(target=self._run, name="scr-learner", daemon=True)

    # ---------------------------------------------------------------- from other threads

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """There is something new in the journal."""
        with self._changed:
            self._changed.notify()

    def when_published(self, sequence: int) -> Future[bool]:
        """Done when the copy that answers has learned this entry (True), or when waiting is over (False)."""
        return self._wait(lambda: self.published >= sequence)

    def when_erased(self, sequence: int) -> Future[bool]:
        """Done when nothing up to this entry, which forgets a class, is left of the class on disk."""
        return self._wait(lambda: self.erased >= sequence)

    def _wait(self, done: Callable[[], bool]) -> Future[bool]:
        future: Future[bool] = Future()
        with self._changed:
            if done() or self._stopping or self.failed:
                future.set_result(done())
            else:
                self._waiters = [(d, f) for d, f in self._waiters if not f.done()]  # those that gave up
                self._waiters.append((done, future))
        return future

    def release(self) -> None:
        """Let go of everyone who waits."""
        self._settle(everyone=True)

    def stop(self) -> None:
        """Finish the batch, write a snapshot, end. What is still to be learned stays in the journal."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.release()

    def _settle(self, everyone: bool = False) -> None:
        with self._changed:
            over = [(done, future) for done, future in self._waiters if everyone or done()]
            self._waiters = [waiter for waiter in self._waiters if waiter not in over]
        for done, future in over:
            if future.set_running_or_notify_cancel():
                future.set_result(done())

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._turn():
                    self._idle()
            if self.learned > self._newest:
                with self._trouble("snapshot", "No snapshot can be written; the journal holds what was learned"):
                    self._snapshot()
        except Exception:
            log.exception("Learning has stopped; answers go on with the last copy of the model.")
            self.failed = True
            self.troubles["learning"] = "Learning has stopped because of an internal error; see the log."
            self.release()

    def _turn(self) -> bool:
        """Do the next thing there is to do; False: nothing."""
        if self._must_erase:
            with self._trouble("erasing", "A forgotten class cannot be erased from the disk yet"):
                self._erase()
        batch = None
        with self._trouble("journal", "The journal cannot be written, so learning waits"):
            batch = self._journal.next_batch(self.learned, self._config.batch_size)
        if batch is not None:
            self._learn(batch)
        behind = self.published < self.learned
        if behind and (batch is None or self._must_erase or self._publishing_is_due()):
            self._publish()
        if self._snapshot_is_due():
            with self._trouble("snapshot", "No snapshot can be written, so the journal grows"):
                self._snapshot()
        return batch is not None or behind

    @contextlib.contextmanager
    def _trouble(self, kind: str, text: str) -> Iterator[None]:
        """Something with the disk that may pass: say it once, and try again later."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if kind not in self.troubles:
                log.warning("%s: %s", text, error)
            self.troubles[kind] = f"{text}: {error}."
            with self._changed:
                if not self._stopping:
                    self._changed.wait(RETRY_SECONDS)
        else:
            self.troubles.pop(kind, None)

    def _idle(self) -> None:
        """Wait for something new; a snapshot, or another try, may be due before it comes."""
        if self._tidied < self.learned:
            give_back_memory()
            self._tidied = self.learned
        with self._changed:
            if self._stopping or self._journal.last > self.learned:
                return
            due = None
            if self._must_erase:
                due = RETRY_SECONDS
            elif self.learned > self._newest:
                due = max(0.01, self._snapshot_time + self._limits.snapshot_seconds - time.monotonic())
            self._changed.wait(due)

    # ---------------------------------------------------------------- learning

    def _learn(self, batch: Batch) -> None:
        if batch.lost:
            self.lost += batch.lost
            log.error("%d entries before %d were damaged in the journal and are lost.", batch.lost, batch.last + 1)
        begun = time.monotonic()
        images = [item for item in batch.items if item.kind == "image"]
        if images:
            self._test(images)
            self._model.learn(images, self._config.image_shape)
            for item in images:
                self.counts[item.label] = self.counts.get(item.label, 0) + 1
            self.images += len(images)
            self._measure(len(images), time.monotonic() - begun)
        for item in batch.items:
            if item.kind == "forget":
                self._forget(item.label)
        self.learned = batch.last

    def _test(self, items: list[Item]) -> None:
        """Ask before learning: the share that is right is the accuracy on images never seen before."""
        known = [item for item in items if item.label in self.replica.model.labels]
        if known:
            pixels = np.frombuffer(b"".join(item.pixels for item in known), dtype=np.uint8).copy()
            answers = self.replica.answer(torch.from_numpy(pixels).reshape(len(known), *self._config.image_shape))
            best = [answer.classes[0].label if answer.classes else None for answer in answers]
            self.recent.extend(label == item.label for label, item in zip(best, known, strict=True))

    def _measure(self, images: int, seconds: float) -> None:
        now = images / max(seconds, 1e-9)
        self.speed = now if self.speed == 0 else 0.8 * self.speed + 0.2 * now

    def _forget(self, label: str) -> None:
        if label in self._model.labels:
            self._model.forget(label)
        self.counts.pop(label, None)
        self._must_erase = True

    def _publish(self) -> None:
        """Exchange the copy that answers for one of this moment."""
        begun = time.monotonic()
        replica = Replica(self._model, self.learned, self._limits.quantile)
        if replica.finite:
            self.replica = replica
            self.troubles.pop("model", None)
        else:
            self.troubles["model"] = (
                "The model has diverged: its features are no longer finite numbers. Answers come from the last good "
                "copy. Start afresh with a smaller learning rate."
            )
        self.published = self.learned
        self._published_at = time.monotonic()
        self._publish_seconds = self._published_at - begun
        self._settle()

    def _publishing_is_due(self) -> bool:
        """While images wait, copies are made in a share of the time only."""
        share = self._limits.publish_share
        return time.monotonic() - self._published_at >= self._publish_seconds * (1 - share) / share

    # ---------------------------------------------------------------- snapshots

    @property
    def _newest(self) -> int:
        return self.snapshots[0].sequence if self.snapshots else 0

    def _snapshot_is_due(self) -> bool:
        if self.learned <= self._newest:
            return False
        images = self.images - self._snapshot_images
        return (
            images >= self._limits.snapshot_images
            or time.monotonic() - self._snapshot_time >= self._limits.snapshot_seconds
        )

    def _snapshot(self) -> None:
        """Write a snapshot and cut the journal at the one before, from which recovery is still possible then."""
        self._snapshot_images, self._snapshot_time = self.images, time.monotonic()
        snapshot = self._save("a")
        kept = [snapshot, *self.snapshots][:KEPT]
        self._folder.keep(kept)
        self.snapshots = kept
        if len(kept) == KEPT:
            self._journal.cut(kept[-1].sequence)
        self._journal.drop_keys(self._limits.keys, self._limits.key_seconds)

    def _save(self, copy: str) -> Snapshot:
        return self._folder.save(self._model.save, Progress(self.learned, self.images, self.counts), copy)

    def _erase(self) -> None:
        """Leave nothing of a forgotten class on disk: two new snapshots, no older ones, no journal before them."""
        kept = [self._save(copy) for copy in "ba"]
        self._folder.keep(kept)
        self.snapshots = kept
        self._journal.cut(self.learned)
        self._snapshot_images, self._snapshot_time = self.images, time.monotonic()
        self.erased, self._must_erase = self.learned, False
        self._settle()


def give_back_memory() -> None:
    """Return what a step has freed to the system: the C library keeps it, several times what the model needs."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has it, and only glibc needs it
        ctypes.CDLL(None).malloc_trim(0)
