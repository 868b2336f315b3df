"""Milliseconds per step on a CUDA device, by how it is run, and what share of the card that is.

    python benchmarks/gpu_step.py [--seeds 1,4,10] [--methods er,mir] [--memory 2000] [--steps 200] [--json FILE]

A method may have options: --methods "scr+:orthogonal=0:updates_per_batch=2".

Steps are taken on random images, with a full memory; a step is all that is done for a batch of the stream. For SCR,
"bytes" and "operations" are the least a step must move and compute: every activation of the encoder written and read
once each way, and the multiplications of its convolutions; they are set against the copy bandwidth and the bfloat16
rate measured on this card in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scrlearn.data import class_incremental
from scrlearn.data.base import ArrayImages, Dataset
from scrlearn.engine.run import TURN, Lane
from scrlearn.experiments.beyond import VARIANTS
from scrlearn.learners import Learner, make_learner
from scrlearn.models import ReducedResNet18
from scrlearn.models.resnet import BatchNorm

CLASSES, BATCH = 100, 10


def made_up(images: int, size: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.arange(images) % CLASSES
    names = tuple(map(str, range(CLASSES)))
    return Dataset("made up", ArrayImages(pixels, labels), ArrayImages(pixels[:100], labels[:100]), names)


def learner(seed: int, memory: int, precision: str, method: str = "scr", size: int = 32) -> Learner:
    name, *given = method.split(":")
    method, options = VARIANTS.get(name, (name, {}))
    options = {**options, **{option: json.loads(value) for option, value in (pair.split("=") for pair in given)}}
    shape = (3, size, size)
    return make_learner(
        method, image_shape=shape, memory_size=memory, device="cuda", precision=precision, seed=seed, **options
    )


def full_lanes(seeds: int, memory: int, precision: str, steps: int, method: str = "scr", size: int = 32) -> list[Lane]:
    """So many learners with full memories and recorded steps, and so many steps before them."""
    filling = memory // BATCH + 20
    dataset = made_up((filling + steps + TURN) * BATCH, size)
    pixels = dataset.train.images.cuda()
    lanes = []
    for seed in range(seeds):
        stream = class_incremental(dataset, tasks=1, seed=seed, batch_size=BATCH)
        lane = Lane(learner(seed, memory, precision, method, size), stream, pixels)
        lane.order.copy_(stream.order(stream.tasks[0]))
        lanes.append(lane)
    torch.cuda.synchronize()
    for _ in range(-(-filling // TURN)):
        turns(lanes)
    return lanes


def graph_steps(seeds: int, memory: int, precision: str, steps: int, method: str = "scr", size: int = 32) -> float:
    """Seconds per step and seed with so many seeds side by side."""
    lanes = full_lanes(seeds, memory, precision, steps, method, size)
    return timed(lambda: turns(lanes), steps // TURN) / TURN / seeds


def turns(lanes: list[Lane]) -> None:
    """A few steps of each, as the engine makes them."""
    for lane in lanes:
        with torch.cuda.stream(lane.runner.stream):
            for _ in range(TURN):
                lane.step()


def eager_steps(memory: int, precision: str, steps: int) -> float:
    one = learner(0, memory, precision)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda()
    y = torch.arange(BATCH, device="cuda")
    for _ in range(memory // BATCH + 3):
        one.learn(x, y)
    return timed(lambda: one.learn(x, y), steps)


def timed(work: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def card() -> dict[str, float]:
    """Copy bandwidth (bytes read and written per second) and bfloat16 operations per second."""
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(block)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    other.copy_(block), a @ a  # the first product sets its library up
    copy = 2 * block.numel() / timed(lambda: other.copy_(block), 20)
    product = 2 * 8192**3 / timed(lambda: a @ a, 10)
    return {"bytes_per_second": copy, "operations_per_second": product}


def least_work(images: int = 220) -> dict[str, float]:
    """Bytes and operations of one step: forward once, backward twice the operations, activations once each way."""
    values = 0.0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal values
        output = output if isinstance(output, torch.Tensor) else output[0]  # one map that is handed on twice
        values += 2 * output.numel()  # as the convolution gives it, and normalised

    encoder = ReducedResNet18().eval()
    for module in encoder.modules():
        if isinstance(module, BatchNorm):
            module.register_forward_hook(count)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(torch.zeros(1, 3, 32, 32))
    return {"operations": 3.0 * counter.get_total_flops() * images, "bytes": 4 * 2 * values * images}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,4,10")
    parser.add_argument("--methods", default="scr+,scr+:orthogonal=0,er,a-gem,mir,aser,gss", help="with the most seeds")
    parser.add_argument("--memory", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing to measure.")
        return
    rates, work = card(), least_work()
    print(f"{torch.cuda.get_device_name()}: {rates['bytes_per_second'] / 1e12:.2f} TB/s copied, ", end="")
    print(f"{rates['operations_per_second'] / 1e12:.0f} TFLOP/s in bfloat16; torch {torch.__version__}", flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "card": rates, "least_work": work}
    rows: dict[str, float] = {}
    for name, measure in variants(given).items():
        spent = rows[name] = measure()
        line = f"  {name:<42}{spent * 1000:8.3f} ms per step"
        if name.startswith("scr,"):
            bandwidth = work["bytes"] / spent / rates["bytes_per_second"]
            rate = work["operations"] / spent / rates["operations_per_second"]
            line += f"   {bandwidth:6.1%} of bandwidth   {rate:6.1%} of the rate"
        print(line, flush=True)
        if given.json:  # after each, so that nothing is lost when time runs out
            peak = {"peak_memory": torch.cuda.max_memory_allocated()}
            given.json.write_text(json.dumps({**about, **peak, "seconds_per_step": rows}, indent=2) + "\n")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def variants(given: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """What is measured, by name."""
    seeds, memory, steps = [int(n) for n in given.seeds.split(",")], given.memory, given.steps
    found: dict[str, Callable[[], float]] = {}
    for many in seeds:
        beside = f", {many} seeds side by side" if many > 1 else ""
        found[f"scr, graph, bf16{beside}"] = partial(graph_steps, many, memory, "bf16", steps)
    for size in (1000, 50000):
        found[f"scr, graph, bf16, M = {size}"] = partial(graph_steps, 1, size, "bf16", steps)
    found["scr, graph, fp32"] = partial(graph_steps, 1, memory, "fp32", steps)
    for precision in ("bf16", "fp32"):
        found[f"scr, eager, {precision}"] = partial(eager_steps, memory, precision, min(steps, 50))
    for method in filter(None, given.methods.split(",")):
        name = f"{method}, graph, bf16, {max(seeds)} seeds side by side"
        found[name] = partial(graph_steps, max(seeds), memory, "bf16", min(steps, 100), method)
    return found


if __name__ == "__main__":
    main()
