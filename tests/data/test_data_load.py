from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from scrlearn.data import ArrayImages, Dataset, available, check, data_root, load
from scrlearn.errors import DataError, InputError


def test_digits_are_all_there_once_and_balanced() -> None:
    data = load("digits")
    assert data.image_shape == (1, 8, 8)
    assert data.class_names == tuple("0123456789")
    assert len(data.train) + len(data.test) == 1797
    counts = [torch.bincount(part.labels) for part in (data.train, data.test)]
    share = counts[1] / (counts[0] + counts[1])
    assert ((share > 0.19) & (share < 0.205)).all()
    together = torch.cat([part.read(torch.arange(len(part))) for part in (data.train, data.test)]).flatten(1)
    assert (together.min(), together.max()) == (0, 255)
    original = (torch.from_numpy(load_digits().data) * 255 / 16).round().to(torch.uint8)
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, original.tolist()))


def test_digits_split_is_fixed() -> None:
    first, second = load("digits"), load("digits")
    assert torch.equal(first.test.read(torch.arange(355)), second.test.read(torch.arange(355)))
    assert torch.equal(first.train.labels, second.train.labels)


def test_image_size_of_digits() -> None:
    small, large = load("digits"), load("digits", image_size=16)
    assert large.image_shape == (1, 16, 16)
    mean = [data.train.read(torch.arange(100)).float().mean() for data in (small, large)]
    assert abs(mean[0] - mean[1]) < 3
    assert load("digits", image_size=8).train.shape == (1, 8, 8)


@pytest.mark.parametrize(("name", "hint"), [("cifar", "cifar10"), ("CIFAR100", "cifar100"), ("miniimagenet", "mini-")])
def test_unknown_names_get_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f'no data set "{name}". Did you mean "{hint}'):
        load(name)


def test_unknown_name_without_neighbour_lists_all() -> None:
    with pytest.raises(InputError, match=r"Known: cifar10, cifar100, digits, folder:PATH, mini-imagenet"):
        load("zzz")


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "84"])
def test_bad_image_size(size: object) -> None:
    with pytest.raises(InputError, match="image_size"):
        load("digits", image_size=size)  # type: ignore[arg-type]


def test_data_root_prefers_argument_then_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCRLEARN_DATA", "/from/environment")
    assert data_root(tmp_path) == tmp_path
    assert data_root() == Path("/from/environment")
    monkeypatch.delenv("SCRLEARN_DATA")
    assert data_root() == Path.home() / ".cache" / "scrlearn" / "data"
    assert data_root("~/x") == Path.home() / "x"


def test_available_says_what_is_there(cifar10_root: Path) -> None:
    found = {item.name: item for item in available(cifar10_root)}
    assert {name: item.present for name, item in found.items()} == {
        "digits": True,
        "cifar10": True,
        "cifar100": False,
        "mini-imagenet": False,
    }
    assert found["cifar100"].where == cifar10_root / "cifar-100-python"
    assert found["digits"].where is None
    assert all(item.description for item in found.values())
    (cifar10_root / "cifar-10-batches-py" / "test_batch").unlink()
    assert not {item.name: item for item in available(cifar10_root)}["cifar10"].present


def test_available_sees_both_layouts_of_mini_imagenet(mini_pickles: Path) -> None:
    assert available(mini_pickles)[-1].present
    (mini_pickles / "mini-imagenet" / "mini-imagenet-cache-val.pkl").unlink()
    assert not available(mini_pickles)[-1].present
    for part in ("train", "val"):
        (mini_pickles / "mini-imagenet" / part).mkdir()
    assert available(mini_pickles)[-1].present


def test_check_of_a_good_set() -> None:
    report = check("digits")
    assert report.ok
    assert (report.classes, report.train, report.test) == (10, 1442, 355)
    assert report.channel_means == pytest.approx((0.3052,), abs=1e-4)
    pixels = load("digits").train.images.double() / 255
    assert report.channel_deviations == pytest.approx((float(pixels.std(correction=0)),))


def test_check_finds_wrong_counts_and_means(cifar10_root: Path) -> None:
    report = check("cifar10", cifar10_root)
    assert not report.ok
    assert report.train_per_class == (10, 10)
    assert any("10 classes do not have 5000 training images: airplane has 10" in text for text in report.problems)
    assert any("channel means" in text and "0.4914, 0.4822, 0.4465" in text for text in report.problems)


def test_check_tells_of_truncated_and_missing_files(cifar10_root: Path) -> None:
    path = cifar10_root / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = check("cifar10", cifar10_root).problems
    assert "data_batch_2 is truncated" in problem
    (problem,) = check("cifar100", cifar10_root).problems
    assert "does not exist" in problem


@pytest.mark.parametrize("size", [None, 8])
def test_check_names_every_image_with_a_damaged_head(make_folder: Callable[..., Path], size: int | None) -> None:
    root = make_folder({"a": 30, "b": 5})
    for name in ("a/7.png", "a/20.png", "b/0.png"):
        (root / name).write_bytes(b"no image")
    problems = "\n".join(check(f"folder:{root}", image_size=size).problems)
    assert all(name in problems for name in ("a/7.png", "a/20.png", "b/0.png"))


def test_check_names_every_damaged_image(make_folder: Callable[..., Path]) -> None:
    root = make_folder({"a": 30, "b": 5})
    for name in ("a/7.png", "a/20.png", "b/0.png"):
        (root / name).write_bytes((root / name).read_bytes()[:-25])
    report = check(f"folder:{root}")
    assert len(report.problems) == 3
    assert all(any(name in text for text in report.problems) for name in ("a/7.png", "a/20.png", "b/0.png"))
    assert (report.classes, report.train + report.test) == (2, 35)
    assert report.channel_means[2] == 0


def test_check_of_an_unknown_name_is_an_error() -> None:
    with pytest.raises(InputError):
        check("zzz")


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2)),
    ],
)
def test_array_images_refuse_what_they_cannot_be(images: torch.Tensor, labels: torch.Tensor) -> None:
    with pytest.raises(InputError, match="expected"):
        ArrayImages(images, labels)


def test_dataset_refuses_parts_that_do_not_fit() -> None:
    def images(count: int, size: int = 4, label: int = 0) -> ArrayImages:
        return ArrayImages(torch.zeros(count, 1, size, size, dtype=torch.uint8), torch.full((count,), label))

    for train, test, message in (
        (images(2), images(0), "2 training and 0 test"),
        (images(2), images(2, size=5), "must be equal"),
        (images(2), images(2, label=1), "from 1 to 1"),
    ):
        with pytest.raises(DataError, match=message):
            Dataset("x", train, test, ("only",))
