"""Small data sets in the real layouts, written by the tests themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_layouts import dump, solid

from scrlearn.data.mini_imagenet import CLASS_ORDER, SPLITS


@pytest.fixture
def cifar10_root(tmp_path: Path) -> Path:
    """CIFAR-10's files with 20 images each; every pixel of image i of file f is 40 f + i."""
    folder = tmp_path / "cifar-10-batches-py"
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data = np.repeat(np.arange(20, dtype=np.uint8)[:, None] + 40 * number, 3072, axis=1)
        dump({b"data": data, b"labels": [i % 10 for i in range(20)], b"batch_label": b"x"}, folder / name)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    dump({b"label_names": [name.encode() for name in names], b"num_vis": 3072}, folder / "batches.meta")
    return tmp_path


@pytest.fixture
def cifar100_root(tmp_path: Path) -> Path:
    """CIFAR-100's files with 200 and 100 images; red, green, blue planes are 1, 2, 3."""
    folder = tmp_path / "cifar-100-python"
    for name, count in (("train", 200), ("test", 100)):
        data = np.repeat(np.array([1, 2, 3], dtype=np.uint8), 1024)[None].repeat(count, axis=0)
        labels = [i % 100 for i in range(count)]
        dump({b"data": data, b"fine_labels": labels, b"coarse_labels": [0] * count}, folder / name)
    dump({b"fine_label_names": [f"class {i}".encode() for i in range(100)]}, folder / "meta")
    return tmp_path


@pytest.fixture
def mini_folders(tmp_path: Path) -> Path:
    """Mini-ImageNet's folders with 3 training images and 1 test image a class; red is the class's place."""
    for part, count in (("train", 3), ("val", 1)):
        for place, name in enumerate(CLASS_ORDER):
            for number in range(count):
                solid(tmp_path / "mini-imagenet" / part / name / f"{name}{number:08}.jpg", (place * 2, 0, 0), (84, 84))
    return tmp_path


@pytest.fixture
def mini_pickles(tmp_path: Path) -> Path:
    """The three pickle files with 6 images a class; a pixel is (place in the stream, number in the class, 7)."""
    for part, names in SPLITS.items():
        images, members = [], {}
        for name in reversed(names):  # the files need not be sorted
            members[name] = list(range(len(images), len(images) + 6))
            images += [np.full((84, 84, 3), (CLASS_ORDER.index(name), number, 7), np.uint8) for number in range(6)]
        content = {"image_data": np.stack(images), "class_dict": members}
        dump(content, tmp_path / "mini-imagenet" / f"mini-imagenet-cache-{part}.pkl", protocol=4)
    return tmp_path


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder of class folders: ``make_folder({"cat": 5}, part="train")``; red is the number of the image."""

    def make(classes: dict[str, int], part: str = "", size: tuple[int, int] = (8, 8)) -> Path:
        root = tmp_path / "photos"
        for place, (name, count) in enumerate(classes.items()):
            for number in range(count):
                solid(root / part / name / f"{number}.png", (number, 100 + place, 0), size)
        return root

    return make
