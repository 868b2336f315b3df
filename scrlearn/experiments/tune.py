"""Choosing settings without looking at the test: a search on the first tasks, over held-out training images."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scrlearn.data import Dataset, default_tasks, load
from scrlearn.errors import InputError, suggest
from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.claims import Claims
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import canonical_json, digest, identity
from scrlearn.experiments.record import Moment
from scrlearn.experiments.result import Result
from scrlearn.experiments.runner import run_all
from scrlearn.learners import find_method
from scrlearn.learners.methods import PARTS
from scrlearn.randomness import derived_seed

Values = dict[str, Any]
Space = Mapping[str, Sequence[Any]]
HOLDOUT = 0.1
REPEATS = 20  # proposals that were tried already, before another one is drawn at random
SAMPLERS = ("tpe", "even")
PRUNE_FROM = 5  # trials before the first one may be given up

_STEPS = {"learning_rate": (0.02, 0.05, 0.1, 0.2), "momentum": (0.0, 0.9)}
_REPLAY = {**_STEPS, "memory_batch": (10, 20, 50, 100)}
_PLUS: Space = {
    "learning_rate": (0.01, 0.02, 0.05),
    "weight_decay": (0.0, 0.001, 0.003),
    "cross_entropy_weight": (1.0, 2.0, 4.0),
    "feature_weight": (0.0, 1.0),
    "temperature": (0.1, 0.2),
    "mix_after": (0.0, 30.0, 100.0, 300.0),
    "orthogonal": (0.02, 0.04, 0.06),
    "updates_per_batch": (1, 2),
}
# what is searched unless told otherwise: the few options that matter most for a method on other data
SPACES: dict[str, Space] = {
    "scr": {**_STEPS, "memory_batch": (50, 100, 200), "temperature": (0.05, 0.07, 0.1, 0.2)},
    "scr+": _PLUS,
    "scr+wide": _PLUS,
    "er": _REPLAY,
    "a-gem": _REPLAY,
    "mir": _REPLAY,
    "gss": _REPLAY,
    "aser": {**_REPLAY, "neighbours": (3, 5)},
    "icarl": _REPLAY,
    "ewc++": {**_STEPS, "strength": (1.0, 10.0, 100.0, 1000.0)},
    "lwf": {**_STEPS, "distillation_temperature": (1.0, 2.0, 4.0)},
    "fine-tune": _STEPS,
    "offline": _STEPS,
}


@dataclass(frozen=True)
class Trial:
    """One choice of values, and how well it did.

    Parameters
    ----------
    number
        Its place in the search, from 0.
    values
        What was chosen.
    accuracies
        Average accuracy on the held-out images after the last task, a figure for each seed.
    by_classifier
        The same for every classifier that was measured.
    seconds
        Wall time.
    pruned
        It was given up after the first seed.
    """

    number: int
    values: Values
    accuracies: tuple[float, ...]
    by_classifier: Mapping[str, Sequence[float]]
    seconds: float
    pruned: bool = False

    @property
    def interval(self) -> Interval:
        """Mean over the seeds with its 95% interval."""
        return interval(self.accuracies)


@dataclass(frozen=True)
class Search:
    """What a search has found.

    Parameters
    ----------
    config
        What every trial ran, but for the values searched.
    space
        The values there were to choose from.
    trials
        All trials, in order.
    study
        The file that keeps them.
    memory_sizes
        The sizes every trial ran with, where there were several.
    """

    config: RunConfig
    space: Space
    trials: tuple[Trial, ...]
    study: Path
    memory_sizes: tuple[int, ...] = ()

    @property
    def ranking(self) -> list[Trial]:
        """Trials with all their seeds, best first; of equals the earlier."""
        whole = [trial for trial in self.trials if not trial.pruned]
        return sorted(whole, key=lambda trial: (-trial.interval.mean, trial.number))

    @property
    def best(self) -> Trial:
        """The trial with the best mean."""
        return self.ranking[0]

    @property
    def effects(self) -> dict[str, dict[Any, float]]:
        """For each option, how well its values do: the mean of all trials as it would be if all had that value.

        By least squares over the trials with all their seeds, as if each value added something of its own. It says most
        where all values were tried equally often (`sampler="even"`).
        """
        whole = [trial for trial in self.trials if not trial.pruned]
        columns = [(name, value) for name, values in self.space.items() for value in values]
        had = np.array([[float(trial.values[name] == value) for name, value in columns] for trial in whole])
        figures = np.array([trial.interval.mean for trial in whole])
        # shares of all trials are taken off, so that the smallest solution is about differences from their mean
        worth = np.linalg.lstsq(had - had.mean(0), figures - figures.mean(), rcond=None)[0]
        found: dict[str, dict[Any, float]] = {}
        for name, values in self.space.items():
            at = [i for i, (option, _) in enumerate(columns) if option == name]
            usual = float(worth[at] @ had.mean(0)[at])
            shown = {value: figures.mean() + worth[i] - usual for value, i in zip(values, at, strict=True)}
            found[name] = {value: float(shown[value]) for value, i in zip(values, at, strict=True) if had[:, i].any()}
        return found

    @property
    def chosen(self) -> RunConfig:
        """The best values on the whole stream, with the real test images."""
        whole = self.config.replace(holdout=0.0, first_tasks=None, seed=0)
        return with_values(whole, self.best.values)

    @property
    def command(self) -> str:
        """The command that runs what was chosen."""
        return shlex.join(run_command(self.chosen))


class SearchStopped(KeyboardInterrupt):
    """A search was interrupted; the trials that were finished are kept."""


class Watcher(Protocol):
    """Who is told how a search goes."""

    def started(self, number: int, values: Values) -> None:
        """A trial begins."""
        ...

    def progress(self, moment: Moment) -> None:
        """A run of the trial is this far."""
        ...

    def ended(self, trial: Trial) -> None:
        """A trial is over, or was found in the study."""
        ...


class Nobody(Watcher):
    """Nobody is told."""

    def started(self, number: int, values: Values) -> None:
        """A trial begins."""

    def progress(self, moment: Moment) -> None:
        """A run of the trial is this far."""

    def ended(self, trial: Trial) -> None:
        """A trial is over, or was found in the study."""


def default_space(method: str) -> Space:
    """What is searched for a method unless told otherwise.

    >>> default_space("fine-tune")
    {'learning_rate': (0.02, 0.05, 0.1, 0.2), 'momentum': (0.0, 0.9)}
    """
    find_method(method)
    return SPACES.get(method, _STEPS)


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """The configuration with values of a space: options of the method, or its classifier."""
    options = {**config.options, **{name: value for name, value in values.items() if name != "classifier"}}
    return config.replace(options=options, classifier=values.get("classifier", config.classifier))


def tune(
    config: RunConfig,
    space: Space | None = None,
    *,
    trials: int = 30,
    seeds: int | Sequence[int] = 3,
    memory_sizes: Sequence[int] = (),
    study: str | Path = "tuning.db",
    sampler: str = "tpe",
    sampler_seed: int = 0,
    prune: bool = False,
    at_once: int = 1,
    data_root: str | Path | None = None,
    download: bool = False,
    dataset: Dataset | None = None,
    parallel: int | None = None,
    watcher: Watcher | None = None,
) -> Search:
    """Search for the values that do best on the first tasks of a stream, without looking at its test images.

    Each trial is run with several seeds; its figure is the mean of their average accuracies on held-out training images
    after the last of the first tasks. Values are proposed by Optuna's tree-structured Parzen estimator, the method's
    own defaults first where they are in the space; or evenly, whatever the trials so far have shown. No choice is run
    twice, and a space that has been tried whole ends the search. Every trial is kept in an SQLite file: the same call
    goes on where it was stopped, and proposes what it would have proposed without the stop. One process at a time works
    on a search.

    Parameters
    ----------
    config
        What to run. Where it holds nothing out, a tenth of the training images is held out; where it does not say how
        many tasks, a third of them are used (at least two).
    space
        Values to choose from, by option; "classifier" may be among them. None: `default_space`.
    trials
        How many, those in the study already included.
    seeds
        How many (from the configuration's own on), or which.
    memory_sizes
        Run every trial with each of these, in the place of the configuration's; the mean over them counts.
    study
        The SQLite file; searches that differ in anything but `trials` lie in it side by side.
    sampler
        "tpe" to look for the best where it is most likely; "even" to try all values of each option equally often, in
        shuffled company, which tells best what each of them is worth (`Search.effects`).
    sampler_seed
        Fixes what is proposed.
    prune
        Give a trial up after its first seed where that is below the median of the first seeds so far (from the sixth
        trial on). On a GPU the first seed then runs alone, before the others run side by side.
    at_once
        Trials that are proposed together, and on a GPU run side by side with all their seeds; not with `prune`.
    data_root, download, dataset, parallel
        See `scrlearn.experiments.run_seeds`.
    watcher
        Told how it goes.

    Raises
    ------
    SearchStopped
        Ctrl-C. The trial under way is lost, the others are kept.
    """
    _require_optuna()
    space = default_space(config.method) if space is None else space
    _check_space(config, space)
    numbers = list(range(config.seed, config.seed + seeds)) if isinstance(seeds, int) else list(seeds)
    if trials < 1 or not numbers:
        raise InputError(f"trials is {trials} and there are {len(numbers)} seeds; expected 1 or more of each.")
    if len(set(memory_sizes)) < len(memory_sizes):
        raise InputError(f"The memory sizes are {list(memory_sizes)}; expected each once.")
    if memory_sizes:
        config = config.replace(memory_size=max(memory_sizes))
    if sampler not in SAMPLERS:
        raise InputError(f'There is no sampler "{sampler}".{suggest(sampler, SAMPLERS)}')
    if at_once < 1 or (at_once > 1 and prune):
        raise InputError(f"at_once is {at_once}; expected 1 or more, and 1 where bad trials are given up early.")
    dataset = dataset or load(config.dataset, data_root, download=download, image_size=config.image_size)
    config = _first_tasks(config, dataset)
    dataset = config.prepare(dataset)
    _check_values(config, space, dataset)
    book = Book(Path(study), config, space, numbers, sampler, sampler_seed, prune, memory_sizes)
    watcher = watcher or Nobody()
    claims, mine = Claims(book.path.parent), f".{book.path.name}-{book.name}"
    if not claims.take(mine):
        raise InputError(f'Another process works on this search in "{book.path}". Wait for it, or use another file.')
    for trial in book.trials():
        watcher.ended(trial)
    try:
        while (left := min(trials - len(book.trials()), book.untried)) > 0:
            if at_once == 1:
                watcher.ended(_try(book, dataset, parallel, watcher))
            else:
                _try_several(
                    book, min(at_once - len(book.trials()) % at_once, left), at_once, dataset, parallel, watcher
                )
    except KeyboardInterrupt as error:
        done = len(book.trials())
        raise SearchStopped(f"Stopped after {done} of {trials} trials. The same command goes on from here.") from error
    finally:
        claims.give_back(mine)
    return Search(config, space, tuple(book.trials()), book.path, tuple(memory_sizes))


def _try(book: Book, dataset: Dataset, parallel: int | None, watcher: Watcher) -> Trial:
    """Run one trial with all its seeds."""
    values, begin = book.propose(), time.monotonic()
    watcher.started(len(book.trials()), values)
    results: list[Result] = []
    pruned = False
    for seeds in book.groups():
        if pruned := bool(results) and book.gives_up(book.accuracies(results)[0][0]):
            break
        configs = book.configs(values, seeds)
        results += run_all(configs, dataset, parallel=parallel, progress=watcher.progress)
    trial = Trial(len(book.trials()), values, *book.accuracies(results), time.monotonic() - begin, pruned)
    book.keep(trial)
    return trial


def _try_several(
    book: Book, count: int, at_once: int, dataset: Dataset, parallel: int | None, watcher: Watcher
) -> None:
    """Run so many trials with all their seeds together; those of one group know nothing of each other."""
    begin, done = time.monotonic(), len(book.trials())
    proposed: list[Values] = []
    for number in range(done, done + count):
        proposed.append(book.propose(number - number % at_once, proposed))
        watcher.started(number, proposed[-1])
    configs = [config for values in proposed for config in book.configs(values, book.seeds)]
    results = run_all(configs, dataset, parallel=parallel, progress=watcher.progress)
    seconds, runs = (time.monotonic() - begin) / count, len(configs) // count
    for i, values in enumerate(proposed):
        trial = Trial(done + i, values, *book.accuracies(results[i * runs : (i + 1) * runs]), seconds)
        book.keep(trial)
        watcher.ended(trial)


def _number(accuracy: float | None) -> float:
    return 0.0 if accuracy is None or math.isnan(accuracy) else accuracy


def _first_tasks(config: RunConfig, dataset: Dataset) -> RunConfig:
    """The configuration that never sees a later task or a test image."""
    tasks = default_tasks(dataset) if config.tasks is None else config.tasks
    first = config.first_tasks or min(tasks, max(2, tasks // 3))
    return config.replace(first_tasks=first, holdout=config.holdout or HOLDOUT)


def _check_space(config: RunConfig, space: Space) -> None:
    """Refuse what cannot be searched before anything runs."""
    if not space:
        raise InputError("The space is empty: give at least one option with the values to try.")
    for name, values in space.items():
        if not values or len({canonical_json(value) for value in values}) < len(values):
            raise InputError(f"The values of {name} are {list(values)}; expected one or more, each once.")
        for value in values:
            if not isinstance(value, bool | int | float | str | None):
                raise InputError(f"{name}={value!r} cannot be searched; give numbers, texts, true, false or null.")
    for parts in _choices(space, PARTS):
        known = find_method(config.method).parameters(**{**config.options, **parts})
        for name in space:
            if name not in known:
                raise InputError(f'Method "{config.method}" has no option "{name}".{suggest(name, known)}')
    with_values(config, {name: values[0] for name, values in space.items()})  # some names are not for the options


def _check_values(config: RunConfig, space: Space, dataset: Dataset) -> None:
    """Refuse a value that no learner takes before the first trial has run: each is tried beside the first others."""
    first = {name: values[0] for name, values in space.items()}
    for name, values in space.items():
        for value in values:
            chosen = with_values(config, {**first, name: value})
            chosen.make_learner(dataset.image_shape, len(dataset.class_names))


def _choices(space: Space, names: Mapping[str, Any]) -> Iterator[Values]:
    """Every combination of the values of some names."""
    among = [name for name in space if name in names]
    for values in itertools.product(*(space[name] for name in among)):
        yield dict(zip(among, values, strict=True))


# --------------------------------------------------------------------------------------------------------- the study


def _require_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise InputError(f'Tuning needs {error.name}, which is not installed: pip install "scrlearn[tune]".') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Book:
    """The study of one search in its SQLite file: proposes values, and keeps what came out.

    Only finished trials are written down, so one that was killed leaves no trace.

    Parameters
    ----------
    path
        The file.
    config, space, seeds, sampler, sampler_seed, prune, memory_sizes
        What is searched; together they are the study's name.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        space: Space,
        seeds: list[int],
        sampler: str,
        sampler_seed: int,
        prune: bool,
        memory_sizes: Sequence[int] = (),
    ) -> None:
        self.optuna = _require_optuna()
        self.path, self.config, self.space, self.seeds = path, config, space, seeds
        self.memory_sizes: list[int | None] = [*memory_sizes] or [config.memory_size]
        self.sampler, self.sampler_seed, self.prune = sampler, sampler_seed, prune
        choice = self.optuna.distributions.CategoricalDistribution
        self.distributions = {name: choice(list(values)) for name, values in space.items()}
        about = {
            "run": {name: value for name, value in identity(config).items() if name != "seed"},
            "space": {name: list(values) for name, values in space.items()},
            "seeds": seeds,
            **({"sampler": sampler} if sampler != SAMPLERS[0] else {}),
            "sampler_seed": sampler_seed,
            "prune": prune,
            **({"memory_sizes": self.memory_sizes} if len(self.memory_sizes) > 1 else {}),
        }
        self.name = digest(about)[:12]
        self.study = self._open(f"{config.method} on {config.dataset}, {self.name}")
        self.study.set_user_attr("about", canonical_json(about))

    def _open(self, name: str) -> Any:
        if self.path.is_dir():
            raise InputError(f'"{self.path}" is a folder; the study is one file, such as {self.path / "tuning.db"}.')
        self.path.parent.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{self.path.resolve()}"
        try:
            return self.optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        except Exception as error:  # SQLAlchemy's errors have no common base with ours
            raise InputError(f'"{self.path}" cannot be used as a study: {error}') from error

    def configs(self, values: Values, seeds: Sequence[int]) -> list[RunConfig]:
        """The runs of a trial: for each seed, one with each memory size."""
        config = with_values(self.config, values)
        return [config.replace(seed=seed, memory_size=size) for seed in seeds for size in self.memory_sizes]

    def accuracies(self, results: Sequence[Result]) -> tuple[tuple[float, ...], dict[str, list[float]]]:
        """A figure for each seed, the mean over the memory sizes; and the same for every classifier."""
        names = list(results[0].by_classifier)
        return tuple(self._means([result.average_accuracy for result in results])), {
            name: self._means([result.by_classifier[name]["average_accuracy"] for result in results]) for name in names
        }

    def _means(self, accuracies: Sequence[float | None]) -> list[float]:
        numbers, size = [_number(accuracy) for accuracy in accuracies], len(self.memory_sizes)
        return [statistics.fmean(numbers[first : first + size]) for first in range(0, len(numbers), size)]

    @property
    def untried(self) -> int:
        """How many choices have not been tried."""
        tried = {canonical_json(trial.values) for trial in self.trials()}
        return math.prod(len(values) for values in self.space.values()) - len(tried)

    def groups(self) -> list[list[int]]:
        """Seeds that run together, one group after the other."""
        return [self.seeds[:1], self.seeds[1:]] if self.prune and len(self.seeds) > 1 else [self.seeds]

    def trials(self) -> list[Trial]:
        """What was tried, in order."""
        return [
            Trial(
                number,
                {name: kept.params[name] for name in self.space},
                tuple(kept.user_attrs["accuracies"]),
                kept.user_attrs["by_classifier"],
                kept.user_attrs["seconds"],
                kept.user_attrs["pruned"],
            )
            for number, kept in enumerate(self.study.get_trials(deepcopy=False))
        ]

    def propose(self, known: int | None = None, beside: Sequence[Values] = ()) -> Values:
        """A choice that was not tried yet. What it is depends on the trials there are and on the seed alone.

        Parameters
        ----------
        known
            Only the first so many trials are learned from; None: all.
        beside
            What is tried at the same time.
        """
        tried = {canonical_json(values) for values in (*(trial.values for trial in self.trials()), *beside)}
        if self.sampler == "even":
            return self._evenly([*(trial.values for trial in self.trials()), *beside]) or self._untried(tried)
        if not tried and (usual := self._defaults()) is not None:
            return usual
        advisor = self.optuna.create_study(direction="maximize")  # a copy: what is only proposed is not written down
        advisor.add_trials(self.study.get_trials(deepcopy=False)[:known])
        for attempt in range(REPEATS):
            seed = derived_seed(self.sampler_seed, "tune", len(tried), attempt) % 2**32
            advisor.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=False)
            proposed = advisor.ask(self.distributions).params
            if canonical_json(proposed) not in tried:
                return {name: proposed[name] for name in self.space}
        return self._untried(tried)

    def _evenly(self, tried: Sequence[Values]) -> Values | None:
        """Of each option a value that was tried least often; of several, one at random. None: all such were tried."""
        for attempt in range(REPEATS):
            values: Values = {}
            for name, choices in self.space.items():
                counts = [sum(earlier[name] == value for earlier in tried) for value in choices]
                most = min(counts) + attempt // (REPEATS // 2)  # once more often, where there is no other way
                least = [value for value, count in zip(choices, counts, strict=True) if count <= most]
                values[name] = least[derived_seed(self.sampler_seed, "even", len(tried), attempt, name) % len(least)]
            if values not in tried:
                return values
        return None

    def _defaults(self) -> Values | None:
        """The method as it stands, where all of it is in the space."""
        known = find_method(self.config.method).parameters(**self.config.options)
        known = {**known, "classifier": self.config.classifier or known["classifier"]}
        usual = {name: known[name] for name in self.space}
        return usual if all(usual[name] in values for name, values in self.space.items()) else None

    def _untried(self, tried: set[str]) -> Values:
        """A choice at random out of those not tried."""
        for attempt in itertools.count():
            seed = derived_seed(self.sampler_seed, "untried", len(tried), attempt)
            numbers = {name: derived_seed(seed, name) % len(values) for name, values in self.space.items()}
            values = {name: self.space[name][number] for name, number in numbers.items()}
            if canonical_json(values) not in tried:
                return values
        raise AssertionError("counted to infinity")

    def gives_up(self, accuracy: float) -> bool:
        """Whether a trial that begins like this is not worth its other seeds."""
        firsts = [trial.accuracies[0] for trial in self.trials()]
        return self.prune and len(firsts) >= PRUNE_FROM and accuracy < statistics.median(firsts)

    def keep(self, trial: Trial) -> None:
        """Write a finished trial down."""
        states = self.optuna.trial.TrialState
        self.study.add_trial(
            self.optuna.trial.create_trial(
                state=states.PRUNED if trial.pruned else states.COMPLETE,
                value=None if trial.pruned else sum(trial.accuracies) / len(trial.accuracies),
                params=trial.values,
                distributions=self.distributions,
                intermediate_values={0: trial.accuracies[0]},
                user_attrs={
                    "accuracies": list(trial.accuracies),
                    "by_classifier": {name: list(values) for name, values in trial.by_classifier.items()},
                    "seconds": trial.seconds,
                    "pruned": trial.pruned,
                },
            )
        )


# ------------------------------------------------------------------------------------------------------- the command

_FLAGS: dict[str, Callable[[Any], list[str]]] = {
    "memory_size": lambda value: ["--memory", str(value)],
    "drop_last": lambda value: [] if value else ["--no-drop-last"],
    "classes_ahead": lambda value: ["--classes-ahead"] if value else [],
    "options": lambda value: [word for name in value for word in ("-O", f"{name}={_word(value[name])}")],
}


def run_command(config: RunConfig) -> list[str]:
    """The words of the `scr run` command with this configuration.

    >>> shlex.join(run_command(RunConfig(method="er", memory_size=200, options={"learning_rate": 0.05}, seed=3)))
    'scr run --dataset digits --method er --memory 200 --seed 3 -O learning_rate=0.05'
    """
    words = ["scr", "run", "--dataset", config.dataset, "--method", config.method]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("dataset", "method") or value == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        words += _FLAGS[field.name](value) if field.name in _FLAGS else [flag, str(value)]
    return words


def _word(value: Any) -> str:
    """A value as `-O NAME=VALUE` reads it: JSON where text would be taken for something else."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except json.JSONDecodeError:
            return value
    return json.dumps(value)
