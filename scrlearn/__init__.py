"""scrlearn learns image classes one small batch at a time, from a stream that never comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["OnlineClassifier", "__version__"]

if TYPE_CHECKING:
    from scrlearn.estimator import OnlineClassifier


def __getattr__(name: str) -> Any:
    # torch and scikit-learn take seconds to import: only when the classifier is asked for
    if name == "OnlineClassifier":
        from scrlearn.estimator import OnlineClassifier

        return OnlineClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
