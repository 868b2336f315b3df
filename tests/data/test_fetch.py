from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scrlearn.data import cifar, download, load
from scrlearn.data.fetch import Archive, fetch
from scrlearn.errors import DataError, InputError


class Site:
    """A web server on the loopback interface; ``claim`` makes it promise more bytes than it sends."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.claim = 0
        self.requests: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests.append(self.path)
                content = site.files.get(self.path)
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"") + site.claim))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever)
    thread.start()
    yield site
    site.server.shutdown()
    thread.join()
    site.server.server_close()


def tarball(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def archive(site: Site) -> Archive:
    content = tarball({"set/a": b"first", "set/b": b"second" * 100_000, "set/readme.html": b"unwanted"})
    site.files["/set.tar.gz"] = content
    return Archive(f"{site.url}/set.tar.gz", hashlib.md5(content).hexdigest(), "set", ("a", "b"))


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_fetch_unpacks_what_is_wanted_and_leaves_nothing_else(archive: Archive, tmp_path: Path) -> None:
    fetch(archive, tmp_path / "new" / "root")
    assert tree(tmp_path / "new" / "root") == {"set/a": b"first", "set/b": b"second" * 100_000}
    assert [path.name for path in (tmp_path / "new" / "root").iterdir()] == ["set"]


def test_fetch_does_nothing_when_all_is_there(archive: Archive, site: Site, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_bytes(b"mine")
    fetch(archive, tmp_path)
    assert site.requests == []
    assert tree(tmp_path) == {"set/a": b"mine", "set/b": b"mine"}


def test_fetch_completes_a_folder_and_keeps_other_files(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_bytes(b"cut off")
    (tmp_path / "set" / "notes").write_bytes(b"mine")
    fetch(archive, tmp_path)
    assert tree(tmp_path) == {"set/a": b"first", "set/b": b"second" * 100_000, "set/notes": b"mine"}


def failing(archive: Archive, root: Path, message: str) -> None:
    (root / "set").mkdir(exist_ok=True)
    (root / "set" / "a").write_bytes(b"old")
    before = tree(root)
    with pytest.raises(DataError, match=message):
        fetch(archive, root)
    assert tree(root) == before
    assert [path.name for path in root.iterdir()] == ["set"]


def test_wrong_md5_changes_nothing(archive: Archive, tmp_path: Path) -> None:
    failing(replace(archive, md5="0" * 32), tmp_path, "instead of 00000")


def test_broken_transfer_changes_nothing(archive: Archive, site: Site, tmp_path: Path) -> None:
    site.claim = 1000
    failing(archive, tmp_path, "(broke off|IncompleteRead)")


def test_missing_page_and_dead_server_change_nothing(archive: Archive, site: Site, tmp_path: Path) -> None:
    failing(replace(archive, url=f"{site.url}/absent.tar.gz"), tmp_path, r"404.*other means")
    failing(replace(archive, url="http://127.0.0.1:9/set.tar.gz"), tmp_path, r"could not be fetched")


@pytest.mark.parametrize(
    "content",
    [b"no archive at all", tarball({"set/a": b"1"}), tarball({"other/a": b"1"}), tarball({"set/a": b"1"})[:40]],
    ids=["no archive", "a file is missing", "another folder", "cut off"],
)
def test_wrong_archive_changes_nothing(content: bytes, site: Site, tmp_path: Path) -> None:
    site.files["/x.tar.gz"] = content
    archive = Archive(f"{site.url}/x.tar.gz", hashlib.md5(content).hexdigest(), "set", ("a", "b"))
    failing(archive, tmp_path, "does not hold what was expected")


def test_archive_cannot_write_outside(site: Site, tmp_path: Path) -> None:
    content = tarball({"set/../../escaped": b"1"})
    site.files["/x.tar.gz"] = content
    archive = Archive(f"{site.url}/x.tar.gz", hashlib.md5(content).hexdigest(), "set", ("../../escaped",))
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(DataError):
        fetch(archive, root)
    assert tree(tmp_path) == {}


def test_unwritable_root_is_a_clear_error(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="could not be stored"):
        fetch(archive, tmp_path / "file")


def test_load_downloads_cifar(cifar10_root: Path, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cifar10_root / "cifar-10-batches-py"
    content = tarball({f"cifar-10-batches-py/{path.name}": path.read_bytes() for path in folder.iterdir()})
    site.files["/cifar-10-python.tar.gz"] = content
    official = cifar._CIFAR10.archive
    mirror = replace(official, url=site.url + "/cifar-10-python.tar.gz", md5=hashlib.md5(content).hexdigest())
    source = cifar._source(replace(cifar._CIFAR10, archive=mirror), "", cifar.CIFAR10.expected)
    monkeypatch.setitem(__import__("scrlearn.data").data.SOURCES, "cifar10", source)
    root = tmp_path / "fresh"
    data = load("cifar10", root, download=True)
    assert len(data.train) == 100
    assert download("cifar10", root) == root / "cifar-10-batches-py"
    assert len(site.requests) == 1


def test_official_places_and_digests() -> None:
    assert cifar._CIFAR10.archive.url == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert cifar._CIFAR10.archive.md5 == "c58f30108f718f92721af3b95e74349a"
    assert cifar._CIFAR100.archive.url == "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
    assert cifar._CIFAR100.archive.md5 == "eb9058c3a382ffc7106e4002c42a8d85"


def test_what_cannot_be_downloaded_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no official place"):
        download("mini-imagenet", tmp_path)
    assert download("digits", tmp_path) is None
