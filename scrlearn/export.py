"""Export: a taught model as one self-contained graph, for a phone or any runtime of ONNX or TorchScript."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn import __version__
from scrlearn.checkpoint import read_meta
from scrlearn.errors import InputError, NotFittedError, ScrlearnError, suggest
from scrlearn.estimator import OnlineClassifier
from scrlearn.files import atomic_write
from scrlearn.images import Array
from scrlearn.labels import encode
from scrlearn.learners import Learner
from scrlearn.learners.base import NCM_TEMPERATURE
from scrlearn.models import Network

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt"}
ABOUT = "scrlearn"
"""The key of the JSON about a model in ONNX metadata; in TorchScript it is the extra file ``scrlearn.json``."""

OPSET = 18  # what torch's exporter speaks without converting, so the oldest runtimes it can reach
TOLERANCE = 1e-3
WITH_DISTANCES = ("ncm", "combined")
INSTALL = 'pip install "scrlearn[export]"'
CHECKED = 32  # images of each kind: random ones, and stored ones
ONNX_LIMIT = 2**31 - 2**20  # bytes of one protobuf message, less what the graph itself takes

Answers = dict[str, Array]
Thing = TypeVar("Thing")


class ExportError(ScrlearnError):
    """A model that cannot be written for another runtime, or a file that does not answer as the model does."""


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Parameters
    ----------
    path
        The file.
    format
        "onnx" or "torchscript".
    classes
        How many classes it tells apart.
    image_shape
        Channels, height and width of the images it takes.
    outputs
        The names of what it gives.
    bytes
        The size of the file.
    difference
        The largest difference between an answer of the file and of the model in float32, on the images compared;
        None where nothing could be compared since onnxruntime is missing.
    images
        How many images were compared.
    rounding
        The largest difference of a probability between the model in float32 and the model as it answers, which may
        compute in bfloat16.
    """

    path: Path
    format: str
    classes: int
    image_shape: tuple[int, int, int]
    outputs: tuple[str, ...]
    bytes: int
    difference: float | None
    images: int
    rounding: float


def export(
    model: OnlineClassifier | str | os.PathLike[str], path: str | os.PathLike[str], format: str = "onnx"
) -> Exported:
    """Write a taught model as one file that predicts without this package.

    The graph takes ``images``, uint8 N×C×H×W with any N (pixels from 0 to 255; it scales them itself), and gives by
    name, in float32: ``scores`` N×K (the largest is predicted), ``probabilities`` N×K, ``distances`` N×K to the
    prototypes (classifiers "ncm" and "combined"), and ``features`` N×d of length 1. A class without a prototype has the
    score ``-inf``, the probability 0 and the distance ``inf``. Averaged weights and mirror images are used as the model
    uses them.

    JSON in the file says what the columns mean: ``labels`` (as `scrlearn.labels.encode` writes them), ``image_shape``
    (channels, height, width), ``classifier``, ``outputs``, ``version``. It is the metadata entry ``scrlearn`` of an
    ONNX file, and the extra file ``scrlearn.json`` of a TorchScript one.

    Before the file appears, its answers are compared with the model's on random and on stored images; a file that
    disagrees is never written. ONNX is compared where onnxruntime is installed.

    Parameters
    ----------
    model
        An `OnlineClassifier`, or the file of one, or the ``checkpoint.scr`` of a run, or the state directory of a
        service (its newest snapshot). A file can be used where the model has the default encoder; with an encoder of
        your own, give the object.
    path
        The file to write; one that is there is replaced.
    format
        "onnx" or "torchscript".

    Examples
    --------
    >>> import tempfile
    >>> images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    >>> small = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    >>> clf = OnlineClassifier(memory_size=20, encoder=small, device="cpu").partial_fit(images, ["cat", "dog"] * 10)
    >>> exported = export(clf, Path(tempfile.mkdtemp()) / "pets.pt", format="torchscript")
    >>> exported.outputs
    ('scores', 'probabilities', 'distances', 'features')
    >>> exported.difference < 1e-4
    True
    """
    if format not in SUFFIXES:
        raise InputError(f'There is no format "{format}".{suggest(format, SUFFIXES)}')
    _check_packages(format)
    _check_place(model, path)
    taught = _taught(model)
    about = _about(taught)
    x = _images(taught.learner)
    with _not_told_by_number():
        # first, before anything is copied: a method that trains when it is asked for an answer does so now
        rounded = taught.learner.probabilities(x)[:, taught.columns].float().cpu().numpy()
        reference = _in_float32(taught.learner)
        expected = _expected(reference, x, taught.columns)
    rounding = _difference("probabilities", expected["probabilities"], rounded)
    if (taught.learner.device.type, taught.learner.precision) == ("cpu", "fp32"):  # then there is nothing to round
        _check_difference(rounding)
    _warn_of_missing(reference, taught)
    graph = _Graph(reference, taught.columns).eval()
    data = (_to_onnx if format == "onnx" else _to_torchscript)(graph, taught.learner.image_shape, about)
    difference = _verified(data, format, x, expected, about)
    return Exported(
        path=atomic_write(path, data),
        format=format,
        classes=len(taught.labels),
        image_shape=taught.learner.image_shape,
        outputs=tuple(expected),
        bytes=len(data),
        difference=difference,
        images=0 if difference is None else len(x),
        rounding=rounding,
    )


def report(exported: Exported) -> str:
    """What was written and how it was checked, in sentences."""
    shape = "×".join(map(str, exported.image_shape))
    lines = [
        f"{exported.path}: {exported.bytes / 1e6:.1f} MB, {exported.classes} classes, images uint8 N×{shape}; gives "
        f"{', '.join(exported.outputs)}."
    ]
    if exported.difference is not None:
        lines.append(f"Checked on {exported.images} images: the largest difference is {exported.difference:.1g}.")
    if exported.rounding > 10 * TOLERANCE:
        lines.append(
            f"The model itself computes in lower precision: its probabilities differ by up to {exported.rounding:.2g}."
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- what is exported


@dataclass(frozen=True)
class _Taught:
    """A learner, its labels, and the class index of each."""

    learner: Learner
    labels: Sequence[Hashable]
    columns: list[int]


def _check_place(model: Any, path: str | os.PathLike[str]) -> None:
    same = isinstance(model, str | os.PathLike) and os.path.realpath(model) == os.path.realpath(path)
    if same:
        raise InputError(f'"{path}" is the model itself; choose another name for the exported file.')


def _taught(model: OnlineClassifier | str | os.PathLike[str]) -> _Taught:
    if isinstance(model, OnlineClassifier):
        return _from_classifier(model)
    if not isinstance(model, str | os.PathLike):
        raise InputError(
            f"The model is a {type(model).__name__}; give an OnlineClassifier, or the path of a saved one."
        )
    model = _newest_snapshot(Path(model)) if os.path.isdir(model) else model
    about = read_meta(model)
    if about.get("kind") == "run":
        return _from_run(model)
    given_again = about.get("given_again") or {}
    if given_again:
        names = ", ".join(f"{name} = a {kind}" for name, kind in given_again.items())
        again = ", ".join(f"{name}=..." for name in given_again)
        raise ExportError(
            f'"{model}" was saved with {names}, which a file cannot hold: from a file, only models with the default '
            f'encoder and plain options can be exported. In Python: scrlearn.export.export(OnlineClassifier.load("'
            f'{model}", {again}), "model.onnx").'
        )
    return _from_classifier(OnlineClassifier.load(model, device="cpu"))


def _newest_snapshot(state: Path) -> Path:
    """What a service wrote last into its state directory; a snapshot counts when its note is there."""
    notes = sorted(state.glob("snapshot-*.json"))
    if not notes:
        raise InputError(
            f'"{state}" is a directory without a snapshot of a service. Give the file of a model, the checkpoint.scr '
            "of a run, or the state directory of a service that has learned something and written it."
        )
    return notes[-1].with_suffix(".scr")


def _from_classifier(classifier: OnlineClassifier) -> _Taught:
    learner, index = classifier.learner_, classifier._index
    if not index:
        raise NotFittedError("Every class has been forgotten: call partial_fit with at least one batch first.")
    return _Taught(learner, list(index), list(index.values()))


def _from_run(path: str | os.PathLike[str]) -> _Taught:
    from scrlearn.experiments import load_learner

    learner, names = load_learner(path, device="cpu")
    columns = learner.met[: learner.num_classes].nonzero().flatten().tolist()
    if not columns:
        raise NotFittedError(f'The run in "{path}" has learned nothing yet.')
    return _Taught(learner, [names[column] for column in columns], columns)


def _outputs(classifier: str) -> tuple[str, ...]:
    distances = ("distances",) if classifier in WITH_DISTANCES else ()
    return ("scores", "probabilities", *distances, "features")


def _about(taught: _Taught) -> str:
    """What the file says about itself, as JSON."""
    labels = []
    for label in taught.labels:
        try:
            labels.append(encode(label))
        except TypeError as error:
            raise InputError(
                f"The label {label!r} cannot be written: {error}. Labels in a file are strings, numbers, bytes, or "
                "tuples of these."
            ) from None
    classifier = taught.learner.classifier
    about = {
        "version": __version__,
        "image_shape": list(taught.learner.image_shape),
        "classifier": classifier,
        "outputs": list(_outputs(classifier)),
        "labels": labels,
    }
    return json.dumps(about, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------------- the graph


class _Graph(nn.Module):
    """All that happens between pixels and answers; the learner itself says what that is."""

    columns: Tensor

    def __init__(self, learner: Learner, columns: list[int]) -> None:
        super().__init__()
        self.network = learner.average if learner.average is not None else learner.network
        self.learner = learner
        self.register_buffer("columns", torch.tensor(columns))
        self.temperature = NCM_TEMPERATURE if learner.classifier == "ncm" else 1.0

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.learner.look(images)
        scores = self.learner.scores_from_features(features).index_select(1, self.columns)
        answers = {"scores": scores, "probabilities": torch.softmax(scores / self.temperature, dim=1)}
        if self.learner.classifier in WITH_DISTANCES:
            distances = self.learner.prototypes().distances(self.learner.compared(features))
            answers["distances"] = distances.index_select(1, self.columns)
        return answers | {"features": F.normalize(features, dim=1)}


def _in_float32(learner: Learner) -> Learner:
    """A learner that answers from the same state on the CPU in float32; it must not learn."""
    twin = _on_cpu(learner)
    twin.device, twin.precision = torch.device("cpu"), "fp32"
    twin.network = _network_in_float32(learner, learner.network)
    twin.average = None if learner.average is None else _network_in_float32(learner, learner.average)
    twin.memory = _on_cpu(learner.memory)
    twin.drift = None if learner.drift is None else _on_cpu(learner.drift)
    twin.runner = None
    twin._changed()  # class means at hand may come from bfloat16 features
    return twin


def _on_cpu(thing: Thing) -> Thing:
    """The same object with its tensors on the CPU; what is there already is shared."""
    moved = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, Tensor):
            setattr(moved, name, value.cpu())
    return moved


def _network_in_float32(learner: Learner, network: Network) -> Network:
    network = copy.deepcopy(network).cpu().eval().requires_grad_(False)
    network.bf16 = False
    if not learner.projection_share:
        network.projection = None  # only the loss looks through it
    return network


# ------------------------------------------------------------------------------------------------------- the formats


def _check_packages(format: str) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if format == "onnx" and missing:
        raise ExportError(
            f"An ONNX file needs {' and '.join(missing)}, not installed here: {INSTALL}; or use TorchScript, which "
            "needs nothing more."
        )


def _to_onnx(graph: _Graph, image_shape: tuple[int, int, int], about: str) -> bytes:
    size = sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())
    if size > ONNX_LIMIT:
        raise ExportError(f"The encoder has {size:,} bytes of weights; one ONNX file holds 2 GB. Use TorchScript.")
    with _hushed(), _explained(graph, "ONNX"):
        program = torch.onnx.export(
            graph,
            (_blank(image_shape),),
            dynamo=True,
            input_names=["images"],
            output_names=list(_outputs(graph.learner.classifier)),
            dynamic_shapes={"images": {0: torch.export.Dim("N", min=1)}},
            opset_version=OPSET,
            verbose=False,
        )
        assert program is not None
        proto = program.model_proto
    _remove_traces(proto.graph)
    proto.producer_name, proto.producer_version = "scrlearn", __version__
    proto.metadata_props.add(key=ABOUT, value=about)
    data: bytes = proto.SerializeToString()
    return data


def _remove_traces(graph: Any) -> None:
    """The exporter notes for each node which line of which file it came from; that is nobody else's business."""
    parts = (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _remove_traces(attribute.g)


def _to_torchscript(graph: _Graph, image_shape: tuple[int, int, int], about: str) -> bytes:
    buffer = io.BytesIO()
    with _hushed(), _explained(graph, "TorchScript"), torch.no_grad():
        # not strict: a dictionary is returned. The trace is checked below, against the model itself
        traced = torch.jit.trace(graph, (_blank(image_shape),), strict=False, check_trace=False)
        torch.jit.save(traced, buffer, _extra_files={f"{ABOUT}.json": about})
    return buffer.getvalue()


def _blank(image_shape: tuple[int, int, int]) -> Tensor:
    # two: one image would be taken for a batch that is always one
    return torch.zeros((2, *image_shape), dtype=torch.uint8)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Leave out what torch says to its own developers: deprecations, TracerWarnings, packages it has no use for."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _explained(graph: _Graph, format: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a module from elsewhere may fail in any way
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [""])[0]
        encoder, other = type(graph.network.encoder).__name__, "TorchScript" if format == "ONNX" else "ONNX"
        raise ExportError(
            f"The encoder {encoder} cannot be written as {format}: {type(cause).__name__}: {reason} Try {other}, or "
            "change the encoder."
        ) from error


# --------------------------------------------------------------------------------------------------------- the check


def _images(learner: Learner) -> Tensor:
    """Random images, and some that the learner has stored."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (CHECKED, *learner.image_shape), dtype=torch.uint8, generator=generator)
    stored = learner.memory.contents()[0]
    return torch.cat([noise, stored[:: max(1, len(stored) // CHECKED)][:CHECKED].cpu()])


def _expected(reference: Learner, x: Tensor, columns: list[int]) -> Answers:
    """What the file has to say about these images."""
    answers = {"scores": reference.scores(x)[:, columns], "probabilities": reference.probabilities(x)[:, columns]}
    with torch.no_grad():
        features = torch.cat([reference.features(part) for part in x.split(reference.prediction_batch)])
        if reference.classifier in WITH_DISTANCES:
            answers["distances"] = reference.prototypes().distances(reference.compared(features))[:, columns]
    answers["features"] = F.normalize(features, dim=1)
    if any(answer.isnan().any() for answer in answers.values()):
        raise ExportError(
            "The model's answers are not numbers: what it learned was lost when its loss grew beyond bounds. Start "
            "afresh with a smaller learning_rate, or export an earlier file."
        )
    return {name: answer.float().cpu().numpy() for name, answer in answers.items()}


@contextlib.contextmanager
def _not_told_by_number() -> Iterator[None]:
    """Leave out the learner's warning of how many classes have no prototype; `_warn_of_missing` says which."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\d+ of the classes learned have no image", category=UserWarning)
        yield


def _warn_of_missing(reference: Learner, taught: _Taught) -> None:
    if reference.classifier == "softmax":
        return
    present = reference.prototypes().present.tolist()
    missing = [repr(label) for label, column in zip(taught.labels, taught.columns, strict=True) if not present[column]]
    if missing:
        names = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        warnings.warn(
            f"No image of {names} is left in memory, so the file can never predict "
            f"{'it' if len(missing) == 1 else 'them'}; a larger memory_size would keep some.",
            stacklevel=3,
        )


def _verified(data: bytes, format: str, x: Tensor, expected: Answers, about: str) -> float | None:
    """The largest difference between the answers of the file and those expected; an error if it is too large."""
    if format == "onnx" and importlib.util.find_spec("onnxruntime") is None:
        warnings.warn(
            f"The file was not compared with the model: that needs onnxruntime, not installed here: {INSTALL}.",
            stacklevel=3,
        )
        return None
    answer, found = (_open_onnx if format == "onnx" else _open_torchscript)(data)
    if found != about:
        raise ExportError(f"The file does not hold what was written about it ({found!r}); nothing was written.")
    worst = 0.0
    for begin, end in ((0, 1), (1, 4), (0, len(x))):  # batches of other sizes than the one it was made from
        answers = answer(x[begin:end])
        for name, values in expected.items():
            found_here = _difference(name, values[begin:end], answers[name])
            rounded = name == "probabilities"
            _check_difference(found_here, _last_digits(expected["scores"]) if rounded else 0.0)
            worst = max(worst, found_here)
    return worst


def _last_digits(scores: Array) -> float:
    """By how much the last digits of the scores can move a probability; much only for scores of many thousands."""
    largest = float(np.abs(scores[np.isfinite(scores)]).max(initial=0))
    return float(np.finfo(np.float32).eps) * largest


def _check_difference(difference: float, rounding: float = 0.0) -> None:
    if difference > TOLERANCE + rounding:
        raise ExportError(
            f"The file does not answer as the model does: the largest difference is {difference:.2g}, more than "
            f"{TOLERANCE + rounding:.1g}. Nothing was written. An encoder that takes other ways for other batches can "
            "do this."
        )


def _open_onnx(data: bytes) -> tuple[Callable[[Tensor], Answers], str | None]:
    """What answers from the bytes of a file, and what the file says about itself."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answer(x: Tensor) -> Answers:
        return dict(zip(names, session.run(names, {"images": x.numpy()}), strict=True))

    return answer, session.get_modelmeta().custom_metadata_map.get(ABOUT)


def _open_torchscript(data: bytes) -> tuple[Callable[[Tensor], Answers], str | None]:
    extra: dict[str, Any] = {f"{ABOUT}.json": ""}
    with _hushed():
        module = torch.jit.load(io.BytesIO(data), map_location="cpu", _extra_files=extra)

    def answer(x: Tensor) -> Answers:
        with torch.no_grad():
            return {name: value.numpy() for name, value in module(x).items()}

    return answer, extra[f"{ABOUT}.json"].decode()


def _difference(name: str, expected: Array, given: Array) -> float:
    """The largest difference, as a share of the largest value where that is above 1; infinite for another shape."""
    if expected.shape != given.shape:
        return math.inf
    if name == "distances":  # near 0 a root turns the last digit of its square into many
        expected, given = expected**2, given**2
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], given[~finite]) or not np.isfinite(given[finite]).all():
        return math.inf
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0)))
    return float(np.abs(expected[finite] - given[finite]).max(initial=0)) / scale
