"""Leave-one-out similarities and the temperature against plain loops and an independent minimiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from scrlearn.classifiers import NearestClassMean, fit_temperature, leave_one_out


def test_leave_one_out_is_a_classifier_without_the_image() -> None:
    features = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0] * 10 + [1] * 12 + [3] * 7 + [4])
    scores, others = leave_one_out(features, y, 5)
    for i in range(30):
        rest = torch.arange(30) != i
        without = NearestClassMean.fit(features[rest], y[rest], 5).scores(features[i : i + 1])[0]
        assert bool(others[i]) == (int(y[i]) != 4)
        if others[i]:
            assert torch.allclose(scores[i], without, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.05, 1e-4])
def test_the_temperature_minimises_the_likelihood(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(4, (200,), generator=generator)
    scores = scale * (F.one_hot(y, 4) + 0.7 * torch.randn(200, 4, generator=generator))
    rest = 1 / 202
    target = torch.full((200, 4), rest / 3).scatter_(1, y[:, None], 1 - rest).double()

    def loss(log_temperature: float) -> float:
        return float(F.cross_entropy(scores.double() / math.exp(log_temperature), target))

    best = minimize_scalar(loss, bounds=(-15, 3), method="bounded", options={"xatol": 1e-6}).x
    assert fit_temperature(scores, y, 0.1) == pytest.approx(math.exp(best), rel=1e-3)


def test_samples_drawn_at_a_temperature_give_it_back() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(20_000, 5)) * 0.03
    p = np.exp(scores / 0.02)
    y = (rng.random((20_000, 1)) > (p / p.sum(1, keepdims=True)).cumsum(1)).sum(1)
    found = fit_temperature(torch.from_numpy(scores), torch.from_numpy(y.clip(max=4)), 0.1)
    assert found == pytest.approx(0.02, rel=0.05)


def test_all_right_is_not_certain() -> None:
    """The fewer samples, the less sure; however far apart the scores are."""
    for count in (2, 20, 200):
        y = torch.arange(count) % 2
        for scale in (1e-3, 1.0):
            scores = scale * F.one_hot(y, 2).float()
            sure = torch.softmax(scores[0] / fit_temperature(scores, y, 0.1), 0)[0]
            assert float(sure) == pytest.approx(1 - 1 / (count + 2), abs=1e-3)


def test_all_wrong_is_hot() -> None:
    y = torch.arange(20) % 2
    assert fit_temperature(-F.one_hot(y, 2).float(), y, 0.1) > 5


def test_nothing_to_tell_from() -> None:
    nothing = torch.empty(0, 3)
    assert fit_temperature(nothing, torch.empty(0, dtype=torch.int64), 0.1) == 0.1
    assert fit_temperature(torch.ones(5, 3), torch.zeros(5, dtype=torch.int64), 0.1) == 0.1
    one = torch.tensor([[0.5, -torch.inf], [0.7, -torch.inf]])
    assert fit_temperature(one, torch.zeros(2, dtype=torch.int64), 0.1) == 0.1


def test_absent_classes_do_not_count() -> None:
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(3, (60,), generator=generator)
    scores = F.one_hot(y, 3) + torch.randn(60, 3, generator=generator)
    wide = torch.full((60, 5), -torch.inf)
    wide[:, [0, 2, 4]] = scores
    assert fit_temperature(wide, 2 * y, 0.1) == fit_temperature(scores, y, 0.1)
