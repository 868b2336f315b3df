"""The nearest class mean against scikit-learn's, and the softmax head that grows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import pairwise_distances
from sklearn.neighbors import NearestCentroid

from scrlearn.classifiers import NearestClassMean, SoftmaxHead
from scrlearn.losses import cross_entropy_loss


def drawn(rows, dim, seed):
    return torch.randn(rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


def by_sklearn(features, y):
    """scikit-learn's classifier on normalised features, its means normalised once more, as the protocol has it."""
    oracle = NearestCentroid().fit(F.normalize(features, dim=1).numpy(), y.numpy())
    oracle.centroids_ /= np.linalg.norm(oracle.centroids_, axis=1, keepdims=True)
    return oracle


# ---------------------------------------------------------------- nearest class mean


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.sampled_from([0, 1, 3, 7]), min_size=4, max_size=40).filter(lambda given: len(set(given)) > 1),
    dim=st.integers(2, 12),
    seed=st.integers(0, 2**32),
)
def test_equals_sklearn(labels, dim, seed):
    features, y, asked = drawn(len(labels), dim, seed), torch.tensor(labels), drawn(25, dim, seed + 1)
    ncm, oracle = NearestClassMean.fit(features, y, num_classes=9), by_sklearn(features, y)
    normalised = F.normalize(asked, dim=1).numpy()
    assert ncm.scores(asked).argmax(1).tolist() == oracle.predict(normalised).tolist()
    assert ncm.distances(asked).argmin(1).tolist() == oracle.predict(normalised).tolist()
    present = sorted(set(labels))
    distances = ncm.distances(asked)
    expected = pairwise_distances(normalised, oracle.centroids_)
    np.testing.assert_allclose(distances[:, present].numpy(), expected, atol=1e-7)
    assert ncm.present.nonzero().flatten().tolist() == present


def test_equals_sklearn_as_it_is_where_classes_spread_equally():
    """With means of equal length the second normalisation changes no order, and scikit-learn's own answers stand."""
    angles = torch.tensor([0.0, 0.4, 1.0, 1.4, 2.5, 2.9], dtype=torch.float64)
    features, y = torch.stack([angles.cos(), angles.sin()], 1) * 3, torch.tensor([0, 0, 1, 1, 2, 2])
    asked = drawn(50, 2, 0)
    oracle = NearestCentroid().fit(F.normalize(features, dim=1).numpy(), y.numpy())
    expected = oracle.predict(F.normalize(asked, dim=1).numpy())
    assert NearestClassMean.fit(features, y, 3).scores(asked).argmax(1).tolist() == expected.tolist()


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_centred_by_hand(offset):
    """Without what all classes share; one class has many more samples, and counts as one."""
    y = torch.tensor([0] * 20 + [2] * 3 + [3] * 4)
    features, asked = drawn(27, 6, 0) + offset, drawn(9, 6, 1) + offset
    ncm = NearestClassMean.fit(features, y, 5, centred=True)
    z = F.normalize(features, dim=1)
    centre = torch.stack([z[y == c].mean(0) for c in (0, 2, 3)]).mean(0)
    torch.testing.assert_close(ncm.centre, centre)
    for c in (0, 2, 3):
        mean = F.normalize(z[y == c] - centre, dim=1).mean(0)
        mean = mean / mean.norm()
        for row, x in zip(ncm.scores(asked), asked, strict=True):
            seen = x / x.norm() - centre
            assert row[c].item() == pytest.approx(float(seen @ mean / seen.norm()))
    assert torch.isinf(ncm.scores(asked)[:, [1, 4]]).all()
    torch.testing.assert_close(ncm.distances(asked)[:, 2], (2 - 2 * ncm.scores(asked)[:, 2]).sqrt())


def test_one_class_alone_is_its_own_centre_and_still_answers():
    ncm = NearestClassMean.fit(drawn(4, 3, 0), torch.zeros(4, dtype=torch.int64), 1, centred=True)
    assert torch.isfinite(ncm.scores(drawn(5, 3, 1))).all()


def test_lengths_of_features_do_not_matter():
    features, y, asked = drawn(12, 5, 0), torch.arange(12) % 3, drawn(8, 5, 1)
    stretched = features * torch.logspace(-3, 3, 12, dtype=torch.float64)[:, None]
    a, b = NearestClassMean.fit(features, y, 3), NearestClassMean.fit(stretched, y, 3)
    torch.testing.assert_close(a.prototypes, b.prototypes)
    torch.testing.assert_close(a.scores(asked), b.scores(asked * 100))


@pytest.mark.parametrize("present", [[2], [0, 5], [1, 2, 3, 4, 5]])
def test_a_class_without_samples_is_never_predicted(present):
    y = torch.tensor(present).repeat(3)
    ncm = NearestClassMean.fit(drawn(len(y), 4, 0), y, num_classes=6)
    asked = torch.cat([drawn(200, 4, 1), -drawn(200, 4, 2), torch.zeros(1, 4, dtype=torch.float64)])
    missing = [c for c in range(6) if c not in present]
    assert set(ncm.scores(asked).argmax(1).tolist()) <= set(present)
    assert set(ncm.distances(asked).argmin(1).tolist()) <= set(present)
    assert (ncm.scores(asked)[:, missing] == -torch.inf).all()
    assert (ncm.distances(asked)[:, missing] == torch.inf).all()
    assert ncm.scores(asked)[:, present].isfinite().all()
    assert ncm.prototypes.isfinite().all()


def test_rows_without_a_class_are_left_out():
    features, y = drawn(6, 3, 0), torch.tensor([0, 1, -1, 0, -1, 1])
    ncm, without = NearestClassMean.fit(features, y, 2), NearestClassMean.fit(features[y >= 0], y[y >= 0], 2)
    torch.testing.assert_close(ncm.prototypes, without.prototypes)


# ---------------------------------------------------------------- softmax head


def test_the_head_grows_by_doubling_and_keeps_its_rows():
    head = SoftmaxHead(5, seed=3)
    assert head.capacity == 16
    head.meet(torch.tensor([0, 15]))
    with torch.no_grad():
        head.weight[0] = 7.0
    before = head.weight.detach().clone()
    assert not head.reserve(16)
    assert head.reserve(17)
    assert head.capacity == len(head.bias) == len(head.active) == 32
    assert torch.equal(head.weight[:16], before)
    assert head.active.nonzero().flatten().tolist() == [0, 15]
    assert head.reserve(100)
    assert head.capacity == 100
    assert isinstance(head.weight, torch.nn.Parameter)
    assert head.weight.requires_grad


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 90), max_size=5))
def test_first_rows_do_not_depend_on_when_the_head_grew(sizes):
    head, at_once = SoftmaxHead(4, seed=1), SoftmaxHead(4, seed=1, ahead=200)
    for classes in (*sizes, 100):
        head.reserve(classes)
    assert torch.equal(head.weight, at_once.weight[: head.capacity])
    assert torch.equal(head.bias, at_once.bias[: head.capacity])


def test_first_rows_are_uniform_like_those_of_a_linear_layer_and_differ_by_seed_and_class():
    weight = SoftmaxHead(64, seed=0, ahead=200).weight
    bound = 1 / 64**0.5
    assert weight.abs().max() <= bound
    assert abs(weight.mean().item()) < 4 * bound / (3 * weight.numel()) ** 0.5
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert len({tuple(row) for row in weight.tolist()}) == 200
    assert not torch.equal(weight, SoftmaxHead(64, seed=1, ahead=200).weight)


def test_unmet_classes_score_minus_infinity_and_get_no_gradient():
    head = SoftmaxHead(6)
    head.meet(torch.tensor([1, 4, 1]))
    features, y = torch.randn(8, 6), torch.tensor([1, 4] * 4)
    logits = head(features)
    met = [1, 4]
    assert torch.isfinite(logits).sum(1).tolist() == [2] * 8
    torch.testing.assert_close(logits[:, met], features @ head.weight[met].T + head.bias[met])
    cross_entropy_loss(logits, y).backward()
    others = [c for c in range(16) if c not in met]
    for gradient in (head.weight.grad, head.bias.grad):
        assert not gradient[others].any()
        assert gradient[met].any(dim=-1).all() if gradient.ndim > 1 else gradient[met].all()
    small = torch.nn.Linear(6, 2)
    with torch.no_grad():
        small.weight.copy_(head.weight[met]), small.bias.copy_(head.bias[met])
    F.cross_entropy(small(features), torch.tensor([0, 1] * 4)).backward()
    torch.testing.assert_close(head.weight.grad[met], small.weight.grad)


@pytest.mark.parametrize(("ahead", "capacity"), [(0, 16), (5, 16), (16, 16), (40, 40)])
def test_classes_ahead_are_trained_as_negatives_from_the_start(ahead, capacity):
    head = SoftmaxHead(3, ahead=ahead)
    assert head.capacity == capacity
    assert head.active.sum() == ahead
    head.meet(torch.tensor([0]))
    cross_entropy_loss(head(torch.randn(4, 3)), torch.zeros(4, dtype=torch.int64)).backward()
    trained = head.bias.grad.nonzero().flatten().tolist()
    assert trained == (list(range(ahead)) if ahead > 1 else [])


@pytest.mark.parametrize("length", [1.0, 7.0])
def test_a_head_of_directions_knows_no_lengths_and_no_bias(length):
    head = SoftmaxHead(6, seed=3, temperature=0.2)
    head.meet(torch.tensor([1, 4]))
    features = drawn(8, 6, 0).float()
    scores = head(features * length)
    for row, x in zip(scores.tolist(), features, strict=True):
        for label in (1, 4):
            w = head.weight[label]
            assert row[label] == pytest.approx(float((x @ w / (x.norm() * w.norm())).detach()) / 0.2, rel=1e-5)
        assert sum(map(np.isfinite, row)) == 2
    with torch.no_grad():
        head.weight[1] *= 5
        head.bias += 1
    torch.testing.assert_close(head(features), scores)
