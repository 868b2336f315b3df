from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_layouts import dump

from scrlearn.data import load
from scrlearn.data.mini_imagenet import CLASS_ORDER, SPLITS
from scrlearn.errors import DataError


def test_class_order_is_that_of_the_paper() -> None:
    assert [len(split) for split in SPLITS.values()] == [64, 16, 20]
    assert len(set(CLASS_ORDER)) == 100
    assert all(list(split) == sorted(split) for split in SPLITS.values())
    assert (CLASS_ORDER[0], CLASS_ORDER[63], CLASS_ORDER[64], CLASS_ORDER[80], CLASS_ORDER[99]) == (
        "n01532829",
        "n13133613",
        "n01855672",
        "n01930112",
        "n07613480",
    )


def test_folders(mini_folders: Path) -> None:
    data = load("mini-imagenet", mini_folders, progress=False)
    assert (len(data.train), len(data.test)) == (300, 100)
    assert data.image_shape == (3, 84, 84)
    assert data.class_names == CLASS_ORDER
    assert data.train.labels.tolist() == [place for place in range(100) for _ in range(3)]
    red = data.train.read(torch.arange(300))[:, 0].float().mean((1, 2))
    assert (red - 2 * data.train.labels).abs().max() <= 2  # JPEG is not exact


def test_folders_at_another_size(mini_folders: Path) -> None:
    assert load("mini-imagenet", mini_folders, image_size=32).image_shape == (3, 32, 32)


def test_pickles(mini_pickles: Path) -> None:
    data = load("mini-imagenet", mini_pickles)
    assert (len(data.train), len(data.test)) == (500, 100)
    assert data.class_names == CLASS_ORDER
    pixels = data.train.read(torch.arange(500))[:, :, 83, 0]
    assert pixels[:, 0].tolist() == data.train.labels.tolist() == [place for place in range(100) for _ in range(5)]
    assert pixels[:5, 1].tolist() == [0, 1, 2, 3, 4]
    assert pixels[:, 2].unique().tolist() == [7]
    assert data.test.read(torch.arange(100))[:, 1, 0, 0].unique().tolist() == [5]
    assert data.train.images.is_contiguous()  # type: ignore[attr-defined]


def test_pickles_in_the_root_itself(mini_pickles: Path) -> None:
    for path in (mini_pickles / "mini-imagenet").iterdir():
        shutil.move(path, mini_pickles / path.name)
    assert len(load("mini-imagenet", mini_pickles).train) == 500


def test_missing_data_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train/ and val/.*cache-train\.pkl"):
        load("mini-imagenet", tmp_path)


def test_missing_pickle_is_named(mini_pickles: Path) -> None:
    (mini_pickles / "mini-imagenet" / "mini-imagenet-cache-val.pkl").unlink()
    with pytest.raises(DataError, match=r"lacks mini-imagenet-cache-val\.pkl"):
        load("mini-imagenet", mini_pickles)


def test_truncated_pickle_is_named(mini_pickles: Path) -> None:
    path = mini_pickles / "mini-imagenet" / "mini-imagenet-cache-test.pkl"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cache-test\.pkl is truncated"):
        load("mini-imagenet", mini_pickles)


def test_missing_and_strange_class_folders(mini_folders: Path) -> None:
    train = mini_folders / "mini-imagenet" / "train"
    (train / "n01532829").rename(train / "n99999999")
    with pytest.raises(DataError, match=r"1 missing \(n01532829, …\) and 1 strange \(n99999999, …\)"):
        load("mini-imagenet", mini_folders)


def test_damaged_image_is_named(mini_folders: Path) -> None:
    path = mini_folders / "mini-imagenet" / "val" / CLASS_ORDER[70] / f"{CLASS_ORDER[70]}00000000.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=f"{path.name} cannot be read"):
        load("mini-imagenet", mini_folders, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_data": np.zeros((4, 32, 32, 3), np.uint8)}, "image_data"),
        ({"image_data": None}, "NoneType"),
        ({"class_dict": [1]}, "class_dict"),
        ({"class_dict": {"n01532829": [0, 1]}}, "63 missing"),
        ({"class_dict": {name: [0, 10_000] for name in SPLITS["train"]}}, "beyond"),
        ({"class_dict": {name: [0.5, 1.5] for name in SPLITS["train"]}}, "image numbers"),
    ],
)
def test_wrong_pickle_content(mini_pickles: Path, change: dict[str, object], message: str) -> None:
    path = mini_pickles / "mini-imagenet" / "mini-imagenet-cache-train.pkl"
    content = pickle.loads(path.read_bytes())
    dump({**content, **change}, path, protocol=4)
    with pytest.raises(DataError, match=message):
        load("mini-imagenet", mini_pickles)
