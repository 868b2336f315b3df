"""Explanations by people, for figures of Table 1 that lie outside the paper's interval: a small TOML file.

    [[note]]
    method = "scr"
    dataset = "mini-imagenet"       # all that follow, and this one too, may be left out: then it is about all of them
    memory = 2000
    classifier = "ncm"
    review = false
    text = "With a shuffled class order it is {shuffled}: the order of the classes is the reason."
    figures.shuffled = { order = "shuffled" }

Figures are not typed into a text: ``{ours}``, ``{paper}`` and ``{difference}`` are those of the cell, and each of
`figures` is the mean over the runs whose configuration differs from the cell's in what is said there. What a benchmark
has found is named by its file, beside the notes, and by what tells the line in it from the others:

    figures.sharper = { file = "benchmarks/sharpness.json", amount = 0.6 }
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrlearn.errors import InputError, suggest
from scrlearn.evaluation import Interval
from scrlearn.experiments.protocol import DATASETS, RECIPES, config_for
from scrlearn.experiments.report.runs import Runs, difference_text, figure_text

if TYPE_CHECKING:
    from scrlearn.experiments.report.table import Comparison

ABOUT = {"method": str, "dataset": str, "memory": int, "classifier": str, "review": bool}
CHANGES = ("method", "dataset", "memory", "classifier", "order", "options", "classes_ahead", "precision")
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
# a decimal of 1 or more that is no version, or anything in percent or points; a setting such as 0.1 may be named
TYPED = re.compile(r"(?<![\w.])[1-9]\d*\.\d+(?![\w.]*\.\d)|\d\s*(?:%|percent\b|points?\b)")


@dataclass(frozen=True)
class Note:
    """An explanation, and what it is about: None stands for all."""

    text: str
    method: str | None = None
    dataset: str | None = None
    memory: int | None = None
    classifier: str | None = None
    review: bool | None = None
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    folder: Path = Path()

    def is_about(self, figure: Comparison) -> bool:
        """Whether it explains a figure of Table 1."""
        wanted = (self.method, self.dataset, self.memory, self.classifier, self.review)
        found = (figure.row.method, figure.dataset, figure.size, figure.row.classifier, figure.review)
        return all(one in (None, other) for one, other in zip(wanted, found, strict=True))

    def text_for(self, figure: Comparison, runs: Runs) -> str:
        """The text with the figures in it."""
        known = {
            "ours": figure_text(figure.ours),
            "paper": str(figure.paper),
            "difference": difference_text(figure.difference),
        } | {name: self._figure(figure, changes, runs) for name, changes in self.figures.items()}
        return PLACEHOLDER.sub(lambda found: known[found[1]], self.text)

    def _figure(self, figure: Comparison, changes: Mapping[str, Any], runs: Runs) -> str:
        if "file" in changes:
            return _of_a_benchmark(self.folder / changes["file"], figure, changes)
        return _of_runs(figure, changes, runs)


def _of_runs(figure: Comparison, changes: Mapping[str, Any], runs: Runs) -> str:
    """A mean from the store: that of the cell, with these changes."""
    rest = {name: changes[name] for name in ("order", "classes_ahead", "precision") if name in changes}
    options = {"review": True} if figure.review else {}
    config = config_for(
        changes.get("method", figure.row.method),
        changes.get("dataset", figure.dataset),
        changes.get("memory", figure.size),
        options={**options, **changes.get("options", {})},
        **rest,
    )
    return figure_text(runs.accuracy(config, changes.get("classifier", figure.row.classifier)))


def _of_a_benchmark(path: Path, figure: Comparison, changes: Mapping[str, Any]) -> str:
    """A mean from a benchmark's file: the line of the cell's method and review with these values."""
    told = {name: value for name, value in changes.items() if name not in ("file", "classifier")}
    wanted = {"method": figure.row.method, "review": figure.review, **told}
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))["runs"]
        found = [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f'"{path}", which a note takes a figure from, cannot be read ({error}).') from error
    if len(found) != 1:
        raise InputError(f'"{path}" has {len(found)} runs with {wanted}; a note takes its figure from one.')
    value = found[0][changes.get("classifier", figure.row.classifier)]
    return figure_text(Interval(value["mean"], value["interval"], found[0]["seeds"]))


def load_notes(path: str | os.PathLike[str]) -> list[Note]:
    """The notes in a file; what is wrong with one is said."""
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f'"{path}" is no TOML: {error}.') from error
    for name in document:
        if name != "note":
            raise InputError(f'"{path}" has "{name}"; expected tables [[note]] alone.')
    notes = document.get("note", [])
    if not isinstance(notes, list):
        raise InputError(f'"{path}" has one [note]; write [[note]], so that others can follow.')
    return [_note(values, f'Note {number} of "{path}"', path.parent) for number, values in enumerate(notes, 1)]


def _note(values: Mapping[str, Any], where: str, folder: Path) -> Note:
    known = {"text": str, "figures": dict, **ABOUT}
    for name, value in values.items():
        if name not in known:
            raise InputError(f'{where} has "{name}".{suggest(name, known)}')
        if type(value) is not known[name]:
            raise InputError(f"{where} has {name} = {value!r}; expected a value like {known[name]()!r}.")
    for name, names in (("method", RECIPES), ("dataset", DATASETS)):
        if values.get(name, next(iter(names))) not in names:
            raise InputError(f'{where} is about {name} "{values[name]}".{suggest(values[name], names)}')
    _check_text(values.get("text", ""), values.get("figures", {}), where)
    return Note(**values, folder=folder)


def _check_text(text: str, figures: Mapping[str, Any], where: str) -> None:
    if not text.strip():
        raise InputError(f"{where} has no text.")
    for name, changes in figures.items():
        for change in changes:
            if change not in CHANGES and "file" not in changes:
                raise InputError(f'{where} changes "{change}" for {{{name}}}.{suggest(change, CHANGES)}')
    names = {"ours", "paper", "difference", *figures}
    for name in PLACEHOLDER.findall(text):
        if name not in names:
            raise InputError(f"{where} uses {{{name}}}.{suggest(name, names)}")
    if typed := TYPED.search(PLACEHOLDER.sub("", text)):
        raise InputError(
            f'{where} has a figure typed by hand ("{typed[0]}"): it would stay when the runs change. Write {{ours}}, '
            "{paper}, {difference}, or a name of its `figures`."
        )
