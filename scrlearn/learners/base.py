"""What a learner is: it learns a batch, answers at any time, and can be stopped and resumed exactly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.classifiers import NearestClassMean, SoftmaxHead
from scrlearn.devices import numerics, resolve_device, resolve_precision
from scrlearn.errors import InputError, NotFittedError, suggest
from scrlearn.memory import Memory
from scrlearn.models import Network, ReducedResNet18, feature_dim, projection_head
from scrlearn.randomness import derived_seed, generator, seeded

CLASSIFIERS = ("softmax", "ncm")
PREDICTION_BATCH = 512
NCM_TEMPERATURE = 0.1
Runner = Callable[..., Tensor]


class Learner:
    """Learns image classes one batch at a time.

    `learn` takes a batch and does everything for it; `step`, inside, is graph-safe: fixed shapes, no host
    synchronisation, random numbers from the learner's own generator on its device. An engine may replace `runner` to
    decide how a step runs; what it computes stays here.

    Parameters
    ----------
    image_shape
        Channels, height, width of the images.
    encoder
        Any module that maps images N×C×H×W (floats in [0, 1]) to vectors N×d. Default: the reduced ResNet18.
    classifier
        "softmax" or "ncm": which one `predict` uses unless told otherwise.
    memory_size
        M: the most images kept.
    memory_batch
        Images of the memory that join each stream batch.
    learning_rate, momentum
        Of stochastic gradient descent.
    classes_ahead
        Classes the softmax head trains from the start, before they appear; 0: the head grows as classes appear.
    averaging
        Decay of the running average of the weights that predicts instead of the weights themselves; 0: none.
    mirror
        Average the features of each image and its mirror image when predicting.
    precision
        "bf16" (encoder in bfloat16), "tf32", "fp32", or "auto": bf16 where the hardware has it.
    device
        "auto", "cpu", "cuda", ...
    seed
        Fixes everything random.
    """

    projection: str | None = None
    has_head = True
    graph_safe = True

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        encoder: nn.Module | None = None,
        classifier: str = "softmax",
        memory_size: int = 0,
        memory_batch: int = 10,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        classes_ahead: int = 0,
        averaging: float = 0.0,
        mirror: bool = False,
        precision: str = "auto",
        device: str | torch.device = "auto",
        seed: int = 0,
    ) -> None:
        self._check(classifier, memory_batch, learning_rate, momentum, averaging)
        self.image_shape = image_shape
        self.classifier = classifier
        self.memory_batch = memory_batch
        self.learning_rate, self.momentum = learning_rate, momentum
        self.averaging, self.mirror = averaging, mirror
        self.device = resolve_device(device)
        self.precision = resolve_precision(precision, self.device)
        self.seed = seed
        self.generator = generator(seed, "learner", device=self.device)
        self.memory = Memory(memory_size, image_shape, self.device)
        self.network = self._build_network(encoder, classes_ahead).to(self.device)
        self.network.to(memory_format=torch.channels_last)
        self.weights = [p for p in self.network.parameters() if p.requires_grad]
        self.velocity = [torch.zeros_like(w) for w in self.weights] if momentum else []
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval() if averaging else None
        self.met = torch.zeros(16, dtype=torch.bool, device=self.device)
        self.updates = torch.zeros((), device=self.device)
        self.num_classes = 0
        self.steps = 0
        self.tasks = 0
        self.runner: Runner = self._run_directly
        self._prototypes: NearestClassMean | None = None

    @staticmethod
    def _check(classifier: str, memory_batch: int, learning_rate: float, momentum: float, averaging: float) -> None:
        if classifier not in CLASSIFIERS:
            raise InputError(f'There is no classifier "{classifier}".{suggest(classifier, CLASSIFIERS)}')
        for name, value, good in (
            ("memory_batch", memory_batch, memory_batch >= 1),
            ("learning_rate", learning_rate, learning_rate > 0),
            ("momentum", momentum, 0 <= momentum < 1),
            ("averaging", averaging, 0 <= averaging < 1),
        ):
            if not good:
                raise InputError(f"{name} is {value}, which is out of range.")

    def _build_network(self, encoder: nn.Module | None, classes_ahead: int) -> Network:
        with seeded(self.seed, "network"):
            # a copy: two learners must never train the same module
            encoder = copy.deepcopy(encoder) if encoder is not None else ReducedResNet18(self.image_shape[0])
            features = feature_dim(encoder.cpu(), self.image_shape)
            projection = projection_head(self.projection, features) if self.projection else None
        head = SoftmaxHead(features, derived_seed(self.seed, "head"), classes_ahead) if self.has_head else None
        return Network(encoder, projection, head, bf16=self.precision == "bf16")

    # ---------------------------------------------------------------- learning

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Learn one batch: images (uint8, N×C×H×W) and class indices. Returns the loss (a tensor, not waited for)."""
        x, y = x.to(self.device), y.to(self.device)
        self.reserve(int(y.max()) + 1)
        self.set_training(True)
        loss = self.runner(self.step, x, y)
        self.advance(len(x))
        return loss

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Everything that happens on the device for one batch. Graph-safe."""
        self.met.index_fill_(0, y, True)
        if self.network.head is not None:
            self.network.head.meet(y)
        loss = self.train_batch(x, y)
        if self.average is not None:
            self.average_weights()
        return loss.detach()

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """The method itself: retrieve, views, gradient step, memory update. Returns the loss."""
        raise NotImplementedError

    def advance(self, images: int) -> None:
        """What the host keeps track of after a step on this many images."""
        self.memory.advance(images)
        self.steps += 1
        self._prototypes = None

    def signature(self, images: int) -> Hashable:
        """What the shapes of the next step depend on, known on the host; a new value needs a new graph."""
        capacity = self.network.head.capacity if self.network.head is not None else 0
        return images, min(self.memory.size, self.memory_batch), capacity, len(self.met)

    def reserve(self, classes: int) -> None:
        """Make room for this many classes; called before a batch with new ones is learned."""
        self.num_classes = max(self.num_classes, classes)
        if classes > len(self.met):
            room = max(classes, 2 * len(self.met)) - len(self.met)
            self.met = torch.cat([self.met, self.met.new_zeros(room)])
        if self.network.head is not None and self.network.head.reserve(classes):
            self._after_growth()

    def _after_growth(self) -> None:
        old = [w.shape for w in self.weights]
        self.weights = [p for p in self.network.parameters() if p.requires_grad]
        if self.velocity:
            self.velocity = [_grown(v, w) for v, w in zip(self.velocity, self.weights, strict=True)]
        if self.average is not None and self.average.head is not None:
            self.average.head.reserve(len(self.met))
            self.average.requires_grad_(False)
        assert len(old) == len(self.weights)

    def end_task(self) -> None:
        """A hint that a task is over; most methods only count it."""
        self.tasks += 1

    # ---------------------------------------------------------------- gradient steps

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """The gradient of a loss by all weights; zeros for those it does not depend on."""
        return list(torch.autograd.grad(loss, self.weights, materialize_grads=True))

    def descend(self, gradient: list[Tensor], scale: float = 1.0) -> None:
        """One step of stochastic gradient descent; `scale` shortens it."""
        with torch.no_grad():
            if self.momentum:
                torch._foreach_mul_(self.velocity, self.momentum)
                torch._foreach_add_(self.velocity, gradient)
                gradient = self.velocity
            torch._foreach_add_(self.weights, gradient, alpha=-self.learning_rate * scale)

    def average_weights(self) -> None:
        """Move the averaged network towards the trained one; the decay rises to `averaging` as steps go by."""
        assert self.average is not None
        with torch.no_grad():
            self.updates += 1
            share = 1 - ((1 + self.updates) / (10 + self.updates)).clamp(max=self.averaging)
            target = _floats(self.average)
            change = torch._foreach_sub(_floats(self.network), target)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(target, change)
            if self.network.head is not None and self.average.head is not None:
                self.average.head.active.copy_(self.network.head.active)

    def set_training(self, training: bool) -> None:
        """Switch BatchNorm and the like, only where it changes anything (walking the modules costs time)."""
        if self.network.training != training:
            self.network.train(training)

    def _run_directly(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with numerics(self.precision):
            return function(*inputs)

    # ---------------------------------------------------------------- answering

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The classifiers this learner can answer with."""
        softmax = ("softmax",) if self.network.head is not None else ()
        ncm = ("ncm",) if self.memory.capacity else ()
        return softmax + ncm

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """L2-normalised encoder features (those the nearest-class-mean classifier compares)."""
        return F.normalize(torch.cat([self.features(part) for part in self._parts(x)]), dim=1)

    def features(self, x: Tensor) -> Tensor:
        """Features of one batch as prediction sees them: evaluation mode, averaged weights and mirror if asked for."""
        self.set_training(False)
        network = self.average if self.average is not None else self.network
        with numerics(self.precision):
            features = network.features(x)
            if self.mirror:
                features = F.normalize(features, dim=1) + F.normalize(network.features(x.flip(-1)), dim=1)
        return features

    @torch.no_grad()
    def scores(self, x: Tensor, classifier: str | None = None) -> Tensor:
        """Score of every class for every image; the largest is predicted, ``-inf`` never is."""
        return self.scores_from_features(torch.cat([self.features(part) for part in self._parts(x)]), classifier)

    def scores_from_features(self, features: Tensor, classifier: str | None = None) -> Tensor:
        """Scores from what `features` gave, so that several classifiers share one pass."""
        classifier = classifier or self.classifier
        if classifier not in self.classifiers:
            raise InputError(self._cannot(classifier))
        if self.num_classes == 0:
            raise NotFittedError("Nothing has been learned yet: call learn (or partial_fit) with at least one batch.")
        if classifier == "ncm":
            return self.prototypes().scores(features)
        head = (self.average if self.average is not None else self.network).head
        assert head is not None
        scores: Tensor = head(features)[:, : self.num_classes]
        return scores.masked_fill(~self.met[: self.num_classes], -torch.inf)

    def _cannot(self, classifier: str) -> str:
        if classifier == "ncm":
            return (
                "The nearest-class-mean classifier computes its prototypes from stored images, and this learner stores "
                "none: give memory_size > 0."
            )
        if classifier in CLASSIFIERS:
            return f'This learner has no softmax head: build it with classifier="{classifier}".'
        return f'There is no classifier "{classifier}".{suggest(classifier, CLASSIFIERS)}'

    def predict(self, x: Tensor, classifier: str | None = None) -> Tensor:
        """The class of each image."""
        return self.scores(x, classifier).argmax(1)

    def probabilities(self, x: Tensor, classifier: str | None = None) -> Tensor:
        """Softmax of the scores; cosine similarities to the prototypes are divided by 0.1 first."""
        scores = self.scores(x, classifier)
        return torch.softmax(scores / (NCM_TEMPERATURE if (classifier or self.classifier) == "ncm" else 1.0), dim=1)

    @torch.no_grad()
    def prototypes(self) -> NearestClassMean:
        """The class means over the memory, computed once after each change."""
        if self._prototypes is None:
            images, labels = self.memory.contents()
            if len(labels) == 0:
                raise NotFittedError("The memory is empty, so there are no prototypes yet: learn at least one batch.")
            features = torch.cat([self.features(part) for part in self._parts(images)])
            self._prototypes = NearestClassMean.fit(features, labels, self.num_classes)
            missing = int((self.met[: self.num_classes] & ~self._prototypes.present).sum())
            if missing:
                warnings.warn(
                    f"{missing} of the classes learned have no image in memory and cannot be predicted by the "
                    "nearest-class-mean classifier; a larger memory_size would keep them.",
                    stacklevel=3,
                )
        return self._prototypes

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(PREDICTION_BATCH):
            yield part.to(self.device)

    def forget(self, label: int) -> int:
        """Remove a class: its images and its prototype; the weights stay. Says how many images there were."""
        removed = self.memory.forget(label)
        self.met[label] = False
        if self.network.head is not None:
            self.network.head.active[label] = False
        self._prototypes = None
        return removed

    # ---------------------------------------------------------------- stopping and going on

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here: nested dicts of tensors and numbers."""
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "memory": self.memory.state_dict(),
            "generator": self.generator.get_state(),
            "met": self.met,
            "updates": self.updates,
            "num_classes": self.num_classes,
            "steps": self.steps,
            "tasks": self.tasks,
        }
        if self.velocity:
            state["velocity"] = {str(i): v for i, v in enumerate(self.velocity)}
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand exactly where the saved learner stood."""
        self.reserve(len(state["met"]))
        self.num_classes, self.steps, self.tasks = state["num_classes"], state["steps"], state["tasks"]
        self.network.load_state_dict(state["network"])
        self.memory.load_state_dict(state["memory"])
        self.generator.set_state(state["generator"].cpu())
        self.met.copy_(state["met"])
        self.updates.copy_(state["updates"])
        for i, velocity in enumerate(self.velocity):
            velocity.copy_(state["velocity"][str(i)])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self._prototypes = None


def _floats(network: nn.Module) -> list[Tensor]:
    """Weights and BatchNorm statistics; the averaged network takes all of them."""
    tensors = [*network.parameters(), *network.buffers()]
    return [t.data for t in tensors if t.is_floating_point()]


def _grown(old: Tensor, like: Tensor) -> Tensor:
    """The old values with zeros for rows that were added."""
    new = torch.zeros_like(like)
    new[tuple(slice(size) for size in old.shape)] = old
    return new
