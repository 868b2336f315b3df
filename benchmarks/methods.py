"""How long each method's step takes, relative to that of experience replay, measured in one run.

    python benchmarks/methods.py --threads 2 --methods er,mir --json methods.json

Every learner gets a full memory of 2000 random 32×32 images of 100 classes and stands in its second task, where the
methods that look back do so. The learners take turns, so that a busy machine slows all of them; a method's time is the
median over its turns. Methods that learn only when the stream is over (offline) have no step to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from scrlearn.engine import GraphRunner, why_not_graph
from scrlearn.learners import METHODS, Learner, make_learner

SHAPE, CLASSES, MEMORY, BATCH = (3, 32, 32), 100, 2000, 10
# times the step of experience replay; for the rest no limit is set
LIMITS = {"a-gem": 2.5, "mir": 5.0, "gss": 20.0, "aser": 20.0}
OPTIONS: dict[str, dict[str, Any]] = {"aser": {"per_class": 2}}


def images(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=random)
    return x, torch.randperm(count, generator=random) % CLASSES


def ready(method: str, device: str, precision: str) -> Learner:
    """A learner in its second task, with a full memory."""
    random = torch.Generator().manual_seed(0)
    options = OPTIONS.get(method, {})
    learner = make_learner(method, image_shape=SHAPE, device=device, precision=precision, memory_size=MEMORY, **options)
    learner.learn(*images(CLASSES, random))
    x, y = images(MEMORY - learner.memory.size, random)
    if len(x):
        slots = torch.arange(learner.memory.size, MEMORY, device=learner.device)
        learner.memory.write(slots, x.to(learner.device), y.to(learner.device))
        learner.memory.advance(len(x))
    learner.end_task()
    if why_not_graph(learner) is None:
        learner.runner = GraphRunner(learner)
    return learner


def seconds_per_step(learner: Learner, steps: int, random: torch.Generator) -> float:
    """Wall time of a step; the machine's own work is waited for."""
    batches = [tuple(t.to(learner.device) for t in images(BATCH, random)) for _ in range(steps)]
    wait = torch.cuda.synchronize if learner.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for x, y in batches:
        learner.learn(x, y)
    wait()
    return (time.perf_counter() - start) / steps


def compare(methods: list[str], device: str, precision: str, rounds: int, steps: int) -> dict[str, float]:
    """Median seconds per step of each method, the methods taking turns."""
    random = torch.Generator().manual_seed(1)
    learners = {method: ready(method, device, precision) for method in methods}
    for learner in learners.values():
        seconds_per_step(learner, 4, random)  # first steps set libraries and graphs up
    turns: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, learner in learners.items():
            turns[method].append(seconds_per_step(learner, steps, random))
    return {method: statistics.median(times) for method, times in turns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    stepwise = [name for name, method in METHODS.items() if method.learner.learn is Learner.learn]
    parser.add_argument("--methods", default=",".join(stepwise))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures, with the machine they were taken on, here")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    methods = ["er", *(m for m in given.methods.split(",") if m != "er")]
    times = compare(methods, given.device, given.precision, given.rounds, given.steps)
    print(f"{'method':<12}{'ms / step':>12}{'× ER':>8}{'limit':>8}")
    for method, seconds in sorted(times.items(), key=lambda item: item[1]):
        ratio, limit = seconds / times["er"], LIMITS.get(method)
        verdict = "" if limit is None else f"{limit:>8g}{'  met' if ratio <= limit else '  MISSED'}"
        print(f"{method:<12}{1000 * seconds:>12.1f}{ratio:>8.2f}{verdict}")
    if given.json:
        name = torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.machine()
        machine = {"machine": f"{name}, {os.cpu_count()} cores", "torch": torch.__version__}
        setting = {"device": given.device, "precision": given.precision, "threads": given.threads}
        figures = {m: {"milliseconds": 1000 * s, "times_er": s / times["er"]} for m, s in times.items()}
        given.json.write_text(json.dumps(machine | setting | {"methods": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
