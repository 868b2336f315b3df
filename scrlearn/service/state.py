"""The state directory: one server's own, with its configuration, its journal and its last two snapshots."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from scrlearn.errors import CheckpointError, ScrlearnError
from scrlearn.files import atomic_write
from scrlearn.service.settings import ModelConfig

CONFIG, JOURNAL, LOCK = "config.json", "journal.sqlite3", "lock"
KEPT = 2
_NAME = re.compile(r"snapshot-(\d{15})-([ab])\.json")
M = TypeVar("M")


class StateError(ScrlearnError):
    """A state directory that cannot be used."""


@dataclass(frozen=True)
class Progress:
    """How far learning has come: the last entry learned, the images learned, and how many of each label."""

    sequence: int = 0
    images: int = 0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on disk."""

    path: Path
    sequence: int
    copy: str


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """What was found: a model and its place, the snapshots that are good (newest first), and what was wrong."""

    model: M | None
    progress: Progress
    snapshots: list[Snapshot]
    notes: list[str]


class StateFolder:
    """A state directory, locked for this process.

    A snapshot is two files: the model, as `OnlineClassifier.save` writes it, and a note with its place in the journal
    and its checksum, written last. One without a note, or whose checksum differs, does not count.

    Parameters
    ----------
    path
        The directory; made if it is not there.

    Examples
    --------
    >>> import tempfile
    >>> folder = StateFolder(Path(tempfile.mkdtemp()) / "state")
    >>> StateFolder(folder.path)
    Traceback (most recent call last):
    ...
    scrlearn.service.state.StateError: Another server (process ...) is running on "...state". Stop it first, or use \
another state directory.
    >>> folder.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(self.path / LOCK)
            atomic_write(self.path / ".probe", b"")
            (self.path / ".probe").unlink()
        except OSError as error:
            raise StateError(
                f'The state directory "{self.path}" cannot be written: {error.strerror or error}. '
                "Change its owner or permissions, or use another one."
            ) from error

    def close(self) -> None:
        """Let another process use the directory."""
        self._lock.close()

    # ---------------------------------------------------------------- configuration

    @property
    def journal(self) -> Path:
        """Where the journal is."""
        return self.path / JOURNAL

    def read_config(self) -> ModelConfig | None:
        """What the state was made with; None if it is new."""
        try:
            return ModelConfig.from_json((self.path / CONFIG).read_text())
        except FileNotFoundError:
            if self.journal.exists() or self.snapshots():
                raise StateError(
                    f'"{self.path}" holds a journal or snapshots but no {CONFIG}. Put the file back, or use an empty '
                    "directory."
                ) from None
            return None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"The state's {CONFIG} cannot be read: {error}.") from error

    def write_config(self, config: ModelConfig) -> None:
        """Write down what the state is made with."""
        atomic_write(self.path / CONFIG, config.to_json().encode())

    # ---------------------------------------------------------------- snapshots

    def snapshots(self) -> list[Snapshot]:
        """The snapshots with a note, newest first."""
        found = []
        for note in self.path.glob("snapshot-*.json"):
            match = _NAME.fullmatch(note.name)
            if match:
                found.append(Snapshot(note.with_suffix(".scr"), int(match[1]), match[2]))
        return sorted(found, key=lambda snapshot: (snapshot.sequence, snapshot.copy), reverse=True)

    def save(self, write: Callable[[Path], object], progress: Progress, copy: str = "a") -> Snapshot:
        """Write a snapshot: `write` puts the model into a file."""
        path = self.path / f"snapshot-{progress.sequence:015d}-{copy}.scr"
        write(path)
        note = {**asdict(progress), "sha256": _sha256(path), "saved": time.time()}
        atomic_write(path.with_suffix(".json"), json.dumps(note, ensure_ascii=False).encode())
        return Snapshot(path, progress.sequence, copy)

    def load(self, read: Callable[[Path], M]) -> Loaded[M]:
        """The model of the newest good snapshot."""
        model: M | None = None
        place, good, notes = Progress(), [], []
        for snapshot in self.snapshots():
            try:
                progress = _read_note(snapshot)
                if model is None:
                    model, place = read(snapshot.path), progress
                good.append(snapshot)
            except (ScrlearnError, OSError) as error:
                notes.append(f"Snapshot {snapshot.path.name} is damaged and was passed over: {error}")
        return Loaded(model, place, good, notes)

    def keep(self, kept: list[Snapshot]) -> None:
        """Remove every snapshot but these, and what a crash left behind."""
        stay = {path for snapshot in kept for path in (snapshot.path, snapshot.path.with_suffix(".json"))}
        # notes first: a model without a note does not count
        for pattern in ("snapshot-*.json", "snapshot-*.scr", ".snapshot-*.tmp", f".{CONFIG}.*.tmp"):
            for path in self.path.glob(pattern):
                if path not in stay:
                    path.unlink(missing_ok=True)

    # ---------------------------------------------------------------- space

    def used_bytes(self) -> int:
        """Bytes of all files here."""
        total = 0
        for path in self.path.iterdir():
            with contextlib.suppress(OSError):  # a file may go while we look
                total += path.stat().st_size
        return total

    def free_bytes(self) -> int:
        """Bytes the disk has left."""
        return shutil.disk_usage(self.path).free


def _lock(path: Path) -> BinaryIO:
    """Take the directory's lock; it goes with the process, however that ends."""
    file = open(path, "a+b")  # noqa: SIM115  # held open as long as the state is
    try:
        import fcntl
    except ImportError:  # no flock here: SQLite's own lock on the journal keeps a second server out
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(20).decode(errors="replace").strip() or "unknown"
        file.close()
        raise StateError(
            f'Another server (process {owner}) is running on "{path.parent}". Stop it first, or use another state '
            "directory."
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def _read_note(snapshot: Snapshot) -> Progress:
    try:
        note: dict[str, Any] = json.loads(snapshot.path.with_suffix(".json").read_bytes())
        progress = Progress(
            int(note["sequence"]), int(note["images"]), {str(k): int(v) for k, v in note["counts"].items()}
        )
        expected = note["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"its note cannot be read ({error}).") from error
    if progress.sequence != snapshot.sequence or _sha256(snapshot.path) != expected:
        raise StateError("its checksum is not the one written down.")
    return progress


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
