"""Mini-ImageNet: 100 classes of 84×84 images, as image folders or as the three few-shot pickle files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scrlearn.data.base import ArrayImages, Dataset, Expected, Source, resize_dataset
from scrlearn.data.images import ImageFiles, list_images, read_ahead
from scrlearn.data.progress import progress_bar
from scrlearn.data.unpickle import read_pickle
from scrlearn.errors import DataError

_SIZE = 84
_BLOCK = 250  # images that a worker decodes at a time
_PARTS = ("train", "val", "test")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The few-shot splits of Ravi and Larochelle, each sorted; one after the other they are the order of the stream.
SPLITS: dict[str, tuple[str, ...]] = {
    "train": _names(
        """
        n01532829 n01558993 n01704323 n01749939 n01770081 n01843383 n01910747 n02074367 n02089867 n02091831 n02101006
        n02105505 n02108089 n02108551 n02108915 n02111277 n02113712 n02120079 n02165456 n02457408 n02606052 n02687172
        n02747177 n02795169 n02823428 n02966193 n03017168 n03047690 n03062245 n03207743 n03220513 n03337140 n03347037
        n03400231 n03476684 n03527444 n03676483 n03838899 n03854065 n03888605 n03908618 n03924679 n03998194 n04067472
        n04243546 n04251144 n04258138 n04275548 n04296562 n04389033 n04435653 n04443257 n04509417 n04515003 n04596742
        n04604644 n04612504 n06794110 n07584110 n07697537 n07747607 n09246464 n13054560 n13133613
        """
    ),
    "val": _names(
        """
        n01855672 n02091244 n02114548 n02138441 n02174001 n02950826 n02971356 n02981792 n03075370 n03417042 n03535780
        n03584254 n03770439 n03773504 n03980874 n09256479
        """
    ),
    "test": _names(
        """
        n01930112 n01981276 n02099601 n02110063 n02110341 n02116738 n02129165 n02219486 n02443484 n02871525 n03127925
        n03146219 n03272010 n03544143 n03775546 n04146614 n04149813 n04418357 n04522168 n07613480
        """
    ),
}
CLASS_ORDER = SPLITS["train"] + SPLITS["val"] + SPLITS["test"]


def _pickles(root: Path) -> list[Path] | None:
    """The three pickle files, in the data root or in mini-imagenet/ in it; None if none of them is there."""
    for folder in (root / "mini-imagenet", root):
        files = [folder / f"mini-imagenet-cache-{part}.pkl" for part in _PARTS]
        if any(file.is_file() for file in files):
            return files
    return None


def _folders(root: Path) -> Path | None:
    """The folder with the class folders; None if it is not there."""
    folder = root / "mini-imagenet"
    return folder if (folder / "train").is_dir() and (folder / "val").is_dir() else None


def load_mini_imagenet(root: Path, image_size: int | None = None, progress: bool = True) -> Dataset:
    """Mini-ImageNet in memory (1.3 GB).

    Read from ``mini-imagenet/train/<class>/*.jpg`` and ``mini-imagenet/val/<class>/*.jpg`` (500 and 100 images a
    class), or from ``mini-imagenet-cache-train.pkl``, ``…-val.pkl`` and ``…-test.pkl`` (600 images a class, of which
    the first 500 are for training, the others for the test). When both are there, the folders are read.

    Classes are in the paper's order: the 64, the 16, the 20 classes of the few-shot splits, each sorted.

    References
    ----------
    Vinyals et al., "Matching Networks for One Shot Learning", 2016; the splits are of Ravi and Larochelle, 2017.
    """
    folder, pickles = _folders(root), _pickles(root)
    if folder is not None:
        train, test = (_read_folder(folder / part, image_size or _SIZE, progress) for part in ("train", "val"))
        return Dataset("mini-imagenet", train, test, CLASS_ORDER)
    if pickles is not None:
        return resize_dataset(_read_pickles(pickles), image_size)
    raise DataError(
        f'"mini-imagenet" was looked for in {root / "mini-imagenet"}; expected the folders train/ and val/ with one '
        "folder of images per class, or mini-imagenet-cache-train.pkl, -val.pkl and -test.pkl. Say where it lies with "
        "root=… (--data-root) or the environment variable SCRLEARN_DATA. It has no official place to download from."
    )


def _compare_classes(found: set[str], expected: tuple[str, ...], where: Path) -> None:
    missing, strange = sorted(set(expected) - found), sorted(found - set(expected))
    if missing or strange:
        examples = [
            f"{len(names)} {what} ({names[0]}, …)"
            for names, what in ((missing, "missing"), (strange, "strange"))
            if names
        ]
        raise DataError(
            f"{where} should hold {len(expected)} classes of Mini-ImageNet: {' and '.join(examples)}. Unpack the data "
            "set again; other classes can be read with folder:PATH."
        )


def _read_folder(folder: Path, size: int, progress: bool) -> ArrayImages:
    found = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    _compare_classes(found, CLASS_ORDER, folder)
    paths, labels = [], []
    for label, name in enumerate(CLASS_ORDER):
        names = list_images(folder / name)
        if not names:
            raise DataError(f"The folder {folder / name} has no images. Unpack the data set again.")
        paths += [f"{name}/{image}" for image in names]
        labels += [label] * len(names)
    files = ImageFiles(folder, paths, (size, size))
    return ArrayImages(_decode_all(files, progress), torch.tensor(labels, dtype=torch.int64))


def _decode_all(files: ImageFiles, progress: bool) -> Tensor:
    """Every image, decoded once by all workers together."""
    images = torch.empty(len(files), 3, *files.size, dtype=torch.uint8)
    blocks = torch.split(torch.arange(len(files)), _BLOCK)
    done = 0
    with progress_bar(f"Reading {files.root}", len(files), show=progress) as advance:
        for block in read_ahead(files.decode_block, blocks, files.workers):
            images[done : done + len(block)] = torch.from_numpy(block)
            done += len(block)
            advance(len(block))
    return images


def _read_pickles(files: list[Path]) -> Dataset:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{files[0].parent} lacks {', '.join(missing)}; all three files are needed.")
    parts: dict[str, list[Tensor]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for file, split in zip(files, SPLITS.values(), strict=True):
        for name, images in _read_cache(file, split).items():
            cut = len(images) * 5 // 6  # 500 of 600
            for part, rows in (("train", images[:cut]), ("test", images[cut:])):
                parts[part].append(torch.from_numpy(rows).permute(0, 3, 1, 2))
                labels[part] += [CLASS_ORDER.index(name)] * len(rows)
    sets = [ArrayImages(torch.cat(parts[part]), torch.tensor(labels[part])) for part in ("train", "test")]
    return Dataset("mini-imagenet", sets[0], sets[1], CLASS_ORDER)


def _read_cache(file: Path, split: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Images of one pickle file by class, in the order of ``split``."""
    content = read_pickle(file)
    images, members = content.get("image_data"), content.get("class_dict")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_SIZE, _SIZE, 3):
        given = f"{images.dtype} of shape {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(f'The "image_data" of {file} is {given}; expected uint8 of shape (N, {_SIZE}, {_SIZE}, 3).')
    if not isinstance(members, dict):
        raise DataError(f'The "class_dict" of {file} is {type(members).__name__}; expected class names with indices.')
    _compare_classes(set(members), split, file)
    chosen = {}
    for name in split:
        indices = np.asarray(members[name])
        if indices.ndim != 1 or len(indices) < 2 or indices.dtype.kind not in "iu":
            raise DataError(f'The class {name} in "class_dict" of {file} must list two or more image numbers.')
        if indices.min() < 0 or indices.max() >= len(images):
            raise DataError(f'The class {name} in "class_dict" of {file} names images beyond the {len(images)} there.')
        chosen[name] = images[indices]
    return chosen


def _present(root: Path) -> bool:
    pickles = _pickles(root)
    return _folders(root) is not None or (pickles is not None and all(file.is_file() for file in pickles))


SOURCE = Source(
    name="mini-imagenet",
    description="Mini-ImageNet, 100 classes, 84×84 colour, 50,000 / 10,000 images",
    where=lambda root: root / "mini-imagenet",
    present=_present,
    load=load_mini_imagenet,
    expected=Expected(500, 100, 100),
)
