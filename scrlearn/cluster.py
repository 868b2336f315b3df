"""Reaching a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from scrlearn.errors import InputError

LOCAL = "local"
REACH_SECONDS = 10.0


def import_ray(module: str = "ray") -> Any:
    """Ray, or one of its modules; it is a large package, and only who asks for it needs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody outside
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"Ray is needed for this ({error}): pip install 'scrlearn[ray]'.") from error


@contextlib.contextmanager
def connected(address: str, object_store_memory: int | None = None) -> Iterator[Any]:
    """A connection to a cluster; gives the module `ray`.

    This package's code goes along, so that every machine runs the same. Where this process is connected already, that
    connection is used, and left open.

    Parameters
    ----------
    address
        "local": start Ray on this machine, for as long as this lasts. Else the address of a cluster: HOST:PORT,
        ray://HOST:PORT, or "auto" for the one that this machine is part of.
    object_store_memory
        Bytes of shared memory for a local one; None: Ray's own choice.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    about: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    about["runtime_env"] = {"py_modules": [str(Path(__file__).parent)]}
    if address == LOCAL:
        about |= {"include_dashboard": False, "object_store_memory": object_store_memory}
    else:
        _check_reachable(address)
    try:
        ray.init(address=address, **about)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f'Ray at "{address}" cannot be used: {str(error).splitlines()[0]} {_ADVICE}') from error
    with _ray_aside():  # until its threads have ended
        try:
            yield ray
        finally:
            with contextlib.redirect_stdout(sys.stderr):  # what it has kept back it says now, in this thread
                ray.shutdown()


class _Stdout:
    """Standard output, but for Ray's own threads: what they say of machines is no result, and goes to the other."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _aim(self) -> TextIO:
        return sys.stderr if threading.current_thread().name.startswith("ray_") else self._stream

    def write(self, text: str) -> int:
        return self._aim().write(text)

    def flush(self) -> None:
        self._aim().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _ray_aside() -> Iterator[None]:
    before, mine = sys.stdout, cast(TextIO, _Stdout(sys.stdout))
    sys.stdout = mine
    try:
        yield
    finally:
        if sys.stdout is mine:
            sys.stdout = before


_ADVICE = "Start a cluster with `ray start --head`, and give the address that it prints; or use this machine: local."


def _check_reachable(address: str) -> None:
    """Say in seconds what Ray says after minutes, and by ending the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # "auto", or what Ray will refuse at once
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f'No Ray cluster answers at "{address}" ({error}). {_ADVICE}') from error
