"""What the service's confidence and its "unknown" are worth, on digits that were never learned; and at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from service_tools import CONFIG, images_of
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from tiny_encoder import tiny
from torch import nn

from scrlearn.service.journal import Item
from scrlearn.service.model import Replica, ServedClassifier, make_model, thresholds
from scrlearn.service.settings import ModelConfig

SHAPE = (1, 8, 8)
KNOWN = 8  # the classes that are taught; the others never are


class Digits:
    """A model that was taught some images of each of the first digits, one digit after the other; and images aside."""

    def __init__(self, count: int, seed: int, encoder: nn.Module | None = None) -> None:
        digits = load_digits()
        images = torch.from_numpy((digits.images * 15).astype(np.uint8))[:, None]
        order = np.random.default_rng(seed).permutation(len(images))
        train, test = order[:1400], order[1400:]
        stream = np.concatenate([train[digits.target[train] == digit][:count] for digit in range(KNOWN)])
        config = ModelConfig("scr", memory_size=200, image_size=8, channels=1, device="cpu", threads=1, seed=seed)
        self.replica = Replica(
            _taught(make_model(config, encoder), images[stream], digits.target[stream].astype(str)), 0
        )
        known, strange = test[digits.target[test] < KNOWN], test[digits.target[test] >= KNOWN]
        self.known, self.strange = (self.replica.answer(images[some], top=KNOWN) for some in (known, strange))
        labels = digits.target[known].astype(str)
        self.right = np.array([answer.classes[0].label for answer in self.known]) == labels
        self.uncalibrated = self.replica.model.predict_proba(images[known]).max(1)


def _taught(model: ServedClassifier, images: torch.Tensor, labels: np.ndarray) -> ServedClassifier:
    for start in range(0, len(images), 10):
        batch = zip(images[start : start + 10], labels[start : start + 10], strict=True)
        model.learn([Item("image", str(label), bytes(image.numpy())) for image, label in batch], SHAPE)
    return model


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error, over ten equal bins."""
    places = np.minimum((confidence * 10).astype(int), 9)
    gaps = [(places == b).mean() * abs(confidence[places == b].mean() - right[places == b].mean()) for b in {*places}]
    return float(sum(gaps))


def two_layers() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


@pytest.fixture(scope="module", params=[(40, 0), (40, 1), (200, 0), (200, 1)], ids=str)
def digits(request: pytest.FixtureRequest) -> Digits:
    count, seed = request.param
    return Digits(count, seed, two_layers())


def test_confidence_is_the_share_that_is_right(digits: Digits) -> None:
    confidence = np.array([answer.confidence for answer in digits.known])
    now, before = calibration_error(confidence, digits.right), calibration_error(digits.uncalibrated, digits.right)
    assert now < 0.06
    assert now < before / 3


def test_a_young_model_is_as_sure_as_it_may_be() -> None:
    """After ten images of a class all features lie close together; that says nothing about how sure an answer is."""
    young = Digits(10, seed=0)
    confidence = np.array([answer.confidence for answer in young.known])
    assert young.uncalibrated.mean() < 0.3 < young.right.mean() - 0.2
    assert abs(confidence.mean() - young.right.mean()) < 0.15
    assert calibration_error(confidence, young.right) < calibration_error(young.uncalibrated, young.right) / 3


def test_strange_digits_are_farther_than_known_ones(digits: Digits) -> None:
    def far(answers: list) -> list[float]:
        limits = dict(zip(digits.replica.labels, digits.replica.thresholds.tolist(), strict=True))
        return [min(near.nearest / limits[near.label] for near in answer.classes) for answer in answers]

    known, strange = far(digits.known), far(digits.strange)
    assert roc_auc_score([0] * len(known) + [1] * len(strange), known + strange) > 0.85
    for answers, ratios in ((digits.known, known), (digits.strange, strange)):
        assert [answer.label is None for answer in answers] == [ratio > 1 for ratio in ratios]


def test_unknown_is_said_of_strange_digits(digits: Digits) -> None:
    known = np.mean([answer.label is None for answer in digits.known])
    strange = np.mean([answer.label is None for answer in digits.strange])
    assert known < 0.06
    assert strange > 0.3


def test_thresholds_follow_the_features(digits: Digits) -> None:
    """Nothing in them is absolute: features drawn ten times closer together have thresholds as much smaller."""
    replica = digits.replica
    centre = replica.features.mean(0)
    closer = F.normalize(centre + 0.1 * (replica.features - centre), dim=1)
    apart = float(torch.pdist(replica.features).mean() / torch.pdist(closer).mean())
    limits = thresholds(closer, replica.stored, KNOWN, 0.95)
    assert apart > 5
    assert float((replica.thresholds / limits).mean()) == pytest.approx(apart, rel=0.3)


# ------------------------------------------------------------------------------------------------------ at the edges


def _small(images: torch.Tensor, labels: list[str], **config: object) -> Replica:
    return Replica(_taught(make_model(ModelConfig(**{**CONFIG, **config}), tiny()), images, np.array(labels)), 0)


def _sound(replica: Replica) -> None:
    images = torch.cat([images_of(label, 3, start=50) for label in ("cat", "dog", "fox")])
    for answer in replica.answer(images, neighbours=2):
        assert np.isfinite([near.confidence for near in answer.classes]).all()
        assert sum(near.confidence for near in answer.classes) == pytest.approx(1, abs=1e-4)
        assert answer.confidence == max(near.confidence for near in answer.classes)
    assert 0 < replica.temperature < 100
    assert not torch.isnan(replica.thresholds).any()


def test_one_class() -> None:
    replica = _small(images_of("cat", 12), ["cat"] * 12)
    _sound(replica)
    [answer] = replica.answer(images_of("cat", 1, start=3))
    assert (answer.label, answer.confidence) == ("cat", 1.0)


def test_one_image_of_each_class() -> None:
    labels = ["cat", "dog", "owl"]
    replica = _small(torch.cat([images_of(label, 1) for label in labels]), labels)
    _sound(replica)
    for answer, label in zip(replica.answer(torch.cat([images_of(label, 1) for label in labels])), labels, strict=True):
        assert answer.label == label
        assert answer.classes[0].nearest == pytest.approx(0, abs=1e-3)


def test_the_same_image_again_and_again() -> None:
    cat, dog = images_of("cat", 1), images_of("dog", 1)
    replica = _small(torch.cat([cat, dog]).repeat(10, 1, 1, 1), ["cat", "dog"] * 10)
    _sound(replica)
    assert torch.isinf(replica.thresholds).all(), "one image, however often, does not say how far another may be"
    for image, label in ((cat, "cat"), (dog, "dog")):
        [answer] = replica.answer(image)
        assert answer.label == label
        assert answer.confidence > 0.9
    _sound(_small(cat.repeat(20, 1, 1, 1), ["cat", "dog"] * 10))


def test_doubled_images_do_not_narrow_a_class() -> None:
    images, labels = torch.cat([images_of("cat", 8), images_of("dog", 8)]), ["cat"] * 8 + ["dog"] * 8
    once = _small(images, labels)
    twice = thresholds(once.features.repeat(2, 1), once.stored.repeat(2), 2, 0.95)
    assert torch.allclose(once.thresholds, twice, rtol=0.1)


def test_pictures_taken_in_a_row_do_not_narrow_a_class() -> None:
    """Ten views of each class with ten pictures of each view: a new view is no farther than the views are apart."""
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(2, 16, generator=generator), dim=1)
    views = centres[:, None] + 0.05 * torch.randn(2, 12, 16, generator=generator)
    pictures = F.normalize(views[:, :10, None] + 0.001 * torch.randn(2, 10, 10, 16, generator=generator), dim=3)
    limits = thresholds(pictures.reshape(200, 16), torch.tensor([0] * 100 + [1] * 100), 2, 0.95)
    apart = torch.pdist(F.normalize(views[0, :10], dim=1)).mean()
    assert float(limits.min()) > 0.6 * float(apart)


def test_a_class_with_few_images_has_the_spread_of_all() -> None:
    counts = {"cat": 12, "dog": 12, "owl": 1}
    images = torch.cat([images_of(label, count) for label, count in counts.items()])
    replica = _small(images, [label for label, count in counts.items() for _ in range(count)])
    cat, dog, owl = replica.thresholds.tolist()
    assert min(cat, dog) <= owl <= max(cat, dog)
