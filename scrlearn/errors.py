"""Errors that speak to the person: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ScrlearnError(ValueError):
    """Base of every error this package raises on purpose."""


class InputError(ScrlearnError):
    """Images, labels or options that cannot be used."""


class DataError(ScrlearnError):
    """A data set that is missing, truncated, or not what it says it is."""


class CheckpointError(ScrlearnError):
    """A checkpoint that cannot be read, or was written by a newer version."""


class NotFittedError(ScrlearnError, AttributeError):
    """A question asked before anything was learned.

    An AttributeError too, as scikit-learn's is: `hasattr` then says whether an estimator has been fitted.
    """


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that proposes the nearest known name, or lists them all.

    >>> suggest("scd", ["scr", "er"])
    ' Did you mean "scr"?'
    >>> suggest("banana", ["scr", "er"])
    ' Known: er, scr.'
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else f" Known: {', '.join(names)}."
