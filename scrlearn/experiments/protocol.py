"""The paper's protocol as data: what it measured, what came out, and the runs that measure it again.

Mai, Li, Kim, Sanner, "Supervised Contrastive Replay", CVPR-W 2021. Everything that a reproduction needs to know is in
the tables of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scrlearn.data.streams import Order
from scrlearn.errors import InputError, suggest
from scrlearn.evaluation import Interval
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import family_key, run_key

PAPER_RUNS = 10
TARGETS = ("table1", "figures", "ablations")
PAPER = "paper"  # all of them
DEFAULT_SEEDS = {"table1": 10, "figures": 5, "ablations": 5}

# ------------------------------------------------------------------------------------------------------------ streams


@dataclass(frozen=True)
class Split:
    """A data set as the paper's stream: its tasks, and the memory sizes it was measured with.

    `split`: training and test images as they came, or drawn anew as the released code does (`RunConfig.split`).
    `middle` is the memory of methods that never train on one: it serves their nearest-class-mean classifier alone.
    """

    title: str
    tasks: int
    memory: tuple[int, ...]
    split: str = "given"

    @property
    def middle(self) -> int:
        """The size in the middle."""
        return self.memory[len(self.memory) // 2]


DATASETS: dict[str, Split] = {
    "cifar10": Split("CIFAR-10", 5, (200, 500, 1000)),
    "cifar100": Split("CIFAR-100", 10, (1000, 2000, 5000)),
    "mini-imagenet": Split("Mini-ImageNet", 10, (1000, 2000, 5000), "shuffled"),
}

# ------------------------------------------------------------------------------------------------------------ methods


@dataclass(frozen=True)
class Recipe:
    """How a method is run to reproduce the paper.

    Parameters
    ----------
    title
        Its name in the paper.
    replays
        Whether the memory size matters: if not, one run stands for all.
    classes_ahead
        The head trains all classes from the start, as in the released code.
    options
        Options of the method.
    by_dataset
        Options that differ between data sets.
    most_seeds
        Enough of them.
    """

    title: str
    replays: bool = True
    classes_ahead: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    by_dataset: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most_seeds: int | None = None


ASER_PER_CLASS = {"cifar10": {"per_class": 9}, "cifar100": {"per_class": 2}, "mini-imagenet": {"per_class": 3}}

RECIPES: dict[str, Recipe] = {
    "fine-tune": Recipe("fine-tune", replays=False),
    "offline": Recipe("iid offline", replays=False, most_seeds=3),
    "ewc++": Recipe("EWC++", replays=False, options={"strength": 0}),  # the released configuration
    "lwf": Recipe("LwF", replays=False),
    "a-gem": Recipe("A-GEM"),
    "er": Recipe("ER"),
    "gss": Recipe("GSS"),
    "mir": Recipe("MIR"),
    "aser": Recipe("ASER_μ", by_dataset=ASER_PER_CLASS),
    "scr": Recipe("SCR", classes_ahead=False),  # with and without review, see `runs_for`
}

# ------------------------------------------------------------------------------------------------------------ Table 1

DATASET_ORDER = ("mini-imagenet", "cifar100", "cifar10")
COLUMNS = [(dataset, size) for dataset in DATASET_ORDER for size in DATASETS[dataset].memory]

# Average accuracy at the end, %, ± 95% interval over 10 runs. One figure for a data set: the memory size plays no part.
TABLE_1 = """
method    classifier | Mini-ImageNet 1k, 2k, 5k   | CIFAR-100 1k, 2k, 5k       | CIFAR-10 0.2k, 0.5k, 1k
fine-tune softmax    |  4.3±0.2                   |  5.8±0.3                   | 18.1±0.3
offline   softmax    | 51.4±0.2                   | 49.6±0.2                   | 81.7±0.1
ewc++     softmax    |  4.5±0.2                   |  5.8±0.3                   | 18.1±0.3
lwf       softmax    |  8.9±0.5                   | 13.9±0.5                   | 21.2±0.9
a-gem     softmax    |  4.5±0.4  4.6±0.2  4.6±0.2 |  5.8±0.3  6.0±0.3  5.9±0.2 | 18.2±0.3 18.3±0.2 18.2±0.2
a-gem     ncm        |  9.5±0.3 10.6±0.3 11.6±0.5 | 11.5±0.8 13.1±0.8 14.3±0.4 | 28.1±1.8 29.0±1.8 29.1±0.9
er        softmax    | 10.3±0.7 13.4±0.7 16.4±1.5 | 11.2±0.6 14.6±0.4 21.0±0.9 | 22.4±1.1 29.0±2.5 37.7±2.0
er        ncm        | 16.8±0.8 19.7±1.0 21.1±0.8 | 16.8±0.5 20.9±0.6 28.3±1.0 | 30.8±2.0 40.8±1.5 49.4±0.9
gss       softmax    | 10.5±0.6 13.5±1.1 14.5±2.2 | 10.6±0.4 13.5±0.4 18.0±1.1 | 23.0±0.9 28.5±1.5 34.6±2.3
gss       ncm        | 15.2±0.9 18.9±0.7 20.9±1.3 | 13.2±0.7 18.1±0.9 25.8±0.7 | 28.5±1.2 37.3±1.6 46.6±2.0
mir       softmax    | 10.7±0.7 14.7±1.1 17.3±1.6 | 11.7±0.3 14.9±0.5 21.6±1.2 | 23.8±0.9 33.6±1.7 43.0±1.6
mir       ncm        | 17.8±0.5 20.5±0.7 22.1±0.9 | 16.4±0.4 19.8±0.6 27.9±1.0 | 31.2±1.5 40.9±1.5 49.9±1.0
aser      softmax    | 12.5±0.8 14.9±0.5 18.2±0.9 | 14.4±0.6 17.5±0.6 21.7±1.0 | 28.5±1.3 39.8±1.7 46.7±1.3
aser      ncm        | 16.6±0.7 18.4±0.5 21.1±0.3 | 22.0±0.6 25.2±0.7 29.6±0.4 | 34.1±0.8 43.7±0.8 50.3±0.9
scr       ncm        | 24.1±0.6 30.6±0.5 35.4±0.5 | 26.6±0.5 32.8±0.7 37.8±0.3 | 48.6±1.1 59.6±1.2 65.7±0.6
"""


@dataclass(frozen=True)
class Row:
    """A row of Table 1: a method with a classifier; `cells` by (data set, memory size), in fractions.

    Where the memory size plays no part, every size of the data set has the same cell.
    """

    method: str
    classifier: str
    cells: Mapping[tuple[str, int], Interval]

    @property
    def title(self) -> str:
        """Its name in the paper."""
        added = "-NCM" if self.classifier == "ncm" and self.method != "scr" else ""
        return RECIPES[self.method].title + added


def _row(line: str) -> Row:
    (names, *groups) = [group.split() for group in line.split("|")]
    cells = {}
    for dataset, texts in zip(("mini-imagenet", "cifar100", "cifar10"), groups, strict=True):
        sizes = DATASETS[dataset].memory
        for size, text in zip(sizes, texts * len(sizes) if len(texts) == 1 else texts, strict=True):
            mean, half_width = text.split("±")
            cells[dataset, size] = Interval(float(mean) / 100, float(half_width) / 100, PAPER_RUNS)
    return Row(names[0], names[1], cells)


ROWS: tuple[Row, ...] = tuple(map(_row, TABLE_1.strip().splitlines()[1:]))


def paper(method: str, classifier: str, dataset: str, memory_size: int) -> Interval | None:
    """The paper's figure for a cell of Table 1, as a fraction; None where it has none.

    >>> print(paper("scr", "ncm", "cifar100", 2000))
    32.8 ± 0.7
    """
    found = [row for row in ROWS if (row.method, row.classifier) == (method, classifier)]
    return found[0].cells.get((dataset, memory_size)) if found else None


# ------------------------------------------------------------------------------------------------------------ figures

MEMORY_METHODS = ("a-gem", "er", "gss", "mir", "aser")


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: the methods it shows, where, and what it needs beside results.

    Confusion matrices, accuracies over tasks, the head's mean weights (`by_classifier["softmax"]["head_weights"]`) and
    times are part of every result; `artefacts` are made for the first seed alone.
    """

    number: int
    name: str
    title: str
    methods: tuple[str, ...]
    places: tuple[tuple[str, int], ...]
    artefacts: tuple[str, ...] = ()


STUDY = ("cifar100", 2000)
FIGURES: tuple[Figure, ...] = (
    Figure(1, "tsne", "Embeddings of the memory", ("er", "mir", "aser", "scr"), (STUDY,), ("memory", "test")),
    Figure(2, "confusion", "Confusion matrices", ("er", "scr"), (STUDY,)),
    Figure(3, "head-weights", "Mean weight of the last layer for new and old classes", ("er",), (STUDY,)),
    Figure(
        4,
        "softmax-ncm",
        "Softmax against the nearest class mean",
        MEMORY_METHODS,
        (("mini-imagenet", 2000), STUDY, ("cifar10", 500)),
    ),
    Figure(
        5,
        "accuracy",
        "Average accuracy on the tasks seen, nearest class mean",
        (*MEMORY_METHODS, "scr"),
        (("cifar10", 200), STUDY, ("mini-imagenet", 2000)),
    ),
    Figure(6, "run-time", "Run time, training and inference", ("fine-tune", "lwf", *MEMORY_METHODS, "scr"), (STUDY,)),
)

# ---------------------------------------------------------------------------------------------------------- ablations


@dataclass(frozen=True)
class Ablation:
    """One choice of SCR and its alternatives: options by the label of each.

    `chosen` is the paper's own, and `paper` what it says of them.
    """

    name: str
    title: str
    choices: Mapping[str, Mapping[str, Any]]
    chosen: str
    ordered: bool
    paper: str


def _numbers(option: str, values: Sequence[float]) -> dict[str, dict[str, Any]]:
    return {str(value): {option: value} for value in values}


BATCHES = (10, 20, 50, 100, 200, 500, 1000)
TEMPERATURES = (0.01, 0.02, 0.04, 0.08, 0.1, 0.16, 0.32, 0.64, 1.0)
ABLATIONS: tuple[Ablation, ...] = (
    Ablation(
        "memory-batch",
        "Memory batch",
        _numbers("memory_batch", BATCHES),
        "100",
        True,
        "more images help up to 200, and 500 or 1,000 do harm",
    ),
    Ablation(
        "management",
        "Memory management",
        {
            "random": {},
            "ASER": {"retrieve": "aser", "update": "aser", **ASER_PER_CLASS[STUDY[0]]},
            "ASER-R": {"retrieve": "aser", **ASER_PER_CLASS[STUDY[0]]},
            "ASER-U": {"update": "aser", **ASER_PER_CLASS[STUDY[0]]},
            "GSS": {"update": "gss"},
        },
        "random",
        False,
        "random is far better than GSS, and a little better than the others",
    ),
    Ablation(
        "temperature",
        "Temperature",
        _numbers("temperature", TEMPERATURES),
        "0.1",
        True,
        "stable from 0.02 to 0.16, worse below and above",
    ),
    Ablation(
        "projection",
        "Projection",
        {name: {"projection": name} for name in ("mlp", "linear", "none")},
        "mlp",
        False,
        "it makes no difference",
    ),
)

# --------------------------------------------------------------------------------------------------------------- runs


def config_for(
    method: str,
    dataset: str,
    memory_size: int | None = None,
    seed: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunConfig:
    """The run that reproduces a cell of Table 1.

    Parameters
    ----------
    method, dataset, memory_size, seed
        The cell; a method that never trains on its memory has the middle size, whatever is asked for.
    options
        More options of the method, such as ``{"review": True}``.
    settings
        Other fields of the configuration, such as ``order`` or ``engine``.

    Example
    -------
    >>> config_for("aser", "cifar10", 200).options, config_for("ewc++", "cifar10").memory_size
    ({'per_class': 9}, 500)
    """
    recipe, split = RECIPES[method], DATASETS[dataset]
    chosen: dict[str, Any] = {
        "tasks": split.tasks,
        "split": split.split,
        "memory_size": memory_size if recipe.replays and memory_size is not None else split.middle,
        "classes_ahead": recipe.classes_ahead,
        "options": {**recipe.options, **recipe.by_dataset.get(dataset, {}), **(options or {})},
    }
    return RunConfig(**{**chosen, **settings, "dataset": dataset, "method": method, "seed": seed})


def runs_for(
    target: str,
    datasets: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    memory: Sequence[int] | None = None,
    seeds: int | Sequence[int] | None = None,
    *,
    first_seed: int = 0,
    order: Order = "natural",
    review: bool | None = None,
    **settings: Any,
) -> list[RunConfig]:
    """The runs that the paper or a part of it is made of, each once.

    Parameters
    ----------
    target
        "table1", "figures" or "ablations"; "paper": all three, the ablations where the paper has them.
    datasets, methods, memory
        Only these; None: all that the paper has. Methods that never train on their memory are there for any size.
    seeds
        How many, or which; None: 10 for Table 1, 5 for the others.
    first_seed
        Where it begins to count them.
    order
        Class order: "natural" as in the released configuration, or "shuffled" by the seed.
    review
        SCR with review of the memory after each task, or without; None: both for Table 1, without for the others.
    settings
        Other fields of every configuration, such as ``engine`` or ``limit``.

    Example
    -------
    >>> len(runs_for("table1", ["cifar10"], seeds=10)), len(runs_for("ablations", seeds=1))
    (243, 21)
    """
    if target not in (*TARGETS, PAPER):
        raise InputError(f'There is no target "{target}".{suggest(target, (*TARGETS, PAPER))}')
    wanted = _Wanted(datasets, methods, memory)
    unique: dict[str, RunConfig] = {}
    for part in TARGETS if target == PAPER else (target,):
        here = wanted
        if target == PAPER and part == "ablations":  # they can be made elsewhere too
            if not wanted.admits("scr", *STUDY):
                continue
            here = _Wanted([STUDY[0]], methods, [STUDY[1]])
        numbers = seed_numbers(DEFAULT_SEEDS[part] if seeds is None else seeds, first_seed)
        for method, dataset, size, options in _cells(part, here, review):
            for seed in numbers[: RECIPES[method].most_seeds]:
                config = config_for(method, dataset, size, seed, options=options, order=order, **settings)
                unique.setdefault(run_key(config), config)
    if not unique:
        raise InputError(f"Nothing of {target} is left with these data sets, methods and memory sizes.")
    return sorted(unique.values(), key=lambda config: list(DATASETS).index(config.dataset))  # each is loaded once


def seed_numbers(seeds: int | Sequence[int], first: int = 0) -> list[int]:
    """Which seeds: so many from the first on, or these.

    >>> seed_numbers(3), seed_numbers(2, first=5), seed_numbers([7, 1])
    ([0, 1, 2], [5, 6], [7, 1])
    """
    numbers = list(range(first, first + seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise InputError(f"The seeds are {seeds}; expected one or more, each once, from 0 on.")
    return numbers


class _Wanted:
    """What of the paper was asked for."""

    def __init__(
        self, datasets: Sequence[str] | None, methods: Sequence[str] | None, memory: Sequence[int] | None
    ) -> None:
        for what, names, known in (("data set", datasets, DATASETS), ("method", methods, RECIPES)):
            for name in names or ():
                if name not in known:
                    raise InputError(f'The paper has no {what} "{name}".{suggest(name, known)}')
        sizes = sorted({size for name in datasets or DATASETS for size in DATASETS[name].memory})
        for size in memory or ():
            if size not in sizes:
                raise InputError(f"The paper has no memory size {size} there; it has {', '.join(map(str, sizes))}.")
        self.datasets, self.methods, self.memory = datasets, methods, memory

    def admits(self, method: str, dataset: str, size: int) -> bool:
        """Whether a cell was asked for."""
        return (
            (self.datasets is None or dataset in self.datasets)
            and (self.methods is None or method in self.methods)
            and (self.memory is None or size in self.memory or not RECIPES[method].replays)
        )


Cell = tuple[str, str, int, dict[str, Any]]


def _cells(part: str, wanted: _Wanted, review: bool | None) -> Iterator[Cell]:
    """The runs of a part of the paper but for their seeds."""
    reviews = [bool(review)] if review is not None or part != "table1" else [False, True]
    return {"table1": _table_cells, "figures": _figure_cells, "ablations": _ablation_cells}[part](wanted, reviews)


def _reviewed(method: str, reviews: Sequence[bool]) -> list[dict[str, Any]]:
    return [{"review": True} if review else {} for review in reviews] if method == "scr" else [{}]


def _table_cells(wanted: _Wanted, reviews: Sequence[bool]) -> Iterator[Cell]:
    for dataset, split in DATASETS.items():
        for method in RECIPES:
            for options in _reviewed(method, reviews):
                for size in split.memory:
                    if wanted.admits(method, dataset, size):
                        yield method, dataset, size, options


def _figure_cells(wanted: _Wanted, reviews: Sequence[bool]) -> Iterator[Cell]:
    for figure in FIGURES:
        for dataset, size in figure.places:
            for method in figure.methods:
                if wanted.admits(method, dataset, size):
                    yield from ((method, dataset, size, options) for options in _reviewed(method, reviews))


def _ablation_cells(wanted: _Wanted, reviews: Sequence[bool]) -> Iterator[Cell]:
    """Those of the paper's study, or of the data sets and memory sizes that were named."""
    for dataset in wanted.datasets or [STUDY[0]]:
        for size in wanted.memory or [STUDY[1] if dataset == STUDY[0] else DATASETS[dataset].middle]:
            if size in DATASETS[dataset].memory and wanted.admits("scr", dataset, size):
                for ablation in ABLATIONS:
                    for choice in ablation.choices.values():
                        here = {**choice, **ASER_PER_CLASS.get(dataset, {})} if "per_class" in choice else choice
                        yield from (
                            ("scr", dataset, size, {**here, **options}) for options in _reviewed("scr", reviews)
                        )


def artefacts_for(config: RunConfig) -> tuple[str, ...]:
    """What figures need of a run beside its result: of the first seed, however the stream was ordered or shortened.

    >>> artefacts_for(config_for("scr", "cifar100", 2000)), artefacts_for(config_for("scr", "cifar100", 1000))
    (('memory', 'test'), ())
    """
    if config.seed != 0:
        return ()
    plain = family_key(config.replace(order="natural", limit=None, precision="auto"))
    names: dict[str, None] = {}
    for figure in FIGURES:
        if figure.artefacts and config.method in figure.methods:
            wanted = [config_for(config.method, *place) for place in figure.places if place[0] == config.dataset]
            if any(family_key(one) == plain for one in wanted):
                names |= dict.fromkeys(figure.artefacts)
    return tuple(names)
