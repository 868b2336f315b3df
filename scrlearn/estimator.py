"""OnlineClassifier: the face for people. Any labels; NumPy, PIL or tensors; learn, ask, stop and go on."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor, nn

from scrlearn import __version__
from scrlearn.checkpoint import digest, load_checkpoint, save_checkpoint
from scrlearn.devices import resolve_device
from scrlearn.engine import GraphRunner, check_engine, why_not_graph
from scrlearn.errors import CheckpointError, InputError, NotFittedError, ScrlearnError, suggest
from scrlearn.images import Array, Images, Shape, to_tensor
from scrlearn.labels import Labels, decode, encode, label_array, read_label, read_labels
from scrlearn.learners import Learner, find_method, make_learner
from scrlearn.learners.methods import PARTS, SURROUNDINGS, made_otherwise
from scrlearn.memory.reservoir import Reservoir
from scrlearn.randomness import GLOBAL_GENERATORS, derived_seed

KIND = "OnlineClassifier"
# these say how images come in and how a step runs, not what is learned, so they may change at any time
FREE = frozenset({"batch_size", "image_size", "engine"})
LOST = (
    "so what was learned is lost. Start afresh with a smaller learning_rate or larger batches, or go on from a saved "
    "file."
)


class Stored(NamedTuple):
    """What the memory holds: images (uint8, N×H×W×C) and their labels."""

    images: Array
    labels: Array


class Neighbours(NamedTuple):
    """For each image asked about, its nearest images in `memory_`, nearest first: their places and distances."""

    indices: Array
    distances: Array


class OnlineClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Learns image classes one small batch at a time and answers at any moment.

    Follows scikit-learn's conventions. Nothing has to be known in advance: classes may appear at any time, and the
    stream may go on for ever, since no more than `memory_size` images are kept. One object must not be used by several
    threads at once: put a lock around it.

    Parameters
    ----------
    method
        A method of the table, "scr" (Supervised Contrastive Replay) unless told otherwise; `scr methods` lists them.
    memory_size
        The most images kept; None: the method's default.
    encoder
        Any module that maps images N×C×H×W (floats in [0, 1]) to vectors N×d; learning starts from its weights, on a
        copy. None: the reduced ResNet18.
    classifier
        Who answers; None: the method's own. All that a learner has can be asked without training again.

        - "softmax": the linear layer that is trained with the encoder; it favours the classes seen last.
        - "ncm": the class whose mean over the stored images is nearest.
        - "combined": the log-probabilities of these two, added up.
        - "lda": as "ncm", in the metric of the covariance that the classes share; needs some images of each class.
    batch_size
        Images learned in one step. What is given at once is cut into batches of this size, in order.
    device
        "auto", "cpu", "cuda", ...
    precision
        "auto", "bf16", "tf32" or "fp32".
    seed
        Fixes everything random: the same seed and stream give the same bits.
    image_size
        Side, or height and width, that images are brought to (scaled until they cover it, the middle taken). None: all
        images must have the size of the first batch.
    engine
        How steps and answers are computed, with the same outcome: "eager" (plain PyTorch), "graph" (as CUDA graphs,
        with a warning where that is not possible), or "auto": graphs on a CUDA device, unless an encoder or another
        part of your own is used, which nobody knows to be recordable. Sizes of batches that do not come again and
        again run eagerly.
    **options
        Any option of the method's parts: temperature=0.2, retrieve="aser", augment=a callable, ... None: the default.

    Attributes
    ----------
    classes_
        The labels known: sorted after `fit`, those that `partial_fit` brings in the order of their first appearance.
    memory_
        The images kept, and their labels.
    learner_
        The learner underneath.

    References
    ----------
    Mai et al., "Supervised Contrastive Replay: Revisiting the Nearest Class Mean Classifier in Online
    Class-Incremental Continual Learning", CVPR-W 2021.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> digits = load_digits(n_class=3)
    >>> images, names = digits.images.astype("uint8") * 15, np.array(["zero", "one", "two"])[digits.target]
    >>> small = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
    >>> clf = OnlineClassifier("scr", memory_size=100, encoder=small, device="cpu")
    >>> clf = clf.partial_fit(images[:200], names[:200])
    >>> clf.classes_
    array(['zero', 'one', 'two'], dtype='<U4')
    >>> clf.score(images[200:300], names[200:300]) > 0.8
    True
    """

    def __init__(
        self,
        method: str = "scr",
        *,
        memory_size: int | None = None,
        encoder: nn.Module | None = None,
        classifier: str | None = None,
        batch_size: int = 10,
        device: str | torch.device = "auto",
        precision: str = "auto",
        seed: int = 0,
        image_size: int | tuple[int, int] | None = None,
        engine: str = "auto",
        **options: Any,
    ) -> None:
        _check_names(method, options)
        self.method = method
        self.memory_size = memory_size
        self.encoder = encoder
        self.classifier = classifier
        self.batch_size = batch_size
        self.device = device
        self.precision = precision
        self.seed = seed
        self.image_size = image_size
        self.engine = engine
        self._options = options
        self._learner: Learner | None = None
        self._built: dict[str, Any] = {}
        self._index: dict[Hashable, int] = {}
        self._told: set[Hashable] = set()
        self._told_of_tasks = False
        self._forget_answers()

    # ---------------------------------------------------------------- parameters

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters, those of the method's parts that were given too."""
        return {**super().get_params(deep), **self._options}

    def set_params(self, **params: Any) -> Self:
        """Change parameters. Those of the learner take effect with `fit`; batch_size, image_size, engine at once."""
        named = {*self._get_param_names()}
        options = {**self._options, **{name: value for name, value in params.items() if name not in named}}
        _check_names(params.get("method", self.method), options)
        check_engine(params.get("engine", self.engine))
        for name in named & params.keys():
            setattr(self, name, params[name])
        self._options = options
        if "engine" in params and self._learner is not None:
            self._choose_runner(self._learner)
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return bool(self._index)

    # ---------------------------------------------------------------- learning

    def fit(self, images: Images, labels: Labels, *, progress: bool = False) -> Self:
        """Forget everything and learn these images, in one pass; then `finish`. Then `classes_` is sorted."""
        x, names = self._read(images, labels, None)
        self._learn(self._build(_shape(x)), {}, x, names, progress)
        self._index = _sorted(self._index)
        self._forget_answers()
        return self.finish()

    def partial_fit(self, images: Images, labels: Labels, classes: object = None, *, progress: bool = False) -> Self:
        """Learn more images; their classes may be known or new.

        Parameters
        ----------
        images
            uint8 NumPy N×H×W×C or N×H×W, uint8 torch N×C×H×W, or a list of PIL images or paths; any number of them.
        labels
            One hashable for each image. Equal values are one class, as for any dictionary: 1, 1.0 and True are.
        classes
            Changes nothing: classes may come at any time. It is here because scikit-learn's tools hand it over.
        progress
            Show a progress bar.
        """
        self._check_unchanged()
        x, names = self._read(images, labels, self._image_shape)
        if self._learner is None:
            self._learn(self._build(_shape(x)), {}, x, names, progress)
        else:
            self._warn_of_tasks(self._learner, names)
            self._learn(self._learner, self._index, x, names, progress)
        return self

    def _warn_of_tasks(self, learner: Learner, names: list[Hashable]) -> None:
        """Say once that a method which lives on `end_task` has never heard of one, when new classes come later on."""
        if learner.needs_task_ends and not learner.tasks and not self._told_of_tasks and {*names} - self._index.keys():
            self._told_of_tasks = True
            warnings.warn(
                f'New classes have come, and "{self.method}" protects what it learned before the last end_task(), '
                "which nobody has called: older classes are forgotten as by fine-tuning. Call end_task() before what "
                'is new, or use a method that needs no such hint, such as "scr".',
                stacklevel=3,
            )

    def end_task(self) -> Self:
        """A hint that what comes next differs from what came before; most methods ignore it."""
        return self._hint("end_task")

    def finish(self) -> Self:
        """A hint that the stream is over: a method that trains at the end does so now. Most do nothing."""
        return self._hint("finish")

    def _hint(self, hint: Literal["end_task", "finish"]) -> Self:
        if self._learner is not None:
            with _own_randomness(self._learner, self._has_foreign_parts()):
                getattr(self._learner, hint)()
            self._forget_answers()
        return self

    def forget(self, label: Hashable) -> int:
        """Remove a class: its images and its prototype. Says how many images there were.

        What the weights have taken from the images stays. The class can be learned again later.
        """
        known = self._require()
        name = read_label(label)
        if name not in self._index:
            raise InputError(f"There is no class {label!r} to forget.{self._similar(name)}")
        removed = known.forget(self._index.pop(name))
        self._told.discard(name)
        self._forget_answers()
        return removed

    def _similar(self, name: Hashable) -> str:
        strings = [label for label in self._index if isinstance(label, str)]
        return suggest(name, strings) if isinstance(name, str) and strings else " See classes_."

    def _read(self, images: Images, labels: Labels, expected: Shape | None) -> tuple[Tensor, list[Hashable]]:
        """Images and labels, checked; nothing has changed yet when an error is raised here."""
        _whole("batch_size", self.batch_size, 1)
        names = read_labels(labels)
        x = self._images(images, expected, len(names))
        if len(x) != len(names):
            raise InputError(f"There are {len(x)} images but {len(names)} labels; give one label for each image.")
        return x, names

    def _images(self, images: Images, expected: Shape | None, count: int | None = None) -> Tensor:
        return to_tensor(images, expected=expected, size=_size(self.image_size), count=count)

    def _learn(
        self, learner: Learner, index: dict[Hashable, int], x: Tensor, names: list[Hashable], progress: bool
    ) -> None:
        loss = torch.zeros(())
        with _progress(len(x), progress) as show:
            for start in range(0, len(x), self.batch_size):
                stop = start + self.batch_size
                loss = self._step(learner, index, x[start:stop], names[start:stop])
                if learner is not self._learner:
                    self._adopt(learner, index)
                show(min(stop, len(x)), loss)
        if not math.isfinite(loss.item()):
            warnings.warn(f"The loss is no longer a finite number, {LOST}", stacklevel=3)

    def _step(self, learner: Learner, index: dict[Hashable, int], x: Tensor, names: list[Hashable]) -> Tensor:
        """Learn one batch; its new classes get their numbers."""
        new = _new_indices(index, names)
        index.update(new)
        y = torch.tensor([index[name] for name in names])
        try:
            with _own_randomness(learner, self._has_foreign_parts()):
                return learner.learn(x.contiguous(), y)
        except BaseException:
            # a batch that was begun may have left images behind, so its classes stay; one that never began leaves none
            begun = learner.met.tolist()
            for name, number in new.items():
                if number >= len(begun) or not begun[number]:
                    del index[name]
            raise
        finally:
            self._forget_answers()

    # ---------------------------------------------------------------- the learner

    def _build(self, shape: Shape) -> Learner:
        """A new learner for images of this shape."""
        self._check_values()
        # NumPy's numbers as Python's: a file holds no others
        plain = {
            name: value.item() if isinstance(value, np.generic) else value for name, value in self._chosen().items()
        }
        given = {name: value for name, value in plain.items() if value is not None}
        given = {**find_method(self.method).without_tasks, **given}  # nothing is known of the stream
        # parts keep state: each learner needs its own
        given |= {role: copy.deepcopy(given[role]) for role in PARTS if role in given}
        try:
            learner = make_learner(given.pop("method"), image_shape=shape, **given)
        except (TypeError, AssertionError) as error:
            raise InputError(f"No learner can be built from these parameters: {error}.") from error
        if learner.classifier not in learner.classifiers:
            raise InputError(
                f'classifier="{learner.classifier}" cannot answer here: this learner offers '
                f"{' and '.join(learner.classifiers) or 'none'}. Change the classifier or memory_size."
            )
        if not learner.weights:
            raise InputError(
                "There is nothing to train: every parameter of the encoder is frozen, and no head is used."
            )
        self._choose_runner(learner)
        return learner

    def _choose_runner(self, learner: Learner) -> None:
        """Let steps and answers run as CUDA graphs, where that is asked for and possible."""
        reason = "eager" if self.engine == "eager" else why_not_graph(learner)
        if reason is not None and self.engine == "graph":
            warnings.warn(f"Running eagerly: {reason}.", stacklevel=4)
        if reason is None and self.engine == "auto" and self._has_foreign_parts():
            reason = "nobody knows whether a part from elsewhere can be recorded"
        learner.runner = None if reason is not None else GraphRunner(learner)

    def _adopt(self, learner: Learner, index: dict[Hashable, int]) -> None:
        self._learner, self._index = learner, index
        self._built, self._told, self._told_of_tasks = self._chosen(), set(), False

    def _chosen(self) -> dict[str, Any]:
        """The parameters a learner is built from."""
        return {name: value for name, value in self.get_params(deep=False).items() if name not in FREE}

    def _check_values(self) -> None:
        if self.memory_size is not None:
            _whole("memory_size", self.memory_size, 0)
        _whole("seed", self.seed, 0)
        check_engine(self.engine)
        if self.encoder is not None and not isinstance(self.encoder, nn.Module):
            raise InputError(
                f"encoder is a {type(self.encoder).__name__}; it must be a torch.nn.Module that maps images N×C×H×W to "
                "vectors N×d."
            )

    def _check_unchanged(self) -> None:
        if self._learner is None:
            return
        now, before = self._chosen(), self._built
        changed = [name for name in {**before, **now} if not _same(now.get(name), before.get(name))]
        if changed:
            back = ", ".join(f"{name}={before.get(name)!r}" for name in changed)
            raise InputError(
                f"Changed since learning began: {', '.join(changed)}. Call fit to start afresh with this, or go on "
                f"after set_params({back})."
            )

    @property
    def _image_shape(self) -> Shape | None:
        return None if self._learner is None else self._learner.image_shape

    def _require(self) -> Learner:
        if self._learner is None:
            raise NotFittedError("Nothing has been learned yet: call partial_fit with at least one batch first.")
        return self._learner

    def _require_classes(self) -> Learner:
        learner = self._require()
        if not self._index:
            raise NotFittedError("Every class has been forgotten: call partial_fit with at least one batch first.")
        return learner

    def _has_foreign_parts(self) -> bool:
        return self.encoder is not None or any(not isinstance(v, _PLAIN) for v in self._options.values())

    def _forget_answers(self) -> None:
        """What was computed from the learner or the labels is out of date."""
        self._classes: Array | None = None
        self._stored_features: Tensor | None = None

    # ---------------------------------------------------------------- answering

    @property
    def classes_(self) -> Array:
        """The labels known: sorted after `fit`, then in the order of their first appearance."""
        self._require()
        if self._classes is None:
            self._classes = label_array(list(self._index))
            self._classes.flags.writeable = False
        return self._classes

    @property
    def learner_(self) -> Learner:
        """The learner underneath; its classes are numbers that only this object can translate."""
        return self._require()

    @property
    def memory_(self) -> Stored:
        """A copy of the images kept, and their labels."""
        images, numbers = self._require().memory.contents()
        names = {number: name for name, number in self._index.items()}
        labels = label_array([names[number] for number in numbers.tolist()])
        return Stored(images.permute(0, 2, 3, 1).cpu().numpy().copy(), labels)

    def predict(self, images: Images, *, classifier: str | None = None) -> Array:
        """The label of each image; `classifier` answers with another classifier than usual."""
        labels: Array = self.classes_[self._ask("scores", images, classifier).argmax(1)]
        return labels

    def predict_proba(self, images: Images, *, classifier: str | None = None) -> Array:
        """The probability of each class for each image, in the order of `classes_`."""
        return self._ask("probabilities", images, classifier)

    def score(
        self,
        images: Images,
        labels: Labels,
        sample_weight: Sequence[float] | None = None,
        *,
        classifier: str | None = None,
    ) -> float:
        """The share of images whose label is predicted; a label that was never learned counts as wrong."""
        self._require_classes()
        x, names = self._read(images, labels, self._image_shape)
        weights = _weights(sample_weight, len(names))
        places = {name: place for place, name in enumerate(self._index)}
        truth = np.array([places.get(name, -1) for name in names])
        right = self._ask("scores", x, classifier).argmax(1) == truth
        return float(np.average(right, weights=weights))

    def embed(self, images: Images) -> Array:
        """The features of each image, of length 1: float32, N×d."""
        learner = self._require()
        return learner.embed(self._images(images, learner.image_shape)).float().cpu().numpy()

    def nearest(self, images: Images, k: int = 5) -> Neighbours:
        """The k images in memory whose features are nearest to each image's, and how far they are (from 0 to 2)."""
        learner = self._require()
        _whole("k", k, 1)
        x = self._images(images, learner.image_shape)
        stored, _ = learner.memory.contents()
        if len(stored) == 0:
            raise NotFittedError(
                "The memory is empty, so there is nothing near: learn a batch with memory_size > 0 first."
            )
        if self._stored_features is None:
            self._stored_features = learner.embed(stored)
        cosine = learner.embed(x) @ self._stored_features.T
        near, places = cosine.topk(min(k, len(stored)), dim=1)
        distances = (2 - 2 * near).clamp(min=0).sqrt()
        return Neighbours(places.cpu().numpy(), distances.cpu().numpy())

    def _ask(self, question: Literal["scores", "probabilities"], images: Images, classifier: str | None) -> Array:
        """What a learner's method says for each image and class, the classes in the order of `classes_`."""
        learner = self._require_classes()
        x = self._images(images, learner.image_shape)
        if (classifier or learner.classifier) != "softmax" and "ncm" in learner.classifiers:
            self._warn_of_missing(learner)
        answer: Tensor = getattr(learner, question)(x, classifier)
        columns = answer.float().cpu().numpy()[:, [*self._index.values()]]
        if np.isnan(columns).any():
            warnings.warn(f"Some answers are no numbers, {LOST}", stacklevel=3)
        return columns

    def _warn_of_missing(self, learner: Learner) -> None:
        """Say once for each class that it has no image left in memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\d+ of the classes learned have no image", category=UserWarning)
            present = learner.prototypes().present.tolist()
        missing = [name for name, number in self._index.items() if not present[number] and name not in self._told]
        if missing:
            self._told.update(missing)
            names = ", ".join(repr(name) for name in missing[:5]) + ", ..." * (len(missing) > 5)
            reservoir = isinstance(getattr(learner, "update", None), Reservoir)
            rare = ', and so would update="balanced", where the class is rare' if reservoir else ""
            warnings.warn(
                f"No image of {names} is left in memory, so the nearest-class-mean classifier cannot predict "
                f"{'it' if len(missing) == 1 else 'them'}; a larger memory_size would keep some{rare}.",
                stacklevel=4,
            )

    # ---------------------------------------------------------------- stopping and going on

    def digest(self) -> str:
        """A fingerprint of all that was learned: weights, memory, labels and the state of the random numbers."""
        state = {} if self._learner is None else self._learner.state_dict()
        labels = sorted(self._index.items(), key=lambda item: item[1])  # however classes_ shows them
        return digest({"state": state, "labels": repr(labels)})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything into one file, whole or not at all; what was there before stays until it is complete.

        An encoder of your own is saved by its weights, and options that are no plain values (an augmentation, say) by
        their names: both are given again to `load`.
        """
        self._check_unchanged()
        params, given_again = {}, {}
        for name, value in self.get_params(deep=False).items():
            try:
                params[name] = encode(str(value) if name == "device" else value)
            except TypeError:
                given_again[name] = f"{type(value).__module__}.{type(value).__qualname__}"
        meta: dict[str, Any] = {"kind": KIND, "version": __version__, "params": params, "given_again": given_again}
        meta["made_with"] = self._every_option()
        state: dict[str, Any] = {}
        if self._learner is not None:
            network = self._learner.network
            meta["image_shape"] = list(self._learner.image_shape)
            meta["labels"] = [[_encode_label(name), number] for name, number in self._index.items()]
            meta["frozen"] = [name for name, weight in network.named_parameters() if not weight.requires_grad]
            state = self._learner.state_dict()
        save_checkpoint(path, state, meta)
        return Path(path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        encoder: nn.Module | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> Self:
        """Go on exactly where the saved classifier stopped.

        Parameters
        ----------
        path
            What `save` wrote.
        encoder
            A module of the same architecture, where the classifier was saved with an encoder of your own. Its weights
            are replaced by those in the file.
        device
            Where to go on; None: the device it was saved with, or "auto" where this machine has no such device. On
            another device the stream of random numbers starts anew.
        **options
            Options that were no plain values (augment=...), given again.
        """
        state, meta = load_checkpoint(path)
        if meta.get("kind") != KIND:
            raise CheckpointError(f'"{path}" holds no OnlineClassifier, but {meta.get("kind") or "something else"}.')
        again = options if encoder is None else {**options, "encoder": encoder}
        _check_given_again(path, meta, again)
        params = {name: decode(value) for name, value in meta["params"].items()} | again
        given = [name for name, value in params.items() if value is not None]
        made_with = {name: decode(value) for name, value in meta.get("made_with", {}).items()}
        # what was left to a default stays what it was, whatever the default is by now
        params |= made_otherwise(params["method"], made_with, [*given, *meta["given_again"]], without_tasks=True)
        params["device"] = _available(params["device"]) if device is None else device
        try:
            self = cls(**params)
            if "image_shape" in meta:
                self._restore(state, meta)
        except CheckpointError:
            raise
        except ScrlearnError as error:
            raise CheckpointError(f'"{path}" cannot be loaded: {error}') from error
        return self

    def _every_option(self) -> dict[str, Any]:
        """Every option of the method with its value, as far as these are plain values."""
        spec, options = find_method(self.method), dict[str, Any]()
        chosen = {name: value for name, value in self._chosen().items() if value is not None and name != "method"}
        for name, value in spec.parameters(**{**spec.without_tasks, **chosen}).items():
            with contextlib.suppress(TypeError):
                options[name] = encode(value)
        return options

    def _restore(self, state: dict[str, Any], meta: dict[str, Any]) -> None:
        learner = self._build((*meta["image_shape"],))
        _check_encoder(learner.network, state["network"], meta["frozen"])
        try:
            learner.load_state_dict(state)
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(f"The file and its parameters do not belong together: {error}.") from error
        self._adopt(learner, {decode(name): number for name, number in meta["labels"]})


_PLAIN = (str, int, float, bool, bytes, type(None), tuple, list)


# -------------------------------------------------------------------- parameters


def _check_names(method: str, options: dict[str, Any]) -> None:
    """Unknown names are said at once; values are checked when a learner is built from them."""
    chosen = {name: value for name, value in options.items() if value is not None}
    known = find_method(method).parameters(**{role: chosen[role] for role in PARTS if role in chosen})
    for name in chosen:
        if name not in known or name in SURROUNDINGS:
            raise InputError(f'Method "{method}" has no option "{name}".{suggest(name, known)}')


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} is {value!r}; it must be a whole number, {least} or more.")


def _size(image_size: Any) -> tuple[int, int] | None:
    if image_size is None:
        return None
    pair = (image_size, image_size) if isinstance(image_size, int | np.integer) else image_size
    good = isinstance(pair, tuple | list) and len(pair) == 2
    if not good or not all(isinstance(side, int | np.integer) and side >= 1 for side in pair):
        raise InputError(f"image_size is {image_size!r}; it must be one side, or (height, width), in pixels.")
    return int(pair[0]), int(pair[1])


def _weights(given: Any, count: int) -> Array | None:
    if given is None:
        return None
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"sample_weight holds what is no number: {error}.") from error
    if weights.shape != (count,):
        raise InputError(f"sample_weight has shape {weights.shape}; expected one number for each of {count} images.")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise InputError("sample_weight must be numbers of 0 or more, and not all of them 0.")
    return weights


def _shape(x: Tensor) -> Shape:
    _, channels, height, width = x.shape
    return channels, height, width


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays and the like have no single answer
        return False


# -------------------------------------------------------------------- learning


def _new_indices(index: dict[Hashable, int], names: list[Hashable]) -> dict[Hashable, int]:
    """Numbers for the labels not met before: the lowest that are free, so that forgetting does not grow the head."""
    unknown = dict.fromkeys(name for name in names if name not in index)
    if not unknown:
        return {}
    taken = {*index.values()}
    free = (number for number in range(len(taken) + len(unknown)) if number not in taken)
    return dict(zip(unknown, free, strict=False))


def _sorted(index: dict[Hashable, int]) -> dict[Hashable, int]:
    """Sorted by label: scikit-learn's scorers take the columns to be so. Labels that have no order stay as they are."""
    try:
        return {name: index[name] for name in sorted(index)}  # type: ignore[type-var]
    except TypeError:
        return index


@contextlib.contextmanager
def _own_randomness(learner: Learner, needed: bool) -> Iterator[None]:
    """Foreign modules (dropout, say) draw from torch's global generators: seed them for the step, then restore."""
    if not needed:
        yield
        return
    seed = derived_seed(learner.seed, "step", learner.steps, learner.tasks)
    cuda = learner.device.type == "cuda"
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[learner.device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(learner.device):
                torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[int, Tensor], None]]:
    """A function to report (images done, loss) to."""
    if not wanted:
        yield lambda done, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress("learning", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, note="")

        def show(done: int, loss: Tensor) -> None:
            speed = bar.tasks[0].speed or 0.0
            bar.update(task, completed=done, note=f"loss {loss.item():.3f}, {speed:.0f} images/s")

        yield show


# -------------------------------------------------------------------- files


def _encode_label(name: Hashable) -> Any:
    try:
        return encode(name)
    except TypeError as error:
        raise InputError(
            f"The label {name!r} cannot be saved: {error}. Labels in a file are strings, numbers, bytes, or tuples of "
            "these."
        ) from None


def _check_given_again(path: str | os.PathLike[str], meta: dict[str, Any], again: dict[str, Any]) -> None:
    """What could not be stored is needed; what was stored is not asked for."""
    for name, kind in meta["given_again"].items():
        if name not in again:
            raise CheckpointError(
                f'"{path}" was saved with {name} = a {kind}, which a file cannot hold. Give it again: '
                f'OnlineClassifier.load("{path}", {name}=...).'
            )
    for name in again:
        if name not in meta["given_again"] and name != "encoder":
            raise CheckpointError(
                f'{name} is stored in "{path}" already; load it without, then use set_params and fit.'
            )


def _available(device: str) -> str:
    try:
        resolve_device(device)
    except InputError:
        return "auto"
    return device


def _check_encoder(network: nn.Module, saved: dict[str, Tensor], frozen: list[str]) -> None:
    """The encoder given must be the one saved: same names, same shapes, same parameters frozen."""
    here, there = _shapes(network.state_dict()), _shapes(saved)
    wrong = [
        f"{name} {here.get(name, 'missing')} ≠ {there.get(name, 'missing')}"
        for name in {**there, **here}
        if here.get(name) != there.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The encoder does not fit the saved one (given ≠ saved): {'; '.join(wrong[:3])}{more}. "
            "Give encoder=a module of the architecture that was saved."
        )
    now = {name for name, weight in network.named_parameters() if not weight.requires_grad}
    if now != {*frozen}:
        names = ", ".join(sorted(now ^ {*frozen})[:3])
        raise CheckpointError(
            f"Other parameters of the encoder were frozen (requires_grad=False) when it was saved: {names}, ... "
            "Freeze the same ones."
        )


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith("encoder.")}
