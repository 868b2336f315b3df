"""The demonstration: two learners of its own learn a stream of digits side by side, apart from the served model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

import scrlearn
from scrlearn.service.problems import stopping
from scrlearn.service.schemas import Strict

log = logging.getLogger("scrlearn.service")
LONGEST_SECONDS = 300.0
# -P: what lies in the directory the service was started from is never imported
COMMAND = (sys.executable, "-P", "-m", "scrlearn.service.demo_stream")


class DemoClass(Strict):
    """A class of the demonstration, and one of its images."""

    label: str
    image: str = Field(description="The image as a data URL (PNG).")


class DemoPoint(Strict):
    """A point of the curves."""

    images: int = Field(description="Images learned until then.")
    classes: int = Field(description="Classes seen until then.")
    accuracy: dict[str, float] = Field(description="Of each method, on test images of the classes seen until then.")


class DemoState(Strict):
    """How far the demonstration has come."""

    status: Literal["idle", "starting", "running", "finished", "stopped", "failed"] = "idle"
    detail: str | None = Field(default=None, description="What went wrong, when it failed.")
    methods: list[str] = Field(default=["scr", "fine-tune"], description="The methods that are compared.")
    classes: list[DemoClass] = Field(default=[], description="The classes in the order of the stream.")
    images: int = Field(default=0, description="Images learned so far.")
    total: int = Field(default=0, description="Images of the whole stream.")
    label: str | None = Field(default=None, description="The class that is being learned.")
    batch: list[str] = Field(default=[], description="The images learned last, as data URLs (PNG).")
    points: list[DemoPoint] = Field(default=[], description="The curves so far.")
    known: dict[str, list[float]] = Field(
        default={}, description="Of each method, the accuracy on each class seen so far, at the last point."
    )
    seconds: float = Field(default=0.0, description="Since the start, until now or until the end.")


class Demo:
    """Runs the demonstration in a process of its own, one at a time, and knows how far it has come.

    Parameters
    ----------
    command
        What writes the events.
    seconds
        The longest it may take.

    Examples
    --------
    >>> Demo().state().status
    'idle'
    """

    def __init__(self, command: Sequence[str] = COMMAND, seconds: float = LONGEST_SECONDS) -> None:
        self._command, self._seconds = list(command), seconds
        self._state = DemoState()
        self._begun = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def state(self) -> DemoState:
        """How far it has come."""
        with self._lock:
            if self._process is not None:
                self._change(seconds=round(time.monotonic() - self._begun, 2))
            return self._state

    def start(self) -> DemoState:
        """Begin; where one is running already, that one goes on."""
        with self._lock:
            if self._closed:
                raise stopping()
            if self._process is None:
                self._begin()
            return self._state

    def stop(self) -> DemoState:
        """End it; what it has shown so far stays."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                self._change(status="stopped", label=None)
        if process is not None:
            process.kill()
            process.wait()
        return self.state()

    def close(self) -> None:
        """End it for good."""
        self._closed = True
        self.stop()

    def _begin(self) -> None:
        path = os.pathsep.join(filter(None, [str(Path(scrlearn.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self._begun = time.monotonic()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            log.error("The demonstration cannot be started: %s", error)
            self._state = DemoState(status="failed", detail=f"No process could be started for it: {error.strerror}.")
            return
        self._state = DemoState(status="starting")
        threading.Thread(target=self._follow, args=(self._process,), name="scr-demo", daemon=True).start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """The thread that reads what the process writes, until its end."""
        assert process.stdout is not None
        watch = threading.Timer(self._seconds, process.kill)
        watch.daemon = True
        watch.start()
        reason = "Its process ended too early."
        with process.stdout as lines:
            try:
                for line in lines:
                    self._take(process, line)
            except ValueError:
                log.exception("The demonstration's process wrote something else than events.")
                reason = "What its process writes cannot be read."
                process.kill()
        watch.cancel()
        code = process.wait()
        with self._lock:
            if self._process is not process:
                return  # stopped, and perhaps begun anew
            self._process = None
            if self._state.status != "finished":
                log.error("The demonstration's process ended with %d.", code)
                if time.monotonic() - self._begun >= self._seconds:
                    reason = f"It took longer than {self._seconds:g} seconds."
                self._change(status="failed", detail=f"{reason} The server's log says more.", label=None)

    def _take(self, process: subprocess.Popen[str], line: str) -> None:
        event: dict[str, Any] = json.loads(line)
        point = event.pop("point", None)
        with self._lock:
            if self._process is process:
                points = self._state.points if point is None else [*self._state.points, point]
                self._change(**event, points=points, seconds=round(time.monotonic() - self._begun, 2))

    def _change(self, **fields: Any) -> None:
        # checked, and a new object each time: whoever holds the last one sees it whole
        self._state = DemoState.model_validate({**dict(self._state), **fields})
