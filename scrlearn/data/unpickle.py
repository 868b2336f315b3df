"""Read pickles of strangers: arrays and plain containers come in, code does not.

Nothing that a file names is ever imported or called. The few names that NumPy and Python write for arrays are answered
with stand-ins of our own, which only take down what the array shall be; the arrays are made afterwards, from checked
types and plain bytes. (Even NumPy's own ``dtype`` is not safe to hand out: its pickled state can claim that bytes are
object pointers.)
"""

from __future__ import annotations

import mmap
import pickle
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from scrlearn.errors import DataError

_NUMBER_TYPE = re.compile(r"[biuf][1248]")


class _Forbidden(Exception):
    """The file names something that is not an array or a plain container."""


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Dtype:
    """Stand-in for ``numpy.dtype``: booleans, integers and floats only."""

    __slots__ = ("_order", "_spec")

    def __init__(self, spec: object, *_: object) -> None:
        self._spec, self._order = _text(spec), "="
        if not _NUMBER_TYPE.fullmatch(self._spec):
            raise _Forbidden(f"an array of type {self._spec!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """State of a NumPy dtype: version, byte order, sub-array, names, fields, …"""
        if any(part is not None for part in state[2:5]):
            raise _Forbidden("an array of records")
        self._order = _text(state[1])

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self._spec).newbyteorder("=" if self._order == "|" else self._order)  # type: ignore[arg-type]


def _array(raw: object, dtype: object, shape: Any, fortran: object) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray | str):
        raise _Forbidden("an array that is not made of plain bytes")
    data = raw.encode("latin1") if isinstance(raw, str) else raw
    return np.frombuffer(data, dtype.numpy()).reshape(shape, order="F" if fortran else "C")


class _Array:
    """Stand-in for ``numpy.ndarray``; its value is known only when its state has come."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """State of a NumPy array: version (absent in old files), shape, dtype, Fortran order, bytes."""
        shape, dtype, fortran, raw = state[-4:]
        self.value = _array(raw, dtype, shape, fortran)


class _Call:
    """A function of ours that a pickle may call, and can in no way change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise _Forbidden("a change of a function")


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _Array:
        raise _Forbidden(f"an array of kind {kind!r}")
    return _Array()


def _scalar(dtype: object, raw: object) -> object:
    return _array(raw, dtype, (), False).item()


def _frombuffer(raw: object, dtype: object, shape: object, order: object) -> object:
    return _array(raw, dtype, shape, _text(order) == "F")


def _encode(text: object, encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):  # other codecs can unpack bombs
        raise _Forbidden(f"the codec {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:  # how protocols 0 to 2 write b""
    return b""


def _ordered(items: Any = ()) -> dict[Any, Any]:
    return dict(items)


def _admitted() -> dict[tuple[str, str], object]:
    """Every name a file may use, under the module paths of old and new NumPy and of Python 2 and 3."""
    table: dict[tuple[str, str], object] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _Call(_encode),
        ("collections", "OrderedDict"): _Call(_ordered),
    }
    for core in ("numpy.core", "numpy._core"):
        table[f"{core}.multiarray", "_reconstruct"] = _Call(_reconstruct)
        table[f"{core}.multiarray", "scalar"] = _Call(_scalar)
        table[f"{core}.numeric", "_frombuffer"] = _Call(_frombuffer)
    for builtins in ("builtins", "__builtin__"):
        table[builtins, "set"] = _Call(set)
        table[builtins, "bytes"] = _Call(_no_bytes)
    return table


class _Reader(pickle._Unpickler):
    """An unpickler whose every name comes from the table above.

    It is Python's own one written in Python: in the one written in C, four damaged bytes can ask for 64 GB of memory.
    The pixels are one item, so that it takes no longer.
    """

    def __init__(self, file: mmap.mmap) -> None:
        super().__init__(file, encoding="bytes")  # Python 2's strings stay bytes: nothing is guessed
        self._table = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table[module, name]
        except KeyError:
            raise _Forbidden(f'"{module}.{name}"') from None


def _resolve(value: Any, done: dict[int, Any]) -> Any:
    """Put the arrays in the place of their stand-ins, and text in the place of bytes in keys."""
    if isinstance(value, _Array):
        if value.value is None:
            raise ValueError("an array has no content")
        return value.value
    if isinstance(value, _Dtype | _Call | type):
        raise _Forbidden("a bare type")
    if not isinstance(value, list | tuple | dict):
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, tuple):
        done[id(value)] = tuple(_resolve(item, done) for item in value)
        return done[id(value)]
    done[id(value)] = value  # before its items, which may hold it
    if isinstance(value, list):
        value[:] = [_resolve(item, done) for item in value]
    else:
        items = [(_text(key) if isinstance(key, bytes) else key, _resolve(item, done)) for key, item in value.items()]
        value.clear()
        value.update(items)
    return value


def read_pickle(path: str | PathLike[str]) -> dict[str, Any]:
    """The dictionary in a pickle file, if it holds nothing but arrays, numbers, text and plain containers.

    Keys that Python 2 wrote come back as text; other text that Python 2 wrote comes back as bytes. Arrays are
    read-only and share the memory of what was read.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    DataError
        The file is missing, truncated, not a pickle, not of a dictionary, or names anything else: then it could run
        code, and nothing of it has been run.

    Example
    -------
    >>> import pickle, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "batch"
    >>> _ = path.write_bytes(pickle.dumps({b"data": np.arange(3, dtype=np.uint8)}))
    >>> read_pickle(path)
    {'data': array([0, 1, 2], dtype=uint8)}
    """
    path = Path(path)
    try:
        # mapped, because reading from a map never makes room for more bytes than the file has
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            content = _resolve(_Reader(whole).load(), {})
    except FileNotFoundError:
        raise DataError(f"The file {path} is missing. Put the whole data set there again.") from None
    except _Forbidden as found:
        raise DataError(
            f"The file {path} asks for {found}; only arrays, numbers, text and plain containers are read, because "
            "a pickle can run code. Nothing was run. Get the file again from its official place."
        ) from None
    except Exception as error:  # damaged bytes can make the reader fail in any way
        raise DataError(
            f"The file {path} is truncated or damaged ({type(error).__name__}: {error}). Delete it and get it again."
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"The file {path} holds a {type(content).__name__}; a dictionary was expected.")
    return content
