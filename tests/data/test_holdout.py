"""Held-out training images, and streams that end early: what settings are chosen with."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scrlearn.data import ArrayImages, Dataset, class_incremental, holdout, load, shuffled_split
from scrlearn.data.base import SelectedImages
from scrlearn.data.images import ImageFiles
from scrlearn.errors import DataError, InputError
from scrlearn.experiments import RunConfig, run
from scrlearn.experiments.identity import run_key

DIGITS = load("digits")


def rows(images):
    return {bytes(image.numpy()) for image in images.read(torch.arange(len(images)))}


def numbered(counts):
    """A data set whose training images carry their number; its test images are all 255."""
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    train = ArrayImages(torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1), labels)
    test = ArrayImages(torch.full((len(counts), 1, 1, 1), 255, dtype=torch.uint8), torch.arange(len(counts)))
    return Dataset("numbered", train, test, tuple(f"c{label}" for label in range(len(counts))))


def numbers(images):
    return images.read(torch.arange(len(images))).flatten().tolist()


# ---------------------------------------------------------------- held-out images


def test_training_images_are_divided_and_test_images_left_out():
    held = holdout(numbered([20, 10, 40]), 0.25)
    train, test = numbers(held.train), numbers(held.test)
    assert sorted(train + test) == list(range(70))
    assert held.test.labels.bincount().tolist() == [5, 2, 10]
    assert held.train.labels.bincount().tolist() == [15, 8, 30]
    labels = [0] * 20 + [1] * 10 + [2] * 40
    assert held.test.labels.tolist() == [labels[n] for n in test]
    assert held.train.labels.tolist() == [labels[n] for n in train]
    assert held.held_out == 0.25
    assert (held.name, held.class_names) == ("numbered", ("c0", "c1", "c2"))
    assert isinstance(held.train, ArrayImages)  # as fast as before


def test_the_seed_alone_chooses():
    data = numbered([30, 30])
    chosen = [numbers(holdout(data, 0.2, seed=seed).test) for seed in (0, 0, 1)]
    torch.manual_seed(5)
    assert chosen[0] == chosen[1] == numbers(holdout(data, 0.2).test)
    assert chosen[0] != chosen[2]
    assert set(numbers(holdout(data, 0.1).test)) < set(chosen[0])  # a smaller share is a part of a larger one


def test_at_least_one_and_never_all():
    held = holdout(numbered([2, 3]), 0.01)
    assert held.test.labels.tolist() == [0, 1]
    held = holdout(numbered([2, 3]), 0.99)
    assert held.train.labels.tolist() == [0, 1]


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_a_share_out_of_range(share):
    with pytest.raises(InputError, match="The share held out is"):
        holdout(DIGITS, share)


def test_a_class_with_one_image_cannot_be_divided():
    with pytest.raises(DataError, match='"c1" of "numbered" has 1 training images'):
        holdout(numbered([5, 1]))


@pytest.fixture
def folder(tmp_path: Path) -> Dataset:
    random = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(tmp_path / name / f"{number}.png")
    return load(f"folder:{tmp_path}")


def test_a_folder_is_read_when_it_is_asked_for(folder, monkeypatch):
    read = []
    decode = ImageFiles.decode_block
    monkeypatch.setattr(ImageFiles, "decode_block", lambda self, numbers: read.append(1) or decode(self, numbers))
    held = holdout(folder, 0.25)
    stream = class_incremental(held, tasks=2, batch_size=2).first(1)
    assert not read
    assert isinstance(held.train, SelectedImages)
    assert len(rows(held.train) | rows(held.test)) == len(held.train) + len(held.test) == len(folder.train)
    assert not (rows(held.train) | rows(held.test)) & rows(folder.test)
    images = torch.cat([x for x, _ in stream.batches(0)])  # by workers, ahead
    assert torch.equal(images, stream.dataset.train.read(stream.tasks[0].train))
    assert {bytes(image.numpy()) for image in images} < rows(held.train)
    assert set(stream.train_labels.tolist()) == {0}


# ---------------------------------------------------------------- the first tasks


@pytest.mark.parametrize("order", ["natural", "shuffled"])
def test_the_first_tasks_are_those_of_the_whole_stream(order):
    whole = class_incremental(DIGITS, tasks=4, order=order, seed=3, limit=15)
    first = whole.first(2)
    assert first.class_names == whole.class_names[:6]
    assert len(first.tasks) == 2
    for task in range(2):
        assert first.tasks[task].classes == whole.tasks[task].classes
        for (x, y), (whole_x, whole_y) in zip(first.batches(task), whole.batches(task), strict=True):
            assert torch.equal(x, whole_x)
            assert torch.equal(y, whole_y)
        ours, theirs = (s.dataset.test.read(s.tasks[task].test) for s in (first, whole))
        assert torch.equal(ours, theirs)
        assert torch.equal(first.test_labels[first.tasks[task].test], whole.test_labels[whole.tasks[task].test])
    assert set(first.train_labels.tolist()) == set(first.test_labels.tolist()) == set(range(6))
    assert sum(len(task.test) for task in first.tasks) == len(first.dataset.test)


def test_images_of_later_classes_do_not_leak():
    whole = class_incremental(DIGITS, tasks=5, blurry=0.3, seed=1)
    assert whole.train_labels[whole.tasks[0].train].max() > 3
    first = whole.first(2)
    for task in first.tasks:
        assert first.train_labels[task.train].max() <= 3
        kept = whole.tasks[task.index].train
        kept = kept[whole.train_labels[kept] <= 3]
        assert torch.equal(first.dataset.train.read(task.train), whole.dataset.train.read(kept))


@pytest.mark.parametrize("tasks", [0, 6])
def test_more_tasks_than_there_are(tasks):
    with pytest.raises(InputError, match=f"The first {tasks} tasks were asked for; the stream has 5"):
        class_incremental(DIGITS, tasks=5).first(tasks)


# ---------------------------------------------------------------- runs

SHORT = RunConfig(method="er", memory_size=30, limit=10, precision="fp32", device="cpu", options={"memory_batch": 5})


def test_a_run_of_the_first_tasks_is_the_beginning_of_the_whole_run():
    whole = run(SHORT, dataset=DIGITS)
    first = run(SHORT.replace(first_tasks=2), dataset=DIGITS)
    assert len(first.accuracy_matrix) == 2
    for name in ("softmax", "ncm"):
        part = np.array(whole.by_classifier[name]["accuracy_matrix"])[:2, :2]
        assert np.array(first.by_classifier[name]["accuracy_matrix"]).tolist() == part.tolist()
    assert first.class_names == whole.class_names[:4]
    assert len(first.by_classifier["ncm"]["confusion"]) == 4


def test_classes_ahead_are_those_of_the_first_tasks():
    result = run(SHORT.replace(first_tasks=1, classes_ahead=True), dataset=DIGITS)
    assert result.method_options["classes_ahead"] == 2


def test_a_run_with_images_held_out_never_sees_the_test():
    config = SHORT.replace(holdout=0.2)
    stream = config.make_stream(DIGITS)
    assert not rows(stream.dataset.test) & rows(DIGITS.test)
    assert not rows(stream.dataset.test) & rows(stream.dataset.train)
    assert torch.equal(stream.test_labels, config.replace(seed=7).make_stream(DIGITS).test_labels)  # whatever the seed
    prepared = config.prepare(DIGITS)
    assert config.prepare(prepared) is prepared
    assert SHORT.prepare(DIGITS) is DIGITS
    result = run(config, dataset=DIGITS)
    assert sum(map(sum, result.by_classifier["ncm"]["confusion"])) == len(prepared.test)
    again = run(config, dataset=prepared)
    assert again.by_classifier == result.by_classifier


def test_what_runs_were_called_before_they_still_are():
    config = RunConfig(method="scr", memory_size=200)
    assert run_key(config) == run_key(config.replace(holdout=0.0, first_tasks=None))
    assert len({run_key(config), run_key(config.replace(holdout=0.1)), run_key(config.replace(first_tasks=2))}) == 3
    older = {name: value for name, value in config.to_dict().items() if name not in ("holdout", "first_tasks")}
    assert RunConfig.from_dict(older) == config


@pytest.mark.parametrize(
    ("changes", "message"), [({"holdout": 1.0}, "holdout is"), ({"first_tasks": 0}, "first_tasks")]
)
def test_mistakes_are_told_before_anything_is_loaded(changes, message):
    with pytest.raises(InputError, match=message):
        SHORT.replace(**changes)


# ---------------------------------------------------------------- a split drawn anew


def told_apart(per_class=600, test=100, classes=3):
    """Images that carry their number in three bytes; the last ones of each class are for the test."""
    labels = torch.arange(classes).repeat_interleave(per_class)
    place = torch.arange(len(labels))
    pixels = torch.stack([place % 256, place // 256, labels], 1).to(torch.uint8)[:, :, None, None]
    for_test = place % per_class >= per_class - test
    train, last = (ArrayImages(pixels[chosen], labels[chosen]) for chosen in (~for_test, for_test))
    return Dataset("told apart", train, last, tuple(f"c{label}" for label in range(classes)))


def test_a_shuffled_split_draws_as_many_of_each_class_from_all_images():
    data = told_apart()
    anew = shuffled_split(data)
    assert rows(anew.train) | rows(anew.test) == rows(data.train) | rows(data.test)
    assert not rows(anew.train) & rows(anew.test)
    for part in ("train", "test"):
        images = getattr(anew, part)
        assert images.labels.bincount().equal(getattr(data, part).labels.bincount())
        assert images.images[:, 2, 0, 0].long().equal(images.labels)
    came_for_test = len(rows(anew.test) & rows(data.test))
    assert 25 <= came_for_test <= 80  # 300 × 1/6 = 50, with a deviation below 6
    assert (anew.split, data.split) == ("shuffled", "given")
    assert (anew.name, anew.class_names) == (data.name, data.class_names)


def test_the_split_depends_on_its_seed_alone():
    data = told_apart()
    first = rows(shuffled_split(data).test)
    torch.manual_seed(9)
    assert rows(shuffled_split(data, 0).test) == first
    assert rows(shuffled_split(data, 1).test) != first


def test_images_on_disk_are_not_split_anew():
    lazy = SelectedImages(DIGITS.train, torch.arange(50))
    with pytest.raises(InputError, match="read from disk as it comes"):
        shuffled_split(Dataset("lazy", lazy, DIGITS.test, DIGITS.class_names))


def test_a_run_with_a_shuffled_split_is_another_run_with_the_same_images_for_all_seeds():
    plain = RunConfig(method="er", memory_size=50, limit=20)
    config = plain.replace(split="shuffled")
    assert run_key(config) != run_key(plain)
    streams = [config.replace(seed=seed).make_stream(DIGITS) for seed in (0, 1)]
    tested = [rows(stream.dataset.test) for stream in streams]
    assert tested[0] == tested[1] == rows(shuffled_split(DIGITS).test) != rows(DIGITS.test)
    assert run(config).accuracy_matrix != run(plain).accuracy_matrix
    held = config.replace(holdout=0.2).prepare(DIGITS)
    assert (held.split, held.held_out) == ("shuffled", 0.2)
    assert rows(held.test) <= rows(shuffled_split(DIGITS).train)
    with pytest.raises(InputError, match="drawn anew already"):
        plain.make_stream(shuffled_split(DIGITS))
    with pytest.raises(InputError, match=r'no split "shufled".*"shuffled"'):
        plain.replace(split="shufled")
