"""Image files: found, decoded to pixels, and read ahead by worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from scrlearn.devices import cores
from scrlearn.errors import DataError
from scrlearn.images import has_32_bits

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf")  # images, but not for us
_AHEAD = 4  # blocks read ahead by each worker
_MOST_WORKERS = 8

T = TypeVar("T")


def default_workers() -> int:
    """One per CPU core this process may use, at most eight."""
    return min(cores(), _MOST_WORKERS)


def list_images(folder: Path, unread: list[Path] | None = None) -> list[str]:
    """Image files in a folder and the folders in it: paths relative to it, sorted, hidden ones left out.

    Images in formats that cannot be read are added to `unread`.
    """
    found = []
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(where, folder)
        for name in files:
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                found.append(name if inside == "." else os.path.join(inside, name))
            elif unread is not None and name.lower().endswith(UNREAD) and not name.startswith("."):
                unread.append(Path(where, name))
    return sorted(found)


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image as it will be shown, read from its header only."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            in_head = image.format != "PNG" or "exif" in image.info  # elsewhere Pillow would decode the whole PNG
            turned = in_head and image.getexif().get(0x0112, 1) >= 5  # orientations 5 to 8 swap the sides
    except Exception as error:  # a damaged header can make the decoder fail in any way
        raise unreadable(path, error) from error
    return (width, height) if turned else (height, width)


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that is no readable image."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"The image {path} was there when the folder was listed and is gone. Load the data set again.")
    return DataError(
        f"The image {path} cannot be read ({type(error).__name__}: {error}). Replace it, or remove it from the folder."
    )


def decode(path: Path, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """One image as uint8 RGB, 3×H×W. Another size is scaled until it covers ``size``, and its middle is taken."""
    height, width = size
    try:
        with Image.open(path) as image:
            side = 2 * max(size)
            image.draft("RGB", (side, side))  # a large JPEG is decoded small, yet at least twice as large as wanted
            if has_32_bits(image):
                raise ValueError("its pixels have 32 bits; save it with whole numbers from 0 to 255")
            picture = _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # damaged bytes can make the decoder fail in any way
        raise unreadable(path, error) from error
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture).transpose(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would cut every value above 255
        grey = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(np.rint(grey.clip(0, 255)).astype(np.uint8))
    if image.mode == "F":  # nobody knows their range, and Pillow would cut them to 0 to 255
        raise ValueError("its pixels are floats; save it with whole numbers from 0 to 255")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # palette with transparency: its colours are kept
        return image.convert("RGB")


def read_ahead(work: Callable[[Tensor], T], blocks: Sequence[Tensor], workers: int) -> Iterator[T]:
    """``work(block)`` for every block in order, done ahead by worker processes.

    Processes are forked, on Linux: a person's script needs no ``if __name__ == "__main__"``. Elsewhere threads do the
    work (Pillow decodes outside Python's lock). With 0 workers nothing is done ahead. No random numbers are used.
    """
    workers = min(workers, len(blocks))
    if workers == 0:
        return map(work, blocks)
    if sys.platform == "linux" and not multiprocessing.current_process().daemon:  # a daemon may have no children
        return _by_processes(work, blocks, workers)
    return _by_threads(work, blocks, workers)


class _Job(TorchDataset[Any]):
    """The blocks as a torch data set, whose item number i is the work done on block i."""

    def __init__(self, work: Callable[[Tensor], Any], blocks: Sequence[Tensor]) -> None:
        self.work, self.blocks = work, blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.work(self.blocks[index])
        except DataError as error:  # sent as a value: torch would wrap a raised one in its own long text
            return error


def _unchanged(item: T) -> T:
    return item


def _begin_worker(parent: int, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; the parent decides what it means
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """End this worker when its parent was killed: nobody reads what it sends, and it would wait for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def _by_processes(work: Callable[[Tensor], T], blocks: Sequence[Tensor], workers: int) -> Iterator[T]:
    loader = DataLoader(
        _Job(work, blocks),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        collate_fn=_unchanged,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # or it would draw from the global one
    )
    for item in loader:
        if isinstance(item, DataError):
            raise item
        yield item


def _by_threads(work: Callable[[Tensor], T], blocks: Sequence[Tensor], workers: int) -> Iterator[T]:
    with ThreadPoolExecutor(workers) as pool:
        todo = iter(blocks)
        waiting: deque[Future[T]] = deque(pool.submit(work, block) for block in islice(todo, workers * _AHEAD))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(work, block) for block in islice(todo, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


class ImageFiles:
    """Image files that are decoded when asked for.

    Parameters
    ----------
    root
        The folder the paths are relative to.
    paths
        One path per image.
    size
        Height and width that every image is brought to.
    workers
        Processes that read ahead, and threads that read one batch.
    """

    def __init__(self, root: Path, paths: Sequence[str], size: tuple[int, int], workers: int | None = None) -> None:
        self.root, self.size = root, size
        self.workers = default_workers() if workers is None else workers
        # one array: a million Python strings would take ten times the memory, again in every worker
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=bytes)

    def __len__(self) -> int:
        """Number of files."""
        return len(self._paths)

    def path(self, index: int) -> Path:
        """Where image number ``index`` lies."""
        return self.root / os.fsdecode(self._paths[index])

    def decode_block(self, indices: Tensor) -> np.ndarray[Any, Any]:
        """Pixels of these images, N×3×H×W, decoded here and now."""
        out = np.empty((len(indices), 3, *self.size), dtype=np.uint8)
        for row, index in enumerate(indices.tolist()):
            out[row] = decode(self.path(index), self.size)
        return out

    def read(self, indices: Tensor) -> Tensor:
        """Pixels of these images, decoded by several threads."""
        if self.workers < 2 or len(indices) < 2 * self.workers:
            return torch.from_numpy(self.decode_block(indices))
        parts = indices.chunk(self.workers)
        with ThreadPoolExecutor(self.workers) as pool:
            return torch.from_numpy(np.concatenate(list(pool.map(self.decode_block, parts))))

    def prefetch(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Pixels of each batch in order, read ahead by worker processes."""
        return (torch.from_numpy(block) for block in read_ahead(self.decode_block, batches, self.workers))
