"""The real data sets, where the environment variable SCRLEARN_DATA says they lie."""

from __future__ import annotations

import os

import pytest
import torch

from scrlearn.data import available, check, class_incremental, default_tasks, load

pytestmark = pytest.mark.data


def need(name: str) -> None:
    if not os.environ.get("SCRLEARN_DATA"):
        pytest.skip("SCRLEARN_DATA is not set: it says where the real data sets lie")
    (item,) = [item for item in available() if item.name == name]
    if not item.present:
        pytest.skip(f"{name} is not at {item.where}")


@pytest.mark.parametrize(
    ("name", "means", "train", "test"),
    [
        ("cifar10", (0.4914, 0.4822, 0.4465), 5000, 1000),
        ("cifar100", (0.5071, 0.4865, 0.4409), 500, 100),
    ],
)
def test_cifar(name: str, means: tuple[float, ...], train: int, test: int) -> None:
    need(name)
    data = load(name)
    images = data.train.images  # type: ignore[attr-defined]
    assert (images.double().mean((0, 2, 3)) / 255).tolist() == pytest.approx(means, abs=1e-4)
    assert torch.bincount(data.train.labels).tolist() == [train] * data.num_classes
    assert torch.bincount(data.test.labels).tolist() == [test] * data.num_classes
    assert data.image_shape == (3, 32, 32)
    assert check(name, progress=False).ok


def test_class_names_of_cifar() -> None:
    need("cifar10")
    need("cifar100")
    assert load("cifar10").class_names[::9] == ("airplane", "truck")
    names = load("cifar100").class_names
    assert (names[0], names[99], len(names)) == ("apple", "worm", 100)


def test_mini_imagenet() -> None:
    need("mini-imagenet")
    data = load("mini-imagenet", progress=False)
    assert torch.bincount(data.train.labels).tolist() == [500] * 100
    assert torch.bincount(data.test.labels).tolist() == [100] * 100
    assert data.image_shape == (3, 84, 84)
    sample = data.train.read(torch.arange(0, 50_000, 50)).float().mean((0, 2, 3)) / 255
    assert sample.tolist() == pytest.approx((0.473, 0.449, 0.405), abs=0.02)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_stream_of_the_protocol(name: str) -> None:
    need(name)
    data = load(name)
    stream = class_incremental(data, tasks=default_tasks(data))
    assert [len(task.train) for task in stream.tasks] == [50_000 // len(stream.tasks)] * len(stream.tasks)
    assert sum(stream.steps(task) for task in stream.tasks) == 5000
    per_task = data.num_classes // len(stream.tasks)
    assert stream.tasks[1].classes == tuple(range(per_task, 2 * per_task))


def test_mini_imagenet_streams_from_disk_as_a_folder() -> None:
    need("mini-imagenet")
    data = load(f"folder:{os.environ['SCRLEARN_DATA']}/mini-imagenet")
    assert (data.num_classes, len(data.train), len(data.test)) == (100, 50_000, 10_000)
    stream = class_incremental(data, tasks=10, limit=20)
    images = torch.cat([images for images, _ in stream.batches(0)])
    assert images.shape == (200, 3, 84, 84)
    assert torch.equal(images, data.train.read(stream.order(0).flatten()))
