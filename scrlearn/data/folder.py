"""Any folder of class folders, read from disk while it streams, so that it may be larger than the memory."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scrlearn.data.base import Dataset, ImageSet, Source
from scrlearn.data.images import SUFFIXES, ImageFiles, image_size, list_images
from scrlearn.errors import DataError, InputError

PREFIX = "folder:"
_TEST_SHARE = 0.2
_PROBES = 10_000  # headers read at most to see whether all images have one size


class FolderImages(ImageSet):
    """Images in files, decoded when they are asked for.

    Parameters
    ----------
    root
        The folder the paths are relative to.
    paths, labels
        One path and one label per image.
    size
        Height and width; an image of another size is scaled until it covers this and its middle is taken.
    workers
        Processes that read ahead; by default one per CPU core, at most eight.

    Example
    -------
    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (8, 6), "red").save(root / "a.png")
    >>> images = FolderImages(root, ["a.png"], [0], (6, 8))
    >>> images.read(torch.tensor([0]))[0, :, 0, 0]
    tensor([255,   0,   0], dtype=torch.uint8)
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int],
        size: tuple[int, int],
        workers: int | None = None,
    ) -> None:
        self.files = ImageFiles(root, paths, size, workers)
        self._labels = torch.tensor(labels, dtype=torch.int64)

    @property
    def labels(self) -> Tensor:
        """One label per image."""
        return self._labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels (always 3), height, width of every image."""
        return 3, *self.files.size

    def __len__(self) -> int:
        """Number of images."""
        return len(self.files)

    def read(self, indices: Tensor) -> Tensor:
        """The images of these numbers, decoded by several threads."""
        return self.files.read(indices)

    def prefetch(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of each batch in order, read ahead by worker processes."""
        return self.files.prefetch(batches)


def natural_key(name: str) -> tuple[Any, ...]:
    """Sorts numbers in names by value: class2 before class10.

    >>> sorted(["class10", "class2"], key=natural_key)
    ['class2', 'class10']
    """
    parts = re.split(r"([0-9]+)", name)  # text and numbers by turns, so that like is compared with like
    return tuple(int(part) if number % 2 else part.casefold() for number, part in enumerate(parts)), name


def load_folder(path: str | Path, image_size: int | None = None, workers: int | None = None) -> Dataset:
    """A folder of class folders as a data set.

    With the subfolders ``train/`` and ``test/`` (or ``val/``), these are the two sets. Otherwise every class is split
    into 80% training and 20% test images (at least one) by a hash of the file names, so that the split is the same on
    every machine and whatever the seed.

    Classes are in natural order (``class2`` before ``class10``). Images lie anywhere below their class folder; hidden
    ones are ignored. All become RGB, turned as their EXIF tag says.

    Parameters
    ----------
    path
        The folder.
    image_size
        Images become ``image_size`` × ``image_size``. By default they keep the size of the first one, and it is an
        error if others are seen to differ (every header is looked at, in large folders 10,000 spread evenly).
    workers
        Processes that read ahead; by default one per CPU core, at most eight.

    Example
    -------
    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (root / name).mkdir()
    ...     for number in range(5):
    ...         Image.new("RGB", (8, 8)).save(root / name / f"{number}.png")
    >>> data = load_folder(root)
    >>> data.class_names, len(data.train), len(data.test)
    (('cat', 'dog'), 8, 2)
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"{root} {what}; expected a folder with one subfolder of images per class.")
    names, train, test = _list_sets(root)
    size = _one_size(root, [file for _, file in train + test], image_size)
    sets = [
        FolderImages(root, [file for _, file in part], [label for label, _ in part], size, workers)
        for part in (train, test)
    ]
    return Dataset(f"{PREFIX}{path}", sets[0], sets[1], names)


Listing = list[tuple[int, str]]  # label, path relative to the data set's folder


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(names, key=natural_key)


def _list_sets(root: Path) -> tuple[tuple[str, ...], Listing, Listing]:
    """Class names, training and test files."""
    unread: list[Path] = []
    second = next((name for name in ("test", "val") if _class_folders(root / name)), None)
    if second and _class_folders(root / "train"):
        names = _class_folders(root / "train")
        strange = [name for name in _class_folders(root / second) if name not in names]
        if strange:
            raise DataError(f"{root / second} has classes that {root / 'train'} lacks: {_some(strange)}.")
        sets = [_list(root, part, names, unread) for part in ("train", second)]
    else:
        names = _class_folders(root)
        sets = list(_split(_list(root, "", names, unread)))
    if unread:
        warnings.warn(
            f"{root} has images in formats that cannot be read ({len(unread)}, such as {min(unread)}); they are left "
            "out. Convert them to JPEG or PNG.",
            stacklevel=3,
        )
    for part, listing in zip(("training", "test"), sets, strict=True):
        with_images = {label for label, _ in listing}
        empty = [name for label, name in enumerate(names) if label not in with_images]
        if empty or not names:
            raise DataError(_lacking(root, names, part, empty, bool(second)))
    return tuple(names), sets[0], sets[1]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _lacking(root: Path, names: list[str], part: str, empty: list[str], has_parts: bool) -> str:
    kinds = " ".join(SUFFIXES)
    if not names:
        return f"{root} has no subfolders; expected one subfolder of images per class."
    need = "one image" if has_parts or part == "training" else "two images, one of them for the test"
    return (
        f"{root} has no {part} images for {_some(empty)}. Every class needs at least {need} "
        f"({kinds}). Add images, or remove the class's folder."
    )


def _list(root: Path, part: str, names: list[str], unread: list[Path]) -> Listing:
    return [
        (label, os.path.join(part, name, file))
        for label, name in enumerate(names)
        for file in list_images(root / part / name, unread)
    ]


def _split(listing: Listing) -> tuple[Listing, Listing]:
    """Of each class, the fifth with the smallest hashes are test images, at least one of two or more."""
    train: Listing = []
    test: Listing = []
    by_class: dict[int, list[str]] = {}
    for label, file in listing:
        by_class.setdefault(label, []).append(file)
    for label, files in by_class.items():
        count = max(1, round(len(files) * _TEST_SHARE)) if len(files) > 1 else 0
        chosen = set(sorted(files, key=_name_hash)[:count])
        train += [(label, file) for file in files if file not in chosen]
        test += [(label, file) for file in files if file in chosen]
    return train, test


def _name_hash(file: str) -> bytes:
    return hashlib.sha256(os.fsencode(Path(file).as_posix())).digest()


def _one_size(root: Path, files: list[str], wanted: int | None) -> tuple[int, int]:
    """Height and width of the set's images: what was asked for, or what all of them have."""
    if wanted is not None:
        return wanted, wanted
    sizes: dict[tuple[int, int], str] = {}  # each size with the first image that has it
    unreadable: list[str] = []
    for number in np.unique(np.linspace(0, len(files) - 1, min(len(files), _PROBES)).astype(int)).tolist():
        try:
            sizes.setdefault(image_size(root / files[number]), files[number])
        except DataError as error:
            unreadable.append(str(error) if not unreadable else files[number])
    if unreadable:
        more = f" Neither can {_some(unreadable[1:])}." if len(unreadable) > 1 else ""
        raise DataError(unreadable[0] + more)
    if len(sizes) > 1:
        examples = [f"{file} is {width}×{height}" for (height, width), file in sizes.items()]
        raise DataError(
            f"The images in {root} have {len(sizes)} different sizes: {examples[0]} and {examples[1]} (width × "
            "height). Say which size they shall get, such as image_size=84 (--image-size 84)."
        )
    return next(iter(sizes))


def source(name: str) -> Source:
    """The source for a name ``folder:PATH``."""
    path = name.removeprefix(PREFIX)
    if not path:
        raise InputError(f'"{name}" names no folder; write {PREFIX} and the path of a folder of class folders.')
    where = Path(path).expanduser()
    return Source(
        name=name,
        description="a folder of class folders",
        where=lambda root: where,
        present=lambda root: where.is_dir(),
        load=lambda root, size, progress: load_folder(path, size),
    )
