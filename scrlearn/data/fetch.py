"""Fetch an archive from its official place: checked by MD5, and there as a whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from scrlearn.data.progress import progress_bar
from scrlearn.errors import DataError

_BLOCK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class Archive:
    """A published tar.gz file.

    Parameters
    ----------
    url, md5
        Where it is, and the MD5 of its bytes.
    folder, files
        The folder in it that is wanted, and the files in that folder.
    """

    url: str
    md5: str
    folder: str
    files: tuple[str, ...]

    def present(self, root: Path) -> bool:
        """Whether every file lies under ``root``."""
        return all((root / self.folder / name).is_file() for name in self.files)


def fetch(archive: Archive, root: Path, *, progress: bool = True) -> None:
    """Download and unpack ``archive`` under ``root``, unless its files are there already.

    Everything happens in a temporary folder beside the target, which is moved into place at the end. When anything
    fails, no file has changed.

    Raises
    ------
    DataError
        The network, the disk, the MD5 or the archive's content failed, with what to do.
    """
    if archive.present(root):
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as temporary:
            file = Path(temporary) / "archive.tar.gz"
            _download(archive, file, progress)
            _unpack(archive, file, Path(temporary) / "unpacked")
            _move(archive, Path(temporary) / "unpacked" / archive.folder, root / archive.folder)
    except OSError as error:
        raise DataError(
            f"{archive.url} could not be stored under {root} ({error}). Free some space, or choose another folder "
            "with root=… or the environment variable SCRLEARN_DATA."
        ) from error


def _download(archive: Archive, file: Path, progress: bool) -> None:
    by_hand = f"Try again, or fetch it by other means and unpack it so that {archive.folder}/ lies in the data folder."
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(archive.url, timeout=_TIMEOUT) as reply:
            length = int(reply.headers.get("Content-Length") or 0)
            _copy(reply, file, digest, length, f"Fetching {Path(archive.url).name}", progress)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise DataError(f"{archive.url} could not be fetched ({error}). {by_hand}") from error
    received = file.stat().st_size
    if length and received != length:
        raise DataError(f"{archive.url} broke off after {received:,} of {length:,} bytes. {by_hand}")
    if digest.hexdigest() != archive.md5:
        raise DataError(
            f"{archive.url} came with MD5 {digest.hexdigest()} instead of {archive.md5}: it is not the published "
            f"file, and was thrown away. {by_hand}"
        )


def _copy(
    reply: http.client.HTTPResponse, file: Path, digest: hashlib._Hash, length: int, text: str, progress: bool
) -> None:
    with file.open("wb") as out, progress_bar(text, length or None, show=progress, in_bytes=True) as advance:
        while block := reply.read(_BLOCK):
            out.write(block)
            digest.update(block)
            advance(len(block))


def _unpack(archive: Archive, file: Path, target: Path) -> None:
    wanted = [f"{archive.folder}/{name}" for name in archive.files]
    try:
        with tarfile.open(file) as tar:
            for name in wanted:  # by hand: the filters of `extractall` came with Python 3.11.4
                _write(tar, name, target)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"The archive {archive.url} does not hold what was expected: {error}.") from error
    for name in wanted:
        with (target / name).open("rb") as unpacked:
            os.fsync(unpacked.fileno())


def _write(tar: tarfile.TarFile, name: str, target: Path) -> None:
    """One plain file of an archive; nothing else of it, and nowhere else."""
    place = target / name
    content = tar.extractfile(name) if tar.getmember(name).isreg() else None
    if content is None or not place.resolve().is_relative_to(target.resolve()):
        raise tarfile.TarError(f"{name} is no plain file in it")
    place.parent.mkdir(parents=True, exist_ok=True)
    with content, place.open("wb") as out:
        shutil.copyfileobj(content, out, _BLOCK)


def _move(archive: Archive, unpacked: Path, target: Path) -> None:
    if not target.exists():
        unpacked.rename(target)
        return
    for name in archive.files:  # the folder was incomplete: other files that lie in it stay
        shutil.move(unpacked / name, target / name)
