"""A report's files: where its runs are read from, and what is written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scrlearn.errors import InputError
from scrlearn.experiments.exports import add_path, is_store
from scrlearn.experiments.report.document import Document
from scrlearn.experiments.report.markdown import markdown
from scrlearn.experiments.report.page import page
from scrlearn.experiments.report.pictures import ENDINGS, save
from scrlearn.experiments.store import Entry, Store
from scrlearn.files import atomic_write

PAGE, MARKDOWN, PICTURES = "index.html", "report.md", "figures"


@dataclass(frozen=True)
class Written:
    """Where a report is."""

    page: Path
    markdown: Path
    pictures: tuple[Path, ...]


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Entry]:
    """The runs of one or more sources together, each run once.

    Parameters
    ----------
    paths
        Result stores, JSON exports, or folders with runs in them.
    """
    sources = [Path(path) for path in paths]
    for path in sources:
        if not path.exists():
            raise InputError(f'There are no results at "{path}". `scr reproduce` and `scr results add` make a store.')
    if len(sources) == 1 and is_store(sources[0]):
        return Store(sources[0], create=False).query()
    with tempfile.TemporaryDirectory() as scratch:
        together = Store(Path(scratch) / "together.db")
        for path in sources:
            if is_store(path):
                together.merge(path)
            else:
                add_path(together, path)
        return together.query()


def write(document: Document, folder: str | os.PathLike[str]) -> Written:
    """Write a report: ``index.html``, which stands alone, ``report.md``, and the pictures as PNG and SVG.

    Parameters
    ----------
    document
        What `build` made.
    folder
        Where to; made if it is not there. Files of the same names are replaced.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f'"{folder}" is a file; a report goes to a folder.')
    folder.mkdir(parents=True, exist_ok=True)
    files = {picture.name: save(picture, folder / PICTURES) for picture in document.pictures()}
    contents = {
        name: {ending: path.read_bytes() for ending, path in zip(ENDINGS, paths, strict=True)}
        for name, paths in files.items()
    }
    atomic_write(folder / PAGE, page(document, contents).encode())
    atomic_write(folder / MARKDOWN, markdown(document, PICTURES).encode())
    return Written(folder / PAGE, folder / MARKDOWN, tuple(path for paths in files.values() for path in paths))
