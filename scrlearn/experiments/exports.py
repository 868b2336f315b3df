"""Results out of a store and into it: flat tables for other tools, complete JSON for another store, and run folders."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scrlearn.errors import CheckpointError, InputError
from scrlearn.experiments.artefacts import collect
from scrlearn.experiments.folders import RESULT
from scrlearn.experiments.identity import canonical_json, identity
from scrlearn.experiments.protocol import artefacts_for
from scrlearn.experiments.result import SUMMARISED, Result
from scrlearn.experiments.store import Entry, Merged, Store
from scrlearn.files import atomic_write

FORMAT = 1
TIMES = ("training", "evaluation", "total", "side_by_side")


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
    text = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows(entries):
        if writer is None:
            writer = csv.DictWriter(text, row, lineterminator="\n")
            writer.writeheader()
        writer.writerow(row | {"accuracy_matrix": canonical_json(row["accuracy_matrix"])})
    return text.getvalue().encode()


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
    parquet.write_table(pyarrow.Table.from_pylist(list(rows(entries))), buffer)
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Sequence[Entry]], bytes]] = {
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
        matrices and artefacts too, which `add_path` takes in again.
    """
    path = Path(path)
    for ending, convert in FORMATS.items():
        if path.name.endswith(ending):
            return atomic_write(path, convert(entries))
    raise InputError(
        f'"{path.name}" does not say in which form to export; its name should end in {", ".join(FORMATS)}.'
    )


# ------------------------------------------------------------------------------------------------------------- in


def add_path(store: Store, path: str | os.PathLike[str]) -> Merged:
    """Put into a store what lies at a path.

    Parameters
    ----------
    store
        Where to.
    path
        A ``result.json``; a folder, with all of those in it; or a file that `export` wrote as JSON.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.rglob(RESULT))
        if not files:
            raise InputError(f'There is no {RESULT} in "{path}"; give the folder that `scr run --out` wrote to.')
        merged = Merged()
        for file in files:
            merged += store.add_entries([_from_folder(file)])
        return merged
    if path.name == RESULT:
        return store.add_entries([_from_folder(path)])
    return store.add_entries(read_export(path))


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
        raise CheckpointError(f'"{path}" is no JSON: {error}.') from error
    if not isinstance(document, dict) or "scrlearn_results" not in document:
        raise CheckpointError(
            f'"{path}" is no export of a result store. Runs come in from a {RESULT}, a folder with some in it, or a '
            "file of `scr results export`; a store by `scr results merge`."
        )
    if document["scrlearn_results"] > FORMAT:
        raise CheckpointError(f'"{path}" was exported by a newer scrlearn; install that one.')
    return [
        Entry(
            Result.from_dict(run["result"]),
            run["date"],
            {name: base64.b64decode(data) for name, data in run["artefacts"].items()},
        )
        for run in document["runs"]
    ]
