"""Writers of small files in the layouts of the real data sets."""

from __future__ import annotations

import pickle
from pathlib import Path

from PIL import Image


def dump(content: object, path: Path, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))


def solid(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    """An image of one colour; size is width, height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
