"""How much a result depends on how sharp the images are: runs on sharpened or smoothed copies of a data set.

    python benchmarks/sharpness.py [--dataset mini-imagenet] [--methods scr,er] [--amounts 0,0.6] [--seeds 4] [--json F]

Copies of a data set that was scaled down differ in how it was done, and in what was lost when the images were stored
again. Each image becomes x + a (x − smooth(x)), where smooth is the mean over 3×3 pixels with binomial weights: above 0
the amount a sharpens, below 0 it smooths. The standard deviation of each channel says how strong that is: for the
Mini-ImageNet of the few-shot papers, 0.277, 0.268 and 0.285 are the figures in use.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scrlearn.data import ArrayImages, Dataset, load
from scrlearn.devices import resolve_device
from scrlearn.experiments import summary
from scrlearn.experiments.protocol import DATASETS, config_for
from scrlearn.experiments.runner import run_all, versions

AT_ONCE = 2000


def sharpened(images: Tensor, amount: float, device: torch.device) -> Tensor:
    """Images (uint8) with so much more, or less, of what sets a pixel apart from its neighbours."""
    if not amount:
        return images
    line = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
    channels = images.shape[1]
    kernel = (line[:, None] * line).expand(channels, 1, 3, 3)
    parts = []
    for part in images.split(AT_ONCE):
        x = part.to(device).float()
        smooth = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, groups=channels)
        parts.append((x + amount * (x - smooth)).round().clamp(0, 255).to(torch.uint8).cpu())
    return torch.cat(parts)


def deviations(images: Tensor) -> list[float]:
    """The standard deviation of each channel, of values from 0 to 1."""
    parts = images.split(AT_ONCE)
    count = images.shape[0] * images.shape[2] * images.shape[3]
    sums = sum(part.sum((0, 2, 3), dtype=torch.float64) for part in parts)
    squares = sum(part.double().square().sum((0, 2, 3)) for part in parts)
    variance = torch.as_tensor(squares / count - (sums / count) ** 2)
    return [round(float(value) / 255, 4) for value in variance.sqrt()]


def measure(dataset: Dataset, method: str, amount: float, args: argparse.Namespace) -> dict[str, Any]:
    """The runs of one method on one copy."""
    made_with = {"device": args.device, "order": args.order, "limit": args.limit}
    options = {"review": True} if args.review and method == "scr" else {}
    configs = [
        config_for(method, args.dataset, args.memory, seed, options=options, **made_with) for seed in range(args.seeds)
    ]
    results = run_all(configs, dataset)
    figures = {name: values["average_accuracy"] for name, values in summary(results).items()}
    row: dict[str, Any] = {"method": method, "amount": amount, "review": bool(options), "seeds": args.seeds}
    row["config"] = configs[0].to_dict()
    for name, value in figures.items():
        row[name] = {"mean": value.mean, "interval": value.half_width}
    print(f"{method:10} {amount:5.2f}   " + "   ".join(f"{name} {value.format()}" for name, value in figures.items()))
    return row


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mini-imagenet", choices=[*DATASETS])
    parser.add_argument("--methods", default="scr")
    parser.add_argument("--memory", type=int, default=2000)
    parser.add_argument("--amounts", default="0,0.6")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--review", action="store_true", help="SCR reviews its memory after each task")
    parser.add_argument("--order", default="natural", choices=["natural", "shuffled"])
    parser.add_argument("--limit", type=int, help="training images of each class, to try things out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", default=os.environ.get("SCRLEARN_DATA"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    given = load(args.dataset, args.data_root)
    assert isinstance(given.train, ArrayImages)
    assert isinstance(given.test, ArrayImages)
    device, rows, found = resolve_device(args.device), [], {}
    for amount in map(float, args.amounts.split(",")):
        train, test = (
            ArrayImages(sharpened(part.images, amount, device), part.labels) for part in (given.train, given.test)
        )
        found[str(amount)] = deviations(train.images)
        print(f"amount {amount}: standard deviations {found[str(amount)]}")
        copy = Dataset(given.name, train, test, given.class_names)
        rows += [measure(copy, method, amount, args) for method in args.methods.split(",")]
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    told = {"dataset": args.dataset, "deviations": found, "runs": rows, "device": machine, "versions": versions()}
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


if __name__ == "__main__":
    main()
