"""The runs of a report: by configuration, with means over seeds, and the commands that make what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import family_key
from scrlearn.experiments.protocol import DATASETS
from scrlearn.experiments.store import Entry


class Runs:
    """All runs, found by their configuration; it remembers which were asked for.

    Parameters
    ----------
    entries
        Runs of a store.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.families: dict[str, list[Entry]] = {}
        self.asked: set[str] = set()
        for entry in entries:
            self.families.setdefault(family_key(entry.config), []).append(entry)
        for members in self.families.values():
            members.sort(key=lambda entry: entry.result.seed)

    def __len__(self) -> int:
        """How many runs there are."""
        return sum(map(len, self.families.values()))

    def seeds(self, config: RunConfig) -> list[Entry]:
        """The runs that differ from this configuration in their seed alone, by seed."""
        key = family_key(config)
        self.asked.add(key)
        return self.families.get(key, [])

    def values(self, config: RunConfig, classifier: str | None = None) -> dict[int, float]:
        """Average accuracy of each seed; of the method's own classifier, if none is named."""
        return values_of(self.seeds(config), classifier)

    def accuracy(self, config: RunConfig, classifier: str | None = None) -> Interval | None:
        """Mean ± interval over the seeds; None where there are no runs."""
        values = self.values(config, classifier)
        return interval(list(values.values())) if values else None

    def rest(self) -> list[list[Entry]]:
        """Runs that nobody has asked for, by configuration, in the order in which they came."""
        return [members for key, members in self.families.items() if key not in self.asked]


def values_of(entries: Iterable[Entry], classifier: str | None = None) -> dict[int, float]:
    """Average accuracy by seed, where it is known."""
    found = {}
    for entry in entries:
        figures = entry.result.by_classifier.get(classifier or entry.result.classifier, {})
        if figures.get("average_accuracy") is not None:
            found[entry.result.seed] = float(figures["average_accuracy"])
    return found


def seconds_of(entry: Entry) -> float:
    """Training and inference; runs that were made side by side share the machine's time."""
    seconds = entry.result.seconds
    return (seconds["training"] + seconds["evaluation"]) / seconds.get("side_by_side", 1)


def has_own_time(entry: Entry) -> bool:
    """Whether all runs beside it were of its kind: those that take turns take the same time, whatever they do in it."""
    seconds = entry.result.seconds
    return seconds.get("alike", seconds.get("side_by_side", 1)) >= seconds.get("side_by_side", 1)


# --------------------------------------------------------------------------------------------------------------- words


def size_text(size: int) -> str:
    """A memory size as the paper writes it.

    >>> size_text(200), size_text(5000)
    ('0.2k', '5k')
    """
    return f"{size / 1000:g}k"


def place_text(dataset: str, size: int | None = None) -> str:
    """A data set, with a memory size where it matters.

    >>> place_text("cifar100", 2000)
    'CIFAR-100, M = 2k'
    """
    title = DATASETS[dataset].title if dataset in DATASETS else dataset
    return title if size is None else f"{title}, M = {size_text(size)}"


def figure_text(value: Interval | None) -> str:
    """Mean ± interval in percent and, in brackets, over how many seeds.

    >>> figure_text(Interval(0.334, 0.002, 10)), figure_text(Interval(0.5, math.nan, 1)), figure_text(None)
    ('33.4 ± 0.2 (10)', '50.0 (1)', 'not yet')
    """
    if value is None or math.isnan(value.mean):
        return "not yet"
    return f"{value.format() if value.n > 1 else f'{100 * value.mean:.1f}'} ({value.n})"


def difference_text(value: Interval | None) -> str:
    """A difference in points.

    >>> difference_text(Interval(0.062, 0.003, 10)), difference_text(Interval(-0.0104, math.nan, 1))
    ('+6.2 ± 0.3', '−1.0')
    """
    if value is None or math.isnan(value.mean):
        return ""
    sign = "−" if value.mean < 0 else "+"
    width = "" if math.isnan(value.half_width) else f" ± {100 * value.half_width:.1f}"
    return f"{sign}{abs(100 * value.mean):.1f}{width}"


def seeds_text(counts: Mapping[str, int]) -> str:
    """Over how many seeds, in a sentence.

    >>> seeds_text({"ER": 5, "SCR": 5}), seeds_text({"ER": 5, "MIR": 5, "SCR": 10})
    ('5 seeds each.', '5 seeds each, but 10 of SCR.')
    """
    usual = max(counts.values(), key=list(counts.values()).count)
    others = [f"{count} of {name}" for name, count in counts.items() if count != usual]
    each = " each" if len(counts) > 1 else ""
    return f"{usual} seed{'' if usual == 1 else 's'}{each}{', but ' + ', '.join(others) if others else ''}."


def command(
    target: str,
    datasets: Sequence[str] = (),
    methods: Sequence[str] = (),
    memory: Sequence[int] = (),
) -> str:
    """The command that makes runs of the protocol.

    >>> command("table1", ["cifar10"], ["er", "scr"], [200])
    'scr reproduce table1 --datasets cifar10 --methods er,scr --memory 200'
    """
    words = ["scr", "reproduce", target]
    for option, values in (("--datasets", datasets), ("--methods", methods), ("--memory", memory)):
        unique = list(dict.fromkeys(map(str, values)))
        words += [option, ",".join(unique)] if unique else []
    return " ".join(words)
