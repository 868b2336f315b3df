"""Results out of a store and into it: flat tables for other tools, complete JSON for another store, and run folders."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scrlearn.errors import CheckpointError, InputError
from scrlearn.experiments import compact
from scrlearn.experiments.artefacts import collect
from scrlearn.experiments.folders import RESULT
from scrlearn.experiments.identity import canonical_json, describe, family_key, identity
from scrlearn.experiments.protocol import artefacts_for
from scrlearn.experiments.result import SUMMARISED, Result
from scrlearn.experiments.store import Entry, Merged, Store
from scrlearn.files import atomic_write

FORMAT = 1
TIMES = ("training", "evaluation", "total", "side_by_side")
COME_IN = (
    f"Runs come in from a {RESULT}, a folder with some in it, or a JSON file of `scr results export`; a store by "
    "`scr results merge`."
)


# ------------------------------------------------------------------------------------------------------------ out


def rows(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """A flat row for each run and classifier; accuracies are fractions."""
    for entry in entries:
        result, config = entry.result, entry.config
        for classifier, figures in sorted(result.by_classifier.items()):
            yield {
                "key": entry.key,
                "dataset": result.dataset,
                "method": result.method,
                "memory_size": result.memory_size,
                "seed": result.seed,
                "review": result.review,
                "order": config.order,
                "classes_ahead": bool(config.classes_ahead),
                "options": canonical_json(identity(config).get("options", {})),
                "config": canonical_json(identity(config)),  # all that is not default: a short stream tells itself
                "classifier": classifier,
                "own_classifier": classifier == result.classifier,
                **{name: figures[name] for name in SUMMARISED},
                "accuracy_matrix": figures["accuracy_matrix"],
                **{f"seconds_{name}": result.seconds.get(name) for name in TIMES},
                "device": result.machine["device"],
                "machine": result.machine["name"],
                "precision": result.machine["precision"],
                **{f"version_{name}": version for name, version in sorted(result.versions.items())},
                "date": entry.date,
            }


def _csv(entries: Sequence[Entry]) -> bytes:
    text, table = io.StringIO(), _table(entries)
    writer = csv.DictWriter(text, table[0] if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"accuracy_matrix": canonical_json(row["accuracy_matrix"])} for row in table)
    return text.getvalue().encode()


def _table(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Rows with the same columns: runs of other versions may name other packages."""
    table = list(rows(entries))
    columns = dict.fromkeys(name for row in table for name in row)
    return [{name: row.get(name) for name in columns} for row in table]


def _json(entries: Sequence[Entry]) -> bytes:
    """Everything there is, a line for each run."""
    lines = [
        canonical_json(
            {
                "date": entry.date,
                "result": entry.result.to_dict(),
                "artefacts": {name: base64.b64encode(data).decode() for name, data in sorted(entry.artefacts.items())},
            }
        )
        for entry in entries
    ]
    return (f'{{"scrlearn_results":{FORMAT},"runs":[\n' + ",\n".join(lines) + "\n]}\n").encode()


def _gzipped_json(entries: Sequence[Entry]) -> bytes:
    return gzip.compress(_json(entries), 9, mtime=0)  # no time in it: equal stores give equal files


def _parquet(entries: Sequence[Entry]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            "A parquet file needs the package pyarrow, which is not installed: `pip install pyarrow`, or export to "
            ".csv or .json."
        ) from error
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(_table(entries)), buffer)
    return buffer.getvalue()


def _compact(entries: Sequence[Entry]) -> bytes:
    return compact.to_text(entries).encode()


FORMATS: dict[str, Callable[[Sequence[Entry]], bytes]] = {
    compact.ENDING: _compact,
    ".csv": _csv,
    ".json": _json,
    ".json.gz": _gzipped_json,
    ".parquet": _parquet,
}


def export(entries: Sequence[Entry], path: str | os.PathLike[str]) -> Path:
    """Write runs to a file, in the form that its name asks for.

    Parameters
    ----------
    entries
        Runs of a store, as `Store.query` gives them.
    path
        ``.csv`` and ``.parquet``: a row for each run and classifier. ``.json`` and ``.json.gz``: everything, confusion
        matrices and artefacts too, which `add_path` takes in again. ``.runs.json``: the same for version control, see
        `compact`. A folder, or a name without an ending: such a file for each data set, method and memory size; runs
        that are there already stay.
    """
    path = Path(path)
    if path.is_dir() or not path.suffix:
        return _export_folder(entries, path)
    for ending, convert in FORMATS.items():
        if path.name.endswith(ending):
            return atomic_write(path, convert(entries))
    raise InputError(
        f'"{path.name}" does not say in which form to export; its name should end in {", ".join(FORMATS)}, or be a '
        "folder."
    )


def _export_folder(entries: Sequence[Entry], folder: Path) -> Path:
    """Bring runs into a folder of compact files; a file that has nothing new is not written."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, group in compact.grouped(entries).items():
            together = Store(Path(scratch) / f"{len(list(Path(scratch).iterdir()))}.db")
            file = folder / name
            old = file.read_bytes() if file.is_file() else b""
            if old:
                together.add_entries(read_export(file))
            for conflict in together.add_entries(group).conflicts:
                warnings.warn(f"Other figures were there: {conflict}.", stacklevel=3)
            new = _compact(together.query())
            if new != old:
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(file, new)
    return folder


# ------------------------------------------------------------------------------------------------------------- in


def add_path(store: Store, path: str | os.PathLike[str]) -> Merged:
    """Put into a store what lies at a path.

    Parameters
    ----------
    store
        Where to.
    path
        A ``result.json``; a file that `export` wrote as JSON; or a folder, with all in it that ``scr run --out`` or
        an export to a folder left there.
    """
    path = Path(path)
    if path.is_dir():
        files, exported = sorted(path.rglob(RESULT)), sorted(path.rglob(f"*{compact.ENDING}"))
        if not files and not exported:
            raise InputError(
                f'There is no {RESULT} in "{path}", and no *{compact.ENDING}; give the folder that `scr run --out` or '
                "`scr results export` wrote to."
            )
        merged = Merged()
        for file in files:
            merged += store.add_entries([_from_folder(file)])
        for file in exported:
            merged += store.add_entries(read_export(file))
        return merged
    if path.name == RESULT:
        return store.add_entries([_from_folder(path)])
    return store.add_entries(read_export(path))


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is to be opened as a store, and not read by `add_path`."""
    return not Path(path).is_dir() and not Path(path).name.endswith((".json", ".json.gz"))


def read_folder(folder: str | os.PathLike[str]) -> list[Entry]:
    """The runs that an export to a folder left there, in the order in which a store gives them; each is there once."""
    found: dict[str, tuple[Entry, Path]] = {}
    for file in sorted(Path(folder).rglob(f"*{compact.ENDING}")):
        for entry in read_export(file):
            if entry.key in found:
                raise CheckpointError(
                    f'"{file}" and "{found[entry.key][1]}" both have the run {describe(entry.config)}; keep one of '
                    "them, or put both into a store (`scr results add`) and export that."
                )
            found[entry.key] = entry, file
    return sorted((entry for entry, _ in found.values()), key=_order)


def _order(entry: Entry) -> tuple[str, str, int, str, int, str]:
    result = entry.result
    return result.dataset, result.method, result.memory_size, family_key(entry.config), result.seed, entry.key


def _from_folder(file: Path) -> Entry:
    """A run as `scr run --out` left it, with what figures need where its checkpoint is there."""
    result = Result.load(file)
    date = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
    try:
        artefacts = collect(file.parent, artefacts_for(result.run_config()))
    except (CheckpointError, InputError) as error:
        warnings.warn(f"The figures of {file.parent} come in without artefacts: {error}", stacklevel=2)
        artefacts = {}
    return Entry(result, date, artefacts)


def read_export(path: str | os.PathLike[str]) -> list[Entry]:
    """The runs in a file that `export` wrote as JSON."""
    path = Path(path)
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise CheckpointError(f'"{path}" is no JSON: {error}. {COME_IN}') from error
    if not isinstance(document, dict) or "scrlearn_results" not in document:
        raise CheckpointError(f'"{path}" is no export of a result store. {COME_IN}')
    if document["scrlearn_results"] > max(FORMAT, compact.FORMAT):
        raise CheckpointError(f'"{path}" was exported by a newer scrlearn; install that one.')
    if document["scrlearn_results"] == compact.FORMAT:
        return compact.from_document(document, path)
    return [
        Entry(
            Result.from_dict(run["result"]),
            run["date"],
            {name: base64.b64decode(data) for name, data in run["artefacts"].items()},
        )
        for run in document["runs"]
    ]
