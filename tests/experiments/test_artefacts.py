"""What figures need beside a result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from scrlearn.data import class_incremental, load
from scrlearn.experiments import artefacts
from scrlearn.learners import make_learner

DIGITS = load("digits")


def learned() -> tuple[object, object]:
    learner = make_learner("er", image_shape=DIGITS.image_shape, memory_size=40, device="cpu")
    stream = class_incremental(DIGITS, tasks=5, order="shuffled", seed=3, limit=10)
    for task in stream.tasks:
        for x, y in stream.batches(task):
            learner.learn(x, y)
    return learner, stream


def test_alike_is_the_accuracy_of_the_nearest_other_image() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 60)
    points = rng.normal(size=(60, 8)) + 0.8 * np.eye(8)[labels]
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    right = 0
    for i in range(60):
        others = np.arange(60) != i
        nearest = KNeighborsClassifier(1).fit(points[others], labels[others])
        right += nearest.predict(points[i : i + 1])[0] == labels[i]
    assert artefacts.alike(points, labels) == pytest.approx(right / 60)
    assert 0.2 < right / 60 < 1
    assert np.isnan(artefacts.alike(points[:1], labels[:1]))


def test_maps_of_the_memory_and_of_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, stream = learned()
    of_memory = artefacts.memory_map(learner)
    assert of_memory["labels"].tolist() == learner.memory.contents()[1].tolist()
    monkeypatch.setattr(artefacts, "MOST_POINTS", 50)
    of_test = artefacts.unseen_map(learner, stream)
    assert of_test["places"].shape == (50, 2)
    # the classes in the stream's order, as everything that is drawn has them
    seen = stream.dataset.test.read(torch.arange(len(stream.test_labels)))
    expected = artefacts.alike(
        *(t[artefacts._some(len(seen), 0)].numpy() for t in (learner.embed(seen), stream.test_labels))
    )
    assert float(of_test["alike"][0]) == pytest.approx(expected, abs=0.03)
    assert set(of_test["labels"].tolist()) <= set(range(10))
    again = artefacts.unseen_map(learner, stream)
    assert all(np.array_equal(of_test[name], again[name]) for name in of_test)
