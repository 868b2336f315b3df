"""The table of methods: each line says which parts make a method, with the paper's defaults."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from scrlearn.errors import InputError, suggest
from scrlearn.learners.agem import AGEM
from scrlearn.learners.base import Learner
from scrlearn.learners.ewc import EWC
from scrlearn.learners.icarl import ICaRL
from scrlearn.learners.lwf import LwF
from scrlearn.learners.objectives import OBJECTIVES, Objective
from scrlearn.learners.offline import Offline
from scrlearn.learners.replay import Replay
from scrlearn.memory import RETRIEVALS, UPDATES, Retrieval, Update

PARTS: dict[str, Mapping[str, type]] = {"objective": OBJECTIVES, "retrieve": RETRIEVALS, "update": UPDATES}
BASES: dict[str, type] = {"objective": Objective, "retrieve": Retrieval, "update": Update}
OWN_CHECK = frozenset({"augment"})  # takes a switch or a function, and says so itself
SURROUNDINGS = frozenset({"image_shape", "encoder", "device", "seed"})
NEED_HEAD = ("softmax", "combined")  # classifiers that a contrastive learner has to train a softmax head for


@dataclass(frozen=True)
class Method:
    """One line of the table: a name, where it comes from, and the parts and options that make it.

    `without_tasks` are the options that are better where nobody says that a task is over.
    """

    name: str
    title: str
    reference: str
    year: int
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    learner: type[Learner] = Replay
    without_tasks: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self, **chosen: Any) -> dict[str, Any]:
        """Every option the method takes, with its default; parts may be chosen differently first."""
        given = {**self.options, **chosen}
        parameters: dict[str, Any] = {}
        for owner in _classes(self.learner):
            parameters |= _signature(owner)
        for role, table in PARTS.items():
            if role in parameters:
                part = given.get(role, parameters[role])
                parameters |= _signature(_find(role, table, part) if isinstance(part, str) else type(part))
        return {name: given.get(name, default) for name, default in parameters.items() if name not in SURROUNDINGS}


# what scr+ is made of, whatever its encoder
SCR_PLUS: Mapping[str, Any] = {
    "objective": "supervised-contrastive",
    "retrieve": "random",
    "update": "balanced",
    "memory_size": 2000,
    "memory_batch": 100,
    "classifier": "combined",
    "calibrated": True,
    "averaging": 0.998,
    "mirror": True,
    "crops": True,
    "centred": True,
    "mix_after": 100.0,
    "cross_entropy_weight": 2.0,
    "momentum": 0.9,
    "learning_rate": 0.01,
    "weight_decay": 0.001,
    "orthogonal": 0.04,
}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "scr",
            "Supervised Contrastive Replay",
            "Mai, Li, Kim, Sanner, CVPR-W",
            2021,
            "contrasts stream and memory images over two views; answers by the nearest class mean",
            {
                "objective": "supervised-contrastive",
                "retrieve": "random",
                "update": "reservoir",
                "memory_size": 2000,
                "memory_batch": 100,
                "classifier": "ncm",
            },
        ),
        Method(
            "scr+",
            "Supervised Contrastive Replay with averaged weights and more",
            "this project",
            2026,
            "SCR with a cross-entropy term, mixed views, orthogonalised velocities and a balanced memory; averaged "
            "weights answer, from each image, its middle and their mirror images, by softmax and class means",
            SCR_PLUS,
        ),
        Method(
            "scr+wide",
            "scr+ with the full ResNet18",
            "this project",
            2026,
            "scr+ with an encoder of 64 channels in the first stage instead of 20, for ten times the arithmetic",
            {**SCR_PLUS, "width": 64},
        ),
        Method(
            "er",
            "Experience Replay",
            "Chaudhry et al., ICML-W",
            2019,
            "replays random images of a reservoir beside the stream",
            {"objective": "cross-entropy", "retrieve": "random", "update": "reservoir", "memory_size": 2000},
        ),
        Method(
            "a-gem",
            "Averaged Gradient Episodic Memory",
            "Chaudhry, Ranzato, Rohrbach, Elhoseiny, ICLR",
            2019,
            "trains on the stream, and takes out of each step what goes against the gradient of a memory batch",
            {"objective": "cross-entropy", "retrieve": "random", "update": "reservoir", "memory_size": 2000},
            AGEM,
            without_tasks={"from_start": True},
        ),
        Method(
            "mir",
            "Maximally Interfered Retrieval",
            "Aljundi et al., NeurIPS",
            2019,
            "replays the images whose loss a step on the stream batch would raise most",
            {"objective": "cross-entropy", "retrieve": "mir", "update": "reservoir", "memory_size": 2000},
        ),
        Method(
            "gss",
            "Gradient-based Sample Selection (greedy)",
            "Aljundi, Lin, Goujaud, Bengio, NeurIPS",
            2019,
            "keeps images whose gradients point in other directions than those of the memory",
            {"objective": "cross-entropy", "retrieve": "random", "update": "gss", "memory_size": 2000},
        ),
        Method(
            "aser",
            "Adversarial Shapley Value Experience Replay",
            "Shim et al., AAAI",
            2021,
            "replays what stands for the memory and is confused with the stream, by k-NN Shapley values (ASER_μ)",
            {
                "objective": "cross-entropy",
                "joint": True,
                "retrieve": "aser",
                "update": "aser",
                "memory_size": 2000,
            },
        ),
        Method(
            "fine-tune",
            "Fine-tuning",
            "lower bound",
            2021,
            "trains on the stream alone; images are stored for the nearest-class-mean classifier only, never replayed",
            {"objective": "cross-entropy", "retrieve": "none", "update": "reservoir", "memory_size": 2000},
        ),
        Method(
            "ewc++",
            "Elastic Weight Consolidation with a running Fisher information",
            "Chaudhry et al., ECCV",
            2018,
            "trains on the stream, and holds the weights that mattered for earlier tasks; images are never replayed",
            {"update": "reservoir", "memory_size": 2000},
            EWC,
        ),
        Method(
            "lwf",
            "Learning without Forgetting",
            "Li and Hoiem, ECCV",
            2016,
            "trains on the stream, and keeps the answers of the network before the task; images are never replayed",
            {"update": "reservoir", "memory_size": 2000},
            LwF,
        ),
        Method(
            "icarl",
            "Incremental Classifier and Representation Learning",
            "Rebuffi et al., CVPR",
            2017,
            "a binary loss for each class, old ones taught by the network before the task; exemplars chosen by herding",
            {"memory_size": 2000, "classifier": "ncm"},
            ICaRL,
        ),
        Method(
            "offline",
            "iid offline",
            "upper bound",
            2021,
            "stores every image and trains on all of them for 50 epochs when the stream is over",
            {},
            Offline,
        ),
    )
}


def plain_name(method: str) -> str:
    """A method's name for files and addresses, where a plus sign means a space to some programs.

    >>> plain_name("ewc++"), plain_name("scr+wide")
    ('ewc-plus-plus', 'scr-plus-wide')
    """
    return method.replace("+", "-plus-").replace("--", "-").removesuffix("-")


def find_method(name: str) -> Method:
    """The method of this name."""
    if name not in METHODS:
        raise InputError(f'There is no method "{name}".{suggest(name, METHODS)}')
    return METHODS[name]


def make_learner(method: str, *, image_shape: tuple[int, int, int], **options: Any) -> Learner:
    """Build a learner from the table; any option of its parts can be given by name.

    Examples
    --------
    >>> learner = make_learner("scr", image_shape=(1, 8, 8), memory_size=200, temperature=0.2)
    >>> learner.objective.temperature
    0.2
    >>> make_learner("scr", image_shape=(1, 8, 8), temprature=0.2)
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: Method "scr" has no option "temprature". Did you mean "temperature"?
    """
    spec = find_method(method)
    surroundings = {name: options.pop(name) for name in SURROUNDINGS & options.keys()}
    parts = {role: options[role] for role in PARTS if role in options}
    known = spec.parameters(**parts)
    for name in options:
        if name not in known:
            raise InputError(f'Method "{method}" has no option "{name}".{suggest(name, known)}')
        _check_kind(name, options[name], known[name])
    given = {**spec.options, **options}
    if surroundings.get("encoder") is not None and "width" not in options:
        given.pop("width", None)  # an encoder of one's own takes the place of the method's
    if given.get("classifier") in NEED_HEAD and "probe" in known:
        given.setdefault("probe", True)
    arguments = {name: given[name] for owner in _classes(spec.learner) for name in _signature(owner) if name in given}
    for role, table in PARTS.items():
        if isinstance(arguments.get(role), str):
            arguments[role] = _build(_find(role, table, arguments[role]), given)
    return spec.learner(image_shape=image_shape, **surroundings, **arguments)


def made_otherwise(
    method: str, made_with: Mapping[str, Any], given: Collection[str], without_tasks: bool = False
) -> dict[str, Any]:
    """The options that a learner was made with, and would not be made with today since a default has changed.

    Parameters
    ----------
    method
        Its name.
    made_with
        Options with the values they had. Those it did not have yet are left to today's defaults, which change nothing.
    given
        Names that somebody chose, so that no default counts.
    without_tasks
        Whether it was made where nobody says that a task is over.

    Examples
    --------
    >>> made_otherwise("er", {"memory_size": 500, "learning_rate": 0.1, "mirror": False}, given=[])
    {'memory_size': 500}
    """
    spec = find_method(method)
    parts = spec.parameters(**{role: made_with[role] for role in PARTS if isinstance(made_with.get(role), str)})
    today = {**parts, **spec.parameters()}  # who the parts are by default, and what those chosen take
    today |= spec.without_tasks if without_tasks else {}
    return {
        name: value for name, value in made_with.items() if name not in given and name in parts and value != today[name]
    }


def _check_kind(name: str, value: Any, default: Any) -> None:
    """Refuse what is of another kind than the default: text for a number, a number for a switch."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if name in PARTS:
        good, expected = isinstance(value, str | BASES[name]), f"a name, or a {BASES[name].__name__}"
    elif name in OWN_CHECK:
        return
    elif isinstance(default, bool):
        good, expected = not isinstance(value, str) and not number, "true or false"
    elif isinstance(default, int):
        good, expected = number and isinstance(value, Integral), f"a whole number, such as {default}"
    elif isinstance(default, float):
        good, expected = number and math.isfinite(value), f"a number, such as {default}"
    else:
        good, expected = not isinstance(default, str) or isinstance(value, str), f'a name, such as "{default}"'
    if not good:
        raise InputError(f"{name} is {value!r}; expected {expected}.")


def _find(role: str, table: Mapping[str, type], name: str) -> type:
    if name not in table:
        raise InputError(f'There is no {role} policy "{name}".{suggest(name, table)}')
    return table[name]


def _build(part: type, options: Mapping[str, Any]) -> Any:
    return part(**{name: options[name] for name in _signature(part) if name in options})


def _classes(learner: type[Learner]) -> list[type]:
    """The learner and the bases it passes its other options on to."""
    return [cls for cls in learner.__mro__ if issubclass(cls, Learner) and "__init__" in vars(cls)]


@functools.cache
def _signature(part: type) -> Mapping[str, Any]:
    """Names and defaults of what a part takes."""
    if part.__init__ is object.__init__:  # type: ignore[misc]
        return {}
    parameters = list(inspect.signature(part.__init__).parameters.values())[1:]  # type: ignore[misc]
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {p.name: None if p.default is p.empty else p.default for p in named}
