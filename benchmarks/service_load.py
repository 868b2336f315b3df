"""How fast does the service answer, alone and while it learns; and does its memory stay flat?

    python benchmarks/service_load.py                        # rounds with and without learning: two or three minutes
    python benchmarks/service_load.py --json load.json       # writes the figures to a file, too
    python benchmarks/service_load.py --minutes 30           # a light load for so long, and the memory of the process

`scr serve` is started on loopback with a state of its own, on two cores at most. Clients in another process keep asking
about one image each, the next when the last is answered. Rounds alternate: without learning, then with a client that
teaches without a pause, so that whatever else the machine does falls on both; a round gives throughput and the median
and 99th percentile of the time to an answer, and the result is the median over the rounds. What counts is the ratio of
the 99th percentiles.

With --minutes, the same clients ask and teach at a fixed low rate. The memory of the process is flat if the median of
the last quarter of the time is at most 5 % above that of the second quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

CORES = 2
FLAT = 1.05
SIZE = 32


# ------------------------------------------------------------------------------------------------------- the clients


def picture(label: int, random: np.random.Generator) -> bytes:
    """A PNG of a class: a colour of its own, and noise."""
    colour = np.random.default_rng(label).integers(0, 256, 3)
    pixels = colour + random.normal(0, 40, (SIZE, SIZE, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def body(labels: list[int], random: np.random.Generator, teach: bool) -> bytes:
    images = [base64.b64encode(picture(label, random)).decode() for label in labels]
    return json.dumps(
        {"images": images} | ({"labels": [f"class {label}" for label in labels]} if teach else {})
    ).encode()


class Connected:
    """A connection that is kept open; HTTP/1.1, as little of it as is needed."""

    def __init__(self, address: str) -> None:
        self.host, self.port = urlsplit(address).hostname, urlsplit(address).port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, content: bytes) -> int:
        # a server ends a connection that is idle for some seconds
        if self.streams is None or self.streams[0].at_eof() or self.streams[1].is_closing():
            self.streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self.streams
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        await reader.readexactly(int(answer.partition("content-length:")[2].partition("\r\n")[0]))
        return int(answer.split()[1])


class Client:
    """Requests one after the other, each when the last is answered and `pause` has passed since it was sent."""

    def __init__(self, address: str, path: str, bodies: list[bytes], pause: float) -> None:
        self.connected, self.path, self.bodies, self.pause = Connected(address), path, bodies, pause
        self.seconds: list[float] = []
        self.statuses: Counter[int] = Counter()

    async def run(self, until: float) -> None:
        number = 0
        while (begun := time.perf_counter()) < until:
            status = await self.connected.post(self.path, self.bodies[number % len(self.bodies)])
            number += 1
            taken = time.perf_counter() - begun
            self.statuses[status] += 1
            if status == 200:
                self.seconds.append(taken)
            await asyncio.sleep(max(0.5 if status == 429 else 0.0, self.pause - taken))


def clients(back: Connection, address: str, path: str, count: int, seconds: float, classes: int, pause: float) -> None:
    """In a process of its own: so many clients at once, for so long."""
    random, teach = np.random.default_rng(os.getpid()), path.startswith("/v1/learn")
    images = 10 if teach else 1
    bodies = [body(random.integers(0, classes, images).tolist(), random, teach) for _ in range(50)]
    some = [Client(address, path, bodies[i:] + bodies[:i], pause) for i in range(count)]
    back.send(None)  # ready
    back.recv()

    async def together() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(client.run(until) for client in some))

    asyncio.run(together())
    back.send(([taken for c in some for taken in c.seconds], sum((c.statuses for c in some), Counter())))


class Crowd:
    """Clients in another process."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=clients, args=(other, *arguments), daemon=True)
        self.process.start()
        self.pipe.recv()

    def start(self) -> None:
        self.pipe.send(None)

    def result(self) -> tuple[list[float], Counter[int]]:
        found: tuple[list[float], Counter[int]] = self.pipe.recv()
        self.process.join()
        return found


# -------------------------------------------------------------------------------------------------------- the service


@contextlib.contextmanager
def service(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """The address and the process of a new service."""
    with tempfile.TemporaryDirectory(prefix="scrlearn-load-") as folder:
        command = [sys.executable, "-m", "scrlearn", "serve", "--state", f"{folder}/state", "--port", "0"]
        command += ["--memory", str(options.memory), "--image-size", str(SIZE), "--device", "cpu"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Serving"), "the service did not start"
            yield line.split()[-1], process.pid
        finally:
            process.terminate()
            process.wait(120)


def state(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/v1/state", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def settle(address: str) -> None:
    """Wait until everything is learned."""
    while (now := state(address))["pending"] or now["published"] < now["accepted"]:
        time.sleep(0.2)


def prepare(address: str, options: argparse.Namespace) -> None:
    """Teach so many images that there is something to answer with."""
    random = np.random.default_rng(0)
    while (images := state(address)["images"]) < options.images:
        content = body([n % options.classes for n in range(images, images + 50)], random, teach=True)
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{address}/v1/learn?wait=60", content, headers), timeout=120)
    settle(address)


def resident_mb(process: int) -> float:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# ------------------------------------------------------------------------------------------------------------- rounds


def measure(address: str, options: argparse.Namespace, learning: bool) -> dict[str, float]:
    """One round."""
    asking = Crowd(address, "/v1/predict", options.clients, options.seconds, options.classes, 0.0)
    # four requests of ten images on the way, so that the learner never waits and little is left when the round is over
    teaching = Crowd(address, "/v1/learn?wait=60", 4, options.seconds, options.classes, 0.0) if learning else None
    before = state(address)["images"]
    if teaching is not None:
        teaching.start()
        while state(address)["images"] == before:
            time.sleep(0.05)
    begun = time.perf_counter()
    asking.start()
    seconds, statuses = asking.result()
    taken = time.perf_counter() - begun
    learned = state(address)["images"] - before
    if teaching is not None:
        teaching.result()
    settle(address)
    assert {*statuses} <= {200, 429}, statuses
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return {
        "answers_per_second": len(seconds) / taken,
        "p50_ms": 1000 * p50,
        "p99_ms": 1000 * p99,
        "max_ms": 1000 * max(seconds),
        "busy": statuses[429],
        "learned_per_second": learned / taken,
    }


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"quiet": [], "learning": []}
    with service(options) as (address, _):
        prepare(address, options)
        measure(address, argparse.Namespace(**{**vars(options), "seconds": 2.0}), learning=True)  # everything once
        for number in range(options.rounds):
            for kind, measured in found.items():
                measured.append(measure(address, options, learning=kind == "learning"))
                shown = "  ".join(f"{name} {value:.1f}" for name, value in measured[-1].items())
                print(f"round {number + 1}, {kind:>8}:  {shown}", flush=True)
    middle = {
        kind: {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        for kind, measured in found.items()
    }
    ratios = {
        name: statistics.median(b[name] / a[name] for a, b in zip(*found.values(), strict=True))
        for name in ("answers_per_second", "p50_ms", "p99_ms")
    }
    for kind, figures in middle.items():
        print(f"{kind:>8}: " + "  ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    print("learning / quiet: " + "  ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    return {"median": middle, "learning_over_quiet": ratios, "rounds": found}


# --------------------------------------------------------------------------------------------------------------- soak


def soak(options: argparse.Namespace) -> dict[str, Any]:
    total = 60 * options.minutes
    with service(options) as (address, process):
        prepare(address, options)
        # ten images every ten seconds, and `rate` questions a second
        pause = options.clients / options.rate
        asking = Crowd(address, "/v1/predict", options.clients, total, options.classes, pause)
        teaching = Crowd(address, "/v1/learn", 1, total, options.classes, 10.0)
        asking.start()
        teaching.start()
        begun, samples = time.monotonic(), []
        while (now := time.monotonic() - begun) < total:
            samples.append((now, resident_mb(process)))
            if len(samples) % 6 == 1:
                print(f"{now / 60:6.1f} min  {samples[-1][1]:8.1f} MB", flush=True)
            time.sleep(min(10.0, total / 60))
        seconds, statuses = asking.result()
        learned = teaching.result()[1]
        end = state(address)
    parts = [[mb for at, mb in samples if part <= 4 * at / total < part + 1] for part in range(4)]
    quarters = [statistics.median(part) for part in parts]
    ratio = quarters[3] / quarters[1]
    print(f"{sum(statuses.values())} questions {dict(statuses)}, {learned} of ten images each to learn")
    print(f"quarters: {', '.join(f'{mb:.1f}' for mb in quarters)} MB; last to second {ratio:.4f}: ", end="")
    print("flat" if ratio <= FLAT else "NOT FLAT")
    return {
        "minutes": options.minutes,
        "questions": dict(statuses),
        "p50_ms": 1000 * float(np.quantile(seconds, 0.5)),
        "p99_ms": 1000 * float(np.quantile(seconds, 0.99)),
        "images_learned": end["images"],
        "disk_mb": end["disk_bytes"] / 2**20,
        "quarters_mb": quarters,
        "last_over_second_quarter": ratio,
        "flat": ratio <= FLAT,
        "samples": [{"minute": round(at / 60, 2), "resident_mb": round(mb, 1)} for at, mb in samples[::6]],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="The service under load.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round")
    parser.add_argument("--clients", type=int, default=8, help="that ask at once")
    parser.add_argument("--memory", type=int, default=500, help="images kept (M)")
    parser.add_argument("--images", type=int, default=500, help="taught before it begins")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=0, help="a light load for so long, instead of rounds")
    parser.add_argument("--rate", type=float, default=20.0, help="questions a second, with --minutes")
    parser.add_argument("--json", type=Path, help="write the figures to this file, beside those of the other kind")
    options = parser.parse_args(arguments)
    if hasattr(os, "sched_setaffinity"):  # children have the same cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an end by which the service ends too
    import torch

    kind = "soak" if options.minutes else "load"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    result = {
        "command": " ".join(["python benchmarks/service_load.py", *(arguments or sys.argv[1:])]),
        "machine": f"{platform.machine()}, {CORES} cores, {versions}",
        **(soak(options) if options.minutes else rounds(options)),
    }
    if options.json:
        others = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**others, kind: result}, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
