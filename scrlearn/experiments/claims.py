"""Who makes which run, where several sweeps work on one store: each run is claimed by a lock on a file.

The system gives a lock back when its process ends, however it ends, so a claim never outlives who made it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there, sweeps of one store may make the same run, which is then in it once
    fcntl = None  # type: ignore[assignment]

ENDING = ".lock"


class Claims:
    """The runs that this process has taken upon itself.

    Parameters
    ----------
    folder
        Where the locks lie, beside the checkpoints; made when needed.

    Example
    -------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> ours, theirs = Claims(folder), Claims(folder)
    >>> ours.take("a run"), theirs.take("a run"), theirs.take("another")
    (True, False, True)
    >>> ours.give_back("a run")
    >>> theirs.take("a run")
    True
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}

    def take(self, key: str) -> bool:
        """Claim a run; False: somebody else has it."""
        if fcntl is None or key in self._files:
            return True
        path = self._path(key)
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the folder has just been cleared away by somebody else
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(file)
                    return False
                if _is_at(file, path):
                    self._files[key] = file
                    return True
                os.close(file)  # removed by who had it, between opening and locking

    def give_back(self, key: str) -> None:
        """Let others have a run."""
        if (file := self._files.pop(key, None)) is not None:
            self._path(key).unlink(missing_ok=True)
            os.close(file)

    def give_all_back(self) -> None:
        """Let others have everything."""
        for key in list(self._files):
            self.give_back(key)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{ENDING}"


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
