from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from data_layouts import dump

from scrlearn.data import load
from scrlearn.errors import DataError


def test_cifar10_is_read_in_the_order_of_its_files(cifar10_root: Path) -> None:
    data = load("cifar10", cifar10_root)
    assert (len(data.train), len(data.test)) == (100, 20)
    assert data.image_shape == (3, 32, 32)
    assert data.class_names[0] == "airplane"
    assert data.num_classes == 10
    images = data.train.read(torch.tensor([0, 21, 99]))
    assert images.dtype == torch.uint8
    assert images[:, 0, 0, 0].tolist() == [0, 41, 179]
    assert data.train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.test.read(torch.tensor([3]))[0, 2, 31, 31] == 203


def test_cifar100_has_fine_labels_and_channel_planes(cifar100_root: Path) -> None:
    data = load("cifar100", cifar100_root)
    assert (len(data.train), len(data.test)) == (200, 100)
    assert data.class_names[99] == "class 99"
    assert data.train.labels[150] == 50
    assert data.train.read(torch.tensor([7]))[0, :, 5, 9].tolist() == [1, 2, 3]


def test_pixels_are_rows_of_rows(tmp_path: Path, cifar100_root: Path) -> None:
    row = np.arange(3072) % 251
    content = {"data": np.tile(row.astype(np.uint8), (2, 1)), "fine_labels": [0, 1]}
    dump(content, cifar100_root / "cifar-100-python" / "train")
    image = load("cifar100", cifar100_root).train.read(torch.tensor([1]))[0]
    assert image[2, 3, 4] == (2 * 1024 + 3 * 32 + 4) % 251


def test_image_size_resizes(cifar10_root: Path) -> None:
    data = load("cifar10", cifar10_root, image_size=16)
    assert data.image_shape == (3, 16, 16)
    assert data.train.read(torch.tensor([21])).unique().tolist() == [41]


def test_missing_folder_says_where_it_looked_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar-10-batches-py, which does not exist") as caught:
        load("cifar10", tmp_path)
    for word in (str(tmp_path), "SCRLEARN_DATA", "download=True", "cifar-10-python.tar.gz"):
        assert word in str(caught.value)


def test_missing_file_is_named(cifar10_root: Path) -> None:
    (cifar10_root / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(DataError, match="lacks data_batch_3"):
        load("cifar10", cifar10_root)


@pytest.mark.parametrize("name", ["data_batch_5", "test_batch", "batches.meta"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_truncated_files_are_named(cifar10_root: Path, name: str, share: float) -> None:
    path = cifar10_root / "cifar-10-batches-py" / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=rf"{name} is truncated or damaged"):
        load("cifar10", cifar10_root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [0, 1]}, r"uint8 of shape \(2, 3071\)"),
        ({"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]}, "float32"),
        ({"data": [1, 2], "labels": [0, 1]}, "list"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "2 integers"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, "cat"]}, "2 integers"),
        ({"data": np.zeros((2, 3072), np.uint8)}, 'no "labels"'),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "from 0 to 10"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [-1, 0]}, "from -1 to"),
    ],
)
def test_wrong_content_is_refused(cifar10_root: Path, change: dict[str, object], message: str) -> None:
    path = cifar10_root / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps(change))
    with pytest.raises(DataError, match=message):
        load("cifar10", cifar10_root)
