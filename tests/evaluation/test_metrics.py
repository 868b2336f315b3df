"""What is computed from the accuracy matrix, against plain loops and values by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from scrlearn.errors import InputError
from scrlearn.evaluation import (
    Interval,
    Metrics,
    anytime_accuracy,
    average_accuracy,
    average_over_time,
    backward_transfer,
    forgetting,
    forward_transfer,
    interval,
)

NAN = math.nan
BY_HAND = [
    [0.90, 0.10, 0.05],
    [0.70, 0.80, 0.20],
    [0.50, 0.90, 0.60],
]


def test_values_by_hand() -> None:
    assert average_accuracy(BY_HAND) == pytest.approx((0.5 + 0.9 + 0.6) / 3)
    assert average_over_time(BY_HAND) == pytest.approx([0.9, 0.75, 2 / 3])
    assert anytime_accuracy(BY_HAND) == pytest.approx((0.9 + 0.75 + 2 / 3) / 3)
    # task 0: best 0.9, ends 0.5; task 1: best before the end 0.8, ends 0.9 (it got better)
    assert forgetting(BY_HAND) == pytest.approx(((0.9 - 0.5) + (0.8 - 0.9)) / 2)
    assert backward_transfer(BY_HAND) == pytest.approx(((0.5 - 0.9) + (0.9 - 0.8)) / 2)
    assert forward_transfer(BY_HAND) == pytest.approx((0.1 + 0.2) / 2)
    assert forward_transfer(BY_HAND, [0.3, 0.04, 0.06]) == pytest.approx((0.06 + 0.14) / 2)


def test_forgetting_looks_at_the_best_and_backward_transfer_at_the_first() -> None:
    rises_then_falls = [[0.4, 0, 0], [0.8, 0.5, 0], [0.5, 0.5, 0.5]]
    assert forgetting(rises_then_falls) == pytest.approx((0.8 - 0.5 + 0) / 2)
    assert backward_transfer(rises_then_falls) == pytest.approx((0.5 - 0.4 + 0) / 2)


def test_forgetting_does_not_count_answers_before_a_task_was_learned() -> None:
    lucky_before = [[0.5, 0.9, 0], [0.5, 0.6, 0], [0.5, 0.6, 0.5]]
    assert forgetting(lucky_before) == 0.0


@pytest.mark.parametrize("tasks", [2, 3, 7])
def test_against_plain_loops(tasks: int) -> None:
    a = np.random.default_rng(tasks).random((tasks, tasks))
    b = np.random.default_rng(tasks + 1).random(tasks)
    last = tasks - 1
    lost = moved = ahead = 0.0
    for j in range(last):
        lost += max(a[i][j] for i in range(j, last)) - a[last][j]
        moved += a[last][j] - a[j][j]
        ahead += a[j][j + 1] - b[j + 1]
    metrics = Metrics.from_matrix(a, b)
    assert metrics.forgetting == pytest.approx(lost / last)
    assert metrics.backward_transfer == pytest.approx(moved / last)
    assert metrics.forward_transfer == pytest.approx(ahead / last)
    seen = [sum(a[i][j] for j in range(i + 1)) / (i + 1) for i in range(tasks)]
    assert metrics.average_over_time == pytest.approx(tuple(seen))
    assert metrics.anytime_accuracy == pytest.approx(sum(seen) / tasks)
    assert metrics.average_accuracy == pytest.approx(seen[-1])


def test_one_task_has_nothing_to_forget() -> None:
    metrics = Metrics.from_matrix([[0.75]])
    assert metrics.average_accuracy == metrics.anytime_accuracy == 0.75
    assert metrics.average_over_time == (0.75,)
    assert metrics.forgetting == metrics.backward_transfer == metrics.forward_transfer == 0.0


@pytest.mark.filterwarnings("error")
def test_a_task_without_test_images_is_left_out() -> None:
    with_gap = [[0.9, NAN, 0.0], [0.7, NAN, 0.1], [0.5, NAN, 0.6]]
    metrics = Metrics.from_matrix(with_gap)
    assert metrics.average_accuracy == pytest.approx(0.55)
    assert metrics.average_over_time == pytest.approx((0.9, 0.7, 0.55))
    assert metrics.forgetting == pytest.approx(0.4)
    assert metrics.backward_transfer == pytest.approx(-0.4)
    assert metrics.forward_transfer == pytest.approx(0.1)


@pytest.mark.filterwarnings("error")
def test_what_was_not_measured_is_nan() -> None:
    metrics = Metrics.from_matrix([[NAN, NAN], [NAN, 0.5]])
    assert math.isnan(metrics.average_over_time[0])
    assert math.isnan(metrics.forgetting)
    assert math.isnan(metrics.forward_transfer)
    assert metrics.average_accuracy == metrics.anytime_accuracy == 0.5


def test_one_cell_missing_does_not_hide_the_best() -> None:
    assert forgetting([[0.9, 0, 0], [NAN, 0.8, 0], [0.5, 0.8, 0.9]]) == pytest.approx(0.2)


def test_as_json_and_back() -> None:
    matrix = [[0.9, NAN], [0.6, NAN]]
    metrics = Metrics.from_matrix(matrix)
    text = json.dumps(metrics.to_dict(), allow_nan=False)
    read = json.loads(text)
    assert set(read) == {field.name for field in dataclasses.fields(Metrics)}
    assert read["accuracy_matrix"] == [[0.9, None], [0.6, None]]
    assert Metrics.from_matrix(read["accuracy_matrix"]).to_dict() == metrics.to_dict()


def test_metrics_are_frozen_and_keep_no_hold_of_the_array() -> None:
    a = np.full((2, 2), 0.5)
    metrics = Metrics.from_matrix(a)
    a[:] = 0.1
    assert metrics.accuracy_matrix == ((0.5, 0.5), (0.5, 0.5))
    assert metrics == Metrics.from_matrix(np.full((2, 2), 0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.forgetting = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([], "shape"),
        ([0.5, 0.5], "shape"),
        ([[0.5, 0.5]], "T × T"),
        ([[0.5], [0.5, 0.5]], "T rows of T numbers"),
        ([[65.7]], "Divide percentages by 100"),
        ([[-0.1]], "between 0 and 1"),
        ([[math.inf]], "between 0 and 1"),
        ([["a"]], "T rows of T numbers"),
    ],
)
def test_bad_matrices(matrix: list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Metrics.from_matrix(matrix)


@pytest.mark.parametrize("baseline", [[0.1], [0.1, 0.1, 0.1], [10.0, 10.0]])
def test_bad_baselines(baseline: list[float]) -> None:
    with pytest.raises(InputError, match="baseline"):
        Metrics.from_matrix([[0.5, 0.5], [0.5, 0.5]], baseline)


@pytest.mark.parametrize("n", [2, 3, 10])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_interval_is_students(n: int, confidence: float) -> None:
    values = np.random.default_rng(n).normal(0.5, 0.1, n)
    low, high = stats.t.interval(confidence, n - 1, loc=values.mean(), scale=stats.sem(values))
    found = interval(values, confidence)
    assert (found.low, found.high, found.n) == (pytest.approx(low), pytest.approx(high), n)


def test_interval_by_the_printed_table() -> None:
    # t(0.975, 9) = 2.262; the sample deviation of 1..10 is 3.0277
    found = interval([float(i) for i in range(1, 11)])
    assert found.mean == 5.5
    assert found.half_width == pytest.approx(2.262 * 3.0277 / math.sqrt(10), rel=1e-3)


@pytest.mark.filterwarnings("error")
def test_interval_of_one_of_none_and_with_gaps() -> None:
    one = interval([0.657])
    assert one.n == 1
    assert math.isnan(one.half_width)
    assert str(one) == "65.7 ± –"
    assert one.low == one.high == 0.657
    assert interval([0.6, NAN, 0.7]) == interval([0.6, 0.7])
    nothing = interval([NAN])
    assert nothing.n == 0
    assert str(nothing) == "–"
    assert interval([0.5, 0.5]).half_width == 0.0


def test_interval_as_text() -> None:
    point = Interval(mean=0.6571, half_width=0.0062, n=10)
    assert str(point) == f"{point}" == "65.7 ± 0.6"
    assert point.format(digits=2) == "65.71 ± 0.62"
    assert Interval(18.7, 0.25, 3).format(scale=1) == "18.7 ± 0.2"


@pytest.mark.parametrize(("values", "confidence"), [([], 0.95), ([[0.1, 0.2]], 0.95), ([math.inf], 0.95), ([1.0], 95)])
def test_bad_intervals(values: list[float], confidence: float) -> None:
    with pytest.raises(InputError):
        interval(values, confidence)
