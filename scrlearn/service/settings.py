"""What the service learns with (part of the state on disk), and the limits it works within."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

from scrlearn.errors import CheckpointError, InputError
from scrlearn.learners.methods import find_method, made_otherwise

FORMAT = 1
DEFAULT_ENCODER = "reduced-resnet18"
MIB = 1 << 20


@dataclass(frozen=True)
class ModelConfig:
    """What learns: fixed when a state directory is made, and read from there ever after.

    Parameters
    ----------
    method
        A method of `scr methods` that answers at any time.
    memory_size
        The most images kept.
    image_size
        Side that images are brought to.
    channels
        3: every image becomes RGB; 1: every image becomes grey.
    encoder
        "reduced-resnet18", "timm:NAME", or "PACKAGE.MODULE:FUNCTION", a function without arguments that gives a module.
    classifier
        "softmax", "ncm", "combined" or "lda"; None: the method's own.
    batch_size
        The most images learned in one step.
    seed
        Fixes everything random.
    device, precision
        As for `OnlineClassifier`.
    threads
        Threads of a learning step; 0: half of the cores, so that answers have the other half. The bits of a sum depend
        on the number of threads, so it belongs to the state.
    options
        Options of the method's parts.
    made_with
        All options with the values they had when the state was made, so that a later version's defaults change nothing.

    Examples
    --------
    >>> config = ModelConfig(method="er", memory_size=100, options={"learning_rate": 0.05})
    >>> ModelConfig.from_json(config.to_json()) == config
    True
    """

    method: str = "scr"
    memory_size: int = 2000
    image_size: int = 32
    channels: int = 3
    encoder: str = DEFAULT_ENCODER
    classifier: str | None = None
    batch_size: int = 10
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict, compare=False)

    AUTOMATIC: ClassVar[Mapping[str, Any]] = {"device": "auto", "precision": "auto", "threads": 0}
    """Values that leave the choice to the service."""

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise InputError(f"channels is {self.channels!r}; it must be 3 (colour) or 1 (grey).")
        for name, least in (("memory_size", 1), ("image_size", 1), ("batch_size", 1), ("seed", 0), ("threads", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"{name} is {value!r}; it must be a whole number, {least} or more.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.image_size, self.image_size

    def resolved(self) -> ModelConfig:
        """With everything that depends on this machine written down, so that a restart cannot change it."""
        from scrlearn.devices import cores, resolve_device, resolve_precision

        device = resolve_device(self.device)
        precision = resolve_precision(self.precision, device, self.image_shape)
        threads = self.threads or max(1, cores() // 2)
        spec = find_method(self.method)
        every = spec.parameters(**{**spec.without_tasks, **self.options})
        plain = {name: value for name, value in every.items() if value is None or isinstance(value, bool | Real | str)}
        return dataclasses.replace(self, device=str(device), precision=precision, threads=threads, made_with=plain)

    def all_options(self) -> dict[str, Any]:
        """Options, and those whose defaults have changed since the state was made."""
        chosen = {"classifier": self.classifier} if self.classifier is not None else {}
        given = [*self.options, *chosen, "memory_size", "precision"]
        changed = made_otherwise(self.method, self.made_with, given, without_tasks=True)
        return {"classifier": None, **changed, **chosen, **self.options}

    def to_json(self) -> str:
        """As JSON."""
        try:
            return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2, sort_keys=True)
        except TypeError as error:
            raise InputError(f"The options must be plain values that JSON can hold: {error}.") from error

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """What `to_json` wrote."""
        try:
            values = json.loads(text)
            version = values.pop("format")
            if version > FORMAT:
                raise CheckpointError(
                    f"The state has format {version}; this version of scrlearn reads up to {FORMAT}. "
                    "Install a newer one."
                )
            return cls(**values)
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"The state's config.json cannot be read: {error}.") from error

    def check_same(self, given: Mapping[str, Any]) -> None:
        """What was asked for now must be what the state was made with."""
        different = {name: value for name, value in given.items() if getattr(self, name) != value}
        different.pop("device", None)  # a state may move to another device; it says so when it does
        if different:
            stored = ", ".join(f"{name}={getattr(self, name)!r}" for name in different)
            asked = ", ".join(f"{name}={value!r}" for name, value in different.items())
            raise InputError(
                f"This state was made with {stored}, and {asked} was asked for. Leave the option out to go on with the "
                "state, or use another state directory to start afresh."
            )


@dataclass(frozen=True)
class Limits:
    """How much of everything there may be. They can change from one start to the next.

    Parameters
    ----------
    body_bytes, bytes_in_flight, body_seconds
        Size of one request's body, of all that are being read at once, and the time one may take to arrive.
    requests
        Requests handled at once.
    images, pixels
        Images in one request, and pixels in one image before it is scaled.
    label_length, classes
        Characters of a label, and labels known at once.
    pending
        Images accepted and not yet learned.
    questions
        Images waiting for an answer.
    answer_batch
        Images answered together.
    snapshot_images, snapshot_seconds
        A snapshot is written after this many images, or after this time when anything was learned.
    journal_images
        Images in the journal at most; reached only when no snapshot can be written.
    keys, key_seconds
        Idempotency keys remembered, by number and by age; older ones may be learned again.
    reserve_bytes
        Space on disk that images are not accepted into; snapshots need it.
    publish_share
        The share of learning time that may go into making copies that answer, while images wait.
    quantile
        The share of its own stored images that a class takes for its own; see `scrlearn.service.model.thresholds`.
    recent
        Images over which the accuracy before learning is counted.
    """

    body_bytes: int = 16 * MIB
    bytes_in_flight: int = 64 * MIB
    body_seconds: float = 30.0
    requests: int = 256
    images: int = 64
    pixels: int = 25_000_000
    label_length: int = 100
    classes: int = 1000
    pending: int = 2000
    questions: int = 256
    answer_batch: int = 64
    snapshot_images: int = 1000
    snapshot_seconds: float = 30.0
    journal_images: int = 20_000
    keys: int = 100_000
    key_seconds: float = 7 * 86400.0
    reserve_bytes: int = 64 * MIB
    publish_share: float = 1 / 3
    quantile: float = 0.95
    recent: int = 200
