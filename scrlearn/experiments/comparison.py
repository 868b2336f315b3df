"""Our figures beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import describe, family_key
from scrlearn.experiments.protocol import config_for, paper
from scrlearn.experiments.store import Store


@dataclass(frozen=True)
class Line:
    """One configuration with one classifier: our average accuracy over its seeds, and the paper's where it has one."""

    config: RunConfig
    classifier: str
    wanted: int
    ours: Interval | None
    paper: Interval | None

    @property
    def name(self) -> str:
        """The configuration in a line."""
        return describe(self.config, seed=False)

    @property
    def verdict(self) -> str:
        """Where our mean lies: "inside" the paper's interval widened by ours, "above" or "below" it; "" if unknown."""
        return "" if self.ours is None or self.paper is None else verdict(self.ours, self.paper)


def verdict(ours: Interval, paper: Interval) -> str:
    """Where a mean lies against an interval that is widened by its own.

    >>> verdict(Interval(0.334, 0.002, 10), Interval(0.328, 0.007, 10))
    'inside'
    >>> verdict(Interval(0.286, 0.004, 10), Interval(0.306, 0.005, 10))
    'below'
    """
    width = paper.half_width + (0.0 if math.isnan(ours.half_width) else ours.half_width)
    if abs(ours.mean - paper.mean) <= width + 1e-12:
        return "inside"
    return "above" if ours.mean > paper.mean else "below"


def compare(configs: Sequence[RunConfig], store: Store) -> list[Line]:
    """A line for each classifier of each configuration, over the seeds that are in the store.

    Parameters
    ----------
    configs
        The runs; those that differ in their seed alone share a line.
    store
        Where their results are.
    """
    families: dict[str, list[RunConfig]] = {}
    for config in configs:
        families.setdefault(family_key(config), []).append(config)
    lines = []
    for members in families.values():
        seeds = {config.seed for config in members}
        results = [entry.result for entry in store.seeds(members[0]) if entry.result.seed in seeds]
        classifiers = dict.fromkeys(name for result in results for name in result.by_classifier) or [""]
        for classifier in sorted(classifiers, key=lambda name: name != "softmax"):
            figures = [result.by_classifier.get(classifier, {}) for result in results]
            values = [one.get("average_accuracy") for one in figures]
            known = [value for value in values if value is not None]
            ours = interval(known) if known else None
            lines.append(Line(members[0], classifier, len(members), ours, paper_figure(members[0], classifier)))
    return lines


def paper_figure(config: RunConfig, classifier: str) -> Interval | None:
    """The paper's figure where the configuration is a cell of Table 1: with review or without, in any order."""
    options = {"review": True} if config.options.get("review") else {}
    try:
        cell = config_for(config.method, config.dataset, config.memory_size, order=config.order, options=options)
    except KeyError:  # a method or data set that the paper has not
        return None
    if config.memory_size is None or family_key(cell) != family_key(config.replace(precision="auto")):
        return None
    return paper(config.method, classifier, config.dataset, config.memory_size)
