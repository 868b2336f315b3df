"""What a learner is: it learns a batch, answers at any time, and can be stopped and resumed exactly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.classifiers import LinearDiscriminant, NearestClassMean, SoftmaxHead, fit_offsets
from scrlearn.devices import numerics, resolve_device, resolve_precision
from scrlearn.errors import InputError, NotFittedError, suggest
from scrlearn.learners.blends import blends
from scrlearn.learners.sdc import DriftCompensation
from scrlearn.learners.single_images import SingleImages
from scrlearn.learners.teacher import Teacher
from scrlearn.memory import Memory
from scrlearn.models import Network, ReducedResNet18, cuda_descent, feature_dim, projection_head
from scrlearn.models.network import to_float
from scrlearn.models.orthogonal import Matrices
from scrlearn.randomness import derived_seed, generator, seeded

CLASSIFIERS = ("softmax", "ncm", "combined", "lda")
PROTOTYPES = ("auto", "memory", "sdc")
PREDICTION_BATCH = {"cuda": 1000}
NCM_TEMPERATURE = 0.1
DEFAULT_WIDTH = 20
MIDDLE = 3 / 4
MOST_CLASSES = 1_000_000
Runner = Callable[..., Tensor]
Progress = Callable[[int, int], None]


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
    width
        Channels of the default encoder's first stage: 20 is the paper's reduced ResNet18, 64 the full one.
    classifier
        Which one `predict` uses unless told otherwise: "softmax" (the linear layer), "ncm" (nearest class mean),
        "combined" (the log-probabilities of both added up), or "lda" (nearest class mean in the metric of the classes'
        shared covariance, see `LinearDiscriminant`).
    memory_size
        M: the most images kept.
    memory_batch
        Images of the memory that join each stream batch.
    learning_rate, momentum, weight_decay
        Of stochastic gradient descent; the decay adds so much of every weight to its gradient, but for the softmax
        head, whose classes may be still to come.
    orthogonal
        Above 0, the weights of the encoder's convolutions and linear layers move by their orthogonalised velocities,
        which turn all directions alike (Muon, see `Matrices`), by this angle in each step. The learning rate and weight
        decay are those of all other weights then. 0: all weights move by gradient descent.
    classes_ahead
        Classes the softmax head trains from the start, before they appear; 0: the head grows as classes appear.
    head_temperature
        Above 0, the softmax head scores classes by the cosine of features and weights, divided by this; 0: it is a
        linear layer.
    prototypes
        Where the nearest-class-mean classifier has its class means from: "memory", the stored images; "sdc", running
        means that follow the encoder by semantic drift compensation and need no stored image (`DriftCompensation`; two
        more forwards a batch); "auto": "sdc" for classifier="ncm" or "combined" with memory_size=0, else "memory".
    drift_width
        σ of semantic drift compensation.
    centred
        Let the nearest-class-mean classifier compare what is left of features when the mean of all class means is taken
        from them; the class means come from the memory then.
    calibrated
        Let every classifier add to the score of each class what makes it say classes as often as they are there, on
        blends of stored images (see `fit_offsets`): of the newest classes new images came, of old ones a few stored
        images again and again, so that new images of old classes are taken for new ones.
    projection_share
        Let the nearest-class-mean classifier compare projected features too, with this weight against the encoder's 1;
        0: the encoder's alone. For methods that train a projection.
    shrinkage
        ρ of the lda classifier, from 0 to 1: how far its covariance is drawn towards the identity; 0: as far as Ledoit
        and Wolf estimate.
    averaging
        Decay of the running average of weights and BatchNorm statistics that predicts instead of those in training, one
        update after each gradient step; 0: none. Update number t has the decay min(averaging, (1 + t) / (10 + t)).
    mirror
        Average the features of each image and its mirror image, for class means and for prediction.
    crops
        Average those of an image that is asked about with those of its middle too, for prediction: 3/4 of its height
        and width, brought back to its size.
    precision
        "bf16" (encoder in bfloat16), "tf32", "fp32", or "auto": bf16 where the hardware has it and the images are 16×16
        or larger.
    device
        "auto", "cpu", "cuda", ...
    seed
        Fixes everything random.
    """

    projection: str | None = None
    has_head = True
    graph_safe = True
    anytime = True
    """Whether an answer between the tasks costs nothing but the answer; if not, ask after `finish` only."""
    trains_on_memory = True
    """Whether stored images are trained on; if not, they serve the nearest-class-mean classifier alone."""
    needs_task_ends = False
    """Whether the method is another, lesser one as long as nobody calls `end_task`."""

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        encoder: nn.Module | None = None,
        width: int = DEFAULT_WIDTH,
        classifier: str = "softmax",
        memory_size: int = 0,
        memory_batch: int = 10,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        orthogonal: float = 0.0,
        classes_ahead: int = 0,
        head_temperature: float = 0.0,
        prototypes: str = "auto",
        drift_width: float = 0.3,
        centred: bool = False,
        calibrated: bool = False,
        projection_share: float = 0.0,
        shrinkage: float = 0.0,
        averaging: float = 0.0,
        mirror: bool = False,
        crops: bool = False,
        precision: str = "auto",
        device: str | torch.device = "auto",
        seed: int = 0,
    ) -> None:
        if classifier not in CLASSIFIERS:
            raise InputError(f'There is no classifier "{classifier}".{suggest(classifier, CLASSIFIERS)}')
        for name, value, good in (
            ("memory_batch", memory_batch, memory_batch >= 1),
            ("learning_rate", learning_rate, learning_rate > 0),
            ("momentum", momentum, 0 <= momentum < 1),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("orthogonal", orthogonal, 0 <= orthogonal < 1),
            ("head_temperature", head_temperature, head_temperature >= 0),
            ("projection_share", projection_share, projection_share >= 0),
            ("shrinkage", shrinkage, 0 <= shrinkage <= 1),
            ("averaging", averaging, 0 <= averaging < 1),
            ("classes_ahead", classes_ahead, classes_ahead >= 0),
        ):
            if not good:
                raise InputError(f"{name} is {value}, which is out of range.")
        _check_width(width, encoder)
        self.image_shape = image_shape
        self.classifier = classifier
        self.memory_batch = memory_batch
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay
        self.averaging, self.mirror, self.crops, self.width = averaging, mirror, crops, width
        self.centred, self.calibrated = centred, calibrated
        self.projection_share, self.shrinkage = projection_share, shrinkage
        self.device = resolve_device(device)
        self.precision = resolve_precision(precision, self.device, image_shape)
        self.seed = seed
        self.prediction_batch = PREDICTION_BATCH.get(self.device.type, 512)
        self.generator = generator(seed, "learner", device=self.device)
        self.memory = Memory(memory_size, image_shape, self.device)
        self.network = self._build_network(encoder, width, classes_ahead, head_temperature).to(self.device)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if projection_share and self.network.projection is None:
            raise InputError(f"projection_share is {projection_share}, but this learner trains no projection.")
        if calibrated and not memory_size:
            raise InputError(
                "calibrated is true, and scores are set right by blends of stored images: give memory_size, or take "
                "calibrated=False" + (" and centred=False." if centred else ".")
            )
        self.weights: list[Tensor] = [p for p in self.network.parameters() if p.requires_grad]
        self._in_head = 0 if self.network.head is None else len(list(self.network.head.parameters()))  # the last ones
        self.velocity = [torch.zeros_like(w) for w in self.weights] if momentum else []
        self.orthogonal, self.matrices = orthogonal, Matrices(self.network.encoder) if orthogonal else None
        self._divide_weights()
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval() if averaging else None
        self.met = torch.zeros(max(16, classes_ahead), dtype=torch.bool, device=self.device)
        self.updates = torch.zeros((), device=self.device)
        self.num_classes = 0
        self.steps = 0
        self.tasks = 0
        self.runner: Runner | None = None
        self._changed()
        self.drift = self._build_drift(prototypes, drift_width)
        self.earlier = Teacher(self._encoder(), training=False) if self.drift is not None else None

    def _build_network(self, encoder: nn.Module | None, width: int, ahead: int, temperature: float) -> Network:
        with seeded(self.seed, "network"):
            if encoder is None:
                encoder = ReducedResNet18(self.image_shape[0], width)
            else:
                encoder = copy.deepcopy(encoder)  # two learners must never train the same module
                SingleImages(encoder)
            self.feature_length = features = feature_dim(encoder.cpu(), self.image_shape)
            projection = projection_head(self.projection, features) if self.projection else None
        if self.device.type == "cuda" and isinstance(encoder, ReducedResNet18):
            encoder.pad_channels(8)  # tensor cores take channels by eights
        head = SoftmaxHead(features, derived_seed(self.seed, "head"), ahead, temperature) if self.has_head else None
        return Network(encoder, projection, head, bf16=self.precision == "bf16")

    def _build_drift(self, prototypes: str, width: float) -> DriftCompensation | None:
        if prototypes not in PROTOTYPES:
            raise InputError(f'There are no prototypes "{prototypes}".{suggest(prototypes, PROTOTYPES)}')
        without_memory = self.classifier in ("ncm", "combined") and self.memory.capacity == 0
        if prototypes == "memory" or (prototypes == "auto" and not without_memory):
            return None
        for name in ("centred", "projection_share"):
            if getattr(self, name):
                raise InputError(
                    f"{name} needs class means of stored images, and this learner has others: turn it off."
                )
        return DriftCompensation(self.feature_length, width, len(self.met), self.device)

    # ---------------------------------------------------------------- learning

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Learn one batch: images (uint8, N×C×H×W) and class indices. Returns the loss (a tensor, not waited for).

        Labels are best given on the CPU: how many classes there are has to be known on the host, and is read off them
        without waiting for the device.
        """
        self._check_batch(x, y)
        self.reserve(int(y.max()) + 1)
        self.set_training(True)
        loss = self.run(self.step, self._sent(x), self._sent(y))
        self.advance(len(x))
        return loss

    def _check_images(self, x: Tensor) -> None:
        if x.dtype != torch.uint8 or tuple(x.shape[1:]) != self.image_shape:
            raise InputError(
                f"The images are {x.dtype} of shape {tuple(x.shape)}; expected torch.uint8, N×"
                f"{'×'.join(map(str, self.image_shape))}."
            )

    def _check_batch(self, x: Tensor, y: Tensor) -> None:
        self._check_images(x)
        if len(x) == 0 or tuple(y.shape) != (len(x),) or y.dtype != torch.int64:
            raise InputError(
                f"There are {len(x)} images, and labels {y.dtype} of shape {tuple(y.shape)}; expected at least one "
                "image, and a class index (torch.int64) for each."
            )
        if not y.is_cuda and int(y.min()) < 0:
            raise InputError(f"The class index {int(y.min())} is below 0; classes count from 0.")
        if not y.is_cuda and int(y.max()) >= MOST_CLASSES:  # each index below it gets a row of the head
            raise InputError(
                f"The class index {int(y.max())} is too large; classes count from 0 without gaps. OnlineClassifier "
                "takes labels of any kind."
            )

    def _sent(self, tensor: Tensor) -> Tensor:
        """On the learner's device. Nobody waits for the way there, unless the sender could still change what is sent.

        A copy from pageable memory has been read when it returns; one from pinned memory has not.
        """
        return tensor.to(self.device, non_blocking=self.device.type == "cuda" and not tensor.is_pinned())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Everything that happens on the device for one batch. Graph-safe."""
        self.met.index_fill_(0, y, True)
        for head in self._heads():
            head.meet(y)
        loss = self.train_batch(x, y)
        if self.drift is not None:
            self._follow(self.drift, x, y)
        return loss.detach()

    @torch.no_grad()
    def _follow(self, drift: DriftCompensation, x: Tensor, y: Tensor) -> None:
        """Let the prototypes that need no memory follow a step."""
        self.set_training(False)
        after = F.normalize(self.look_whole(x), dim=1)
        self.set_training(True)
        if self.tasks and self.earlier is not None:
            drift.compensate(F.normalize(self._features(self.earlier.network, x), dim=1), after)
        drift.observe(after, y)

    def _encoder(self) -> Network:
        """What prediction sees the images with, alone."""
        network = self.average if self.average is not None else self.network
        return Network(network.encoder, bf16=network.bf16)

    def _heads(self) -> list[SoftmaxHead]:
        """The softmax head, and its average."""
        return [n.head for n in (self.network, self.average) if n is not None and n.head is not None]

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """The method itself: retrieve, views, gradient step, memory update. Returns the loss."""
        raise NotImplementedError

    def advance(self, images: int) -> None:
        """What the host keeps track of after a step on this many images."""
        self.memory.advance(images)
        self.steps += 1
        self._changed()

    def _changed(self) -> None:
        """Weights or memory are others now: what was computed from them for answering is out of date."""
        self._stored: Tensor | None = None
        self._prototypes: NearestClassMean | None = None
        self._discriminant: LinearDiscriminant | None = None
        self._temperature: float | None = None
        self._blended: tuple[Tensor, Tensor] | None = None
        self._offsets: dict[str, Tensor] = {}

    def signature(self, images: int) -> Hashable:
        """What the shapes of the next step depend on, known on the host; a new value needs a new graph."""
        capacity = self.network.head.capacity if self.network.head is not None else 0
        compensates = self.drift is not None and self.tasks > 0
        return images, min(self.memory.size, self.memory_batch), capacity, len(self.met), compensates

    @property
    def room(self) -> Hashable:
        """What of the signature only ever grows: a step that was recorded with less room can never be repeated."""
        return len(self.met), self.network.head.capacity if self.network.head is not None else 0

    def reserve(self, classes: int) -> None:
        """Make room for this many classes; called before a batch with new ones is learned."""
        self.num_classes = max(self.num_classes, classes)
        if classes > len(self.met):
            room = max(classes, 2 * len(self.met)) - len(self.met)
            self.met = torch.cat([self.met, self.met.new_zeros(room)])
            if self.drift is not None:
                self.drift.reserve(len(self.met))
        if self.network.head is not None and self.network.head.reserve(classes):
            self._after_growth()

    def _after_growth(self) -> None:
        self.weights = [p for p in self.network.parameters() if p.requires_grad]
        self._divide_weights()
        if self.velocity:
            self.velocity = [fitted(v, w) for v, w in zip(self.velocity, self.weights, strict=True)]
        if self.average is not None and self.average.head is not None and self.network.head is not None:
            self.average.head.reserve(self.network.head.capacity)
            self.average.requires_grad_(False)

    def end_task(self) -> None:
        """A hint that a task is over; most methods only count it."""
        self.tasks += 1
        if self.drift is not None and self.earlier is not None:
            self.drift.end_task()
            self.earlier.copy(self._encoder())

    def finish(self, progress: Progress | None = None) -> None:
        """The stream is over; what a method still has to do before it answers (most: nothing) it does now.

        `progress` is called with (steps done, steps in all).
        """

    # ---------------------------------------------------------------- gradient steps

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """The gradient of a loss by all weights; zeros for those it does not depend on."""
        return list(torch.autograd.grad(loss, self.weights, materialize_grads=True))

    def descend(self, gradient: list[Tensor], scale: float = 1.0) -> None:
        """One step of stochastic gradient descent, and of the averaged weights; `scale` shortens the gradient."""
        moved = self.weights if self.average is None else split_tensors(self.network)[0]
        if cuda_descent.suits(moved):
            self._descend_at_once(gradient, scale)
            return
        with torch.no_grad():
            if self.matrices is not None:
                self._turn(self.matrices, gradient, scale)
            weights, velocity, gradient = (self._of_descent(each) for each in (self.weights, self.velocity, gradient))
            if self.weight_decay:
                body = len(gradient) - self._in_head
                decayed = torch._foreach_add(gradient[:body], weights[:body], alpha=self.weight_decay)
                gradient = [*decayed, *gradient[body:]]
            if self.momentum:
                torch._foreach_mul_(velocity, self.momentum)
                torch._foreach_add_(velocity, gradient, alpha=scale)
                torch._foreach_add_(weights, velocity, alpha=-self.learning_rate)
            else:
                torch._foreach_add_(weights, gradient, alpha=-self.learning_rate * scale)
            if self.average is not None:
                self._average(self.average)

    def _divide_weights(self) -> None:
        """Find the places of the weights that are turned, and of all others, which gradient descent moves."""
        places = {id(weight): place for place, weight in enumerate(self.weights)}
        self._turned = [places.pop(id(weight)) for weight in self.matrices.weights] if self.matrices is not None else []
        self._descended = [*places.values()]

    def _of_descent(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of one tensor for each weight, those for the weights that gradient descent moves."""
        return [tensors[place] for place in self._descended] if tensors and self.matrices is not None else tensors

    def _turn(self, matrices: Matrices, gradient: list[Tensor], scale: float) -> None:
        """Move the weights that are matrices by their velocities, and a look ahead, made orthogonal."""
        velocities = [self.velocity[place] for place in self._turned] if self.momentum else []
        matrices.turn([gradient[place] for place in self._turned], self.orthogonal, velocities, self.momentum, scale)

    @torch.no_grad()
    def _descend_at_once(self, gradient: list[Tensor], scale: float) -> None:
        """The same with one kernel for all that is not turned, and the averages."""
        if self.matrices is not None:
            self._turn(self.matrices, gradient, scale)
        own, slopes = self._of_descent(self.weights), self._of_descent(gradient)
        velocity: Sequence[Tensor | None] = self._of_descent(self.velocity) or [None] * len(own)
        body = len(own) - self._in_head
        weights = [
            cuda_descent.Moved(w.data, g, v, decay=self.weight_decay if i < body else 0.0)
            for i, (w, g, v) in enumerate(zip(own, slopes, velocity, strict=True))
        ]
        if self.average is not None:
            self.updates += 1
            floats, others = split_tensors(self.average)
            trained, trained_others = split_tensors(self.network)
            by_place = {one.weight.data_ptr(): one for one in weights}
            weights = [
                by_place.get(t.data_ptr(), cuda_descent.Moved(t))._replace(average=a)
                for t, a in zip(trained, floats, strict=True)
            ]
            if others:
                torch._foreach_copy_(others, trained_others)
        cuda_descent.descend(weights, self.updates, self.learning_rate, self.momentum, scale, self.averaging)

    def _average(self, average: Network) -> None:
        """Move the averaged network towards the trained one; the decay rises to `averaging` as steps go by."""
        self.updates += 1
        share = 1 - ((1 + self.updates) / (10 + self.updates)).clamp(max=self.averaging)
        floats, others = split_tensors(average)
        trained, trained_others = split_tensors(self.network)
        change = torch._foreach_sub(trained, floats)
        torch._foreach_mul_(change, share)
        torch._foreach_add_(floats, change)
        if others:  # counters and masks have no average
            torch._foreach_copy_(others, trained_others)

    def set_training(self, training: bool) -> None:
        """Switch BatchNorm and the like, only where it changes anything (walking the modules costs time)."""
        if self.network.training != training:
            self.network.train(training)

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run one of this learner's functions, as the engine has it where there is one."""
        return (self.runner or self.run_directly)(function, *inputs)

    def run_directly(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Without an engine: call the function."""
        with numerics(self.precision):
            return function(*inputs)

    # ---------------------------------------------------------------- answering

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The classifiers that are measured: softmax and ncm; all there are where its own is neither of the two."""
        usual = self.classifier in ("softmax", "ncm")
        return tuple(name for name in (CLASSIFIERS[:2] if usual else CLASSIFIERS) if self._has(name))

    def _has(self, classifier: str) -> bool:
        """Whether this learner can answer with a classifier."""
        softmax = self.network.head is not None
        memory = self.memory.capacity > 0
        ncm = memory or self.drift is not None
        return {"softmax": softmax, "ncm": ncm, "combined": softmax and ncm, "lda": memory}.get(classifier, False)

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """L2-normalised encoder features (those the nearest-class-mean classifier compares)."""
        return F.normalize(torch.cat([self.features(part) for part in self._parts(x)]), dim=1)

    def features(self, x: Tensor) -> Tensor:
        """Features of one batch as prediction sees them."""
        self.set_training(False)
        return self.run(self.look, x)

    def look(self, x: Tensor) -> Tensor:
        """What the encoder sees in images that are asked about, in their middle too if asked for. Graph-safe."""
        features = self.look_whole(x)
        if self.crops:
            features = (features + self.look_whole(middle(to_float(x), *self.image_shape[1:]))) / 2
        return features

    def look_whole(self, x: Tensor) -> Tensor:
        """What the encoder sees in images, with averaged weights and the mirror image if asked for. Graph-safe."""
        return self._features(self.average if self.average is not None else self.network, x)

    def _features(self, network: Network, x: Tensor) -> Tensor:
        features = network.features(x)
        if self.mirror:  # not normalised first: the softmax layer has learned features as they are
            features = (features + network.features(x.flip(-1))) / 2
        return features

    @torch.no_grad()
    def scores(self, x: Tensor, classifier: str | None = None) -> Tensor:
        """Score of every class for every image (uint8, N×C×H×W); the largest is predicted, ``-inf`` never is."""
        self._check_images(x)
        return self.scores_from_features(torch.cat([self.features(part) for part in self._parts(x)]), classifier)

    def scores_from_features(self, features: Tensor, classifier: str | None = None) -> Tensor:
        """Scores from what `features` gave, so that several classifiers share one pass."""
        classifier = classifier or self.classifier
        if not self._has(classifier):
            raise InputError(self._cannot(classifier))
        if self.num_classes == 0:
            raise NotFittedError("Nothing has been learned yet: call learn (or partial_fit) with at least one batch.")
        scores = self._uncalibrated(features, classifier)
        return scores + self.offsets(classifier) if self.calibrated else scores

    def _uncalibrated(self, features: Tensor, classifier: str) -> Tensor:
        """The scores of a classifier that this learner has."""
        if classifier == "ncm":
            return self.prototypes().scores(self.compared(features))
        if classifier == "lda":
            return self.discriminant().scores(features)
        if classifier == "combined":  # a class that one of the two does not know has -inf
            logits, cosines = (self._uncalibrated(features, name) for name in ("softmax", "ncm"))
            return torch.log_softmax(logits, dim=1) + torch.log_softmax(cosines / self.temperature_of_means(), dim=1)
        head = (self.average if self.average is not None else self.network).head
        assert head is not None
        scores: Tensor = head(features)[:, : self.num_classes]
        return scores.masked_fill(~self.met[: self.num_classes], -torch.inf)

    def compared(self, features: Tensor) -> Tensor:
        """What the nearest-class-mean classifier takes of features: them, with their projection if asked for."""
        if not self.projection_share:
            return features
        network = self.average if self.average is not None else self.network
        return torch.cat([F.normalize(features, dim=1), self.projection_share * network.project(features)], dim=1)

    def _cannot(self, classifier: str) -> str:
        if classifier == "lda":
            return "The lda classifier computes its metric from stored images: give memory_size > 0."
        if classifier in CLASSIFIERS and self.network.head is None and classifier != "ncm":
            return f'This learner has no softmax head: build it with classifier="{classifier}".'
        if classifier in CLASSIFIERS:
            return (
                "The nearest-class-mean classifier computes its prototypes from stored images, and this learner stores "
                'none: give memory_size > 0, or prototypes="sdc", which needs no images.'
            )
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
        """The class means over the memory, computed once after each change; or those that need no memory."""
        if self.drift is not None:
            return self.drift.classifier(self.num_classes)
        if self._prototypes is None:
            features, labels = self._stored_features()
            self._prototypes = NearestClassMean.fit(self.compared(features), labels, self.num_classes, self.centred)
            missing = int((self.met[: self.num_classes] & ~self._prototypes.present).sum())
            if missing:
                warnings.warn(
                    f"{missing} of the classes learned have no image in memory and cannot be predicted by the "
                    "nearest-class-mean classifier; a larger memory_size would keep them.",
                    stacklevel=3,
                )
        return self._prototypes

    @torch.no_grad()
    def temperature_of_means(self) -> float:
        """What cosines to the class means are divided by to become logits, computed once after each change.

        The temperature at which stored images are told best, each compared with a mean of its class without itself.
        """
        if self.drift is not None:  # class means without images
            return NCM_TEMPERATURE
        if self._temperature is None:
            features, labels = self._stored_features()
            self._temperature = self.prototypes().temperature(self.compared(features), labels, NCM_TEMPERATURE)
        return self._temperature

    @torch.no_grad()
    def offsets(self, classifier: str) -> Tensor:
        """What a calibrated classifier adds to the score of each class, computed once after each change."""
        if self.memory.size == 0:  # every class was taken out, or none is stored: nothing can be told
            return torch.zeros(self.num_classes, device=self.device)
        if classifier not in self._offsets:
            features, shares = self._blended_features()
            scores = self._uncalibrated(features, classifier)
            default = NCM_TEMPERATURE if classifier == "ncm" else 1.0
            self._offsets[classifier] = fit_offsets(scores, shares, default)
        return self._offsets[classifier]

    def _blended_features(self) -> tuple[Tensor, Tensor]:
        """Features of blends of stored images, and how much these are of each class."""
        if self._blended is None:
            images, labels = self.memory.contents()
            pairs = blends(images, labels, self.num_classes, generator(self.seed, "blends", self.steps))
            self.set_training(False)
            features = [self.run(self.look_whole, part) for part in self._parts(pairs.images)]
            self._blended = torch.cat(features), pairs.shares
        return self._blended

    @torch.no_grad()
    def discriminant(self) -> LinearDiscriminant:
        """The class means and the shared metric over the memory, computed once after each change."""
        if self._discriminant is None:
            self.prototypes()  # warns of classes that have no image in memory
            self._discriminant = LinearDiscriminant.fit(*self._stored_features(), self.num_classes, self.shrinkage)
        return self._discriminant

    def has_seen_memory(self, features: Tensor) -> None:
        """Hand in what `look_whole` says of the images in memory, so that they need not be looked at again."""
        self._stored = features

    def _stored_features(self) -> tuple[Tensor, Tensor]:
        """Features and classes of the images in memory."""
        images, labels = self.memory.contents()
        if len(labels) == 0:
            raise NotFittedError("The memory is empty, so there are no prototypes yet: learn at least one batch.")
        if self._stored is None:
            self.set_training(False)
            self._stored = torch.cat([self.run(self.look_whole, part) for part in self._parts(images)])
        return self._stored, labels

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(self.prediction_batch):
            yield part.to(self.device)

    def forget(self, label: int) -> int:
        """Remove a class: its images and its prototype; the weights stay. Says how many images there were."""
        if not 0 <= label < self.num_classes:
            raise InputError(f"There is no class {label} to forget; {self.num_classes} are known, counted from 0.")
        return self.remove(label)

    def remove(self, label: int) -> int:
        """What `forget` does with a class that is known. Who keeps more of a class removes that first."""
        removed = self.memory.forget(label)
        self.met[label] = False
        for head in self._heads():
            head.active[label] = False
        if self.drift is not None:
            self.drift.forget(label)
        self._changed()
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
        if self.network.head is not None:
            state["capacity"] = self.network.head.capacity
        if self.velocity:
            state["velocity"] = {str(i): v for i, v in enumerate(self.velocity)}
        if self.matrices is not None:
            state["lengths"] = self.matrices.lengths
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if self.drift is not None and self.earlier is not None:
            state |= {"drift": self.drift.state_dict(), "earlier": self.earlier.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand exactly where the saved learner stood.

        On another kind of device, which has another kind of random numbers, a new stream of them begins.
        """
        self.reserve(len(state["met"]))
        if self.network.head is not None and self.network.head.reserve(state["capacity"]):
            self._after_growth()
        self.num_classes, self.steps, self.tasks = state["num_classes"], state["steps"], state["tasks"]
        self.network.load_state_dict(state["network"])
        self.memory.load_state_dict(state["memory"])
        self._go_on_drawing(state["generator"].cpu())
        self.met.copy_(state["met"])
        self.updates.copy_(state["updates"])
        for i, velocity in enumerate(self.velocity):
            velocity.copy_(fitted(state["velocity"][str(i)], velocity))
        if self.matrices is not None:
            self.matrices.lengths.copy_(state["lengths"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.drift is not None and self.earlier is not None:
            self.drift.load_state_dict(state["drift"])
            self.earlier.load_state_dict(state["earlier"])
        self._changed()

    def _go_on_drawing(self, saved: Tensor) -> None:
        if saved.shape != self.generator.get_state().shape:
            saved = generator(self.seed, "moved", self.steps, device=self.device).get_state()
        self.generator.set_state(saved)


def middle(x: Tensor, height: int, width: int) -> Tensor:
    """The middle of float images, 3/4 of each side in the whole size, as far from the left as from the right."""
    top, left = (round((1 - MIDDLE) / 2 * length) for length in (height, width))
    part = x[..., top : height - top, left : width - left]
    return F.interpolate(part, size=(height, width), mode="bilinear", align_corners=False)


def _check_width(width: int, encoder: nn.Module | None) -> None:
    if width < 1:
        raise InputError(f"width is {width}; it must be 1 or more.")
    if encoder is not None and width != DEFAULT_WIDTH:
        raise InputError(f"width is {width}, but it belongs to the default encoder, and another one was given.")


def split_tensors(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and BatchNorm statistics, of which there is an average; and what else belongs to the network's state."""
    hidden = {id(m._buffers[name]) for m in network.modules() for name in m._non_persistent_buffers_set}
    tensors = [*(p.data for p in network.parameters()), *(b for b in network.buffers() if id(b) not in hidden)]
    return [t for t in tensors if t.is_floating_point()], [t for t in tensors if not t.is_floating_point()]


def fitted(old: Tensor, like: Tensor) -> Tensor:
    """The old values in another shape: rows and channels that were added are zero."""
    new = torch.zeros_like(like)
    common = tuple(slice(min(sizes)) for sizes in zip(old.shape, like.shape, strict=True))
    new[common] = old[common].to(new.device)
    return new
