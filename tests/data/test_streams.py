from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scrlearn.data import DEFAULT_TASKS, ArrayImages, Dataset, Stream, class_incremental, default_tasks, load
from scrlearn.data.folder import load_folder
from scrlearn.errors import InputError


def make_dataset(counts: list[int], test: int = 2) -> Dataset:
    """Pixel (0, 0) of training image i is i % 256; labels are interleaved."""
    labels = torch.tensor([label for label, count in enumerate(counts) for _ in range(count)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))]
    pixels = (torch.arange(len(labels)) % 256).to(torch.uint8)
    images = pixels[:, None, None, None].expand(-1, 1, 2, 2)
    test_labels = torch.arange(len(counts)).repeat(test)
    test_images = torch.zeros(len(test_labels), 1, 2, 2, dtype=torch.uint8)
    names = tuple(f"c{label}" for label in range(len(counts)))
    return Dataset("made", ArrayImages(images, labels), ArrayImages(test_images, test_labels), names)


def same(first: Stream, second: Stream) -> bool:
    return first.class_order == second.class_order and all(
        a.classes == b.classes and torch.equal(a.train, b.train) and torch.equal(a.test, b.test)
        for a, b in zip(first.tasks, second.tasks, strict=True)
    )


@st.composite
def streams(draw: st.DrawFn) -> tuple[Dataset, dict[str, Any]]:
    counts = draw(st.lists(st.integers(8, 40), min_size=1, max_size=12))
    tasks = draw(st.integers(1, len(counts)))
    return make_dataset(counts), {
        "tasks": tasks,
        "order": draw(st.sampled_from(["natural", "shuffled"])),
        "seed": draw(st.integers(0, 2**40)),
        "batch_size": draw(st.integers(1, 12)),
        "blurry": draw(st.sampled_from([0.0, 0.1, 0.5])) if tasks > 1 else 0.0,
        "drop_last": False,
    }


@settings(max_examples=60, deadline=None)
@given(streams())
def test_tasks_partition_classes_and_images(made: tuple[Dataset, dict[str, Any]]) -> None:
    dataset, options = made
    stream = class_incremental(dataset, **options)
    classes = [dense for task in stream.tasks for dense in task.classes]
    assert classes == list(range(dataset.num_classes))
    assert sorted(stream.class_order) == classes
    sizes = [len(task.classes) for task in stream.tasks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(torch.cat([task.train for task in stream.tasks]).sort().values, torch.arange(len(dataset.train)))
    for task in stream.tasks:
        assert set(stream.test_labels[task.test].tolist()) == set(task.classes)
    assert sum(len(task.test) for task in stream.tasks) == len(dataset.test)


@settings(max_examples=40, deadline=None)
@given(streams())
def test_same_seed_same_stream_whatever_else_is_drawn(made: tuple[Dataset, dict[str, Any]]) -> None:
    dataset, options = made
    torch.manual_seed(0)
    first = class_incremental(dataset, **options)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(options["seed"] % 1000 + 1)
    torch.rand(7)
    second = class_incremental(dataset, **options)
    assert same(first, second)
    torch.manual_seed(0)
    assert torch.equal(states[0], torch.get_rng_state())  # nothing was drawn from the global generators
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


@settings(max_examples=40, deadline=None)
@given(streams(), st.booleans())
def test_batches_and_exact_resume(made: tuple[Dataset, dict[str, Any]], drop_last: bool) -> None:
    dataset, options = made
    # a task may have given images to others
    smallest = min(len(task.train) for task in class_incremental(dataset, **options).tasks)
    options["drop_last"], options["batch_size"] = drop_last, min(options["batch_size"], smallest)
    stream = class_incremental(dataset, **options)
    size = stream.batch_size
    for task in stream.tasks:
        batches = list(stream.batches(task))
        assert len(batches) == stream.steps(task)
        lengths = [len(images) for images, _ in batches]
        assert set(lengths[:-1]) <= {size}
        assert sum(lengths) == (len(task.train) // size * size if drop_last else len(task.train))
        used = task.train[: sum(lengths)]
        assert torch.equal(torch.cat([labels for _, labels in batches]), stream.train_labels[used])
        assert torch.equal(torch.cat([images for images, _ in batches])[:, 0, 0, 0], (used % 256).to(torch.uint8))
        for start in {0, 1, len(batches) // 2, len(batches)}:
            rest = list(stream.batches(task, start))
            assert len(rest) == len(batches) - start
            for (a, b), (c, d) in zip(rest, batches[start:], strict=True):
                assert torch.equal(a, c)
                assert torch.equal(b, d)


def test_labels_are_ranks_in_the_class_order() -> None:
    dataset = make_dataset([10] * 6)
    stream = class_incremental(dataset, tasks=3, order="shuffled", seed=4)
    assert stream.class_order != tuple(range(6))
    order = torch.tensor(stream.class_order)
    assert torch.equal(order[stream.train_labels], dataset.train.labels)
    assert torch.equal(order[stream.test_labels], dataset.test.labels)
    assert stream.class_names == tuple(dataset.class_names[label] for label in stream.class_order)
    assert stream.train_labels.dtype == torch.int64
    images, labels = next(stream.batches(stream.tasks[1]))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert set(labels.tolist()) <= {2, 3}


def test_seeds_differ_and_images_are_shuffled() -> None:
    dataset = make_dataset([50] * 4)
    streams = [class_incremental(dataset, tasks=2, seed=seed) for seed in range(3)]
    assert streams[0].class_order == (0, 1, 2, 3)
    assert not any(same(streams[a], streams[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    train = streams[0].tasks[0].train
    assert not torch.equal(train, train.sort().values)
    labels = streams[0].train_labels[train[:40]]
    assert set(labels.tolist()) == {0, 1}  # classes are mixed


def test_class_order_does_not_depend_on_other_options() -> None:
    dataset = make_dataset([40] * 8)
    orders = {
        class_incremental(dataset, order="shuffled", seed=3, **options).class_order
        for options in ({"tasks": 2}, {"tasks": 4, "blurry": 0.2}, {"tasks": 2, "limit": 20, "imbalance": 2.0})
    }
    assert len(orders) == 1


def test_shuffled_orders_are_uniform() -> None:
    dataset = make_dataset([10] * 3)
    orders = Counter(
        class_incremental(dataset, tasks=1, order="shuffled", seed=seed).class_order for seed in range(600)
    )
    assert len(orders) == 6
    assert max(orders.values()) < 150  # expected 100 each; five standard deviations are 46
    assert min(orders.values()) > 54


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.floats(0.0, 0.95), st.integers(0, 1000))
def test_blurry_share_leaks_evenly_and_tests_stay(tasks: int, blurry: float, seed: int) -> None:
    dataset = make_dataset([60] * 6)
    stream = class_incremental(dataset, tasks=tasks, blurry=blurry, seed=seed, batch_size=1)
    plain = class_incremental(dataset, tasks=tasks, seed=seed, batch_size=1)
    for dense in range(6):
        counts = [int((stream.train_labels[task.train] == dense).sum()) for task in stream.tasks]
        (own,) = [task.index for task in stream.tasks if dense in task.classes]
        assert counts.pop(own) == 60 - round(60 * blurry)
        assert max(counts) - min(counts) <= 1
    assert all(torch.equal(a.test, b.test) for a, b in zip(stream.tasks, plain.tasks, strict=True))
    assert [task.classes for task in stream.tasks] == [task.classes for task in plain.tasks]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.floats(1.0, 50.0), st.integers(0, 1000))
def test_imbalance_ratio_and_decay(classes: int, imbalance: float, seed: int) -> None:
    dataset = make_dataset([200] * classes)
    stream = class_incremental(dataset, tasks=1, imbalance=imbalance, seed=seed, batch_size=1)
    counts = torch.bincount(stream.train_labels[stream.tasks[0].train], minlength=classes).sort(descending=True).values
    assert counts[0] == 200
    ideal = [200 * imbalance ** (-rank / (classes - 1)) for rank in range(classes)]
    assert all(abs(count - wanted) <= 0.5 for count, wanted in zip(counts.tolist(), ideal, strict=True))
    assert len(stream.tasks[0].test) == len(dataset.test)


def test_rare_classes_do_not_always_come_last() -> None:
    dataset = make_dataset([100] * 5)
    rarest = set()
    for seed in range(20):
        stream = class_incremental(dataset, tasks=1, imbalance=10, seed=seed)
        rarest.add(int(torch.bincount(stream.train_labels[stream.tasks[0].train]).argmin()))
    assert len(rarest) > 2


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(0, 100))
def test_limit_per_class(limit: int, seed: int) -> None:
    counts = [50, 20, 35]
    stream = class_incremental(make_dataset(counts), tasks=3, limit=limit, seed=seed, batch_size=1)
    for task, count in zip(stream.tasks, counts, strict=True):
        assert len(task.train) == min(limit, count)
        assert len(set(task.train.tolist())) == len(task.train)


def test_limit_is_chosen_by_the_seed() -> None:
    dataset = make_dataset([100])
    chosen = [set(class_incremental(dataset, tasks=1, limit=20, seed=s).tasks[0].train.tolist()) for s in (0, 1)]
    assert chosen[0] != chosen[1]


def test_order_is_what_batches_give() -> None:
    dataset = make_dataset([23, 19, 31, 10])
    stream = class_incremental(dataset, tasks=2, batch_size=5, seed=1)
    for task in stream.tasks:
        order = stream.order(task)
        assert order.shape == (stream.steps(task), 5)
        assert torch.equal(order, stream.order(task.index))
        for row, (images, labels) in zip(order, stream.batches(task.index), strict=True):
            assert torch.equal(images, dataset.train.read(row))
            assert torch.equal(labels, stream.train_labels[row])


def test_order_of_incomplete_batches() -> None:
    stream = class_incremental(make_dataset([12]), tasks=1, batch_size=5, drop_last=False)
    assert stream.steps(0) == 3
    with pytest.raises(InputError, match="no rectangle"):
        stream.order(0)
    assert class_incremental(make_dataset([10]), tasks=1, batch_size=5, drop_last=False).order(0).shape == (2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "1 to 4 tasks"),
        ({"tasks": 5}, '"made" has 4 classes'),
        ({"order": "shufled"}, 'Did you mean "shuffled"'),
        ({"seed": -1}, "seed is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"blurry": 1.0}, "below 1"),
        ({"blurry": -0.1}, "blurry is -0.1"),
        ({"blurry": float("nan")}, "blurry is nan"),
        ({"blurry": 0.1, "tasks": 1}, "one task"),
        ({"imbalance": 0.5}, "imbalance is 0.5"),
        ({"imbalance": float("nan")}, "imbalance is nan"),
        ({"imbalance": float("inf")}, "imbalance is inf"),
        ({"limit": 0}, "limit is 0"),
        ({"tasks": 2.5}, "tasks is 2.5; expected a whole number"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"seed": "1"}, "seed is '1'"),
        ({"limit": True}, "limit is True"),
        ({"blurry": "some"}, "blurry is 'some'; expected a number"),
        ({"limit": 3}, "Task 0 has 6 training images, fewer than one batch of 10"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        class_incremental(make_dataset([10] * 4), **{"tasks": 2, **options})


def test_start_beyond_the_end() -> None:
    stream = class_incremental(make_dataset([20]), tasks=1)
    with pytest.raises(InputError, match="batches 0 to 1; it cannot start at number 3"):
        stream.batches(0, 3)
    with pytest.raises(InputError, match="number -1"):
        stream.batches(0, -1)


def test_a_task_that_is_not_there() -> None:
    stream = class_incremental(make_dataset([20]), tasks=1)
    for ask in (stream.steps, stream.order, stream.batches):
        with pytest.raises(InputError, match="There is no task 1; the stream has 1, counted from 0"):
            ask(1)


def test_resume_of_a_stream_from_disk(make_folder: Callable[..., Path]) -> None:
    dataset = load_folder(make_folder({"a": 30, "b": 30, "c": 30}), workers=2)
    stream = class_incremental(dataset, tasks=2, batch_size=4, seed=2)
    whole, rest = list(stream.batches(0)), list(stream.batches(0, 5))
    assert len(rest) == len(whole) - 5
    for (a, b), (c, d) in zip(rest, whole[5:], strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    for row, (images, _) in zip(stream.order(0), whole, strict=True):
        assert torch.equal(images, dataset.train.read(row))


def test_default_numbers_of_tasks(make_folder: Callable[..., Path]) -> None:
    assert DEFAULT_TASKS == {"digits": 5, "cifar10": 5, "cifar100": 10, "mini-imagenet": 10}
    assert default_tasks(load("digits")) == 5
    assert default_tasks(make_dataset([10] * 3)) == 3
    assert default_tasks(load(f"folder:{make_folder({str(i): 2 for i in range(9)})}")) == 5


def test_known_stream_stays_the_same() -> None:
    """Results are published with their seed: a change of these numbers changes every published result."""
    stream = class_incremental(load("digits"), tasks=5, order="shuffled", seed=7)
    assert stream.class_order == (0, 8, 9, 4, 6, 7, 2, 1, 3, 5)
    assert stream.tasks[0].train[:6].tolist() == [308, 28, 612, 357, 559, 1362]
