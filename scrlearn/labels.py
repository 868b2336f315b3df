"""What people have as labels — any hashables — read, checked, shown as arrays, and written as JSON."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from scrlearn.errors import InputError

Labels: TypeAlias = Any
"""A list, NumPy array, tensor or series of hashables: strings, numbers, tuples, ..."""


def read_labels(labels: Labels) -> list[Hashable]:
    """The labels as plain Python values, one per image; NumPy and torch scalars become Python's.

    Raises
    ------
    InputError
        For a label that is missing (None, NaN) or cannot be hashed, and for anything that is no list of labels.

    Examples
    --------
    >>> read_labels(np.array([3, 5]))
    [3, 5]
    >>> read_labels(["cat", np.str_("dog"), ("bird", np.int64(2))])
    ['cat', 'dog', ('bird', 2)]
    """
    if isinstance(labels, str | bytes):
        raise InputError(f"The labels are one string, {labels!r}; give a list with one label for each image.")
    if isinstance(labels, dict | set | frozenset) or not isinstance(labels, Iterable):
        raise InputError(f"The labels are a {type(labels).__name__}; give a list with one label for each image.")
    if getattr(labels, "ndim", 1) != 1:
        shape = tuple(getattr(labels, "shape", ()))
        column = "labels.iloc[:, 0]" if hasattr(labels, "iloc") else "labels.ravel()"  # a data frame has no ravel
        hint = "[label]" if shape == () else column if shape[1:] == (1,) else "labels.argmax(1) for one-hot ones"
        raise InputError(f"The labels have shape {shape}; expected one label for each image: {hint}.")
    given = labels.tolist() if isinstance(labels, Tensor) else labels
    return [read_label(label, f"labels[{number}]") for number, label in enumerate(given)]


def read_label(label: Any, name: str = "The label") -> Hashable:
    """One label as a plain Python value."""
    plain = _plain(label)
    try:
        hash(plain)
    except TypeError:
        raise InputError(
            f"{name} is {_short(label)}, a {type(label).__name__}, which cannot be hashed; use a string, a number or a "
            "tuple."
        ) from None
    if _is_missing(plain):
        raise InputError(f"{name} is {label!r}: the label is missing. Leave its image out, or name the class.")
    return plain  # type: ignore[no-any-return]


def _plain(label: Any) -> Any:
    if isinstance(label, np.generic) or (isinstance(label, np.ndarray | Tensor) and label.ndim == 0):
        return label.item()
    # exactly tuple: a named tuple is another type, and stays what it is
    return tuple(map(_plain, label)) if type(label) is tuple else label


def _is_missing(label: Any) -> bool:
    if isinstance(label, tuple):
        return any(map(_is_missing, label))
    try:
        return label is None or bool(label != label)
    except (TypeError, ValueError):  # such as pandas.NA, which does not even differ from itself
        return True


def label_array(labels: Sequence[Hashable]) -> np.ndarray[Any, Any]:
    """Labels as an array of their own type where they share one, of objects otherwise.

    Examples
    --------
    >>> label_array(["cat", "dog"])
    array(['cat', 'dog'], dtype='<U3')
    >>> label_array([1, "cat"])
    array([1, 'cat'], dtype=object)
    """
    if {*map(type, labels)} in ({str}, {int}, {float}, {bool}):
        array = np.array(labels)
        # NumPy drops zeros at a string's end and may round large numbers
        if array.tolist() == list(labels):
            return array
    objects = np.empty(len(labels), dtype=object)
    for place, label in enumerate(labels):  # one by one: NumPy would take tuples apart
        objects[place] = label
    return objects


def encode(value: Any) -> Any:
    """A value as JSON that keeps its type: str, int, float, bool, None, bytes, and tuples and lists of these.

    Raises
    ------
    TypeError
        For any other type.

    Examples
    --------
    >>> decode(encode(("cat", 1, b"x"))) == ("cat", 1, b"x")
    True
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) in (tuple, list):
        return {type(value).__name__: [encode(item) for item in value]}
    raise TypeError(f"{_short(value)} is a {type(value).__name__}")


def decode(value: Any) -> Any:
    """The value that `encode` wrote."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    items = [decode(item) for item in content]
    return tuple(items) if kind == "tuple" else items


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
