"""One SCR step on the CPU: this package's default settings against plain PyTorch, measured in turns in one run.

The plain step is what one would write first: float32, the usual memory format, a forward for each of the two views.
Both train on 10 stream and 100 memory images of 32×32, with the same augmentation and loss.

    python benchmarks/cpu_step.py [--rounds 10] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from scrlearn.augment import Augment
from scrlearn.learners import make_learner
from scrlearn.losses import supervised_contrastive_loss
from scrlearn.models import ReducedResNet18, projection_head

SHAPE, STREAM, MEMORY, CLASSES = (3, 32, 32), 10, 100, 100


def plain_step() -> Callable[[], None]:
    encoder, projection = ReducedResNet18(), projection_head("mlp", 160)
    optimizer = torch.optim.SGD([*encoder.parameters(), *projection.parameters()], lr=0.1)
    generator, augment = torch.Generator().manual_seed(0), Augment()
    images = torch.randint(0, 256, (1000, *SHAPE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, CLASSES, (1000,), generator=generator)

    def step() -> None:
        chosen = torch.randperm(1000, generator=generator)[: STREAM + MEMORY]
        x, y = images[chosen].float() / 255, labels[chosen]
        features = [encoder(x), encoder(augment(x, generator))]
        z = torch.cat([torch.nn.functional.normalize(projection(f), dim=1) for f in features])
        loss = supervised_contrastive_loss(z, torch.cat([y, y]), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def own_step(precision: str) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    learner = make_learner("scr", image_shape=SHAPE, memory_size=1000, device="cpu", precision=precision)

    def step() -> None:
        x = torch.randint(0, 256, (STREAM, *SHAPE), dtype=torch.uint8, generator=generator)
        learner.learn(x, torch.randint(0, CLASSES, (STREAM,), generator=generator))

    for _ in range(MEMORY // STREAM + 1):  # until a whole memory batch is there
        step()
    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The fastest of some rounds for each, in turns, so that all meet the same machine."""
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn:  # the first one warms up
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    steps = {
        "plain PyTorch, fp32, two forwards": plain_step(),
        "scrlearn, default settings": own_step("auto"),
        "scrlearn, precision fp32": own_step("fp32"),
    }
    seconds = measure(steps, given.rounds)
    first = next(iter(seconds.values()))
    about = f"{given.threads} threads, torch {torch.__version__}"
    print(f"One SCR step, {STREAM + MEMORY} images of 32×32, two views, {about}")
    for name, spent in seconds.items():
        print(f"  {name:<36}{spent * 1000:8.1f} ms   {first / spent:5.2f} times as fast as plain")
    if given.json:
        machine = {"threads": given.threads, "torch": torch.__version__, "machine": platform.machine()}
        ratios = {name: first / spent for name, spent in seconds.items()}
        given.json.write_text(json.dumps({**machine, "seconds": seconds, "times_as_fast": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
