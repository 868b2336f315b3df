from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scrlearn.data.unpickle import read_pickle
from scrlearn.errors import DataError


def read_bytes(folder: Path, content: bytes) -> dict[str, Any]:
    path = folder / "file.pkl"
    path.write_bytes(content)
    return read_pickle(path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "i8", "<i4", ">i4", "f4", "f8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_protocol_come_back(tmp_path: Path, protocol: int, dtype: str, order: Any) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4) % 7, dtype=dtype, order=order)
    content = {"data": array, "inner": [array[0], (array[1], 3)], "empty": array[:0]}
    got = read_bytes(tmp_path, pickle.dumps(content, protocol=protocol))
    np.testing.assert_array_equal(got["data"], array)
    assert got["data"].dtype == array.dtype
    np.testing.assert_array_equal(got["inner"][1][0], array[1])
    assert got["inner"][1][1] == 3
    assert got["empty"].shape == (0, 3, 4)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_containers_and_numbers_come_back(tmp_path: Path, protocol: int) -> None:
    content = {
        b"key": [1, 2.5, None, True, "text", b"bytes"],
        "set": {1, 2},
        "ordered": OrderedDict(a=1, b=2),
        "scalar": np.int64(7),
        "nested": {b"inner": (1, (2,))},
    }
    got = read_bytes(tmp_path, pickle.dumps(content, protocol=protocol))
    assert got["key"] == [1, 2.5, None, True, "text", b"bytes"]
    assert got["set"] == {1, 2}
    assert got["ordered"] == {"a": 1, "b": 2}
    assert got["scalar"] == 7
    assert got["nested"] == {"inner": (1, (2,))}


def python2_batch(data: bytes, columns: int) -> bytes:
    """What Python 2 wrote for {'data': array, 'labels': [3]}: byte strings, NumPy's old module names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    rows = len(data) // columns
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86" + dtype
    array += b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + b"]K\x03a" + b"u."


def test_files_of_python_2_are_read(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2  # bytes above 127 must not be decoded as text
    got = read_bytes(tmp_path, python2_batch(data, 256))
    assert got["labels"] == [3]
    np.testing.assert_array_equal(got["data"], np.frombuffer(data, np.uint8).reshape(2, 256))


def test_new_and_old_numpy_module_names(tmp_path: Path) -> None:
    content = pickle.dumps({"data": np.arange(3)}, protocol=2)
    names = {b"numpy._core.multiarray", b"numpy.core.multiarray"}
    (used,) = [name for name in names if name in content]
    (other,) = names - {used}
    for variant in (content, content.replace(used, other)):
        np.testing.assert_array_equal(read_bytes(tmp_path, variant)["data"], np.arange(3))


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("depth", [0, 2])
def test_code_is_refused_and_never_run(tmp_path: Path, protocol: int, depth: int) -> None:
    trace = tmp_path / "trace"
    evil: Any = Evil(os.mkdir, str(trace))
    for _ in range(depth):
        evil = {"data": [np.arange(2), evil]}
    with pytest.raises(DataError, match=r"mkdir.*Nothing was run"):
        read_bytes(tmp_path, pickle.dumps(evil, protocol=protocol))
    assert not trace.exists()


@pytest.mark.parametrize(
    "value",
    [
        Evil(eval, "1+1"),
        Evil(getattr, "", "upper"),
        Evil(bytearray, 1 << 40),
        np.array([object], dtype=object),
        np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
        np.array(["text"]),
        np.ma.array([1]),
        np.float64,
        io.BytesIO,
    ],
)
def test_other_types_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="only arrays"):
        read_bytes(tmp_path, pickle.dumps({"data": value}))


@pytest.mark.parametrize(
    "attack",
    [
        b"cnumpy\ndtype\nU\x02u1\x85R(K\x03U\x01|NNN]K?K\x00tb.",  # a state with fields
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.",  # a codec that can unpack a bomb
        b"c_codecs\nencode\n}U\x09_functionK\x01s\x86b.",  # an attribute of a stand-in
        b"c_codecs\nencode\nN}U\x09_functionK\x01s\x86b.",
        b"cnumpy\nndarray\nN}U\x05valueK\x01s\x86b.",
        b"cnumpy\nndarray\n.",
        b"cnumpy.core.multiarray\n_reconstruct\nc_codecs\nencode\nK\x00\x85U\x01b\x87R.",
        b"cscrlearn.data.unpickle\nread_pickle\n.",
        b"cnumpy\ndtype.__init__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x10dtype.__reduce__\x93.",
        b"Pidentifier\n.",
        b"}r\xff\xff\xff\xff.",  # room for four thousand million remembered items
        b"B\xff\xff\xff\xff.",  # bytes that are not there
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_hand_made_attacks_are_refused(tmp_path: Path, attack: bytes) -> None:
    with contextlib.suppress(DataError) if attack.startswith(b"}r") else pytest.raises(DataError):
        read_bytes(tmp_path, b"\x80\x02" + attack if not attack.startswith(b"\x80") else attack)
    # and the reader still works: nothing of it was changed
    assert read_bytes(tmp_path, pickle.dumps({"a": b"\xff"}, protocol=2)) == {"a": b"\xff"}
    np.testing.assert_array_equal(read_bytes(tmp_path, pickle.dumps({"a": np.arange(3)}))["a"], np.arange(3))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_give_a_clear_error(tmp_path: Path, data: st.DataObject) -> None:
    whole = pickle.dumps({"data": np.arange(40, dtype=np.uint8), "labels": [1, 2, 3]}, protocol=2)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DataError, match=r"file\.pkl"):
        read_bytes(tmp_path, whole[:cut])
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DataError):  # a changed pixel is not noticed; nothing but a DataError may come out
        read_bytes(tmp_path, bytes(flipped))


def test_recursive_and_repeated_containers(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert (got := read_bytes(tmp_path, pickle.dumps({"loop": loop}))["loop"])[0] is got
    many: Any = (np.arange(2),)
    for _ in range(60):  # 2**60 leaves, were they visited one by one
        many = (many, many)
    got = read_bytes(tmp_path, pickle.dumps({"many": many}))["many"]
    assert got[0] is got[1]


def test_missing_file_and_wrong_content(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        read_pickle(tmp_path / "absent")
    with pytest.raises(DataError, match=r"holds a list.*dictionary was expected"):
        read_bytes(tmp_path, pickle.dumps([1]))
    with pytest.raises(DataError, match="truncated or damaged"):
        read_bytes(tmp_path, b"")
    with pytest.raises(DataError, match="truncated or damaged"):
        read_bytes(tmp_path, b"<html>Not found</html>")
