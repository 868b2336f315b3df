"""Is a classifier right when it is confident, and does it notice images of a class it was never shown?

    python benchmarks/confidence.py

Digits 0 to 7 are learned one class after the other (SCR, M=200), 8 and 9 never. Printed for each seed: how many of the
images of known classes are answered above a threshold of `predict_proba`, how many of these answers are right, and how
well unknown classes are told from known ones (area under the ROC curve: 0.5 is chance, 1 is perfect) by the largest
probability and by the distance to the nearest image in memory.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from scrlearn import OnlineClassifier

THRESHOLDS = (0.0, 0.5, 0.7, 0.9)


def measure(seed: int) -> str:
    digits = load_digits()
    images, labels = (digits.images * 15).astype(np.uint8), digits.target
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = order[:1400], order[1400:]
    stream = np.concatenate([train[labels[train] == digit] for digit in range(8)])
    clf = OnlineClassifier("scr", memory_size=200, device="cpu", seed=seed).partial_fit(images[stream], labels[stream])
    known, unknown = test[labels[test] < 8], test[labels[test] > 7]
    right = clf.predict(images[known]) == labels[known]
    sure = clf.predict_proba(images[known]).max(1)
    shares = [f"≥{t}: {(sure >= t).mean():.0%} answered, {right[sure >= t].mean():.1%} right" for t in THRESHOLDS]
    both, is_unknown = images[np.concatenate([known, unknown])], np.arange(len(test)) >= len(known)
    by_probability = roc_auc_score(is_unknown, -clf.predict_proba(both).max(1))
    by_distance = roc_auc_score(is_unknown, clf.nearest(both, k=1).distances[:, 0])
    return f"{'; '.join(shares)}; unknown by probability {by_probability:.2f}, by distance {by_distance:.2f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Confidence and unknown classes on the digits.")
    parser.add_argument("--seeds", type=int, default=3)
    for seed in range(parser.parse_args(arguments).seeds):
        print(f"seed {seed}: {measure(seed)}", flush=True)


if __name__ == "__main__":
    main()
