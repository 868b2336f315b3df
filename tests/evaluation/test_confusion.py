"""Counting answers, against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics as sklearn_metrics

from scrlearn.errors import InputError
from scrlearn.evaluation import accuracy, confusion_matrix, per_class_accuracy

Labels = NDArray[np.int64]


@pytest.fixture(params=[(1, 5), (2, 50), (10, 1000), (100, 777)], ids=str)
def answers(request: pytest.FixtureRequest) -> tuple[Labels, Labels, int]:
    classes, n = request.param
    rng = np.random.default_rng(classes)
    true = rng.integers(0, classes, n)
    return true, np.where(rng.random(n) < 0.6, true, rng.integers(0, classes, n)), classes


@pytest.mark.filterwarnings("ignore:A single label:UserWarning")
def test_equals_scikit_learn(answers: tuple[Labels, Labels, int]) -> None:
    true, predicted, classes = answers
    found = confusion_matrix(true, predicted, classes)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, sklearn_metrics.confusion_matrix(true, predicted, labels=list(range(classes))))
    assert accuracy(predicted, true) == sklearn_metrics.accuracy_score(true, predicted)
    recall = sklearn_metrics.recall_score(
        true, predicted, labels=list(range(classes)), average=None, zero_division=np.nan
    )
    np.testing.assert_allclose(per_class_accuracy(true, predicted, classes), recall)


def test_rows_are_the_truth_and_nothing_is_off_by_one() -> None:
    """Every (true, predicted) pair lands in its own cell, by index, and in no other."""
    classes = 4
    for t in range(classes):
        for p in range(classes):
            expected = np.zeros((classes, classes), dtype=np.int64)
            expected[t, p] = 3
            np.testing.assert_array_equal(
                confusion_matrix(true=[t] * 3, predicted=[p] * 3, num_classes=classes), expected
            )


def test_classes_that_never_occur_keep_their_place() -> None:
    found = confusion_matrix([3, 3], [3, 1], 5)
    assert found.shape == (5, 5)
    assert found[3].tolist() == [0, 1, 0, 1, 0]
    assert found.sum() == 2


def test_no_answer_is_a_wrong_answer() -> None:
    true, predicted = [0, 0, 1, 2], [0, -1, -1, 2]
    assert accuracy(predicted, true) == 0.5
    assert per_class_accuracy(true, predicted, 3).tolist() == [0.5, 0.0, 1.0]
    assert confusion_matrix(true, predicted, 3).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
    kept = confusion_matrix(true, predicted, 3, no_answer_column=True)
    assert kept.tolist() == [[1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]]
    assert kept.dtype == np.int64


def test_accuracy_is_exactly_the_count_over_the_number() -> None:
    true = np.zeros(3, dtype=np.uint8)
    found = accuracy(np.array([0, 1, 0], dtype=np.int32), true)
    assert type(found) is float
    assert found == 2 / 3
    assert accuracy(torch.tensor([0, 1]), torch.tensor([0, 1])) == 1.0


@pytest.mark.filterwarnings("error")
def test_no_images() -> None:
    assert math.isnan(accuracy([], []))
    assert confusion_matrix([], [], 2).tolist() == [[0, 0], [0, 0]]
    assert np.isnan(per_class_accuracy([], [], 2)).all()


@pytest.mark.parametrize(
    ("true", "predicted", "classes", "message"),
    [
        ([0, 1], [0], 2, "1 predictions for 2 true labels"),
        ([0, 2], [0, 1], 2, "True labels contain class 2"),
        ([0, 1], [0, 2], 2, "Predictions contain class 2"),
        ([0, -1], [0, 1], 2, "True labels contain -1"),
        ([0, 1], [0, -2], 2, "Predictions contain -2"),
        ([0.0, 1.0], [0, 1], 2, "integer class indices"),
        ([[0, 1]], [[0, 1]], 2, "one class index per image"),
        ([], [], 0, "num_classes is 0"),
    ],
)
def test_bad_labels(true: list[int], predicted: list[int], classes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        confusion_matrix(true, predicted, classes)
    with pytest.raises(InputError, match=message):
        per_class_accuracy(true, predicted, classes)
