"""The service itself, without HTTP: accept, learn, answer, forget, survive."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import sqlite3
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from scrlearn import __version__
from scrlearn.errors import InputError
from scrlearn.service.answers import Answerer, Reply
from scrlearn.service.encoders import make_encoder
from scrlearn.service.journal import Item, Journal, Receipt, Request
from scrlearn.service.model import Cartographer, Map, Replica, ServedClassifier, make_model
from scrlearn.service.problems import Problem, stopping
from scrlearn.service.settings import DEFAULT_ENCODER, Limits, ModelConfig
from scrlearn.service.state import StateError, StateFolder
from scrlearn.service.worker import Worker

log = logging.getLogger("scrlearn.service")
QUEUED_REQUESTS = 256
TOGETHER = 64
UNSEEN = ("Cf", "Mn", "Me", "Zs")  # blanks, marks and joiners: a label of nothing else cannot be seen


@dataclass(frozen=True)
class _Waiting:
    request: Request
    future: Future[Receipt]


class Service:
    """A model that learns for ever: what it accepts is on disk first, and it answers at any time.

    Three threads: one writes the journal (requests that arrive together share one commit), one learns, one answers.

    Parameters
    ----------
    state
        The state directory; made if it is not there.
    config
        What to learn with, for a new state: fields of `ModelConfig`. For an existing state they may be left out, and
        must be the same if given.
    limits
        How much of everything there may be.
    encoder
        A module of your own; it is given again at each start.

    Examples
    --------
    >>> import tempfile
    >>> config = {"method": "scr", "memory_size": 20, "image_size": 8, "channels": 1, "device": "cpu"}
    >>> with Service(tempfile.mkdtemp(), config) as service:
    ...     images = torch.stack([torch.full((1, 8, 8), 255 * (i % 2), dtype=torch.uint8) for i in range(20)])
    ...     receipt = service.learn(images, ["dark", "bright"] * 10).result()
    ...     learned = service.worker.when_published(receipt.last).result()
    ...     [answer.label for answer in service.ask(images[:2]).result().answers]
    ['dark', 'bright']
    """

    def __init__(
        self,
        state: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        limits: Limits | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.started = time.time()
        self.folder = StateFolder(state)
        with contextlib.ExitStack() as stack:
            stack.callback(self.folder.close)
            self.config = self._configure(dict(config or {}), encoder)
            _settle_numerics(self.config)
            encoder = encoder or make_encoder(self.config)
            fresh = make_model(self.config, encoder)
            self._write_first_config()
            loaded = self.folder.load(lambda path: _load(path, self.config, encoder))
            self.notes = loaded.notes
            self.journal = Journal(self.folder.journal, floor=loaded.progress.sequence)
            stack.callback(self.journal.close)
            self._check_complete(loaded.model)
            self.worker = Worker(loaded, fresh, self.journal, self.folder, self.config, self.limits)
            stack.pop_all()
        self.cartographer = Cartographer()
        self._labels = self._accepted_labels()
        self.behind = self.journal.last
        self._stopping = False
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(QUEUED_REQUESTS)
        self._queued = 0
        self._lock = threading.Lock()
        self._ended = False
        self._writer = threading.Thread(target=self._write, name="scr-journal", daemon=True)
        self.answerer = Answerer(lambda: self.worker.replica, self.limits.questions, self.limits.answer_batch)
        # when the copies that answer have learned an entry; those on other machines are later than the one here
        self.when_answering: Callable[[int], Future[bool]] = self.worker.when_published
        for note in self.notes:
            log.warning(note)
        self._writer.start()
        self.worker.start()

    # ---------------------------------------------------------------- starting and stopping

    def _configure(self, given: dict[str, Any], encoder: nn.Module | None) -> ModelConfig:
        if encoder is not None:
            given["encoder"] = f"given:{type(encoder).__name__}"
        unknown = given.keys() - ModelConfig.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(ModelConfig.__dataclass_fields__)
            raise InputError(f"There is no setting {', '.join(sorted(unknown))}. Known: {known}.")
        stored = self.folder.read_config()
        self._new = stored is None
        if stored is None:
            return ModelConfig(**given).resolved()
        given = {name: value for name, value in given.items() if value != ModelConfig.AUTOMATIC.get(name)}
        stored.check_same(given)
        if stored.encoder not in (DEFAULT_ENCODER, given.get("encoder")):
            # a state is data: what it names is never imported
            raise InputError(f'This state was made with the encoder "{stored.encoder}": give it again.')
        if given.get("device", stored.device) != stored.device:
            log.warning("The state moves from %s to %s: bits may differ from here on.", stored.device, given["device"])
        return replace(stored, device=given.get("device", stored.device))

    def _write_first_config(self) -> None:
        if self._new:
            self.folder.write_config(self.config)

    def _check_complete(self, model: ServedClassifier | None) -> None:
        if self.journal.salvaged:
            self.notes.append("The journal was damaged; everything in it that could be read was kept.")
        if model is None and self.journal.begin > 0:
            raise StateError(
                f'There is no good snapshot in "{self.folder.path}", and the journal begins only after entry '
                f"{self.journal.begin}. Put back a copy of the directory, or use an empty one. {' '.join(self.notes)}"
            )

    def _accepted_labels(self) -> set[str]:
        """The labels there will be when everything accepted so far has been learned."""
        labels = set(self.worker.counts)
        for kind, label in self.journal.labels(self.worker.learned):
            (labels.add if kind == "image" else labels.discard)(label)
        return labels

    def release(self) -> None:
        """Stop is near: accept nothing new, and let go of everyone who waits for something to be learned."""
        self._stopping = True
        self.worker.release()

    def close(self) -> None:
        """Finish what has begun, write a snapshot, and let go of the state directory."""
        self.release()
        self._queue.put(None)
        self._writer.join()
        while not self._queue.empty():  # what came at the very last moment
            late = self._queue.get()
            if late is not None and late.future.set_running_or_notify_cancel():
                late.future.set_exception(stopping())
        self.answerer.stop()
        self.worker.stop()
        self.journal.close()
        self.folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- accepting

    def learn(self, images: Tensor, labels: Sequence[str], key: str | None = None) -> Future[Receipt]:
        """Accept images (uint8, N×C×H×W) to learn; done when they are on disk."""
        if tuple(images.shape[1:]) != self.config.image_shape or images.dtype != torch.uint8:
            raise InputError(f"Images must be uint8 of shape {self.config.image_shape}, not {tuple(images.shape[1:])}.")
        if len(images) != len(labels):
            raise Problem("invalid", f"There are {len(images)} images but {len(labels)} labels.")
        names = [self.check_label(label) for label in labels]
        self._check_room(len(images))
        pixels = [image.contiguous().numpy().tobytes() for image in images]
        items = [Item("image", name, data) for name, data in zip(names, pixels, strict=True)]
        return self._submit(Request(items, key))

    def forget(self, label: str, key: str | None = None) -> Future[Receipt]:
        """Accept to forget a class; done when that is on disk. `worker.when_erased` says when the class is gone."""
        return self._submit(Request([Item("forget", self.check_label(label))], key))

    def check_label(self, label: str) -> str:
        """The label as it is stored: trimmed, in Unicode's composed form."""
        # a letter has a few marks at most; what is much too long is not looked at
        text = unicodedata.normalize("NFC", label[: 8 * self.limits.label_length]).strip()
        if all(unicodedata.category(character) in UNSEEN for character in text):
            raise Problem("invalid", "A label is empty; name the class.")
        if len(text) > self.limits.label_length or len(label) > 8 * self.limits.label_length:
            detail = f"A label has {len(label)} characters; at most {self.limits.label_length} are allowed."
            raise Problem("invalid", detail)
        if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
            raise Problem("invalid", "A label holds a control character or half of a surrogate pair; use plain text.")
        if text in (".", ".."):
            raise Problem("invalid", f'"{text}" cannot be a label: no address can name it.')
        return text

    def _check_room(self, images: int) -> None:
        """Refuse rather than let a queue, or the disk, fill up."""
        if self.worker.failed:
            raise Problem(
                "learning-stopped", "Learning has stopped because of an internal error; see the server's log."
            )
        waiting = self.pending
        if waiting and waiting + images > self.limits.pending:
            raise Problem(
                "busy", f"{waiting} images wait to be learned already.", retry_after=min(60.0, self._seconds(images))
            )
        if len(self.journal) + images > self.limits.journal_images:
            raise Problem("disk-full", "The journal is full, because no snapshot can be written; see /v1/state.")
        if self.folder.free_bytes() < self.limits.reserve_bytes:
            raise Problem("disk-full", "The disk is almost full; nothing was accepted. Free some space on the server.")

    def _seconds(self, images: int) -> float:
        return images / self.worker.speed if self.worker.speed else 5.0

    def _submit(self, request: Request) -> Future[Receipt]:
        if self._stopping:
            raise stopping()
        waiting = _Waiting(request, Future())
        try:
            self._queue.put_nowait(waiting)
        except queue.Full:
            raise Problem("busy", "Too many requests wait for the disk.", retry_after=1) from None
        with self._lock:
            self._queued += len(request.items)
        return waiting.future

    def _write(self) -> None:
        """The thread of the journal: whatever waits goes to disk in one commit."""
        while not self._ended:
            group = self._next_group()
            if group:
                try:
                    self._commit(group)
                except BaseException as error:  # whoever asked must hear of it, and the thread must live on
                    problem = error if isinstance(error, Problem) else _not_written(error)
                    for waiting in group:
                        waiting.future.set_exception(problem)
                with self._lock:
                    self._queued -= sum(len(waiting.request.items) for waiting in group)

    def _next_group(self) -> list[_Waiting]:
        """Wait for requests and take those that are there."""
        group: list[_Waiting] = []
        while len(group) < TOGETHER:
            try:
                waiting = self._queue.get(block=not group)
            except queue.Empty:
                break
            if waiting is None:
                self._ended = True
                break
            if waiting.future.set_running_or_notify_cancel():
                group.append(waiting)
            else:
                with self._lock:
                    self._queued -= len(waiting.request.items)
        return group

    def _commit(self, group: list[_Waiting]) -> None:
        labels = set(self._labels)
        answers = self.journal.append(
            [waiting.request for waiting in group], lambda request: self._admit(request, labels)
        )
        self._labels = labels
        self.worker.wake()
        for waiting, answer in zip(group, answers, strict=True):
            if isinstance(answer, Problem):
                waiting.future.set_exception(answer)
            else:
                waiting.future.set_result(answer)

    def _admit(self, request: Request, labels: set[str]) -> Problem | None:
        """What there is against a request, given the labels there will be; they follow it."""
        for item in request.items:
            if item.kind == "forget" and item.label not in labels:
                return Problem("not-found", f'There is no class "{item.label}".')
        new = {item.label for item in request.items if item.kind == "image"} - labels
        if len(labels) + len(new) > self.limits.classes and new:
            return Problem(
                "too-many-classes", f"There are {len(labels)} classes; at most {self.limits.classes} are allowed."
            )
        labels |= new
        labels -= {item.label for item in request.items if item.kind == "forget"}
        return None

    # ---------------------------------------------------------------- answering

    @property
    def replica(self) -> Replica:
        """The copy of the model that answers now."""
        return self.worker.replica

    @property
    def pending(self) -> int:
        """Images accepted and not yet learned."""
        return max(0, self.journal.last - self.worker.learned) + self._queued

    @property
    def recovering(self) -> bool:
        """Whether what the journal held at the start is still being learned."""
        return self.worker.published < self.behind

    @property
    def status(self) -> Literal["ok", "recovering", "failed"]:
        """In a word."""
        return "failed" if self.worker.failed else "recovering" if self.recovering else "ok"

    def ask(self, images: Tensor, neighbours: int = 0) -> Future[Reply]:
        """What is on these images (uint8, N×C×H×W)."""
        return self.answerer.ask(images, neighbours)

    def map(self) -> tuple[int, Map]:
        """The stored images as points of a plane, and the place in the journal the map is of."""
        replica = self.replica
        return replica.sequence, self.cartographer.draw(replica)

    def classes(self) -> list[dict[str, Any]]:
        """The classes the copy that answers knows."""
        replica, learned = self.replica, dict(self.worker.counts)
        return [
            {
                "label": label,
                "learned": learned.get(label, 0),
                "stored": stored,
                "threshold": replica.threshold(label),
            }
            for label, stored in replica.counts().items()
        ]

    def state(self, digest: bool = False) -> dict[str, Any]:
        """How things stand."""
        worker, replica = self.worker, self.replica
        recent = list(worker.recent)
        return {
            "status": self.status,
            "problems": list(worker.troubles.values()),
            "notes": self.notes,
            "version": __version__,
            "model": {
                name: dict(value) if name == "options" else value
                for name, value in asdict(self.config).items()
                if name != "made_with"
            },
            "classes": len(replica.labels),
            "steps": replica.steps,
            "images": worker.images,
            "lost": worker.lost,
            "stored": len(replica.stored),
            "accepted": self.journal.last,
            "learned": worker.learned,
            "published": worker.published,
            "replicas": self.answerer.places(),
            "pending": self.pending,
            "speed": round(worker.speed, 2),
            "recent": {"images": len(recent), "right": sum(recent)},
            "snapshot": worker.snapshots[0].sequence if worker.snapshots else None,
            "disk_bytes": self.folder.used_bytes(),
            "memory_bytes": resident_bytes(),
            "uptime": round(time.time() - self.started, 3),
            "digest": {"sequence": replica.sequence, "sha256": replica.digest()} if digest else None,
        }


def _load(path: Path, config: ModelConfig, encoder: nn.Module | None) -> ServedClassifier:
    return ServedClassifier.load(path, encoder=encoder, device=config.device)


def _settle_numerics(config: ModelConfig) -> None:
    """For the whole process: each step sets its own too, but two threads enter and leave theirs at different times."""
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = config.precision != "fp32"


def _not_written(error: BaseException) -> Problem:
    """The journal refused: is the disk full, or is it something else?"""
    log.error("Requests could not be written to the journal: %s", error)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return Problem("disk-full", "The disk is full; nothing was accepted. Free some space on the server.")
    detail = "The journal could not be written; nothing was accepted. See the server's log."
    return Problem("not-written", detail, retry_after=10)


def resident_bytes() -> int:
    """Memory this process uses now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # not Linux: the most it ever used
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
