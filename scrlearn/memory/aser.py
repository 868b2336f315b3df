"""ASER: replay and keep images by their k-nearest-neighbour Shapley values in the encoder's feature space.

A Shapley value says what one stored image is worth to a nearest-neighbour classifier that has to recognise another
image. Images that help with what is in memory (cooperative) and hinder what arrives now (adversarial) are replayed;
images that help least are given up.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from scrlearn.errors import InputError, suggest
from scrlearn.memory.policy import Policy, Retrieval, Update
from scrlearn.memory.reservoir import Reservoir

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner

VALUES = ("mu", "asv", "neg_sv")
ABSENT = -1
# Candidates altogether while there are few classes, where no number per class is given (CIFAR-10's 9 × 10).
CANDIDATES = 90
# Images in one forward for features: bounds the memory it takes.
FEATURE_BATCH = 512


def knn_shapley(
    eval_features: Tensor, eval_labels: Tensor, cand_features: Tensor, cand_labels: Tensor, k: int
) -> Tensor:
    """Exact Shapley values of candidates for a k-nearest-neighbour classifier, one row an evaluation image.

    The game: a set S of candidates earns ``1/k`` for each of the (at most k) members nearest to the evaluation image
    that has its class. Sorted by distance, with m_i = 1 where candidate i has the class and 0 elsewhere, the values are
    ``s_i = s_{i+1} + (m_i − m_{i+1}) min(k, i) / (k i)``, beginning behind the last one with 0. So the last one is
    worth ``m_N min(k, N) / (k N)``, which is right for fewer than k candidates too.

    A label of −1 means absent: such a candidate is worth 0 and changes no other value, and such an evaluation image has
    a row of zeros. Equal distances count in the order of the candidates. Needs memory for candidates × candidates.

    Parameters
    ----------
    eval_features, eval_labels
        E×d feature vectors and E classes of the images to be recognised.
    cand_features, cand_labels
        N×d feature vectors and N classes of the candidates.
    k
        Neighbours the classifier asks.

    Returns
    -------
    Tensor
        E×N values.

    References
    ----------
    Jia et al., "Efficient Task-Specific Data Valuation for Nearest Neighbor Algorithms", VLDB 2019, Theorem 1.

    Examples
    --------
    >>> points = torch.tensor([[0.0], [1.0], [2.0]])
    >>> knn_shapley(torch.tensor([[-1.0]]), torch.tensor([7]), points, torch.tensor([7, 3, 7]), k=1)
    tensor([[ 0.8333, -0.1667,  0.3333]])
    """
    _check_neighbours(k)
    places = torch.arange(1, len(cand_labels) + 1, dtype=cand_features.dtype, device=cand_features.device)
    weights = places.clamp(max=k) / (k * places)
    order = _distances(eval_features, cand_features).masked_fill(cand_labels == ABSENT, torch.inf).argsort(stable=True)
    sorted_labels = cand_labels[order]
    match = ((sorted_labels == eval_labels[:, None]) & (sorted_labels != ABSENT)).to(cand_features.dtype)
    change = match - torch.cat([match[:, 1:], torch.zeros_like(match[:, :1])], dim=1)
    # a product with a triangle of ones sums the recursion: unlike a float cumsum it is deterministic on every device
    suffix = torch.ones(len(places), len(places), dtype=match.dtype, device=match.device).tril()
    values = (change * weights) @ suffix
    return torch.zeros_like(values).scatter_(1, order, values)


def _distances(eval_features: Tensor, cand_features: Tensor) -> Tensor:
    """Squared Euclidean distances, up to a constant in each row."""
    # distances do not depend on the origin; near the features' own mean the difference of squares loses the least
    origin = cand_features.mean(0)
    centred = cand_features - origin
    return centred.square().sum(1) - 2 * (eval_features - origin) @ centred.T


def adversarial_shapley(cooperative: Tensor, adversarial: Tensor, present: Tensor, value: str) -> Tensor:
    """The value of each candidate for retrieval.

    Parameters
    ----------
    cooperative
        E×N Shapley values for images of the memory.
    adversarial
        B×N Shapley values for the images of the stream batch.
    present
        Which of the E rows count; the others are zero. Where none counts, the cooperative part is 0.
    value
        "mu" (ASER_μ): mean cooperative minus mean adversarial. "asv" (ASER): largest cooperative minus smallest
        adversarial. "neg_sv": minus the sum of the adversarial ones.

    References
    ----------
    Shim et al., "Online Class-Incremental Continual Learning with Adversarial Shapley Value", AAAI 2021.

    Examples
    --------
    >>> cooperative, adversarial = torch.tensor([[0.1, 0.4], [0.3, 0.0]]), torch.tensor([[0.2, -0.2]])
    >>> adversarial_shapley(cooperative, adversarial, torch.tensor([True, True]), "mu")
    tensor([0.0000, 0.4000])
    >>> adversarial_shapley(cooperative, adversarial, torch.tensor([True, True]), "asv")
    tensor([0.1000, 0.6000])
    """
    if value == "neg_sv":
        return -adversarial.sum(0)
    if value == "mu":
        return cooperative.sum(0) / present.sum().clamp(min=1) - adversarial.mean(0)
    largest = cooperative.masked_fill(~present[:, None], -torch.inf).amax(0)
    return torch.where(present.any(), largest, 0.0) - adversarial.amin(0)


# ---------------------------------------------------------------- drawing samples


class Drawn(NamedTuple):
    """A fixed number of memory slots and their classes; class −1 marks those that are only there to fill up."""

    slots: Tensor
    labels: Tensor

    @property
    def present(self) -> Tensor:
        """Which of them count."""
        return self.labels != ABSENT


def class_ranks(labels: Tensor, generator: torch.Generator) -> Tensor:
    """The place of each image in a random order of its class, from 0.

    Those below n are a class-balanced sample of n per class; those from n to 2n are another one without the first.
    """
    noise = torch.randint(2**32, labels.shape, generator=generator, device=labels.device)
    order = (labels * 2**32 + noise).argsort(stable=True)
    ordered = labels[order]
    rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(rank).scatter_(0, order, rank)


def draw(labels: Tensor, allowed: Tensor, room: int, generator: torch.Generator) -> Drawn:
    """Draw up to `room` of the allowed slots, uniformly, in random order; the rest of the room is marked absent."""
    key = torch.rand(len(labels), generator=generator, device=labels.device, dtype=torch.float64) + ~allowed
    slots = key.topk(room, largest=False).indices
    return Drawn(slots, torch.where(allowed[slots], labels[slots], ABSENT))


@torch.no_grad()
def features_of(learner: Learner, images: Tensor) -> Tensor:
    """Encoder features in evaluation mode; the mode is set back afterwards."""
    training = learner.network.training
    learner.set_training(False)
    features = torch.cat([learner.network.features(part) for part in images.split(FEATURE_BATCH)])
    learner.set_training(training)
    return features


def _check_neighbours(k: int) -> None:
    if k < 1:
        raise InputError(f"The number of neighbours is {k}; it must be 1 or more.")


# ---------------------------------------------------------------- policies


class ShapleyPolicy(Policy):
    """What the two policies share: how many images of each class they look at.

    Everything has a fixed shape: room for n images of each class the learner has room for, the rest marked absent. What
    is computed depends on the classes met alone, not on how much room was made ahead.
    """

    def __init__(self, neighbours: int, per_class: int | None, classes_ahead: int) -> None:
        _check_neighbours(neighbours)
        if per_class is not None and per_class < 1:
            raise InputError(
                f"per_class is {per_class}; it must be 1 or more, or None to follow the number of classes."
            )
        self.neighbours, self.per_class, self.classes_ahead = neighbours, per_class, classes_ahead

    def classes(self, learner: Learner) -> Tensor:
        """How many classes there are: those met, or those known ahead of time if they are more."""
        return learner.met.sum().clamp(min=max(1, self.classes_ahead))

    def images_per_class(self, learner: Learner) -> Tensor | int:
        """n: as given, or as many as make 90 altogether, at least 2, but never more than half the memory holds."""
        if self.per_class is not None:
            return self.per_class
        classes = self.classes(learner)
        half = (learner.memory.capacity // (2 * classes)).clamp(min=1)
        return torch.minimum((CANDIDATES // classes).clamp(min=2), half)

    def room(self, learner: Learner, classes: int) -> int:
        """Room for n images of each of so many classes, known on the host."""
        capacity = learner.memory.capacity
        if self.per_class is not None:
            return min(self.per_class * classes, capacity)
        return min(max(CANDIDATES, 2 * classes), max(classes, capacity // 2), capacity)


class ASERRetrieval(ShapleyPolicy, Retrieval):
    """Replays the images with the largest adversarial Shapley values.

    Candidates are a class-balanced sample of the memory. One is worth much if it lies near images of its class in
    another such sample (so it stands for what must not be forgotten) and near images of other classes in the stream
    batch (so it is about to be confused). Features come from the encoder in evaluation mode, distances are Euclidean.
    Until the memory is full, images are drawn at random.

    Where fewer candidates exist than images are asked for (n × classes below the memory batch, as with the memory batch
    of 100 of Supervised Contrastive Replay), all of them are replayed and random other images of the memory make up the
    number, so that a batch always has its full size.

    Parameters
    ----------
    neighbours
        k of the nearest-neighbour classifier.
    per_class
        n: candidates of each class. The paper's values: 9 for CIFAR-10, 2 for CIFAR-100, 3 for Mini-ImageNet. None:
        90 divided by the number of classes, at least 2, and at most what leaves half the memory for evaluation.
    value
        "mu" (ASER_μ), "asv" (ASER) or "neg_sv"; see `adversarial_shapley`.
    classes_ahead
        The learner's option of this name. Only the rule for n looks at it here.

    References
    ----------
    Shim, Mai, Jeong, Sanner, Kim, Jang, "Online Class-Incremental Continual Learning with Adversarial Shapley Value",
    AAAI 2021.

    Examples
    --------
    >>> ASERRetrieval(per_class=2, value="asv").value
    'asv'
    >>> ASERRetrieval(value="asw")
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: There is no Shapley value type "asw". Did you mean "asv"?
    """

    def __init__(
        self, neighbours: int = 3, per_class: int | None = None, value: str = "mu", classes_ahead: int = 0
    ) -> None:
        if value not in VALUES:
            raise InputError(f'There is no Shapley value type "{value}".{suggest(value, VALUES)}')
        super().__init__(neighbours, per_class, classes_ahead)
        self.value = value

    def __call__(
        self, learner: Learner, x: Tensor, y: Tensor, count: int, gradient: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The candidates with the largest values; a random batch until the memory is full."""
        memory = learner.memory
        count = min(count, memory.size)
        if not memory.full:
            return memory.read(memory.sample(count, learner.generator))
        candidates, evaluation = self.sample(learner)
        values = self.values(learner, x, y, candidates, evaluation)
        return memory.read(self.best(learner, values, candidates, count))

    def sample(self, learner: Learner) -> tuple[Drawn, Drawn]:
        """Candidates, and an evaluation set without them: both class-balanced samples of the memory."""
        labels = learner.memory.contents()[1]
        ranks, n = class_ranks(labels, learner.generator), self.images_per_class(learner)
        room = self.room(learner, learner.num_classes)
        candidates = draw(labels, ranks < n, room, learner.generator)
        if self.value == "neg_sv":  # looks at the stream only
            return candidates, Drawn(labels[:0], labels[:0])
        return candidates, draw(labels, (ranks >= n) & (ranks < 2 * n), room, learner.generator)

    def values(self, learner: Learner, x: Tensor, y: Tensor, candidates: Drawn, evaluation: Drawn) -> Tensor:
        """The adversarial Shapley value of each candidate; what it is for an absent one means nothing."""
        stored, _ = learner.memory.read(torch.cat([candidates.slots, evaluation.slots]))
        features = features_of(learner, torch.cat([stored, x]))
        cand_features, eval_features = features.split([len(candidates.slots), len(evaluation.slots) + len(x)])
        eval_labels = torch.cat([evaluation.labels, y])
        shapley = knn_shapley(eval_features, eval_labels, cand_features, candidates.labels, self.neighbours)
        cooperative, adversarial = shapley.split([len(evaluation.slots), len(x)])
        return adversarial_shapley(cooperative, adversarial, evaluation.present, self.value)

    def best(self, learner: Learner, values: Tensor, candidates: Drawn, count: int) -> Tensor:
        """The slots of so many candidates, best first, then random others where there are too few."""
        spare = learner.memory.capacity
        priority = torch.rand(spare + 1, generator=learner.generator, device=values.device, dtype=torch.float64)
        order = values.masked_fill(~candidates.present, -torch.inf).argsort(descending=True, stable=True)
        slots = torch.where(candidates.present, candidates.slots, spare)[order]
        above_one = torch.arange(len(order) + 1, 1, -1, device=values.device, dtype=torch.float64)
        return priority.scatter_(0, slots, above_one)[:spare].topk(count).indices

    def signature(self, learner: Learner) -> Hashable:
        """Whether the memory is full, and the room for candidates or the way of drawing."""
        if learner.memory.full:
            return True, self.room(learner, learner.num_classes)
        return False, learner.memory.sampling(learner.memory_batch)


class ASERUpdate(ShapleyPolicy, Update):
    """Keeps the images with the largest sums of Shapley values.

    The evaluation set is a class-balanced sample of the memory and those images of the stream batch whose class holds
    less than a share of the memory drawn from U(0, 1 / classes), so that new classes get in. Candidates are n × classes
    random other images of the memory and the whole stream batch; as many as the batch has, with the smallest sums of
    Shapley values over the evaluation set, leave or are not let in. Of equal sums what is stored stays. Until the
    memory is full, it is filled as a reservoir is. The evaluation set never takes more than half the memory, so that
    something can leave.

    Parameters
    ----------
    neighbours
        k of the nearest-neighbour classifier.
    per_class
        n: images of each class in the evaluation set. The paper's values: 9 for CIFAR-10, 2 for CIFAR-100, 3 for
        Mini-ImageNet. None: 90 divided by the number of classes, at least 2, and at most what leaves half the memory
        for candidates.
    classes_ahead
        The learner's option of this name: the number of classes where it is known before they appear. Otherwise the
        classes met so far count.

    References
    ----------
    Shim, Mai, Jeong, Sanner, Kim, Jang, "Online Class-Incremental Continual Learning with Adversarial Shapley Value",
    AAAI 2021.

    Examples
    --------
    >>> ASERUpdate(per_class=0)
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: per_class is 0; it must be 1 or more, or None to follow the number of classes.
    """

    def __init__(self, neighbours: int = 3, per_class: int | None = None, classes_ahead: int = 0) -> None:
        super().__init__(neighbours, per_class, classes_ahead)
        self.filling = Reservoir()

    def __call__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        """Let the batch compete with stored images for their slots."""
        if not learner.memory.full:
            self.filling(learner, x, y)
            return
        candidates, evaluation, minority = self.sample(learner, y)
        values = self.values(learner, x, y, candidates, evaluation, minority)
        learner.memory.write(self.settle(learner, values, candidates), x, y)

    def sample(self, learner: Learner, y: Tensor) -> tuple[Drawn, Drawn, Tensor]:
        """Candidates and evaluation set from memory, and the batch's classes, −1 where they are no minority."""
        memory, generator = learner.memory, learner.generator
        labels, n, classes = memory.contents()[1], self.images_per_class(learner), self.classes(learner)
        evaluation_room, room = self._rooms(learner)
        evaluation = draw(labels, class_ranks(labels, generator) < n, evaluation_room, generator)
        others = torch.ones(memory.capacity + 1, dtype=torch.bool, device=y.device)
        others.index_fill_(0, torch.where(evaluation.present, evaluation.slots, memory.capacity), False)
        slots, drawn = draw(labels, others[: memory.capacity], room, generator)
        surplus = torch.arange(room, device=y.device) >= n * classes
        share = (labels == y[:, None]).sum(1) / memory.capacity
        threshold = torch.rand((), generator=generator, device=y.device) / classes
        return Drawn(slots, drawn.masked_fill(surplus, ABSENT)), evaluation, torch.where(share < threshold, y, ABSENT)

    def values(
        self, learner: Learner, x: Tensor, y: Tensor, candidates: Drawn, evaluation: Drawn, minority: Tensor
    ) -> Tensor:
        """The sum of Shapley values of each candidate: those from memory, then the batch."""
        from_memory = len(candidates.slots)
        stored, _ = learner.memory.read(torch.cat([candidates.slots, evaluation.slots]))
        # the batch in the middle: it belongs to both sets, and needs its features once
        features = features_of(learner, torch.cat([stored[:from_memory], x, stored[from_memory:]]))
        cand_labels, eval_labels = torch.cat([candidates.labels, y]), torch.cat([minority, evaluation.labels])
        cand_features, eval_features = features[: len(cand_labels)], features[from_memory:]
        return knn_shapley(eval_features, eval_labels, cand_features, cand_labels, self.neighbours).sum(0)

    def settle(self, learner: Learner, values: Tensor, candidates: Drawn) -> Tensor:
        """The slot of each image of the batch: one that a stored image leaves, or the spare one for those not kept."""
        spare, from_memory, batch = learner.memory.capacity, len(candidates.slots), len(values) - len(candidates.slots)
        offset = torch.arange(batch, device=values.device)
        absent = torch.cat([~candidates.present, torch.zeros_like(offset, dtype=torch.bool)])
        order = values.masked_fill(absent, -torch.inf).argsort(descending=True, stable=True)
        # as many are kept as came from memory, the next ones leave, and the absent ones stand behind them
        leaving = order[candidates.present.sum() + offset]
        enters = torch.ones(len(values), dtype=torch.bool, device=values.device).index_fill_(0, leaving, False)
        enters = enters[from_memory:]
        slots = torch.cat([candidates.slots, torch.full_like(offset, spare)])[leaving]
        freed = slots[(leaving >= from_memory).to(torch.int8).argsort(stable=True)]
        return torch.where(enters, freed[(enters.cumsum(0) - 1).clamp(min=0)], spare)

    def _rooms(self, learner: Learner) -> tuple[int, int]:
        """Room for the evaluation set and for the candidates."""
        evaluation = self.room(learner, learner.num_classes)
        candidates = self.room(learner, max(learner.num_classes, self.classes_ahead))
        return min(evaluation, learner.memory.capacity // 2), candidates

    def signature(self, learner: Learner) -> Hashable:
        """Whether the memory is full, and the room for both sets."""
        return learner.memory.full, self._rooms(learner) if learner.memory.full else None
