"""Is a classifier right when it is confident, and does it notice images of a class it was never shown?

    python benchmarks/confidence.py
    python benchmarks/confidence.py --json confidence.json   # writes the figures of the service to a file, too

Digits 0 to 7 are learned one class after the other (SCR, M=200), 8 and 9 never. Printed for each seed: how many of the
images of known classes are answered above a threshold of `predict_proba`, how many of these answers are right, and how
well unknown classes are told from known ones (area under the ROC curve: 0.5 is chance, 1 is perfect) by the largest
probability and by the distance to the nearest image in memory.

Then the same of the service, whose confidence and thresholds are learned from the memory, after 10 images of each class
(a young model), after 40 and after all (about 140), and after all with a memory that holds them all: the calibration
error (how far the confidence lies from the share of right answers, on average over ten bins) of `predict_proba` and of
the service, and the share of images that are called unknown, of known classes, of known classes among those answered
right, and of unknown ones.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from scrlearn.images import Array, to_tensor
from scrlearn.service.model import Replica, ServedClassifier

KNOWN = 8
THRESHOLDS = (0.0, 0.5, 0.7, 0.9)
CASES = ((10, 200), (40, 200), (None, 200), (None, 2000))  # images of each class (None: all), and M


@dataclass
class Taught:
    """A classifier, and images that it has not seen, of classes that it knows and of others."""

    clf: ServedClassifier
    known: Array
    labels: Array
    unknown: Array


def teach(seed: int, count: int | None, memory: int) -> Taught:
    digits = load_digits()
    images, labels = (digits.images * 15).astype(np.uint8), digits.target
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = order[:1400], order[1400:]
    stream = np.concatenate([train[labels[train] == digit][:count] for digit in range(KNOWN)])
    clf = ServedClassifier("scr", memory_size=memory, device="cpu", seed=seed).partial_fit(
        images[stream], labels[stream]
    )
    known = labels[test] < KNOWN
    return Taught(clf, images[test[known]], labels[test[known]], images[test[~known]])


def probabilities(taught: Taught) -> str:
    """Of `predict_proba` and `nearest`."""
    clf, known = taught.clf, taught.known
    right = clf.predict(known) == taught.labels
    sure = clf.predict_proba(known).max(1)
    shares = [f"≥{t}: {(sure >= t).mean():.0%} answered, {right[sure >= t].mean():.1%} right" for t in THRESHOLDS]
    both = np.concatenate([known, taught.unknown])
    is_unknown = np.arange(len(both)) >= len(known)
    by_probability = roc_auc_score(is_unknown, -clf.predict_proba(both).max(1))
    by_distance = roc_auc_score(is_unknown, clf.nearest(both, k=1).distances[:, 0])
    return f"{'; '.join(shares)}; unknown by probability {by_probability:.2f}, by distance {by_distance:.2f}"


def service(taught: Taught) -> dict[str, float]:
    """Of the copy of the model that answers in the service."""
    replica = Replica(taught.clf, 0)
    known, unknown = (replica.answer(to_tensor(images)) for images in (taught.known, taught.unknown))
    right = np.array([answer.classes[0].label for answer in known]) == taught.labels.astype(str)
    confidence = np.array([answer.confidence for answer in known])
    refused, strange = (np.array([answer.label is None for answer in answers]) for answers in (known, unknown))
    found = {
        "right": right.mean(),
        "confidence": confidence.mean(),
        "temperature": replica.temperature,
        "calibration_error": calibration_error(confidence, right),
        "calibration_error_predict_proba": calibration_error(taught.clf.predict_proba(taught.known).max(1), right),
        "unknown_of_known": refused.mean(),
        "unknown_of_known_and_right": refused[right].mean(),
        "unknown_of_unknown": strange.mean(),
    }
    return {name: round(float(value), 5) for name, value in found.items()}


def calibration_error(confidence: Array, right: Array) -> float:
    places = np.minimum((confidence * 10).astype(int), 9)
    gaps = [(places == b).mean() * abs(confidence[places == b].mean() - right[places == b].mean()) for b in {*places}]
    return float(sum(gaps))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Confidence and unknown classes on the digits.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures of the service to this file, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    for seed in range(options.seeds):
        for count, memory in CASES:
            taught = teach(seed, count, memory)
            if (count, memory) == (None, 200):
                print(f"seed {seed}: {probabilities(taught)}", flush=True)
            case = {"seed": seed, "images_of_each_class": count or "all", "memory": memory}
            results.append(case | service(taught))
            print("service: " + ", ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if options.json:
        about = {"command": "python benchmarks/confidence.py --json FILE", "torch": torch.__version__}
        options.json.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
