"""What is computed from an accuracy matrix, and the interval over seeds.

Throughout, ``a`` is the accuracy matrix: ``a[i][j]`` is the accuracy, a fraction in [0, 1], on the test images of task
j after task i was learned; T is the number of tasks and both indices start at 0. A NaN stands for a task without test
images (or a cell that was not measured) and is left out of every mean. What has nothing to be computed from is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scrlearn.errors import InputError

Matrix = NDArray[np.float64]


def _mean(values: ArrayLike) -> float:
    """Mean without the NaNs; NaN when nothing is left (numpy would warn)."""
    known = np.asarray(values, dtype=np.float64).ravel()
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else math.nan


def _checked(accuracy_matrix: ArrayLike) -> Matrix:
    try:
        a = np.array(accuracy_matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"The accuracy matrix must be T rows of T numbers each: {error}.") from error
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size:
        raise InputError(
            f"The accuracy matrix has shape {a.shape}; expected T × T with T ≥ 1: row i after task i, column j for "
            "task j. Put NaN where there is nothing to measure."
        )
    outside = a[~np.isnan(a) & ~((a >= 0) & (a <= 1))]
    if outside.size:
        hint = " Divide percentages by 100." if 1 < outside.max() <= 100 else ""
        raise InputError(f"The accuracy matrix holds {outside[0]:g}; expected fractions between 0 and 1.{hint}")
    return a


def average_accuracy(accuracy_matrix: ArrayLike) -> float:
    """Mean accuracy over all tasks at the end of the stream: ``1/T Σ_j a[T-1][j]``.

    The figure of the paper's Table 1. Reference: Chaudhry et al., "Riemannian Walk for Incremental Learning",
    ECCV 2018.

    >>> average_accuracy([[0.9, 0.0], [0.6, 0.8]])
    0.7
    """
    return _mean(_checked(accuracy_matrix)[-1])


def average_over_time(accuracy_matrix: ArrayLike) -> list[float]:
    """Mean accuracy on the tasks seen so far, after each task: ``A_i = 1/(i+1) Σ_{j≤i} a[i][j]``.

    The curve of accuracy over tasks. Reference: Chaudhry et al., ECCV 2018.

    >>> average_over_time([[0.9, 0.0], [0.6, 0.8]])
    [0.9, 0.7]
    """
    a = _checked(accuracy_matrix)
    return [_mean(row[: i + 1]) for i, row in enumerate(a)]


def anytime_accuracy(accuracy_matrix: ArrayLike) -> float:
    """Mean over the stream of the accuracy on what was seen: ``1/T Σ_i A_i``, A_i as in `average_over_time`.

    High only for a learner that is good all along and not just at the end. Reference: "average incremental accuracy"
    in Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017.

    >>> round(anytime_accuracy([[0.9, 0.0], [0.6, 0.8]]), 6)
    0.8
    """
    return _mean(average_over_time(accuracy_matrix))


def forgetting(accuracy_matrix: ArrayLike) -> float:
    """How much was once known and is lost: ``1/(T-1) Σ_{j<T-1} (max_{j≤i≤T-2} a[i][j] − a[T-1][j])``.

    Negative when old tasks got better; 0 for a single task. Reference: Chaudhry et al., ECCV 2018.

    >>> round(forgetting([[0.9, 0.0], [0.6, 0.8]]), 6)
    0.3
    """
    a = _checked(accuracy_matrix)
    last = len(a) - 1
    # fmax passes over NaN, so a cell that was not measured does not hide the best of the others
    losses = [np.fmax.reduce(a[j:last, j]) - a[last, j] for j in range(last)]
    return _mean(losses) if losses else 0.0


def backward_transfer(accuracy_matrix: ArrayLike) -> float:
    """What later tasks did to earlier ones: ``1/(T-1) Σ_{j<T-1} (a[T-1][j] − a[j][j])``.

    Negative when tasks were forgotten; 0 for a single task. Reference: Lopez-Paz and Ranzato, "Gradient Episodic
    Memory for Continual Learning", NeurIPS 2017.

    >>> round(backward_transfer([[0.9, 0.0], [0.6, 0.8]]), 6)
    -0.3
    """
    a = _checked(accuracy_matrix)
    return _mean(a[-1, :-1] - np.diagonal(a)[:-1]) if len(a) > 1 else 0.0


def forward_transfer(accuracy_matrix: ArrayLike, baseline: ArrayLike | None = None) -> float:
    """What earlier tasks did for one not yet seen: ``1/(T-1) Σ_{j>0} (a[j-1][j] − baseline[j])``.

    ``baseline[j]`` is the accuracy on task j of a classifier that has learned nothing (by chance, or measured before
    the first batch); 0 by default. A class-incremental learner cannot name a class it never saw, so without tasks
    that share classes this is 0 or below. 0 for a single task. Reference: Lopez-Paz and Ranzato, NeurIPS 2017.

    >>> round(forward_transfer([[0.9, 0.3], [0.6, 0.8]], baseline=[0.1, 0.1]), 6)
    0.2
    """
    a = _checked(accuracy_matrix)
    b = np.zeros(len(a)) if baseline is None else np.array(baseline, dtype=np.float64)
    if b.shape != (len(a),):
        raise InputError(f"The baseline has shape {b.shape}; expected one accuracy per task: ({len(a)},).")
    outside = b[~np.isnan(b) & ~((b >= 0) & (b <= 1))]
    if outside.size:
        raise InputError(f"The baseline holds {outside[0]:g}; expected fractions between 0 and 1.")
    return _mean(np.diagonal(a, offset=1) - b[1:]) if len(a) > 1 else 0.0


@dataclass(frozen=True)
class Metrics:
    """Everything that is computed from one run's accuracy matrix. Build it with `Metrics.from_matrix`.

    Parameters
    ----------
    accuracy_matrix
        ``a[i][j]``: accuracy (a fraction) on task j after task i; NaN where a task has no test images.
    average_accuracy, anytime_accuracy, forgetting, backward_transfer, forward_transfer
        As the functions of the same names in this module say, with formula and reference.
    average_over_time
        Mean accuracy on the tasks seen so far, after each task.

    References
    ----------
    Chaudhry et al., "Riemannian Walk for Incremental Learning", ECCV 2018. Lopez-Paz and Ranzato, "Gradient Episodic
    Memory for Continual Learning", NeurIPS 2017.

    Example
    -------
    >>> metrics = Metrics.from_matrix([[1.0, 0.0], [0.25, 0.75]])
    >>> metrics.average_accuracy, metrics.forgetting, metrics.average_over_time
    (0.5, 0.75, (1.0, 0.5))
    """

    accuracy_matrix: tuple[tuple[float, ...], ...]
    average_accuracy: float
    anytime_accuracy: float
    average_over_time: tuple[float, ...]
    forgetting: float
    backward_transfer: float
    forward_transfer: float

    @classmethod
    def from_matrix(cls, accuracy_matrix: ArrayLike, baseline: ArrayLike | None = None) -> Metrics:
        """All metrics of one run; ``baseline`` as in `forward_transfer`."""
        a = _checked(accuracy_matrix)
        return cls(
            accuracy_matrix=tuple(tuple(float(value) for value in row) for row in a),
            average_accuracy=average_accuracy(a),
            anytime_accuracy=anytime_accuracy(a),
            average_over_time=tuple(average_over_time(a)),
            forgetting=forgetting(a),
            backward_transfer=backward_transfer(a),
            forward_transfer=forward_transfer(a, baseline),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and floats, ready for JSON: NaN, which JSON does not have, becomes None.

        `from_matrix` reads the None back as NaN.
        """
        return {
            "accuracy_matrix": [[_or_none(value) for value in row] for row in self.accuracy_matrix],
            "average_accuracy": _or_none(self.average_accuracy),
            "anytime_accuracy": _or_none(self.anytime_accuracy),
            "average_over_time": [_or_none(value) for value in self.average_over_time],
            "forgetting": _or_none(self.forgetting),
            "backward_transfer": _or_none(self.backward_transfer),
            "forward_transfer": _or_none(self.forward_transfer),
        }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class Interval:
    """A mean with the half width of its confidence interval. Build it with `interval`.

    Parameters
    ----------
    mean
        Mean of the values.
    half_width
        The interval is mean ± half_width; NaN when a single value leaves it unknown.
    n
        How many values there were.

    Example
    -------
    >>> str(Interval(mean=0.657, half_width=0.006, n=10))
    '65.7 ± 0.6'
    >>> Interval(mean=18.7, half_width=float("nan"), n=1).format(scale=1, digits=2)
    '18.70 ± –'
    """

    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        """Lower end; the mean itself when the width is unknown."""
        return self.mean if math.isnan(self.half_width) else self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end; the mean itself when the width is unknown."""
        return self.mean if math.isnan(self.half_width) else self.mean + self.half_width

    def format(self, scale: float = 100.0, digits: int = 1) -> str:
        """Text like "65.7 ± 0.6": fractions as percentages by default, ``scale=1`` for other units.

        What is not known is shown as "–".
        """
        if math.isnan(self.mean):
            return "–"
        width = "–" if math.isnan(self.half_width) else f"{self.half_width * scale:.{digits}f}"
        return f"{self.mean * scale:.{digits}f} ± {width}"

    def __str__(self) -> str:
        """The fractions of this package as percentages."""
        return self.format()


def interval(values: Sequence[float] | NDArray[np.floating[Any]], confidence: float = 0.95) -> Interval:
    """Mean ± Student-t interval of independent runs: ``t_{(1+c)/2, n-1} · s / √n``, s with n−1 in the denominator.

    NaN values (a metric that a run could not have) are left out, and ``n`` counts the others. With one value the half
    width is NaN.

    >>> str(interval([0.65, 0.66, 0.67]))
    '66.0 ± 2.5'
    >>> str(interval([0.65]))
    '65.0 ± –'
    """
    if not 0 < confidence < 1:
        raise InputError(f"The confidence is {confidence}; expected a number between 0 and 1, such as 0.95.")
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or not v.size:
        raise InputError(f"An interval needs a list of one or more numbers; got an array of shape {v.shape}.")
    if np.isinf(v).any():
        raise InputError("An interval cannot be computed from infinite values; look for the run that produced them.")
    v = v[~np.isnan(v)]
    n = int(v.size)
    if n < 2:
        return Interval(mean=_mean(v), half_width=math.nan, n=n)
    from scipy.special import stdtrit  # loading it takes a third of a second, which a single run need not wait for

    t = float(stdtrit(n - 1, (1 + confidence) / 2))
    return Interval(mean=float(v.mean()), half_width=t * float(v.std(ddof=1)) / math.sqrt(n), n=n)
