"""Random numbers that belong to their owner: every object has its own generator, derived from its seed."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

# torch's global generators belong to the whole process: one thread at a time seeds them, draws and puts them back
GLOBAL_GENERATORS = threading.RLock()


def derived_seed(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, unrelated to those of other purposes.

    >>> derived_seed(0, "stream") == derived_seed(0, "stream") != derived_seed(1, "stream")
    True
    """
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for one purpose."""
    return torch.Generator(device=device).manual_seed(derived_seed(seed, *purpose))


@contextlib.contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Run code that draws from torch's global CPU generator (layers' first weights) without touching it."""
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(seed, *purpose))
        yield
