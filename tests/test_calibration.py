"""Leave-one-out similarities, temperature, offsets and blends against plain loops and independent minimisers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize, minimize_scalar

from scrlearn.classifiers import NearestClassMean, fit_offsets, fit_temperature, leave_one_out
from scrlearn.learners.blends import MOST, blends


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


# ---------------------------------------------------------------- offsets


def told(count: int, classes: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores that lean towards some classes, the two halves of each image, and its shares."""
    random = torch.Generator().manual_seed(seed)
    halves = torch.randint(classes, (count, 2), generator=random)
    shares = F.one_hot(halves, classes).double().mean(1)
    lean = torch.randn(classes, generator=random, dtype=torch.float64)
    noise = torch.randn(count, classes, generator=random, dtype=torch.float64)
    return scale * (3 * shares + noise + 2 * lean), halves, shares


@pytest.mark.parametrize(("classes", "scale"), [(2, 1.0), (5, 0.05), (30, 10.0)])
def test_offsets_are_those_of_an_independent_minimiser(classes: int, scale: float) -> None:
    scores, _, shares = told(300, classes, seed=classes, scale=scale)
    s = scores.numpy() - scores.numpy().mean(1, keepdims=True)
    of_class = shares.sum(0).numpy()
    t = shares.numpy() * (of_class.mean() / of_class)  # all classes count the same

    def loss(point: np.ndarray) -> float:
        z = point[0] / scale * s + point[1:]
        log_probability = (
            z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1, keepdims=True)
        )
        return float(-(t * log_probability).sum(1).mean() + 1e-2 * np.square(point[1:]).sum())

    found = minimize(loss, np.r_[1.0, np.zeros(classes)], method="BFGS", options={"gtol": 1e-7})
    expected = (found.x[1:] - found.x[1:].mean()) / (found.x[0] / scale)
    offsets = fit_offsets(scores, shares, default=1.0)
    np.testing.assert_allclose(offsets.numpy(), expected, atol=2e-3 * scale)
    torch.testing.assert_close(fit_offsets(scores, shares, default=100.0), offsets, atol=1e-4 * scale, rtol=1e-4)


def test_classes_are_then_said_as_often_as_they_are_there() -> None:
    """Where all classes count the same, and but for the cost of offsets: what makes the loss least."""
    scores, _, shares = told(2000, 6, seed=1)
    offsets = fit_offsets(scores, shares, 1.0)
    said = torch.bincount(scores.argmax(1), minlength=6) / 2000
    assert float((said - shares.mean(0)).abs().max()) > 0.2  # without offsets
    counted = shares * (shares.mean() / shares.mean(0))

    def told_by(scale: float) -> torch.Tensor:
        return torch.log_softmax(scale * (scores + offsets), dim=1)

    def loss(scale: float) -> float:
        cost = 1e-2 * (scale * offsets).square().sum()
        return float(cost - (counted * told_by(scale)).sum(1).mean())

    scale = minimize_scalar(loss, bounds=(0.01, 10), method="bounded", options={"xatol": 1e-9}).x
    after = (told_by(scale).exp() * counted.sum(1, keepdim=True)).mean(0)
    torch.testing.assert_close(after + 2e-2 * scale * offsets, counted.mean(0), atol=1e-4, rtol=0)


def test_offsets_undo_what_was_added_to_a_class() -> None:
    scores, _, shares = told(500, 4, seed=2)
    lean = torch.tensor([1.5, -0.5, 0.0, -1.0], dtype=torch.float64)
    one, other = fit_offsets(scores, shares, 1.0), fit_offsets(scores + lean, shares, 1.0)
    torch.testing.assert_close(one - other, lean, atol=0.25, rtol=0)  # the cost of offsets makes them smaller
    torch.testing.assert_close(fit_offsets(scores + 7, shares, 1.0), one)  # what all have in common


def test_classes_that_cannot_be_compared_get_no_offset() -> None:
    scores, _, shares = told(300, 4, seed=3)
    usual = fit_offsets(scores, shares, 1.0)
    wide = torch.cat([scores, torch.full((300, 1), -torch.inf), scores[:, :1] + 5], dim=1)
    more = torch.cat([shares, torch.zeros(300, 2)], dim=1)
    found = fit_offsets(wide, more, 1.0)
    torch.testing.assert_close(found[:4], usual)
    assert found[4:].tolist() == [0.0, 0.0]  # one has no score, the other no image
    assert not fit_offsets(scores[:0], shares[:0], 1.0).any()
    assert not fit_offsets(scores[:, :1], shares[:, :1], 1.0).any()
    assert not fit_offsets(torch.zeros(300, 4), shares, 1.0).isnan().any()
    assert not fit_offsets(-3 * shares, shares, 1.0).any()  # scores that say the opposite


def test_a_class_with_few_images_is_not_taken_for_a_rare_one() -> None:
    """Scores that lean to no class get no offsets, however many images there are of each."""
    random = torch.Generator().manual_seed(4)
    y = torch.tensor([0] * 2000 + [1] * 2000 + [2] * 60)
    shares = F.one_hot(y, 3).double()
    scores = 2 * shares + torch.randn(len(y), 3, generator=random, dtype=torch.float64)
    assert fit_offsets(scores, shares, 1.0).abs().max() < 0.2
    copies = torch.cat([torch.arange(4000), torch.arange(4000, 4060).repeat(33)])  # as if there were as many
    torch.testing.assert_close(
        fit_offsets(scores, shares, 1.0), fit_offsets(scores[copies], shares[copies], 1.0), atol=0.01, rtol=0
    )


def test_scores_that_tell_all_images_apart_give_finite_offsets() -> None:
    y = torch.arange(40) % 4
    offsets = fit_offsets(20 * F.one_hot(y, 4).double(), F.one_hot(y, 4).double(), 1.0)
    assert offsets.abs().max() < 1e-3


# ---------------------------------------------------------------- blends


@pytest.mark.parametrize("count", [1, 2, 7, 700])
def test_blends_are_means_of_pairs(count: int) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 4, 4), dtype=torch.uint8, generator=random)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(count) % 256, torch.arange(count) // 256 * 100
    y = torch.randint(0, 3, (count,), generator=random)
    found = blends(images, y, 4, torch.Generator().manual_seed(1))
    assert len(found.images) == len(found.shares) == 2 * count
    torch.testing.assert_close(found.shares.sum(1), torch.ones(2 * count))
    orders = [torch.randperm(count, generator=g) for g in [torch.Generator().manual_seed(1)] for _ in range(2)]
    rows = iter(zip(found.images, found.shares, strict=True))
    for order in orders:
        for place, one in enumerate(order.tolist()):
            other = int(order[place - 1])
            image, share = next(rows)
            assert image.tolist() == ((images[one].int() + images[other].int()) // 2).tolist()
            expected = [((int(y[one]) == c) + (int(y[other]) == c)) / 2 for c in range(4)]
            assert share.tolist() == expected
    assert count == 1 or all(sorted(order.tolist()) == list(range(count)) for order in orders)


def test_there_are_only_so_many_blends() -> None:
    images, y = torch.zeros(3000, 1, 2, 2, dtype=torch.uint8), torch.arange(3000) % 5
    found = blends(images, y, 5, torch.Generator().manual_seed(0))
    assert len(found.images) == len(found.shares) == MOST
