from __future__ import annotations

import datetime
import enum
import json
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scrlearn.errors import InputError
from scrlearn.labels import decode, encode, label_array, read_label, read_labels


class Colour(enum.IntEnum):
    RED = 1


class Missing:
    """As pandas.NA: it does not say whether it differs from itself."""

    def __ne__(self, other):
        return self

    def __bool__(self):
        raise TypeError("ambiguous")

    __hash__ = object.__hash__


class Frame:
    """As a pandas.DataFrame of one column."""

    ndim, shape, iloc = 2, (2, 1), ()

    def __iter__(self):
        return iter(["label"])


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (["a", "b"], ["a", "b"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1, 2]), [1, 2]),
        (np.array([True]), [True]),
        (np.array([0.5], dtype=np.float32), [0.5]),
        (np.array(["a", 1], dtype=object), ["a", 1]),
        (torch.tensor([3, 4]), [3, 4]),
        ([torch.tensor(3), np.int8(4), np.array(5)], [3, 4, 5]),
        ([("a", np.int64(1)), ("b", 2)], [("a", 1), ("b", 2)]),
        (range(2), [0, 1]),
        ((name for name in "ab"), ["a", "b"]),
        ([], []),
    ],
)
def test_labels_become_plain_values(labels, wanted):
    read = read_labels(labels)
    assert read == wanted
    assert list(map(type, read)) == list(map(type, wanted))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("cat", "one string, 'cat'"),
        (3, "The labels are a int"),
        ({"a", "b"}, "The labels are a set"),
        ({0: "a"}, "The labels are a dict"),
        (None, "The labels are a NoneType"),
        (np.array([[1], [2]]), r"shape \(2, 1\).*labels\.ravel\(\)"),
        (Frame(), r"shape \(2, 1\).*labels\.iloc\[:, 0\]"),
        (np.eye(3), r"shape \(3, 3\).*one-hot"),
        (torch.tensor(3), r"shape \(\).*\[label\]"),
        (["a", None], r"labels\[1\] is None: the label is missing"),
        ([1.0, float("nan")], r"labels\[1\] is nan: the label is missing"),
        ([np.datetime64("NaT")], "the label is missing"),
        ([Decimal("nan")], "the label is missing"),
        ([("a", float("nan"))], "the label is missing"),
        ([Missing()], "the label is missing"),
        (["a", ["b"]], r"labels\[1\] is \['b'\], a list, which cannot be hashed"),
        ([{"a": 1}], "cannot be hashed"),
        ([np.array([1, 2])], "cannot be hashed"),
    ],
)
def test_bad_labels_are_explained(labels, message):
    with pytest.raises(InputError, match=message):
        read_labels(labels)


def test_other_hashables_pass_as_they_are():
    day = datetime.date(2024, 1, 1)
    assert read_label(day) is day
    assert read_label(Colour.RED) is Colour.RED


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (["a", "bb"], "<U2"),
        ([1, 2], "int64"),
        ([0.5], "float64"),
        ([True, False], "bool"),
        ([1, "a"], "object"),
        ([1, 0.5], "object"),
        ([True, 2], "object"),
        ([2**80], "object"),
        (["a\0"], "object"),
        ([b"a"], "object"),
        ([(1, 2), (3, 4)], "object"),
        ([], "object"),
    ],
)
def test_arrays_hold_the_labels_themselves(labels, dtype):
    array = label_array(labels)
    assert array.dtype == np.dtype(dtype)
    assert array.shape == (len(labels),)
    assert array.tolist() == labels


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(scalars, lambda inner: st.lists(inner).map(tuple) | st.lists(inner), max_leaves=8)


def types(value):
    return [type(value), *map(types, value)] if isinstance(value, tuple | list) else type(value)


@settings(deadline=None, max_examples=50)
@given(values)
def test_values_come_back_from_json_with_their_types(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert types(back) == types(value)


@pytest.mark.parametrize("value", [Colour.RED, datetime.date(2024, 1, 1), object(), {"a": 1}, frozenset(), ("a", {1})])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="is a "):
        encode(value)


def test_numpy_scalars_are_written_as_numbers():
    assert encode((np.int64(3), np.float32(0.5))) == {"tuple": [3, 0.5]}
