"""What a run is made of: everything that decides its figures, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scrlearn.data import Dataset, Stream, class_incremental, default_tasks, holdout, shuffled_split
from scrlearn.data.streams import Order
from scrlearn.devices import PRECISIONS
from scrlearn.engine import check_engine
from scrlearn.errors import InputError, suggest
from scrlearn.learners import Learner, find_method, make_learner
from scrlearn.learners.methods import NEED_HEAD, made_otherwise

SPLITS = ("given", "shuffled")
# given as fields of their own, so that nobody has to guess which of two values counted
_NO_OPTIONS = {
    "memory_size": "it has a field of its own: RunConfig(memory_size=…) (--memory)",
    "classifier": "it has a field of its own: RunConfig(classifier=…) (--classifier)",
    "precision": "it has a field of its own: RunConfig(precision=…) (--precision)",
    "device": "it has a field of its own: RunConfig(device=…) (--device)",
    "seed": "it has a field of its own: RunConfig(seed=…) (--seed)",
    "image_shape": "the data set says it",
    "encoder": "a run has the reduced ResNet18; make_learner(encoder=…) and OnlineClassifier(encoder=…) take a module",
}


@dataclass(frozen=True)
class RunConfig:
    """One run: a data set as a stream, and the learner that learns it.

    Where data lie, where results go and how progress is shown are not part of it: they change no figure.

    Parameters
    ----------
    dataset
        A name that `scrlearn.data.load` knows.
    method
        A name of the table of methods.
    memory_size
        M; None: the method's own default.
    seed
        Fixes the stream and the learner.
    tasks
        Number of tasks; None: what the field uses for this data set.
    order, batch_size, blurry, imbalance, limit, drop_last
        See `scrlearn.data.class_incremental`.
    classifier
        The one whose figures stand first in the result; None: the method's own. The others that the learner has are
        measured too.
    options
        Options of the method by name; the values are what JSON can say.
    image_size
        Bring images to this height and width; None: their own.
    precision, device
        See `scrlearn.learners.Learner`.
    classes_ahead
        Classes the softmax head trains before they appear: a number, or True for all classes of the data set.
    engine
        How a step runs: "eager", "graph" (one CUDA graph), or "auto".
    holdout
        Share of each class's training images that are tested on instead of the test images; 0: none. For choosing
        settings without looking at the test. Which images does not depend on the seed.
    first_tasks
        Only so many tasks of the stream, as if it ended there; None: all.
    split
        "given": training and test images as they came; "shuffled": drawn anew, the same for every seed, as the paper's
        released code does with Mini-ImageNet (see `scrlearn.data.shuffled_split`).

    Example
    -------
    >>> config = RunConfig(method="er", memory_size=200, options={"memory_batch": 20})
    >>> RunConfig.from_dict(config.to_dict()) == config
    True
    """

    dataset: str = "digits"
    method: str = "scr"
    memory_size: int | None = None
    seed: int = 0
    tasks: int | None = None
    order: Order = "natural"
    batch_size: int = 10
    blurry: float = 0.0
    imbalance: float = 1.0
    limit: int | None = None
    drop_last: bool = True
    classifier: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    precision: str = "auto"
    device: str = "auto"
    classes_ahead: bool | int = False
    engine: str = "auto"
    holdout: float = 0.0
    first_tasks: int | None = None
    split: str = "given"

    def __post_init__(self) -> None:
        """Refuse what can be told to be wrong without any data."""
        find_method(self.method)
        check_engine(self.engine)
        if self.precision not in PRECISIONS:
            raise InputError(f'There is no precision "{self.precision}".{suggest(self.precision, PRECISIONS)}')
        if self.split not in SPLITS:
            raise InputError(f'There is no split "{self.split}".{suggest(self.split, SPLITS)}')
        if not 0 <= self.holdout < 1:
            raise InputError(f"holdout is {self.holdout}; expected a share from 0 to below 1, such as 0.1.")
        if self.first_tasks is not None and self.first_tasks < 1:
            raise InputError(f"first_tasks is {self.first_tasks}; expected 1 or more, or None for all.")
        for name, reason in _NO_OPTIONS.items():
            if name in self.options:
                raise InputError(f'"{name}" was given among the options; {reason}.')
        try:
            plain = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"The options must be values that JSON can say: {error}.") from error
        object.__setattr__(self, "options", plain)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration with these values; what is not named has its default."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise InputError(f'A run has no setting "{name}".{suggest(name, known)}')
        return cls(**values)

    def replace(self, **changes: Any) -> RunConfig:
        """The same configuration with some values changed."""
        return dataclasses.replace(self, **changes)

    def differences(self, other: RunConfig) -> list[str]:
        """One phrase for each setting in which the two differ."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{name} {theirs[name]!r} there, {mine[name]!r} here" for name in mine if mine[name] != theirs[name]]

    def prepare(self, dataset: Dataset) -> Dataset:
        """The data set with the split and the held-out images that this configuration asks for."""
        if self.split == "shuffled" and dataset.split == "given":
            dataset = shuffled_split(dataset)
        if self.split != dataset.split:
            raise InputError(f'The images of "{dataset.name}" were drawn anew already; give it as it was loaded.')
        return holdout(dataset, self.holdout) if self.holdout and dataset.held_out != self.holdout else dataset

    def make_stream(self, dataset: Dataset) -> Stream:
        """The data set as this configuration's stream."""
        stream = class_incremental(
            self.prepare(dataset),
            tasks=default_tasks(dataset) if self.tasks is None else self.tasks,
            order=self.order,
            seed=self.seed,
            batch_size=self.batch_size,
            blurry=self.blurry,
            imbalance=self.imbalance,
            limit=self.limit,
            drop_last=self.drop_last,
        )
        return stream if self.first_tasks is None else stream.first(self.first_tasks)

    def learner_options(self, classes: int) -> dict[str, Any]:
        """What is given to `make_learner`, for a data set with this many classes."""
        chosen: dict[str, Any] = {**self.options, "precision": self.precision}
        if self.memory_size is not None:
            chosen["memory_size"] = self.memory_size
        if self.classifier is not None:
            chosen["classifier"] = self.classifier
        if self.classes_ahead:
            chosen["classes_ahead"] = classes if self.classes_ahead is True else self.classes_ahead
        return chosen

    def as_made(self, made_with: Mapping[str, Any]) -> RunConfig:
        """This configuration of a run from its file: options whose defaults have changed since are named.

        `made_with` are all options that the run had; what was left to defaults then is not what it would be today.
        """
        fields = {name for name in ("memory_size", "classifier") if getattr(self, name) is not None}
        given = {*self.options, *fields, "precision", "classes_ahead", "probe"}  # these follow from fields
        changed = made_otherwise(self.method, made_with, given)
        own = {name: changed.pop(name) for name in ("memory_size", "classifier") if name in changed}
        return self.replace(**own, options={**changed, **self.options}) if changed or own else self

    def make_learner(self, image_shape: tuple[int, int, int], classes: int) -> Learner:
        """The learner of this configuration, which has learned nothing yet."""
        options = self.learner_options(classes)
        try:
            return make_learner(self.method, image_shape=image_shape, device=self.device, seed=self.seed, **options)
        except (TypeError, AssertionError) as error:  # an option of a wrong type
            raise InputError(f"No learner can be built from the options {options}: {error}.") from error

    def all_options(self, classes: int) -> dict[str, Any]:
        """Every option of the method with the value it has in this run, chosen or default."""
        chosen = self.learner_options(classes)
        every = find_method(self.method).parameters(**chosen)
        if every.get("classifier") in NEED_HEAD and "probe" in every:  # `make_learner` adds the head that is asked for
            every["probe"] = chosen.get("probe", True)
        return every
