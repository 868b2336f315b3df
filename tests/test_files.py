"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scrlearn.files import atomic_write


def test_writes_a_new_file_and_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    assert atomic_write(path, b"one") == path.resolve()
    assert path.read_bytes() == b"one"
    atomic_write(str(path), memoryview(b"two"))
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_full_disk_is_said_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.scr"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"no space left for 1,234 bytes.*unchanged.*model\.scr") as caught:
        atomic_write(path, b"x" * 1234)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are a Unix thing")
def test_a_write_that_the_kernel_cuts_short(tmp_path: Path) -> None:
    """A real failure in the middle of the bytes: the process may not write files of more than 1,000 bytes."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    program = (
        "import resource, sys; from scrlearn.files import atomic_write\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: atomic_write(sys.argv[1], b'x' * 100_000)\n"
        "except OSError as error: sys.exit(error.errno)\n"
    )
    finished = subprocess.run([sys.executable, "-B", "-c", program, str(path)], check=False)
    assert finished.returncode == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_killed_while_writing_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    program = (
        "import sys; from scrlearn.files import atomic_write\n"
        "for i in range(10**9):\n"
        "    atomic_write(sys.argv[1], bytes([i % 256]) * 300_000)\n"
        "    if i == 3: print('going', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"going\n"
    process.kill()
    process.wait()
    process.stdout.close()
    content = path.read_bytes()
    assert len(content) == 300_000
    assert len(set(content)) == 1


def test_many_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    contents = [bytes([i]) * 50_000 for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: atomic_write(path, content), contents))
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.skipif(sys.platform == "win32", reason="permission bits are a Unix thing")
def test_permissions_are_those_of_an_ordinary_file_or_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    new = atomic_write(tmp_path / "new", b"x")
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    new.chmod(0o640)
    atomic_write(new, b"y")
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need rights there")
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        atomic_write(tmp_path / "nowhere" / "a.bin", b"x")


def test_never_replaces_a_folder_or_a_device(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        atomic_write(tmp_path / "folder", b"x")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match="not a regular file"):
            atomic_write(tmp_path / "pipe", b"x")
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    assert atomic_write(tmp_path / ("n" * 250), b"x").read_bytes() == b"x"
