"""The result store: every run that was made, in one SQLite file that many may write and that merges with others."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from scrlearn.errors import InputError, ScrlearnError, suggest
from scrlearn.experiments.artefacts import Arrays, unpack
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import canonical_json, describe, digest, family_key, identity, run_key
from scrlearn.experiments.result import SUMMARISED, Result

SCHEMA = 1
APPLICATION = 0x5C121EA2  # says to SQLite's tools, and to us, whose file it is
BUSY_SECONDS = 60.0
AT_A_TIME = 50

TABLES = """
CREATE TABLE runs (
    key TEXT PRIMARY KEY,           -- of the configuration with its seed, without the machine
    family TEXT NOT NULL,           -- the same without the seed
    dataset TEXT NOT NULL, method TEXT NOT NULL, memory_size INTEGER NOT NULL, seed INTEGER NOT NULL,
    class_order TEXT NOT NULL, review INTEGER NOT NULL,
    config TEXT NOT NULL,           -- what is not default, as JSON
    date TEXT NOT NULL, device TEXT NOT NULL, machine TEXT NOT NULL, version TEXT NOT NULL, seconds REAL,
    figures TEXT NOT NULL,          -- fingerprint of everything that was measured, times excepted
    document BLOB NOT NULL          -- the whole result as JSON, compressed by zlib
) WITHOUT ROWID;
CREATE INDEX runs_family ON runs (family);
CREATE TABLE accuracies (
    key TEXT NOT NULL REFERENCES runs (key) ON DELETE CASCADE, classifier TEXT NOT NULL,
    average_accuracy REAL, anytime_accuracy REAL, forgetting REAL, backward_transfer REAL, forward_transfer REAL,
    accuracy_matrix TEXT NOT NULL,  -- JSON: row i after task i, column j on task j
    PRIMARY KEY (key, classifier)
) WITHOUT ROWID;
CREATE TABLE artefacts (
    key TEXT NOT NULL REFERENCES runs (key) ON DELETE CASCADE, name TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (key, name)
);
"""
# a filter's name, and the column it looks into
FILTERS = {name: name for name in ("key", "family", "dataset", "method", "memory_size", "seed", "review", "device")}
FILTERS["order"] = "class_order"


class StoreError(ScrlearnError):
    """A result store that cannot be read or written."""


@dataclass(frozen=True)
class Entry:
    """A run in the store: its result, when it came in, and its artefacts as `artefacts.pack` made them."""

    result: Result
    date: str
    artefacts: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """Its configuration."""
        return self.result.run_config()

    @property
    def key(self) -> str:
        """Its name, the same on every machine."""
        return run_key(self.config)

    @property
    def figures(self) -> str:
        """A fingerprint of what was measured, without confusion matrices: a compact export leaves them out."""
        figures = {
            classifier: {name: value for name, value in values.items() if name != "confusion"}
            for classifier, values in self.result.by_classifier.items()
        }
        return digest({"by_classifier": figures, "classes": self.result.class_names})

    def arrays(self, name: str) -> Arrays:
        """An artefact."""
        if name not in self.artefacts:
            raise InputError(f'{describe(self.config)} has no artefact "{name}".{suggest(name, self.artefacts)}')
        return unpack(self.artefacts[name])

    def rank(self) -> tuple[Any, ...]:
        """Of two entries of one run the smaller one stays: the more complete, the newer version, the older date."""
        version = [-int(part) if part.isdigit() else 0 for part in self.result.versions["scrlearn"].split(".")]
        return -len(self.artefacts), version, self.date, digest(self.result.to_dict())

    def rank_of_result(self) -> tuple[Any, ...]:
        """The same where the figures are equal: artefacts come from both, and confusion matrices are worth most."""
        matrices = sum("confusion" in values for values in self.result.by_classifier.values())
        return -matrices, *self.rank()[1:]


@dataclass(frozen=True)
class Conflict:
    """One run with two different outcomes; the one that stays is said."""

    run: str
    kept: float | None
    dropped: float | None

    def __str__(self) -> str:
        """The two accuracies side by side."""
        return f"{self.run}: {_percent(self.kept)} stays, {_percent(self.dropped)} is left out"


@dataclass
class Merged:
    """What adding runs did: those that were new, those that were there already, those that were there differently."""

    new: int = 0
    same: int = 0
    conflicts: list[Conflict] = field(default_factory=list)

    def __str__(self) -> str:
        """In a sentence."""
        return f"{self.new} new, {self.same} there already, {len(self.conflicts)} there with other figures"

    def __iadd__(self, other: Merged) -> Merged:
        """Both together."""
        self.new, self.same, self.conflicts = (
            self.new + other.new,
            self.same + other.same,
            self.conflicts + other.conflicts,
        )
        return self


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}%"


class Store:
    """All runs in one SQLite file.

    Any number of processes may write at the same time: each change is one short transaction, and who comes second
    waits. The file must lie on a disk of the machine (SQLite's write-ahead log does not work over a network); runs of
    several machines come together by `merge`.

    A run is there once. Its key is made of everything that decides its figures (see `identity`); where the same run
    comes a second time, the more complete one stays, then that of the newer version of this package, then the older.

    Parameters
    ----------
    path
        The file; made when it is not there.
    create
        Whether to make it; if not, a missing file is an error.

    Example
    -------
    >>> import tempfile
    >>> from scrlearn.experiments import run
    >>> store = Store(Path(tempfile.mkdtemp()) / "results.db")
    >>> config = RunConfig(method="er", memory_size=50, limit=10)
    >>> print(store.add(run(config)))
    1 new, 0 there already, 0 there with other figures
    >>> store.has(config), store.has(config.replace(seed=1)), len(store.query(method="er"))
    (True, False, 1)
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = True) -> None:
        self.path = Path(path)
        if not self.path.exists():
            if not create:
                raise StoreError(
                    f'There is no result store at "{self.path}". `scr reproduce` and `scr results add` make one.'
                )
            _create(self.path)
        with self._reading() as db:
            _check(db, self.path)

    # ---------------------------------------------------------------- writing

    def add(self, result: Result, artefacts: Mapping[str, bytes] | None = None, date: str | None = None) -> Merged:
        """Put a run in, durably.

        Parameters
        ----------
        result
            What the run found.
        artefacts
            What figures need beside it, as `artefacts.pack` makes it.
        date
            When it was made (ISO 8601); default: now.
        """
        return self.add_entries([Entry(result, date or now(), dict(artefacts or {}))])

    def add_entries(self, entries: Iterable[Entry]) -> Merged:
        """Put runs in, some at a time, so that other writers never wait long."""
        merged, waiting = Merged(), iter(entries)
        while some := list(islice(waiting, AT_A_TIME)):
            with self._writing() as db:
                for entry in some:
                    merged += _put(db, entry)
        return merged

    def merge(self, other: str | os.PathLike[str] | Store) -> Merged:
        """Take in all runs of another store; a run that is in both is there once."""
        source = other if isinstance(other, Store) else Store(other, create=False)
        return self.add_entries(source.query())

    def remove(self, keys: Iterable[str]) -> int:
        """Take runs out; says how many there were."""
        with self._writing() as db:
            return sum(db.execute("DELETE FROM runs WHERE key = ?", (key,)).rowcount for key in keys)

    # ---------------------------------------------------------------- reading

    def has(self, config: RunConfig, artefacts: Sequence[str] = ()) -> bool:
        """Whether a run is there, with these artefacts."""
        entry = self.get(config)
        return entry is not None and entry.artefacts.keys() >= set(artefacts)

    def get(self, config: RunConfig) -> Entry | None:
        """A run, if it is there."""
        key = run_key(config)
        return next((entry for entry in self.query(key=key) if entry.key == key), None)  # see `_put`

    def find(self, key: str) -> Entry:
        """The run whose key begins like this."""
        full = self.full_key(key)
        found = self.query(key=full)
        if not found:
            raise InputError(f"The run {full[:8]} has a method or an option that is not known here.")
        return found[0]

    def full_key(self, key: str) -> str:
        """The whole key that begins like this."""
        with self._reading() as db:
            pattern = key.replace("%", "").replace("_", "") + "%"
            found = [full for (full,) in db.execute("SELECT key FROM runs WHERE key LIKE ? LIMIT 2", (pattern,))]
        if len(found) != 1:
            many = "Several runs have" if found else "No run has"
            raise InputError(f'{many} a key that begins with "{key}"; `scr results list --runs` shows the keys.')
        return str(found[0])

    def seeds(self, config: RunConfig) -> list[Entry]:
        """All runs that differ from this configuration in their seed alone."""
        family = family_key(config)
        return [entry for entry in self.query(family=family) if family_key(entry.config) == family]

    def query(self, **filters: Any) -> list[Entry]:
        """Runs with these properties, in a fixed order.

        Runs of a method or a part that is not known here (somebody's own) are left out; a warning says which.

        Parameters
        ----------
        filters
            dataset, method, memory_size, seed, order, review, device, key, family: a value, or several to choose from.
        """
        where, values = _conditions(filters)
        order = "dataset, method, memory_size, family, seed, key"
        with self._reading() as db:
            db.execute("BEGIN")  # one moment for runs and artefacts
            rows = db.execute(f"SELECT key, date, document FROM runs{where} ORDER BY {order}", values).fetchall()
            chosen = f"SELECT key FROM runs{where}"
            artefacts: dict[str, dict[str, bytes]] = {}
            for key, name, data in db.execute(
                f"SELECT key, name, data FROM artefacts WHERE key IN ({chosen}) ORDER BY name", values
            ):
                artefacts.setdefault(key, {})[name] = data
        return _known(
            (Entry(_result(document), date, artefacts.get(key, {})) for key, date, document in rows), self.path
        )

    def __len__(self) -> int:
        """How many runs there are."""
        with self._reading() as db:
            return int(db.execute("SELECT count(*) FROM runs").fetchone()[0])

    # ---------------------------------------------------------------- the file

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with _errors(self.path), contextlib.closing(_connect(self.path)) as db:
            yield db

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")  # the lock first: what is read now is still true when it is written
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        advice = "is the disk full, the folder read-only, or another process stuck?"
        raise StoreError(f'The result store "{path}" cannot be used ({error}): {advice}') from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f'"{path}" is not a result store, or is damaged: {error}.') from error


def _connect(path: Path) -> sqlite3.Connection:
    """A connection of its own for each use: safe with threads, forks and kills."""
    uri = path.absolute().as_uri()
    try:
        db = sqlite3.connect(f"{uri}?mode=rw", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return db
    except sqlite3.OperationalError:
        if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
            raise
        return sqlite3.connect(f"{uri}?immutable=1", uri=True, isolation_level=None)  # on a read-only disk


def _create(path: Path) -> None:
    """Make the file beside, and put it in its place whole: who comes second finds a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    with _errors(path):
        try:
            with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as db:
                names = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA};"
                db.executescript(f"BEGIN; {TABLES} {names} COMMIT;")
                db.execute("PRAGMA journal_mode = WAL")
            _put_in_place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a disk without links, where a rename must do
        if not path.exists():
            os.replace(temporary, path)


def _check(db: sqlite3.Connection, path: Path) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise StoreError(f'"{path}" is an SQLite file, but not a result store of scrlearn; choose another file.')
    if version != SCHEMA:
        what = (
            "install a newer scrlearn"
            if version > SCHEMA
            else "export it with the scrlearn that wrote it, and `scr results add` the export"
        )
        raise StoreError(
            f'The result store "{path}" has version {version}; this scrlearn reads and writes {SCHEMA}: {what}.'
        )


def _conditions(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """SQL for the filters that are not None."""
    parts: list[str] = []
    values: list[Any] = []
    for name, value in filters.items():
        if name not in FILTERS:
            raise InputError(f'Runs cannot be chosen by "{name}".{suggest(name, FILTERS)}')
        if value is None:
            continue
        several = list(value) if isinstance(value, list | tuple | set | frozenset | range) else [value]
        parts.append(f"{FILTERS[name]} IN ({', '.join('?' * len(several))})")
        values += several
    return (" WHERE " + " AND ".join(parts) if parts else ""), values


# -------------------------------------------------------------------------------------------------------- one run


def _result(document: bytes) -> Result:
    return Result.from_dict(json.loads(zlib.decompress(document)))


def _known(entries: Iterable[Entry], path: Path) -> list[Entry]:
    """Those that can be named here; a warning tells of the others."""
    known: list[Entry] = []
    reasons: Counter[str] = Counter()
    for entry in entries:
        try:
            run_key(entry.config)
        except InputError as error:
            reasons[str(error)] += 1
        else:
            known.append(entry)
    for reason, count in reasons.items():
        warnings.warn(f'{count} of the runs in "{path}" cannot be read here and are left out: {reason}', stacklevel=3)
    return known


def _put(db: sqlite3.Connection, entry: Entry) -> Merged:
    """Write a run, or what of it is better than what is there."""
    old = _read(db, entry.key)
    if old is not None and old.key != entry.key:  # made with defaults that have changed since: another run by now
        db.execute("DELETE FROM runs WHERE key = ?", (entry.key,))
        _put(db, old)
        old = None
    if old is None:
        _write(db, entry)
        return Merged(new=1)
    best, other = sorted([old, entry], key=Entry.rank)
    if best.figures == other.figures:
        best, other = sorted([old, entry], key=Entry.rank_of_result)
        both = {**other.artefacts, **best.artefacts}
        both |= {
            name: min(best.artefacts[name], other.artefacts[name]) for name in best.artefacts.keys() & other.artefacts
        }
        _write(db, Entry(best.result, best.date, both))
        return Merged(same=1)
    _write(db, best)
    return Merged(
        conflicts=[Conflict(describe(best.config), best.result.average_accuracy, other.result.average_accuracy)]
    )


def _read(db: sqlite3.Connection, key: str) -> Entry | None:
    row = db.execute("SELECT date, document FROM runs WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    artefacts = dict(db.execute("SELECT name, data FROM artefacts WHERE key = ?", (key,)))
    return Entry(_result(row[1]), row[0], artefacts)


def _write(db: sqlite3.Connection, entry: Entry) -> None:
    result, config, key = entry.result, entry.config, entry.key
    document = zlib.compress(canonical_json(result.to_dict()).encode(), 9)
    db.execute("DELETE FROM runs WHERE key = ?", (key,))
    values = (
        *(key, family_key(config), result.dataset, result.method, result.memory_size, result.seed),
        *(config.order, result.review, canonical_json(identity(config)), entry.date),
        *(result.machine["device"], result.machine["name"], result.versions["scrlearn"], result.seconds["total"]),
        *(entry.figures, document),
    )
    db.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(values))})", values)
    for classifier, figures in result.by_classifier.items():
        numbers = [figures[name] for name in SUMMARISED]
        row = (key, classifier, *numbers, canonical_json(figures["accuracy_matrix"]))
        db.execute(f"INSERT INTO accuracies VALUES ({', '.join('?' * len(row))})", row)
    db.executemany("INSERT INTO artefacts VALUES (?, ?, ?)", [(key, *item) for item in sorted(entry.artefacts.items())])
