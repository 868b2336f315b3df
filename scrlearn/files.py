"""Files that appear whole or not at all: write beside, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def atomic_write(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> Path:
    """Write ``data`` to ``path`` so that a reader, or a crash, finds the old file or the new one and nothing between.

    The bytes go to a file of a unique name in the same folder, reach the disk, and take the place of the old file in
    one rename. A symbolic link keeps pointing where it did, and a file that was there keeps its permissions. When
    anything fails, the temporary file is removed and the old file is untouched.

    Parameters
    ----------
    path
        Where the file shall be. Its folder must exist.
    data
        The whole content.

    Returns
    -------
    Path
        ``path``, with symbolic links followed.

    Raises
    ------
    OSError
        What the system says; for a full disk, with the file's name, the size, and what to do.

    Example
    -------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> atomic_write(folder / "a.txt", b"hello").read_bytes()
    b'hello'
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of_old_file(target)
    temporary = target.parent / f".{target.name[:64]}.{secrets.token_hex(8)}.tmp"
    try:
        _write_and_sync(temporary, data, mode)
        os.replace(temporary, target)
    except BaseException as error:  # Ctrl-C too must leave nothing behind
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _clearer(error, target, len(memoryview(data).cast("B"))) from error
        raise
    _sync_directory(target.parent)
    return target


def _mode_of_old_file(target: Path) -> int | None:
    """Permission bits of the file to be replaced; None when there is none."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder has this name; choose another name for the file", str(target))
    if not stat.S_ISREG(status.st_mode):  # renaming over a device or pipe would destroy it
        raise OSError(errno.EINVAL, "this is not a regular file and cannot be replaced by one", str(target))
    return stat.S_IMODE(status.st_mode)


def _write_and_sync(temporary: Path, data: bytes | bytearray | memoryview, mode: int | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:  # 0o666: the person's umask decides, as for open()
        file.write(data)
        file.flush()
        if mode is not None:
            os.chmod(temporary, mode)
        os.fsync(file.fileno())


def _sync_directory(folder: Path) -> None:
    """Make the rename itself durable, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _clearer(error: OSError, target: Path, size: int) -> OSError:
    """The same kind of error, speaking of the file the person asked for."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = (
            f"no space left for {size:,} bytes; a file of this name from before is unchanged. "
            "Free some space or choose another folder"
        )
        return OSError(error.errno, text, str(target))
    if error.errno == errno.ENOENT and not target.parent.is_dir():
        return FileNotFoundError(errno.ENOENT, f"the folder {target.parent} does not exist; create it", str(target))
    return OSError(error.errno, error.strerror or str(error), str(target))
