"""Files of the page, read once at the start: no path from a request ever reaches the file system."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class PageFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The files of the page by their names; none where there is no page."""
    if not folder.is_dir():
        return {}
    return {path.name: _read(path) for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".py"}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
