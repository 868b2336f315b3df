"""The accuracy matrix and what is computed from it; per-class accuracy; intervals over seeds."""

from scrlearn.evaluation.confusion import NO_ANSWER, accuracy, confusion_matrix, per_class_accuracy
from scrlearn.evaluation.metrics import (
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

__all__ = [
    "NO_ANSWER",
    "Interval",
    "Metrics",
    "accuracy",
    "anytime_accuracy",
    "average_accuracy",
    "average_over_time",
    "backward_transfer",
    "confusion_matrix",
    "forgetting",
    "forward_transfer",
    "interval",
    "per_class_accuracy",
]
