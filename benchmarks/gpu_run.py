"""Seconds for whole runs on a CUDA device: data loading, recording of graphs, training and all evaluations counted.

    python benchmarks/gpu_run.py [--dataset cifar100] [--methods scr,er] [--memory 2000] [--seeds 1,4,8,16] [--json F]

Other options (`--data-root`, `--engine` …) are passed on to `scr run`.

Each figure is a fresh process, as a user would start it: `scr run --dataset D --method METHOD --memory M --seeds N`.
Kernels that Triton compiles are kept on disk; the first process on a machine compiles them and takes longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch


class CardMemory(threading.Thread):
    """The most memory of the card that was in use while something ran, over what was in use before, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self.over = self._used(), 0, threading.Event()

    @staticmethod
    def _used() -> int:
        free, whole = torch.cuda.mem_get_info()
        return whole - free

    def run(self) -> None:
        while not self.over.wait(0.1):
            self.peak = max(self.peak, self._used() - self.before)


def one(dataset: str, method: str, memory: int, seeds: int, more: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "scrlearn", "run", "--dataset", dataset, "--method", method, "--json", *more]
    command += ["--memory", str(memory), "--seeds", str(seeds)]
    card = CardMemory()
    card.start()
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    spent = time.perf_counter() - begin
    card.over.set()
    said = json.loads(done.stdout)
    results = said.get("results", [said])
    accuracy = sum(result["average_accuracy"] for result in results) / len(results)
    return {
        "seconds": spent,
        "seconds_per_run": spent / seeds,
        "average_accuracy": accuracy,
        "peak_memory": float(card.peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar100")
    parser.add_argument("--methods", default="scr")
    parser.add_argument("--memory", type=int, default=2000)
    parser.add_argument("--seeds", default="1,4,8,16")
    parser.add_argument("--json", type=Path)
    given, more = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing to measure.")
        return
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: {given.dataset}, M = {given.memory}")
    rows = {}
    for method in given.methods.split(","):
        for seeds in map(int, given.seeds.split(",")):
            row = rows[f"{method}, {seeds} seeds"] = one(given.dataset, method, given.memory, seeds, more)
            print(
                f"  {method:<8}{seeds:3d} seeds   {row['seconds']:7.1f} s   {row['seconds_per_run']:6.2f} s per run   "
                f"{row['average_accuracy']:6.2%}   {row['peak_memory'] / 2**30:5.1f} GiB",
                flush=True,
            )
    if given.json:
        about = {"device": name, "torch": torch.__version__, "dataset": given.dataset, "memory": given.memory}
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
