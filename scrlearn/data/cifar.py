"""CIFAR-10 and CIFAR-100, from the official Python (pickle) folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scrlearn.data.base import ArrayImages, Dataset, Expected, Source, resize_dataset
from scrlearn.data.fetch import Archive, fetch
from scrlearn.data.unpickle import read_pickle
from scrlearn.errors import DataError

_HOME = "https://www.cs.toronto.edu/~kriz"
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    """Names of the files and of what is in them."""

    name: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    class_names: str
    archive: Archive


_CIFAR10 = _Layout(
    name="cifar10",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    labels="labels",
    class_names="label_names",
    archive=Archive(
        url=f"{_HOME}/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
    ),
)
_CIFAR100 = _Layout(
    name="cifar100",
    train=("train",),
    test="test",
    meta="meta",
    labels="fine_labels",
    class_names="fine_label_names",
    archive=Archive(
        url=f"{_HOME}/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        files=("train", "test", "meta"),
    ),
)


def _value(content: dict[str, Any], key: str, path: Path) -> Any:
    if key not in content:
        raise DataError(
            f'The file {path} has no "{key}" (it has: {", ".join(map(str, content)) or "nothing"}); '
            "this is not the official file. Get the data set again."
        )
    return content[key]


def _read_batch(path: Path, label_key: str) -> tuple[np.ndarray[Any, Any], list[int]]:
    content = read_pickle(path)
    rows, labels = _value(content, "data", path), _value(content, label_key, path)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _PIXELS:
        given = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise DataError(f'The "data" of {path} is {given}; expected uint8 of shape (N, {_PIXELS}). Get the file again.')
    if not isinstance(labels, list) or len(labels) != len(rows) or not all(isinstance(label, int) for label in labels):
        raise DataError(
            f'The "{label_key}" of {path} must be a list of {len(rows)} integers, one per image. Get the file again.'
        )
    return rows, labels


def _read_images(folder: Path, files: tuple[str, ...], label_key: str) -> ArrayImages:
    batches = [_read_batch(folder / name, label_key) for name in files]
    images = np.concatenate([rows for rows, _ in batches]).reshape(-1, *_SHAPE)
    labels = [label for _, part in batches for label in part]
    return ArrayImages(torch.from_numpy(images), torch.tensor(labels, dtype=torch.int64))


def _load(layout: _Layout, root: Path, image_size: int | None) -> Dataset:
    folder = root / layout.archive.folder
    missing = [name for name in layout.archive.files if not (folder / name).is_file()]
    if missing:
        what = f"lacks {', '.join(missing)}" if folder.is_dir() else "does not exist"
        raise DataError(
            f'"{layout.name}" was looked for in {folder}, which {what}. Say where it lies with root=… (--data-root) or '
            f"the environment variable SCRLEARN_DATA, or fetch it from {layout.archive.url} with download=True "
            "(--download)."
        )
    meta = folder / layout.meta
    names = _value(read_pickle(meta), layout.class_names, meta)
    texts = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    train = _read_images(folder, layout.train, layout.labels)
    test = _read_images(folder, (layout.test,), layout.labels)
    return resize_dataset(Dataset(layout.name, train, test, texts), image_size)


def _source(layout: _Layout, description: str, expected: Expected) -> Source:
    archive = layout.archive
    return Source(
        name=layout.name,
        description=description,
        where=lambda root: root / archive.folder,
        present=lambda root: archive.present(root),
        load=lambda root, image_size, progress: _load(layout, root, image_size),
        fetch=lambda root, progress: fetch(archive, root, progress=progress),
        expected=expected,
    )


CIFAR10 = _source(
    _CIFAR10,
    "CIFAR-10, 10 classes, 32×32 colour, 50,000 / 10,000 images",
    Expected(5000, 1000, 10, (0.4914, 0.4822, 0.4465)),
)
CIFAR100 = _source(
    _CIFAR100,
    "CIFAR-100, 100 classes, 32×32 colour, 50,000 / 10,000 images",
    Expected(500, 100, 100, (0.5071, 0.4865, 0.4409)),
)
