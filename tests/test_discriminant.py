"""The shared-covariance classifier against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from scrlearn.classifiers import SMALLEST_SHARE, LinearDiscriminant, shrunk_covariance


def drawn(images, length, classes, seed=0):
    """Classes with a mean each and one covariance that is far from round."""
    random = np.random.default_rng(seed)
    y = random.integers(0, classes, images)
    spread = random.normal(size=(length, length)) * np.linspace(0.1, 1.0, length)
    return random.normal(size=(classes, length))[y] + random.normal(size=(images, length)) @ spread, y


def unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@pytest.mark.parametrize(("images", "length"), [(200, 8), (30, 50)])  # more images than features, and fewer
@pytest.mark.parametrize("given", [0.0, 0.3])
def test_equals_scikit_learn(images, length, given):
    features, y = drawn(images, length, classes=5)
    lda = LinearDiscriminant.fit(torch.from_numpy(features).float(), torch.from_numpy(y), 5, given)
    z = unit(features)
    centred = z - np.stack([z[y == c].mean(0) for c in range(5)])[y]
    share = given or ledoit_wolf(centred, assume_centered=True)[1]
    assert lda.shrinkage.item() == pytest.approx(share, rel=1e-4)
    assert share > SMALLEST_SHARE
    # with the classes' own frequencies its covariance is the pooled one; without their logarithms, as if all were equal
    frequencies = np.bincount(y) / len(y)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=share, priors=frequencies).fit(z, y)
    asked, _ = drawn(40, length, classes=5, seed=1)
    expected = oracle.decision_function(unit(asked)) - np.log(frequencies)
    # scikit-learn shrinks each class's covariance towards its own size; their mean is the same as ours
    np.testing.assert_allclose(lda.scores(torch.from_numpy(asked).float()), expected, rtol=2e-3, atol=2e-3)


def test_scores_are_log_densities_up_to_a_constant():
    features, y = drawn(60, 6, classes=3)
    lda = LinearDiscriminant.fit(torch.from_numpy(features), torch.from_numpy(y), num_classes=3)
    z = unit(features)
    means = np.stack([z[y == c].mean(0) for c in range(3)])
    covariance, _ = shrunk_covariance(torch.from_numpy(z - means[y]))
    precision = np.linalg.inv(covariance.numpy())
    density = np.stack([-0.5 * np.einsum("nd,de,ne->n", z - m, precision, z - m) for m in means], axis=1)
    scores = lda.scores(torch.from_numpy(features)).numpy()
    difference = scores - density
    np.testing.assert_allclose(difference - difference[:, :1], 0, atol=1e-4)


def test_a_class_without_images_is_never_predicted():
    features, y = drawn(50, 4, classes=2)
    lda = LinearDiscriminant.fit(torch.from_numpy(features), torch.from_numpy(2 * y), num_classes=4)
    assert lda.present.tolist() == [True, False, True, False]
    scores = lda.scores(torch.from_numpy(features))
    assert scores[:, [1, 3]].eq(-torch.inf).all()
    assert scores[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("y", [[0, 1, 2], [0, 0, 1]])  # one image a class; two that differ in one direction
def test_very_few_images_still_have_a_metric(y):
    features = torch.tensor([[1.0, 0.1, 0.0], [1.0, -0.1, 0.0], [0.0, 0.0, 1.0]])
    lda = LinearDiscriminant.fit(features, torch.tensor(y), num_classes=max(y) + 1)
    scores = lda.scores(features)
    assert scores.isfinite().all()
    assert scores.argmax(1).tolist() == y
