"""Where the time of a step goes on a CUDA device, kernel by kernel.

    python benchmarks/gpu_kernels.py [--methods scr,er] [--size 32] [--seeds 10] [--memory 2000] [--json FILE]

Steps are recorded and replayed as the engine does, on random images, with a full memory. The table is of one seed
alone, whose kernels follow each other; below it stands how long a step of it takes, and a step of each of many seeds
side by side.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from gpu_step import TURN, full_lanes, graph_steps, timed, turns
from torch.profiler import ProfilerActivity, profile

STEPS = 3 * TURN


def kernels(method: str, memory: int, size: int) -> tuple[dict[str, tuple[float, float]], float]:
    """By name: how many in a step, and their seconds in a step; and the seconds of a whole step."""
    lanes = full_lanes(1, memory, "auto", 2 * STEPS, method, size)
    whole = timed(lambda: turns(lanes), STEPS // TURN) / TURN
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS // TURN):
            turns(lanes)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[re.sub(r"\(.*", "", event.name.removeprefix("void "))].append(event.device_time / 1e6)
    return {name: (len(times) / STEPS, sum(times) / STEPS) for name, times in found.items()}, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="scr")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--memory", type=int, default=2000)
    parser.add_argument("--most", type=int, default=25, help="kernels in the table")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing to measure.")
        return
    rows = {}
    for method in given.methods.split(","):
        found, whole = kernels(method, given.memory, given.size)
        many = graph_steps(given.seeds, given.memory, "auto", 6 * TURN, method, given.size)
        print(f"{method}, {given.size}×{given.size}, M = {given.memory}: µs in a step, kernels in a step")
        for name, (count, spent) in sorted(found.items(), key=lambda row: -row[1][1])[: given.most]:
            print(f"{spent * 1e6:9.1f} {count:6.1f}  {name[:100]}")
        count, spent = (sum(row[i] for row in found.values()) for i in (0, 1))
        print(f"{spent * 1e6:9.1f} {count:6.1f}  all kernels; a step takes {whole * 1e6:.1f} µs,", end=" ")
        print(f"and {many * 1e6:.1f} µs for each of {given.seeds} seeds side by side", flush=True)
        rows[method] = {"kernels": found, "step": whole, "step_side_by_side": many}
    if given.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "options": vars(given)}
        given.json.write_text(json.dumps({**about, "seconds": rows}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
