"""The model that learns, and the copies of it that answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.classifiers import NearestClassMean, fit_temperature, leave_one_out
from scrlearn.errors import InputError
from scrlearn.estimator import OnlineClassifier
from scrlearn.images import Array, Shape
from scrlearn.learners import find_method
from scrlearn.learners.base import NCM_TEMPERATURE
from scrlearn.service.journal import Item
from scrlearn.service.settings import ModelConfig

SAME = 2e-3  # features that are no farther apart than rounding puts them: the same image, stored twice
BORROWED = 5  # a class's spread counts as if it had so many images more, spread as those of all classes are
ROOM = 1.1  # stored images have been learned; new ones of the same class lie a little farther apart
AT_ONCE = 1024
SEEN_AT_ONCE = 64


class ServedClassifier(OnlineClassifier):
    """An `OnlineClassifier` that can be copied while it goes on learning; its files are the same.

    Examples
    --------
    >>> config = ModelConfig("er", memory_size=20, image_size=8, channels=1, device="cpu")
    >>> model = make_model(config)
    >>> model.learn([Item("image", "dark", bytes(64)), Item("image", "bright", bytes([255] * 64))], (1, 8, 8))
    >>> twin = model.twin()
    >>> twin.digest() == model.digest()
    True
    """

    def learn(self, items: Sequence[Item], shape: Shape) -> None:
        """One step on the images of a batch, each of this shape."""
        pixels = np.frombuffer(b"".join(item.pixels for item in items), dtype=np.uint8)
        images = torch.from_numpy(pixels.reshape(len(items), *shape).copy())
        self.partial_fit(images, [item.label for item in items])

    @property
    def labels(self) -> dict[str, int]:
        """The labels known, and the learner's numbers for them."""
        return {str(name): number for name, number in self._index.items()}

    def twin(self) -> Self:
        """A copy that stands where this one does and shares nothing with it."""
        other = type(self)(**self.get_params(deep=False))
        if self._learner is not None:
            learner = other._build(self._learner.image_shape)
            learner.runner = None  # copies are short-lived: nothing is worth recording, and nothing must hold them
            learner.load_state_dict(self._learner.state_dict())
            other._adopt(learner, dict(self._index))
        return other

    def check(self, shape: Shape) -> Self:
        """Say now, and not with the first batch, if no learner can be built for images of this shape."""
        self._build(shape)
        return self


def make_model(config: ModelConfig, encoder: nn.Module | None = None) -> ServedClassifier:
    """A model that has learned nothing yet."""
    if find_method(config.method).name == "offline":
        raise InputError(
            'Method "offline" keeps every image and learns at the end; a service needs one that learns on.'
        )
    return ServedClassifier(
        config.method,
        memory_size=config.memory_size,
        encoder=encoder,
        batch_size=config.batch_size,
        device=config.device,
        precision=config.precision,
        seed=config.seed,
        image_size=config.image_size,
        **config.all_options(),
    ).check(config.image_shape)


@dataclass(frozen=True)
class Near:
    """A class and how near an image is to it."""

    label: str
    distance: float | None
    nearest: float | None
    confidence: float
    threshold: float | None


@dataclass(frozen=True)
class Neighbour:
    """A stored image near another one."""

    slot: int
    label: str
    distance: float


@dataclass(frozen=True)
class Answer:
    """What the model says about one image; `label` is None when nothing it knows is near."""

    label: str | None
    confidence: float
    classes: list[Near]
    neighbours: list[Neighbour]


@dataclass(frozen=True)
class Map:
    """The stored images as points of a plane: places N×2, labels, and the share of the variance that is shown."""

    points: Array
    slots: list[int]
    labels: list[str]
    explained: float


class Replica:
    """A copy of the model at one moment, with all that is needed to answer; nothing in it ever changes.

    Parameters
    ----------
    model
        The model; copied.
    sequence
        The last journal entry it has learned.
    quantile
        See `thresholds`.

    Attributes
    ----------
    temperature
        What the cosine similarities of the nearest class mean are divided by for a confidence; fitted to the memory.
    thresholds
        How far from the nearest stored image of each label an image of it may be.
    """

    def __init__(self, model: ServedClassifier, sequence: int, quantile: float = 0.95) -> None:
        self.model = model.twin()
        self.sequence = sequence
        self.labels = [*self.model.labels]
        self._numbers = [*self.model.labels.values()]
        self._names = {number: name for name, number in self.model.labels.items()}
        self.images = torch.empty(0, 0, 0, 0, dtype=torch.uint8)
        self.stored = torch.empty(0, dtype=torch.int64)
        self.features = torch.empty(0, 0)
        self.ncm: NearestClassMean | None = None
        self.thresholds = torch.full((len(self.labels),), torch.inf)
        self.temperature = NCM_TEMPERATURE
        self.finite = True
        self.steps = 0
        if self.labels:
            self._look(quantile)

    @torch.no_grad()
    def _look(self, quantile: float) -> None:
        """See the memory with these weights: prototypes, what is near and how sure that makes, and the map's points."""
        learner = self.model.learner_
        self.steps = learner.steps
        images, stored = learner.memory.contents()
        self.images, self.stored = images.cpu(), stored.cpu()
        if len(images):
            seen = self._see(images, learner.look_whole)  # class means are made of whole images
            self.finite = bool(torch.isfinite(seen).all())
            asked = self._see(images) if learner.crops else seen  # compared with images that are asked about
            self.features = F.normalize(asked, dim=1).cpu()
            learner.has_seen_memory(seen)
            self.ncm = NearestClassMean.fit(learner.compared(seen), stored, learner.num_classes, learner.centred)
            limits = thresholds(self.features, self.stored, learner.num_classes, quantile)
            self.thresholds = limits[self._numbers]
        if learner.drift is not None:
            self.ncm = learner.prototypes()
        if len(images) and self.finite:
            if learner.classifier == "ncm" and self.ncm is not None:
                self.temperature = self._calibrate(self.ncm, learner.compared(seen), stored)
            self._scores(seen[:1])  # what a classifier computes once, it computes here and not for the first answer

    def _calibrate(self, ncm: NearestClassMean, seen: Tensor, stored: Tensor) -> float:
        """The temperature at which a confidence is the share of stored images that such answers are right for."""
        if self.model.learner_.drift is not None:  # these prototypes are not made from the memory
            return fit_temperature(ncm.scores(seen), stored, NCM_TEMPERATURE)
        return ncm.temperature(seen, stored, NCM_TEMPERATURE)

    def counts(self) -> dict[str, int]:
        """Stored images of each label."""
        found = torch.bincount(self.stored, minlength=max(self._numbers, default=-1) + 1).tolist()
        return {label: found[number] for label, number in zip(self.labels, self._numbers, strict=True)}

    def name(self, slot: int) -> str:
        """The label of a stored image."""
        return self._names[int(self.stored[slot])]

    def threshold(self, label: str) -> float | None:
        """How far from the nearest stored image of this label an image of it may be; None: any distance."""
        return _finite(float(self.thresholds[self.labels.index(label)]))

    # ---------------------------------------------------------------- answering

    @torch.no_grad()
    def answer(self, images: Tensor, neighbours: int = 0, top: int = 5) -> list[Answer]:
        """What is on each image (uint8, N×C×H×W): the nearest classes, best first, and the nearest stored images."""
        if not self.labels:
            return [Answer(None, 0.0, [], []) for _ in images]
        features = self._see(images)
        scores = self._scores(features)
        probabilities = torch.softmax(scores, dim=1).nan_to_num(0.0)
        distances = torch.full_like(scores, torch.inf)
        if self.ncm is not None:
            distances = self.ncm.distances(self.model.learner_.compared(features)).float().cpu()[:, self._numbers]
        similar = F.normalize(features, dim=1).cpu() @ self.features.T if len(self.features) else None
        nearest = self._nearest(similar, len(images))
        unknown = torch.isinf(scores).all(1)  # no class can be named at all
        unknown |= (nearest > self.thresholds).all(1)
        near = self._neighbours(similar, neighbours, len(images))
        answers = []
        for row, order in enumerate(scores.argsort(dim=1, descending=True, stable=True)[:, :top].tolist()):
            classes = [self._near(p, distances[row, p], nearest[row, p], probabilities[row, p]) for p in order]
            label = None if bool(unknown[row]) else classes[0].label
            answers.append(Answer(label, classes[0].confidence, classes, near[row]))
        return answers

    def _see(self, images: Tensor, look: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        learner = self.model.learner_
        learner.set_training(False)
        # on a CPU small parts are faster, since they stay in its caches, and need less memory
        parts = images.split(SEEN_AT_ONCE if learner.device.type == "cpu" else learner.prediction_batch)
        return torch.cat([learner.run(look or learner.look, part.to(learner.device)) for part in parts])

    def _scores(self, features: Tensor) -> Tensor:
        """Of the classifier the method answers with, ready for a softmax, in the order of `labels`."""
        learner = self.model.learner_
        if self.ncm is None and learner.classifier != "softmax":  # no image is left of any class
            return torch.full((len(features), len(self.labels)), -torch.inf)
        if learner.classifier != "ncm" or self.ncm is None:
            return learner.scores_from_features(features).float().cpu()[:, self._numbers]
        scores = self.ncm.scores(learner.compared(features))
        if learner.calibrated and len(self.images):
            scores = scores + learner.offsets("ncm")
        return scores.cpu()[:, self._numbers] / self.temperature

    def _near(self, place: int, distance: Tensor, nearest: Tensor, probability: Tensor) -> Near:
        far, closest, limit = (_finite(float(value)) for value in (distance, nearest, self.thresholds[place]))
        return Near(self.labels[place], far, closest, round(float(probability), 6), limit)

    def _nearest(self, similar: Tensor | None, images: int) -> Tensor:
        """How far the nearest stored image of each label is, ``inf`` where there is none."""
        best = torch.full((images, max(self._numbers) + 1), -torch.inf)
        if similar is not None:
            best.scatter_reduce_(1, self.stored.expand(images, -1), similar, "amax")
        return _distance(best)[:, self._numbers]

    def _neighbours(self, similar: Tensor | None, count: int, images: int) -> list[list[Neighbour]]:
        if similar is None or count == 0:
            return [[] for _ in range(images)]
        near, slots = similar.topk(min(count, len(self.features)), dim=1)
        distances = _distance(near)
        return [
            [Neighbour(slot, self.name(slot), round(distance, 6)) for slot, distance in zip(row, far, strict=True)]
            for row, far in zip(slots.tolist(), distances.tolist(), strict=True)
        ]

    def digest(self) -> str:
        """A fingerprint of all that was learned."""
        return self.model.digest()


class Cartographer:
    """Draws the map of the memory: the two main directions of its features, turned to lie as they did last time.

    A map is drawn once for each copy of the model. Principal directions are only known up to turning and mirroring, so
    each new pair is turned, within its plane, to the nearest position to the last pair; points then move no more than
    the features did.

    Examples
    --------
    >>> directions(np.diag([3.0, 2.0, 1.0]), None)[0].round(6).tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: Array | None = None
        self._drawn: tuple[int, Map] | None = None

    def draw(self, replica: Replica) -> Map:
        """The map of this copy."""
        with self._lock:
            if self._drawn is None or self._drawn[0] != replica.sequence:
                self._drawn = replica.sequence, self._draw(replica)
            return self._drawn[1]

    def _draw(self, replica: Replica) -> Map:
        slots = list(range(len(replica.features)))
        names = [replica.name(slot) for slot in slots]
        if len(slots) < 2:
            return Map(np.zeros((len(slots), 2)), slots, names, 0.0)
        features = replica.features.double().numpy()
        features = features - features.mean(0)
        basis, explained = directions(features.T @ features, self._before)
        self._before = basis
        return Map((features @ basis).round(4), slots, names, explained)


def directions(scatter: Array, before: Array | None) -> tuple[Array, float]:
    """The two main directions of a scatter matrix (d×2) and the share of the variance they show."""
    size = len(scatter)
    first = max(0, size - 2)
    values, vectors = scipy.linalg.eigh(scatter, subset_by_index=[first, size - 1])
    basis = np.zeros((size, 2))
    basis[:, : size - first] = vectors[:, ::-1]
    if before is None or before.shape != basis.shape:
        largest = np.abs(basis).argmax(0)
        basis = basis * np.where(basis[largest, [0, 1]] < 0, -1.0, 1.0)
    else:
        left, _, right = np.linalg.svd(basis.T @ before)
        basis = basis @ left @ right
    total = float(np.trace(scatter))
    return basis, float(values.sum() / total) if total > 0 else 0.0


def thresholds(features: Tensor, labels: Tensor, num_classes: int, quantile: float) -> Tensor:
    """How far from the nearest stored image of a class another image of it may be, learned from the memory.

    For each stored image, the nearest other one of its class is looked for, and how far that is in units of the class's
    spread, the root mean square of these distances. All of them together have one quantile; a threshold is that
    quantile times the spread, and a tenth more. It is no smaller than the stored images' distance from the mean of
    their class: pictures taken one right after the other are nearer to each other than a new one can be. Where no class
    has two different images, nothing can be said, and the threshold is infinite.

    Parameters
    ----------
    features
        Of the stored images, of length 1.
    labels, num_classes
        Their classes.
    quantile
        The share of the stored images that must be near enough to another one.

    Examples
    --------
    >>> square = F.normalize(torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.1, 1.0], [-0.1, 1.0]]), dim=1)
    >>> thresholds(square, torch.tensor([0, 0, 1, 1]), 2, quantile=1.0)
    tensor([0.2189, 0.2189])
    """
    nearest = _nearest_other(features, labels)
    compared = torch.isfinite(nearest)
    if not bool(compared.any()):
        return torch.full((num_classes,), torch.inf)
    scores, _ = leave_one_out(features, labels, num_classes)
    away = _distance(scores.gather(1, labels[:, None])[:, 0])[compared]
    nearest, labels = nearest[compared], labels[compared]
    spread, least = (_spread(distances, labels, num_classes) for distances in (nearest, away))
    limit = float(np.quantile((nearest / spread[labels]).numpy(), quantile)) * ROOM
    return torch.maximum(limit * spread, least)


def _nearest_other(features: Tensor, labels: Tensor) -> Tensor:
    """The distance from each image to the nearest one of its class that is not the same; ``inf``: there is none."""
    nearest = torch.full((len(labels),), torch.inf)
    for number in labels.unique().tolist():
        [mine] = torch.nonzero(labels == number, as_tuple=True)
        for part in mine.split(AT_ONCE):
            apart = _distance(features[part] @ features[mine].T)
            nearest[part] = apart.masked_fill(apart <= SAME, torch.inf).amin(1)
    return nearest


def _spread(distances: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The root mean square of each class's distances; a class with few borrows from all."""
    squares = torch.zeros(num_classes).index_add_(0, labels, distances.square())
    counts = torch.bincount(labels, minlength=num_classes)
    return ((squares + BORROWED * distances.square().mean()) / (counts + BORROWED)).sqrt()


def _distance(cosine: Tensor) -> Tensor:
    """Between vectors of length 1."""
    return (2 - 2 * cosine).clamp(min=0).sqrt()


def _finite(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None
