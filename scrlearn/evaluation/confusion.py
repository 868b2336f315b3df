"""From predicted class indices to accuracy, per class and as a confusion matrix.

A prediction of −1 means that the classifier had no answer. It is a wrong answer everywhere.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scrlearn.errors import InputError

NO_ANSWER = -1

Indices = NDArray[np.int64]


def accuracy(predicted: ArrayLike, true: ArrayLike) -> float:
    """Share of right answers: exactly ``right / all``; NaN when there are no images.

    >>> accuracy([0, 1, -1, 1], [0, 1, 2, 2])
    0.5
    """
    truth, answers = _checked(true, predicted)
    return int((truth == answers).sum()) / len(truth) if len(truth) else math.nan


def confusion_matrix(
    true: ArrayLike, predicted: ArrayLike, num_classes: int, *, no_answer_column: bool = False
) -> NDArray[np.int64]:
    """Count answers: row = true class, column = predicted class.

    Parameters
    ----------
    true, predicted
        Class indices from 0 to ``num_classes − 1``; predicted may be −1, for no answer.
    num_classes
        Number of rows.
    no_answer_column
        Add a last column that counts the −1, so that every row sums to the images of its class. Without it they are
        in no column.

    Returns
    -------
    ndarray of int64
        ``num_classes × num_classes``, or one column more.

    Example
    -------
    >>> confusion_matrix(true=[0, 0, 1, 1], predicted=[0, 1, 1, -1], num_classes=2)
    array([[1, 1],
           [0, 1]])
    >>> confusion_matrix(true=[0, 0, 1, 1], predicted=[0, 1, 1, -1], num_classes=2, no_answer_column=True)
    array([[1, 1, 0],
           [0, 1, 1]])
    """
    truth, answers = _checked(true, predicted, num_classes)
    columns = num_classes + 1
    answers = np.where(answers == NO_ANSWER, num_classes, answers)
    counts = np.bincount(truth * columns + answers, minlength=num_classes * columns).astype(np.int64)
    matrix = counts.reshape(num_classes, columns)
    return matrix if no_answer_column else matrix[:, :num_classes].copy()


def per_class_accuracy(true: ArrayLike, predicted: ArrayLike, num_classes: int) -> NDArray[np.float64]:
    """Share of right answers for each class; NaN for a class without test images.

    >>> per_class_accuracy(true=[0, 0, 1, 1], predicted=[0, 0, 1, -1], num_classes=3)
    array([1. , 0.5, nan])
    """
    matrix = confusion_matrix(true, predicted, num_classes, no_answer_column=True)
    total = matrix.sum(axis=1)
    out = np.full(num_classes, np.nan)
    np.divide(np.diagonal(matrix), total, out=out, where=total > 0)
    return out


def _checked(true: ArrayLike, predicted: ArrayLike, num_classes: int | None = None) -> tuple[Indices, Indices]:
    truth, answers = _indices(true, "True labels"), _indices(predicted, "Predictions")
    if len(truth) != len(answers):
        raise InputError(f"{len(answers)} predictions for {len(truth)} true labels; expected as many of each.")
    if num_classes is not None and num_classes < 1:
        raise InputError(f"num_classes is {num_classes}; expected 1 or more.")
    _in_range(truth, "True labels", 0, num_classes)
    _in_range(answers, "Predictions", NO_ANSWER, num_classes)
    return truth, answers


def _indices(values: ArrayLike, what: str) -> Indices:
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"{what} have shape {array.shape}; expected one class index per image.")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{what} are of type {array.dtype}; expected integer class indices.")
    return array.astype(np.int64)


def _in_range(indices: Indices, what: str, lowest: int, num_classes: int | None) -> None:
    if not indices.size:
        return
    if indices.min() < lowest:
        raise InputError(f"{what} contain {indices.min()}; the smallest allowed index is {lowest}.")
    if num_classes is not None and indices.max() >= num_classes:
        raise InputError(
            f"{what} contain class {indices.max()}, but num_classes is {num_classes}: "
            f"indices go from 0 to {num_classes - 1}."
        )
