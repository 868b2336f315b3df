"""Beyond the paper: the runs that measure `scr+` against SCR, and what each of its parts is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scrlearn.data.streams import Order
from scrlearn.errors import InputError, suggest
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import run_key
from scrlearn.experiments.protocol import DATASETS, seed_numbers
from scrlearn.learners import find_method

TARGETS = ("beyond", "beyond-ablations", "beyond-wide")
DEFAULT_SEEDS = {"beyond": 10, "beyond-ablations": 5, "beyond-wide": 5}

# what a preset was built from, and the options that are one choice with another one
BASES = {"scr+": "scr"}
BELONGS_TO = {"learning_rate": "momentum", "classifier": "cross_entropy_weight"}

# what is measured: method and options
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "scr": ("scr", {}),
    "scr+": ("scr+", {}),
    "scr+ wide": ("scr+wide", {}),
}
IN_TABLE = ("scr", "scr+")
STUDIES = (("cifar100", 2000), ("cifar10", 500))


def variant(name: str, dataset: str, memory_size: int, seed: int = 0, **settings: Any) -> RunConfig:
    """A line of `VARIANTS` in a cell of Table 1, on the same images as the paper's methods.

    >>> variant("scr+ wide", "cifar10", 500).method
    'scr+wide'
    """
    method, options = VARIANTS[name]
    common = {"dataset": dataset, "memory_size": memory_size, "seed": seed, "split": _split(dataset), **settings}
    return RunConfig(method=method, options=options, **common)


def _split(dataset: str) -> str:
    return DATASETS[dataset].split if dataset in DATASETS else "given"


def parts_of(method: str = "scr+") -> dict[str, dict[str, Any]]:
    """The parts of a preset: what it adds to the method it was built from, by name, with their options.

    >>> len(parts_of("scr+")), parts_of("scr+")["mirror"], sorted(parts_of("scr+")["momentum"])
    (11, {'mirror': True}, ['learning_rate', 'momentum'])
    """
    if method not in BASES:
        raise InputError(f'"{method}" is not built from another method.{suggest(method, BASES)}')
    base, parts = _options(BASES[method]), dict[str, dict[str, Any]]()
    for name, value in _options(method).items():
        if base.get(name) != value:
            parts.setdefault(BELONGS_TO.get(name, name), {})[name] = value
    return parts


def _options(method: str) -> Mapping[str, Any]:
    return find_method(method).parameters()


def ablations_of(
    method: str = "scr+", dataset: str = "cifar100", memory_size: int = 2000, seed: int = 0, **settings: Any
) -> dict[str, RunConfig]:
    """The preset and the method it was built from; that with each part added, and the preset with each part taken away.

    Parameters
    ----------
    method
        The preset.
    dataset, memory_size, seed, settings
        Fields of every configuration.

    Example
    -------
    >>> runs = ablations_of("scr+")
    >>> len(runs), runs["scr + mirror"].options, runs["scr+ − mirror"].options
    (24, {'mirror': True}, {'mirror': False})
    """
    base = BASES.get(method, method)
    common = {"dataset": dataset, "memory_size": memory_size, "seed": seed, "split": _split(dataset), **settings}
    runs = {base: RunConfig(method=base, **common)}
    parts, usual = parts_of(method), _options(base)
    for name, options in parts.items():
        runs[f"{base} + {name}"] = _with(base, options, common)
    runs[method] = RunConfig(method=method, **common)
    for name, options in parts.items():
        runs[f"{method} − {name}"] = _with(method, {option: usual[option] for option in options}, common)
    return runs


def _with(method: str, options: Mapping[str, Any], common: Mapping[str, Any]) -> RunConfig:
    """A run with these options; who answers is a field of its own."""
    others = {name: value for name, value in options.items() if name != "classifier"}
    return RunConfig(method=method, classifier=options.get("classifier"), options=others, **common)


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
    """The runs of a part of this study, each once; called as `protocol.runs_for` is.

    Parameters
    ----------
    target
        "beyond": SCR and `scr+`, in all nine cells of Table 1. "beyond-ablations": each part added and taken away, on
        CIFAR-100 with 2,000 and CIFAR-10 with 500 images. "beyond-wide": `scr+` with the full ResNet18, in all nine
        cells.
    datasets, methods, memory
        Only these; None: all.
    seeds
        How many, or which; None: 10, for the ablations and the wide encoder 5.
    first_seed
        Where it begins to count them.
    order
        Class order: "natural", or "shuffled" by the seed.
    review
        Review the memory after each task, in every run; None: not.
    settings
        Other fields of every configuration.

    Example
    -------
    >>> len(runs_for("beyond", seeds=1)), len(runs_for("beyond-ablations", ["cifar10"], seeds=1))
    (18, 24)
    """
    if target not in TARGETS:
        raise InputError(f'There is no target "{target}".{suggest(target, TARGETS)}')
    _check_names("data set", datasets, DATASETS)
    _check_names("method", methods, {method: None for method, _ in VARIANTS.values()})
    numbers = seed_numbers(DEFAULT_SEEDS[target] if seeds is None else seeds, first_seed)
    common = {"order": order, **settings}
    unique: dict[str, RunConfig] = {}
    for dataset, size in _cells(target):
        if (datasets is None or dataset in datasets) and (memory is None or size in memory):
            by_seed = [_cell(target, dataset, size, seed, common) for seed in numbers]
            for config in (config for seeds in zip(*by_seed, strict=True) for config in seeds):
                if review:
                    config = config.replace(options={**config.options, "review": True})
                if methods is None or config.method in methods:
                    unique.setdefault(run_key(config), config)
    if not unique:
        raise InputError(f"Nothing of {target} is left with these data sets, methods, memory sizes and seeds.")
    return list(unique.values())


def _check_names(what: str, names: Sequence[str] | None, known: Mapping[str, Any]) -> None:
    for name in names or ():
        if name not in known:
            raise InputError(f'There is no {what} "{name}" in this study.{suggest(name, known)}')


def _cells(target: str) -> list[tuple[str, int]]:
    if target == "beyond-ablations":
        return list(STUDIES)
    return [(dataset, size) for dataset, split in DATASETS.items() for size in split.memory]


def _cell(target: str, dataset: str, size: int, seed: int, common: dict[str, Any]) -> list[RunConfig]:
    """The runs of one seed in one cell."""
    if target == "beyond-ablations":
        return list(ablations_of("scr+", dataset, size, seed, **common).values())
    names = IN_TABLE if target == "beyond" else ("scr+ wide",)
    return [variant(name, dataset, size, seed, **common) for name in names]
