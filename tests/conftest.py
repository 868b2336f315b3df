"""What tests of several rooms need."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """A folder of its own for Ray; the names of its sockets may not be long."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", str(folder))
        # no secret is written into the home of whoever tests; Ray reads it once in a process
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        environment.setenv("RAY_AUTH_MODE", "token")
        yield folder
    shutil.rmtree(folder, ignore_errors=True)
