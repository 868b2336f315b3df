"""The journal: what was accepted, in order, on disk before it is acknowledged; and the batches it was learned in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from scrlearn.errors import CheckpointError
from scrlearn.service.problems import Problem

Kind = Literal["image", "forget"]
VERSION = 1
BUSY_SECONDS = 5.0
_SCHEMA = """
CREATE TABLE entries (
    sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, label TEXT NOT NULL, pixels BLOB NOT NULL, checksum BLOB NOT NULL
);
CREATE TABLE batches (last INTEGER PRIMARY KEY);
CREATE TABLE keys (
    key TEXT PRIMARY KEY, fingerprint BLOB NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    created REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX keys_by_age ON keys (created);
"""
_TABLES = {
    "entries": ("sequence", "kind", "label", "pixels", "checksum"),
    "batches": ("last",),
    "keys": ("key", "fingerprint", "first", "last", "created"),
}


class Item(NamedTuple):
    """One thing to do: learn an image (uint8 pixels C×H×W) under a label, or forget a label."""

    kind: Kind
    label: str
    pixels: bytes = b""


class Request(NamedTuple):
    """Items that are accepted together or not at all, and the key under which they may be sent again."""

    items: Sequence[Item]
    key: str | None = None

    def fingerprint(self) -> bytes:
        """What tells this request from another with the same key."""
        hasher = hashlib.sha256()
        for item in self.items:
            for part in (item.kind.encode(), item.label.encode(), item.pixels):
                hasher.update(len(part).to_bytes(8, "big"))
                hasher.update(part)
        return hasher.digest()


class Receipt(NamedTuple):
    """Where a request stands in the journal; `repeated` if its key had been used for the same request before."""

    first: int
    last: int
    repeated: bool


class Batch(NamedTuple):
    """Items that are learned in one step, the place of the last one, and how many of them were damaged on disk."""

    items: list[Item]
    last: int
    lost: int


class Journal:
    """An SQLite file in which every commit has reached the disk (write-ahead log, synchronous=FULL).

    Entries have consecutive numbers. Before a batch is learned, its end is written down as well, so that whoever
    reads the journal again cuts it into the same batches. An entry carries a checksum; one that does not fit is left
    out and counted as lost.

    Parameters
    ----------
    path
        The file; made if it is not there.
    floor
        The number of the last entry that is in a snapshot; new entries get higher ones.

    Attributes
    ----------
    begin, last
        Entries after `begin`, up to `last`, are in the file.
    salvaged
        Whether the file was damaged, and what could still be read was written anew.

    Examples
    --------
    >>> import tempfile
    >>> journal = Journal(Path(tempfile.mkdtemp()) / "journal.sqlite3")
    >>> journal.append([Request([Item("image", "cat", b"abc"), Item("image", "dog", b"abd")], key="k1")])
    [Receipt(first=1, last=2, repeated=False)]
    >>> journal.append([Request([Item("image", "cat", b"abc"), Item("image", "dog", b"abd")], key="k1")])
    [Receipt(first=1, last=2, repeated=True)]
    >>> [item.label for item in journal.next_batch(0, size=10).items]
    ['cat', 'dog']
    """

    def __init__(self, path: Path, floor: int = 0) -> None:
        self.path = path
        self.salvaged = False
        self._lock = threading.RLock()
        _finish_salvage(path)
        try:
            self._db = _open(path)
            self._check()
        except sqlite3.DatabaseError as error:
            if _is_not_damage(error):
                raise _cannot_open(path, error) from error
            salvage(path)
            self.salvaged = True
            self._db = _open(path)
        numbers = self._db.execute(
            "SELECT max(coalesce((SELECT max(sequence) FROM entries), 0), coalesce((SELECT max(last) FROM batches), 0),"
            " coalesce((SELECT max(last) FROM keys), 0))"
        ).fetchone()
        self.last = max(int(numbers[0]), floor)
        first = self._db.execute("SELECT min(sequence) FROM entries").fetchone()[0]
        self.begin = self.last if first is None else int(first) - 1

    def _check(self) -> None:
        """Make the tables of a new file; look through an old one."""
        try:
            self._make_or_check()
        except BaseException:
            self._db.close()
            raise

    def _make_or_check(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise CheckpointError(
                f'"{self.path}" has format {version}; this version of scrlearn reads up to {VERSION}. '
                "Install a newer one."
            )
        if version == 0:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
        elif self._db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("a page is damaged")

    # ---------------------------------------------------------------- writing

    def append(
        self, requests: Sequence[Request], admit: Callable[[Request], Problem | None] = lambda request: None
    ) -> list[Receipt | Problem]:
        """Write requests, all in one commit; when this returns they are on disk, and when it raises none is.

        A request whose key was used for another one gives a `Problem` in its place, and so does one that `admit` has
        something against; it is not asked about one that was accepted before.
        """
        with self._lock, self._transaction():
            return [self._append_one(request, admit) for request in requests]

    def _append_one(self, request: Request, admit: Callable[[Request], Problem | None]) -> Receipt | Problem:
        fingerprint = request.fingerprint()
        if request.key is not None:
            found = self._db.execute("SELECT fingerprint, first, last FROM keys WHERE key = ?", (request.key,))
            row = found.fetchone()
            if row is not None and row[0] == fingerprint:
                return Receipt(row[1], row[2], repeated=True)
            if row is not None:
                detail = "This Idempotency-Key was used for another request. Use a new key for each new request."
                return Problem("key-reused", detail)
        problem = admit(request)
        if problem is not None:
            return problem
        first, last = self.last + 1, self.last + len(request.items)
        rows = ((first + i, *item, _checksum(first + i, item)) for i, item in enumerate(request.items))
        self._db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        if request.key is not None:
            self._db.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?)", (request.key, fingerprint, first, last, time.time())
            )
        self.last = last
        return Receipt(first, last, repeated=False)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; the counter too."""
        before = getattr(self, "last", 0)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self.last = before
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself already
                self._db.execute("ROLLBACK")
            raise

    # ---------------------------------------------------------------- reading

    def next_batch(self, after: int, size: int) -> Batch | None:
        """The batch that follows entry `after`: the one written down, or else a new one, which is written down now.

        A new batch is the next images, at most `size`; a forgotten class is a batch of its own.
        """
        with self._lock:
            row = self._db.execute("SELECT last FROM batches WHERE last > ? ORDER BY last LIMIT 1", (after,)).fetchone()
            last = row[0] if row is not None else self._cut_batch(after, size)
            if last is None:
                return None
            rows = self._db.execute(
                "SELECT sequence, kind, label, pixels, checksum FROM entries WHERE sequence > ? AND sequence <= ? "
                "ORDER BY sequence",
                (after, last),
            )
            items = [item for item in map(_read, rows) if item is not None]
            return Batch(items, last, lost=last - after - len(items))

    def _cut_batch(self, after: int, size: int) -> int | None:
        rows = self._db.execute(
            "SELECT sequence, kind FROM entries WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, size)
        ).fetchall()
        if not rows and after >= self.last:
            return None
        last = int(rows[0][0]) if rows else self.last  # entries that are known to have been there may be gone
        if rows and rows[0][1] == "image":
            for sequence, kind in rows:
                if kind != "image":
                    break
                last = sequence
        with self._transaction():
            self._db.execute("INSERT INTO batches VALUES (?)", (last,))
        return last

    def forgets(self, through: int) -> bool:
        """Whether an entry up to this one forgets a class."""
        with self._lock:
            query = "SELECT 1 FROM entries WHERE kind = 'forget' AND sequence <= ? LIMIT 1"
            return self._db.execute(query, (through,)).fetchone() is not None

    def labels(self, after: int) -> Iterator[tuple[Kind, str]]:
        """What entries after this one do, and to which label, in order."""
        with self._lock:
            rows = self._db.execute(
                "SELECT kind, label FROM entries WHERE sequence > ? ORDER BY sequence", (after,)
            ).fetchall()
        yield from rows

    def __len__(self) -> int:
        """Entries on disk."""
        return self.last - self.begin

    # ---------------------------------------------------------------- staying small

    def cut(self, through: int) -> None:
        """Remove entries up to this one, and overwrite their bytes."""
        with self._lock:
            with self._transaction():
                self._db.execute("DELETE FROM entries WHERE sequence <= ?", (through,))
                self._db.execute("DELETE FROM batches WHERE last <= ?", (through,))
            self.begin = max(self.begin, min(through, self.last))
            # the log holds copies of what was removed until it is written back
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def drop_keys(self, most: int, age: float) -> None:
        """Forget keys that are too old, or more than there may be."""
        with self._lock, self._transaction():
            self._db.execute("DELETE FROM keys WHERE created < ?", (time.time() - age,))
            self._db.execute(
                "DELETE FROM keys WHERE key IN "
                "(SELECT key FROM keys ORDER BY created DESC, last DESC LIMIT -1 OFFSET ?)",
                (most,),
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


# -------------------------------------------------------------------- the file


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        # one process only: a second one fails here even where there is no flock
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA auto_vacuum = FULL")
        db.execute("PRAGMA journal_mode = WAL").fetchone()
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA cell_size_check = ON")
    except BaseException:
        db.close()
        raise
    return db


def _is_not_damage(error: sqlite3.DatabaseError) -> bool:
    """A file that cannot be opened, locked or written is no damaged file."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _cannot_open(path: Path, error: sqlite3.DatabaseError) -> CheckpointError:
    hint = " Is another server running on this state?" if "locked" in str(error) else ""
    return CheckpointError(f'The journal "{path}" cannot be opened: {error}.{hint}')


def _checksum(sequence: int, item: Item) -> bytes:
    hasher = hashlib.blake2b(digest_size=8)
    for part in (str(sequence).encode(), item.kind.encode(), item.label.encode(), item.pixels):
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def _read(row: tuple[int, Kind, str, bytes, bytes]) -> Item | None:
    sequence, kind, label, pixels, checksum = row
    try:
        item = Item(kind, label, pixels)
        return item if _checksum(sequence, item) == checksum else None
    except (AttributeError, TypeError):  # damage can change a value's type
        return None


# -------------------------------------------------------------------- damage


def salvage(path: Path) -> None:
    """Replace a damaged journal by one with everything in it that can still be read."""
    fresh = path.with_name(f"{path.name}.tmp")
    for leftover in (fresh, *_companions(fresh)):
        leftover.unlink(missing_ok=True)
    _lengthen(path)
    target = sqlite3.connect(fresh, isolation_level=None)
    try:
        target.executescript(f"PRAGMA auto_vacuum = FULL; PRAGMA synchronous = FULL; BEGIN; {_SCHEMA}")
        for table, columns in _TABLES.items():
            marks = ", ".join("?" * len(columns))
            for row in _readable(path, table, columns):
                target.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)
        target.execute(f"PRAGMA user_version = {VERSION}")
        target.execute("COMMIT")
    finally:
        target.close()
    os.replace(fresh, _salvaged(path))
    _finish_salvage(path)


def _lengthen(path: Path) -> None:
    """SQLite reads nothing of a file that is shorter than its head says; with zeros at its end it reads the rest."""
    with open(path, "rb") as file:
        head = file.read(32)
    if head.startswith(b"SQLite format 3\x00") and len(head) == 32:
        page = int.from_bytes(head[16:18], "big")
        size = int.from_bytes(head[28:32], "big") * (65536 if page == 1 else page)
        if path.stat().st_size < size <= 1 << 36:
            os.truncate(path, size)


def _finish_salvage(path: Path) -> None:
    """Put a complete salvaged journal into place; the old log first, since it belongs to the old file."""
    if _salvaged(path).exists():
        for companion in _companions(path):
            companion.unlink(missing_ok=True)
        os.replace(_salvaged(path), path)


def _salvaged(path: Path) -> Path:
    return path.with_name(f"{path.name}.salvaged")


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm", "-journal"))


def _readable(path: Path, table: str, columns: tuple[str, ...]) -> Iterable[tuple[object, ...]]:
    """Rows of a damaged table, from its beginning and from its end up to the damage."""
    found: dict[object, tuple[object, ...]] = {}
    for order in ("ASC", "DESC"):
        query = f"SELECT {', '.join(columns)} FROM {table} ORDER BY {columns[0]} {order}"
        with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(sqlite3.connect(path)) as db:
            _take(db.execute(query), found.setdefault)
    return found.values()


def _take(rows: Iterable[tuple[object, ...]], keep: Callable[[object, tuple[object, ...]], object]) -> None:
    for row in rows:
        if None not in row:
            keep(row[0], row)
