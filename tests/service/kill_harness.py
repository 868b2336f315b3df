"""A service that is killed again and again while it is taught and asked, and its twin that never was.

The server runs in a process of its own, forked from one that has torch loaded already. Before it cuts its journal it
puts what it cuts into an archive, so that the whole history is known at the end and the twin can learn it in one go.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch
from service_tools import CONFIG, encoded, pixels, png
from torch import nn

from scrlearn.service.journal import Item, Journal
from scrlearn.service.model import ServedClassifier, make_model
from scrlearn.service.settings import Limits, ModelConfig

KILLED = {**CONFIG, "method": "scr", "options": {"memory_batch": 20}}
LIMITS = Limits(snapshot_images=40, snapshot_seconds=0.15)
LABELS = ("cat", "dog", "owl", "fox", "eel", "ant")
PATIENCE = 60


def encoder() -> nn.Module:
    """A little network with BatchNorm, whose running statistics must come back too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16))


# -------------------------------------------------------------------------------------------- in the server's process


def server(state: str, archive: str, ready: Connection, limits: Limits = LIMITS) -> None:
    """Serve until killed, or until SIGTERM."""
    from scrlearn.service.run import serve

    torch.set_num_threads(1)
    _archive_what_is_cut(Path(archive))
    _give_encoder()
    serve(state, KILLED, port=0, limits=limits, ready=ready.send)


def _archive_what_is_cut(archive: Path) -> None:
    cut = Journal.cut

    def archive_and_cut(self: Journal, through: int) -> None:
        entries, batches = read_journal(self._db, through)
        with contextlib.closing(sqlite3.connect(archive)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS entries (sequence INTEGER PRIMARY KEY, kind, label, pixels)")
            db.execute("CREATE TABLE IF NOT EXISTS batches (last INTEGER PRIMARY KEY)")
            db.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?)", entries)
            db.executemany("INSERT OR IGNORE INTO batches VALUES (?)", batches)
        cut(self, through)

    Journal.cut = archive_and_cut  # type: ignore[method-assign]


def _give_encoder() -> None:
    """The service of `serve` with the tests' encoder."""
    from scrlearn.service import core

    class WithEncoder(core.Service):
        def __init__(self, state: Any, config: Any, **more: Any) -> None:
            super().__init__(state, config, encoder=encoder(), **more)

    core.Service = WithEncoder  # type: ignore[misc]


def read_journal(db: sqlite3.Connection, through: int = 2**60) -> tuple[list[Any], list[Any]]:
    entries = db.execute("SELECT sequence, kind, label, pixels FROM entries WHERE sequence <= ?", (through,)).fetchall()
    return entries, db.execute("SELECT last FROM batches WHERE last <= ?", (through,)).fetchall()


# ---------------------------------------------------------------------------------------------- in the test's process


@dataclass
class Request:
    """Something to teach or to forget, until it is acknowledged."""

    key: str
    images: list[tuple[str, int]]
    forget: str | None = None


@dataclass
class Harness:
    """Starts, teaches, kills, and keeps account."""

    folder: Path
    seed: int = 0
    sent: int = 0
    acknowledged: list[Request] = field(default_factory=list)
    unsettled: list[Request] = field(default_factory=list)
    answers: int = 0
    digests: dict[int, set[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["scrlearn.service.app", "scrlearn.service.run", "kill_harness"])
        self.lock = threading.Lock()
        self.over = threading.Event()

    @property
    def state(self) -> Path:
        return self.folder / "state"

    # ---------------------------------------------------------------------------------------------- the server's life

    def start(self, patience: float = PATIENCE) -> bool:
        """Start a server and wait until it listens; says whether it does."""
        receiver, sender = self.context.Pipe(duplex=False)
        arguments = (str(self.state), str(self.folder / "archive"), sender, self.limits)
        self.process = self.context.Process(target=server, args=arguments, daemon=True)
        self.process.start()
        sender.close()
        listens = receiver.poll(patience)
        if listens:
            self.address = receiver.recv()
        receiver.close()
        return listens

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0, "the end was orderly"

    # --------------------------------------------------------------------------------------------------- a life of it

    def life(self, requests: int) -> None:
        """Start, teach and ask from several sides, kill after so many requests; 0: kill while it is still starting."""
        if not self.start(PATIENCE if requests else self.random.uniform(0, 0.5)):
            assert requests == 0, "the server did not start"
            self.kill()
            return
        self.over.clear()
        threads = [threading.Thread(target=self._work, args=(work,)) for work in (self._teach,) * 3 + (self._ask,)]
        for thread in threads:
            thread.start()
        enough = len(self.acknowledged) + requests
        while len(self.acknowledged) < enough and all(thread.is_alive() for thread in threads):
            time.sleep(0.002)
        time.sleep(self.random.uniform(0, 0.03))
        self.kill()
        self.over.set()
        for thread in threads:
            thread.join()
        assert not self.errors, self.errors

    def _work(self, work: Any) -> None:
        with httpx.Client(base_url=self.address, timeout=PATIENCE) as client:
            while not self.over.is_set():
                try:
                    work(client)
                except httpx.TransportError:  # killed
                    return
                except Exception as error:
                    self.errors.append(repr(error))
                    return

    def _next_request(self) -> Request:
        """One that was not acknowledged before the server died, or a new one."""
        with self.lock:
            if self.unsettled and self.random.random() < 0.7:
                return self.unsettled.pop(0)
            key = f"key-{self.seed}-{self.sent}-{self.random.random()}"
            if self.sent > 100 and self.random.random() < 0.03:
                return Request(key, [], self.random.choice(LABELS))
            count = self.random.choice((1, 1, 1, 2, 7, 25))
            numbers = range(self.sent, self.sent + count)
            self.sent += count
            return Request(key, [(self.random.choice(LABELS), number) for number in numbers])

    def _teach(self, client: httpx.Client) -> None:
        request = self._next_request()
        try:
            self._send(client, request)
        except httpx.TransportError:
            with self.lock:
                self.unsettled.append(request)
            raise

    def _send(self, client: httpx.Client, request: Request) -> None:
        headers = {"Idempotency-Key": request.key}
        if request.forget is not None:
            answer = client.delete(f"/v1/classes/{request.forget}", headers=headers)
        else:
            files = encoded(*(png(label, number) for label, number in request.images))
            body = {"images": files, "labels": [label for label, _ in request.images]}
            answer = client.post("/v1/learn", json=body, headers=headers)
        with self.lock:
            if answer.status_code == 200:
                self.acknowledged.append(request)
            elif answer.status_code in (429, 503):  # busy, or about to stop: nothing was accepted
                self.unsettled.append(request)
            elif answer.status_code != 404 or request.forget is None:
                self.errors.append(f"{answer.status_code} {answer.text}")

    def _ask(self, client: httpx.Client) -> None:
        answer = client.post("/v1/predict", json={"images": encoded(png("cat", 1), png("dog", 2))})
        if answer.status_code == 200:
            self.answers += 1
        elif answer.status_code not in (429, 503):
            self.errors.append(f"{answer.status_code} {answer.text}")
        if self.random.random() < 0.3:
            self.note_digest(client)

    def note_digest(self, client: httpx.Client) -> dict[str, Any]:
        """Remember the fingerprint of the model at its place in the journal."""
        state = client.get("/v1/state?digest=true").json()
        with self.lock:
            self.digests.setdefault(state["digest"]["sequence"], set()).add(state["digest"]["sha256"])
        return state

    def settle(self) -> dict[str, Any]:
        """Start once more, send what is not acknowledged, wait for everything to be learned, stop in good order."""
        assert self.start(), "the server did not start"
        with httpx.Client(base_url=self.address, timeout=PATIENCE) as client:
            while self.unsettled:
                self._send(client, self.unsettled.pop(0))
            assert not self.errors, self.errors
            end = time.monotonic() + PATIENCE
            while (state := self.note_digest(client))["published"] < state["accepted"]:
                assert time.monotonic() < end, state
                time.sleep(0.05)
        self.stop()
        return state

    # ------------------------------------------------------------------------------------------------------- the twin

    def history(self) -> tuple[dict[int, Item], list[int]]:
        """Everything that was ever in the journal, and how it was cut into batches."""
        entries: dict[int, Item] = {}
        lasts: set[int] = set()
        for path in (self.folder / "archive", self.state / "journal.sqlite3"):
            if path.exists():
                with contextlib.closing(sqlite3.connect(path)) as db:
                    rows, batches = read_journal(db)
                for sequence, kind, label, data in rows:
                    assert entries.setdefault(sequence, Item(kind, label, data)) == Item(kind, label, data)
                lasts |= {last for (last,) in batches}
        return entries, sorted(lasts)

    def check(self, state: dict[str, Any]) -> None:
        """Nothing acknowledged is lost, nothing is there twice, and every model seen was the twin's."""
        entries, lasts = self.history()
        assert sorted(entries) == list(range(1, state["accepted"] + 1)), "places are consecutive"
        found = [item.pixels for item in entries.values() if item.kind == "image"]
        assert len(found) == len(set(found)) == state["images"], "no image twice"
        expected = {_pixels(*image) for request in self.acknowledged for image in request.images}
        assert expected == set(found), "all that was acknowledged, and nothing else"
        twin, compared = self._twin(), 0
        before = 0
        for last in lasts:
            learn(twin, [entries[sequence] for sequence in range(before + 1, last + 1)])
            before = last
            if last in self.digests:
                assert self.digests[last] == {twin.digest()}, f"the model at {last} is not the twin's"
                compared += 1
        assert before == state["accepted"]
        assert compared == len(self.digests.keys() - {0}), "every model seen stood at the end of a batch"
        assert self.digests[state["accepted"]] == {twin.digest()}

    @staticmethod
    def _twin() -> ServedClassifier:
        return make_model(ModelConfig(**KILLED), encoder())


def learn(twin: ServedClassifier, items: list[Item]) -> None:
    """What a batch of the journal does."""
    images = [item for item in items if item.kind == "image"]
    if images:
        twin.learn(images, (1, 8, 8))
    for item in items:
        if item.kind == "forget" and item.label in twin.labels:
            twin.forget(item.label)


def _pixels(label: str, number: int) -> bytes:
    return pixels(label, number).tobytes()
