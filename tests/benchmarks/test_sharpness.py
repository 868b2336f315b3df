from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from scrlearn.data import load

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "sharpness.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def noise(images=5):
    return torch.randint(0, 256, (images, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("amount", [0.6, -0.5])
def test_it_is_the_formula(script, amount):
    images = noise(2)
    found = script["sharpened"](images, amount, CPU)
    weights = np.outer([1, 2, 1], [1, 2, 1]) / 16
    padded = np.pad(images.numpy().astype(float), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    for n, c, i, j in np.ndindex(*images.shape):
        smooth = (padded[n, c, i : i + 3, j : j + 3] * weights).sum()
        x = float(images[n, c, i, j])
        wanted = min(max(x + amount * (x - smooth), 0), 255)
        assert abs(float(found[n, c, i, j]) - wanted) <= 0.5 + 1e-3


def test_flat_images_stay_as_they_are(script):
    flat = torch.full((1, 3, 5, 5), 77, dtype=torch.uint8)
    assert torch.equal(script["sharpened"](flat, 2.0, CPU), flat)


def test_deviations_grow_with_the_amount(script):
    images = noise()
    assert script["deviations"](images) == pytest.approx((images / 255).std((0, 2, 3), correction=0).tolist(), abs=1e-4)
    smooth = script["sharpened"](images, -0.8, CPU)
    assert all(a < b for a, b in zip(script["deviations"](smooth), script["deviations"](images), strict=True))


def test_its_lines_are_those_that_notes_look_for(script):
    given = argparse.Namespace(
        dataset="cifar10", memory=20, seeds=2, review=True, device="cpu", order="natural", limit=5, data_root=None
    )
    scr, er = (script["measure"](load("digits"), method, 0.6, given) for method in ("scr", "er"))
    assert (scr["method"], scr["amount"], scr["review"], scr["seeds"]) == ("scr", 0.6, True, 2)
    assert not er["review"]
    assert 0 <= scr["ncm"]["mean"] <= 1
    assert scr["ncm"]["interval"] >= 0
