"""A tiny model and tiny images for the tests of the service."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn
from PIL import Image
from tiny_encoder import tiny

from scrlearn.service.app import create_app
from scrlearn.service.core import Service
from scrlearn.service.guard import Access
from scrlearn.service.settings import Limits

CONFIG = {
    "method": "er",
    "memory_size": 40,
    "image_size": 8,
    "channels": 1,
    "classifier": "ncm",
    "device": "cpu",
    "precision": "fp32",
    "threads": 1,
}
HERE = "http://127.0.0.1"


def pixels(label: str, number: int = 0) -> np.ndarray:
    """An 8×8 image of a class; its number is in the last row, so that no two are the same."""
    rng = np.random.default_rng([*label.encode()])
    image = rng.integers(40, 216, (8, 8), dtype=np.uint8)
    image[7] = [(number >> bit & 1) * 60 + 100 for bit in range(8, 16)]
    image[6] = [(number >> bit & 1) * 60 + 100 for bit in range(8)]
    return image


def file_of(image: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


def png(label: str, number: int = 0) -> bytes:
    return file_of(pixels(label, number))


def encoded(*files: bytes) -> list[str]:
    return [base64.b64encode(file).decode() for file in files]


def images_of(label: str, count: int, start: int = 0) -> torch.Tensor:
    """As the service sees them: uint8, N×1×8×8."""
    return torch.from_numpy(np.stack([pixels(label, start + n) for n in range(count)]))[:, None]


def open_service(folder: Path, limits: Limits | None = None, **config: object) -> Service:
    return Service(folder, {**CONFIG, **config}, limits=limits, encoder=tiny())


def teach(service: Service, label: str, count: int, start: int = 0, key: str | None = None) -> int:
    """Teach images and wait until they answer; the place of the last."""
    receipt = service.learn(images_of(label, count, start), [label] * count, key).result(10)
    assert service.worker.when_published(receipt.last).result(10)
    return receipt.last


@contextlib.contextmanager
def api(folder: Path, limits: Limits | None = None, token: str | None = None, **config: object) -> Iterator[Any]:
    """A client to a server with a new service; `client.service` is the service."""
    with (
        open_service(folder, limits, **config) as service,
        listening(service, Access(token)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        client.service = service  # type: ignore[attr-defined]
        yield client


@contextlib.contextmanager
def listening(service: Service, access: Access | None = None) -> Iterator[str]:
    """The address of a real server on this machine."""
    app = create_app(service, access)
    server = uvicorn.Server(uvicorn.Config(app, http="h11", port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    try:
        yield f"{HERE}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        app.state.demo.close()
