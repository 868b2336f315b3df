"""From a picture's data to a matplotlib figure, and to files.

The data of a picture are values as they stand in the store, one for each seed; means and intervals are computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scrlearn.evaluation import Interval, interval
from scrlearn.experiments import plots
from scrlearn.experiments.report.document import Picture

Values = Sequence[float]
ENDINGS = ("png", "svg")


def _interval(values: Values) -> Interval:
    return interval(values) if len(values) else Interval(math.nan, math.nan, 0)


def _published(pair: Sequence[Sequence[float] | None]) -> tuple[Interval | None, Interval | None]:
    first, second = (None if value is None else Interval(value[0], value[1], 0) for value in pair)
    return first, second


def _softmax_ncm(title: str, bars: Mapping[str, Sequence[Values]], paper: Mapping[str, Any]) -> Figure:
    ours = {name: (_interval(softmax), _interval(ncm)) for name, (softmax, ncm) in bars.items()}
    return plots.softmax_vs_ncm(ours, title=title, paper={name: _published(pair) for name, pair in paper.items()})


def _run_times(title: str, seconds: Mapping[str, Values]) -> Figure:
    return plots.run_times({name: _interval(values) for name, values in seconds.items()}, title=title)


def _ablation(title: str, choices: Mapping[str, Values], chosen: str, ordered: bool, xlabel: str) -> Figure:
    intervals = [_interval(values) for values in choices.values()]
    return plots.ablation(list(choices), intervals, xlabel=xlabel, title=title, ordered=ordered, chosen=chosen)


def _bars(title: str, names: Sequence[str], groups: Mapping[str, Sequence[Values]], xlabel: str) -> Figure:
    return plots.accuracy_bars(
        {name: [_interval(values) for values in rows] for name, rows in groups.items()},
        names,
        title=title,
        xlabel=xlabel,
    )


KINDS: dict[str, Callable[..., Figure]] = {
    "memory maps": plots.memory_maps,
    "confusions": plots.confusions,
    "head weights": plots.head_weights,
    "softmax and ncm": _softmax_ncm,
    "accuracy over tasks": plots.accuracy_over_tasks,
    "run times": _run_times,
    "ablation": _ablation,
    "bars": _bars,
}


def draw(picture: Picture) -> Figure:
    """The picture, drawn."""
    return KINDS[picture.kind](**picture.data)


def save(picture: Picture, folder: Path) -> list[Path]:
    """Draw it into a folder, as PNG and as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(picture)
    paths = [folder / f"{picture.name}.{ending}" for ending in ENDINGS]
    for path in paths:
        plots.save(figure, path)
    return paths
