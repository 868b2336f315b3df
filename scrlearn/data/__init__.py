"""Images come in: data sets by name, and streams made of them.

>>> from scrlearn.data import class_incremental, load
>>> stream = class_incremental(load("digits"), tasks=5)
>>> [task.classes for task in stream.tasks]
[(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from scrlearn.data import cifar, digits, folder, mini_imagenet
from scrlearn.data.base import ArrayImages, Dataset, ImageSet, Source
from scrlearn.data.check import Report, check_source
from scrlearn.data.folder import FolderImages
from scrlearn.data.holdout import holdout, shuffled_split
from scrlearn.data.streams import DEFAULT_TASKS, Stream, Task, class_incremental, default_tasks
from scrlearn.errors import InputError, suggest

__all__ = [
    "DEFAULT_TASKS",
    "SOURCES",
    "ArrayImages",
    "Availability",
    "Dataset",
    "FolderImages",
    "ImageSet",
    "Report",
    "Stream",
    "Task",
    "available",
    "check",
    "class_incremental",
    "data_root",
    "default_tasks",
    "download",
    "holdout",
    "load",
    "shuffled_split",
]

SOURCES: dict[str, Source] = {
    source.name: source for source in (digits.SOURCE, cifar.CIFAR10, cifar.CIFAR100, mini_imagenet.SOURCE)
}


@dataclass(frozen=True)
class Availability:
    """A data set this package can read, and whether it is there.

    Parameters
    ----------
    name, description
        The name to ask for, and one line about it.
    where
        Where it was looked for; None for what is part of the package.
    present
        Whether it is there.
    downloadable
        Whether ``download`` can fetch it.
    """

    name: str
    description: str
    where: Path | None
    present: bool
    downloadable: bool


def data_root(root: str | Path | None = None) -> Path:
    """The folder data sets lie in: the argument, else SCRLEARN_DATA, else ~/.cache/scrlearn/data.

    >>> data_root("/data")
    PosixPath('/data')
    """
    chosen = root or os.environ.get("SCRLEARN_DATA") or "~/.cache/scrlearn/data"
    return Path(chosen).expanduser()


def _source(name: str) -> Source:
    if name.startswith(folder.PREFIX):
        return folder.source(name)
    if name not in SOURCES:
        hint = suggest(name, [*SOURCES, folder.PREFIX + "PATH"])
        raise InputError(f'There is no data set "{name}".{hint}')
    return SOURCES[name]


def _check_size(image_size: int | None) -> None:
    if image_size is not None and (isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1):
        raise InputError(f"image_size is {image_size!r}; expected a whole number of pixels, 1 or more, such as 84.")


def load(
    name: str,
    root: str | Path | None = None,
    *,
    download: bool = False,
    image_size: int | None = None,
    progress: bool = True,
) -> Dataset:
    """A data set by name.

    Parameters
    ----------
    name
        ``"digits"``, ``"cifar10"``, ``"cifar100"``, ``"mini-imagenet"``, or ``"folder:PATH"`` for any folder of class
        folders.
    root
        The folder data sets lie in; by default what ``data_root`` says.
    download
        Fetch the data set from its official place if it is not there (CIFAR).
    image_size
        Bring all images to this height and width. By default they keep their own.
    progress
        Show a bar on the terminal while reading or fetching takes long.

    Raises
    ------
    InputError
        There is no such data set.
    DataError
        It is missing, truncated, or not what it says it is.

    Example
    -------
    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test)
    (1442, 355)
    >>> load("cifar")
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: There is no data set "cifar". Did you mean "cifar10"?
    """
    source = _source(name)
    _check_size(image_size)
    where = data_root(root)
    if download and source.fetch is not None:
        source.fetch(where, progress)
    return source.load(where, image_size, progress)


def download(name: str, root: str | Path | None = None, *, progress: bool = True) -> Path | None:
    """Fetch a data set from its official place unless it is there; where it lies (None: part of the package)."""
    source, where = _source(name), data_root(root)
    if source.fetch is not None:
        source.fetch(where, progress)
    elif not source.present(where):
        raise InputError(
            f'"{name}" has no official place to download from. Put it at {source.where(where)}, or say where it lies '
            "with root=… (--data-root) or the environment variable SCRLEARN_DATA."
        )
    return source.where(where)


def available(root: str | Path | None = None) -> list[Availability]:
    """Every data set with a name, and whether it is there.

    >>> [(item.name, item.present) for item in available("/nowhere")]
    [('digits', True), ('cifar10', False), ('cifar100', False), ('mini-imagenet', False)]
    """
    where = data_root(root)
    return [
        Availability(
            source.name, source.description, source.where(where), source.present(where), source.fetch is not None
        )
        for source in SOURCES.values()
    ]


def check(name: str, root: str | Path | None = None, *, image_size: int | None = None, progress: bool = True) -> Report:
    """Read a whole data set and say whether it is complete: files, counts, and channel means where published.

    What is wrong with the data is told in the report, not raised.

    >>> check("digits").ok
    True
    """
    _check_size(image_size)
    return check_source(_source(name), data_root(root), image_size, progress)
