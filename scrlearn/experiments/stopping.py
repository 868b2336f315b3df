"""Stopping a run on request: the batch at hand is finished and everything saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has saved where it stands.

    Parameters
    ----------
    checkpoint
        Where it was saved.
    step, steps
        Batches learned, and batches in the whole stream.
    signal_number
        The signal that asked for it.
    """

    def __init__(self, checkpoint: Path, step: int, steps: int, signal_number: int) -> None:
        self.checkpoint, self.step, self.steps, self.signal_number = checkpoint, step, steps, signal_number
        super().__init__(f"Stopped after {step} of {steps} batches and saved to {checkpoint}.")


@contextmanager
def stop_requests(active: bool) -> Iterator[list[int]]:
    """A list into which the first SIGINT or SIGTERM is put; the second one acts as it would have without this."""
    received: list[int] = []
    if not active or threading.current_thread() is not threading.main_thread():
        yield received
        return
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}
    owner = os.getpid()

    def restore() -> None:
        for number in watched:
            signal.signal(number, before[number])

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker, which shall simply end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)
        restore()

    for number in watched:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
