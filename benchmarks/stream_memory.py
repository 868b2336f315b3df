"""Does a long stream need more memory, or more time per batch, the longer it gets?

    python benchmarks/stream_memory.py                       # a million images, some minutes
    python benchmarks/stream_memory.py --images 50000        # a quick look
    python benchmarks/stream_memory.py --method er --memory 5000

Random 8×8 images of ten classes pass through an OnlineClassifier with a tiny encoder, so that the time is that of the
learner and its memory rather than that of convolutions. Printed for every tenth of the stream: the process's resident
memory and the median time per batch (on a CPU the processor's time, so that other programs do not count); at the end,
the ratios of the last tenth to the first. What is needed once (code being loaded, buffers being allocated) falls into
the first images, which are left out of the comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from scrlearn import OnlineClassifier

BLOCK = 1000
PARTS = 10


def resident_bytes() -> int:
    """Memory of this process that lies in RAM now; where the system does not say, the most so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most * 1024


def tiny_encoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16))


def blocks(images: int, classes: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The stream: noise with a bright row and column that tell the class; made block by block, never held."""
    random = np.random.default_rng(seed)
    for start in range(0, images, BLOCK):
        count = min(BLOCK, images - start)
        x = random.integers(0, 80, (count, 8, 8), dtype=np.uint8)
        y = random.integers(0, classes, count)
        x[np.arange(count), y % 8] = 220
        x[np.arange(count), :, y // 8 % 8] = 220
        yield x, y


def measure(options: argparse.Namespace) -> tuple[list[float], list[int]]:
    """Milliseconds per batch and resident bytes, for each block of the stream."""
    clf = OnlineClassifier(
        options.method,
        memory_size=options.memory,
        encoder=tiny_encoder(),
        batch_size=options.batch,
        device=options.device,
    )
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    milliseconds, resident = [], []
    for x, y in blocks(options.images, options.classes, seed=0):
        start = clock()
        clf.partial_fit(x, y)  # waits for the device: it looks at the last loss
        milliseconds.append(1000 * (clock() - start) / -(-len(x) // options.batch))
        resident.append(resident_bytes())
        print(f"\r{len(resident) * BLOCK:,} images", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    assert len(clf.memory_.images) == min(options.memory, options.images)
    return milliseconds, resident


def report(options: argparse.Namespace, milliseconds: list[float], resident: list[int]) -> dict[str, Any]:
    """The tenths of the stream, and the last against the first."""
    # the first hundredth, and at least until the memory is full, is warming up
    warm = min(max(len(resident) // 100, -(-options.memory // BLOCK)), len(resident) - 1)
    bounds = [warm + (len(resident) - warm) * part // PARTS for part in range(PARTS + 1)]
    tenths = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    parts = [
        {
            "images": min(b * BLOCK, options.images),
            "resident_mb": max(resident[a:b]) / 2**20,
            "ms_per_batch": statistics.median(milliseconds[a:b]),
        }
        for a, b in tenths
    ]
    first, last = parts[0], parts[-1]
    return {
        "options": vars(options),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "parts": parts,
        "growth_mb": last["resident_mb"] - first["resident_mb"],
        "resident_ratio": last["resident_mb"] / first["resident_mb"],
        "time_ratio": last["ms_per_batch"] / first["ms_per_batch"],
        "seconds": sum(milliseconds) * BLOCK / options.batch / 1000,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Memory and time per batch over a long stream.")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--method", default="scr")
    parser.add_argument("--memory", type=int, default=1000, help="images kept (M)")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # such small tensors only lose by being shared between cores
    result = report(options, *measure(options))
    print(f"{options.method}, M={options.memory}, batches of {options.batch}, {result['machine']}")
    print(f"{'images':>10}  {'resident MB':>11}  {'ms per batch':>12}")
    for part in result["parts"]:
        print(f"{part['images']:>10,}  {part['resident_mb']:>11.1f}  {part['ms_per_batch']:>12.3f}")
    print(f"memory: {result['resident_ratio']:.3f} times the first tenth's ({result['growth_mb']:+.1f} MB)")
    print(f"time per batch: {result['time_ratio']:.3f} times the first tenth's")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return result


if __name__ == "__main__":
    main()
