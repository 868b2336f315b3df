"""Runs as small text files that version control can compare: a line for each run, a file for each group.

Settings that runs share stand once at the head of a file, under a name made of their content, so that a new run adds a
line and changes no other. Confusion matrices are left out but where a figure shows one: they are nine tenths of a
result, and each class's accuracy, which stays, says most of what they say.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scrlearn.errors import CheckpointError
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import canonical_json, digest, family_key
from scrlearn.experiments.protocol import FIGURES, config_for
from scrlearn.experiments.result import Result
from scrlearn.experiments.store import Entry
from scrlearn.learners.methods import plain_name

FORMAT = 2  # 1 is the complete form, see `exports`
ENDING = ".runs.json"
SHARED = ("class_names", "config", "machine", "method_options", "tasks", "versions")
NAME_LENGTH = 8


def shows_confusion(config: RunConfig) -> bool:
    """Whether a figure of the paper shows the confusion matrix of this run: of the first seed.

    >>> shows_confusion(config_for("er", "cifar100", 2000)), shows_confusion(config_for("mir", "cifar100", 2000))
    (True, False)
    """
    places = [place for figure in FIGURES if figure.name == "confusion" for place in figure.places]
    methods = {method for figure in FIGURES if figure.name == "confusion" for method in figure.methods}
    if config.seed != 0 or config.method not in methods:
        return False
    wanted = {family_key(config_for(config.method, *place)) for place in places if place[0] == config.dataset}
    return family_key(config) in wanted


def slim(result: Result) -> Result:
    """The result without the confusion matrices that no figure shows."""
    kept = result.classifier if shows_confusion(result.run_config()) else None
    figures = {
        classifier: {name: value for name, value in values.items() if name != "confusion" or classifier == kept}
        for classifier, values in result.by_classifier.items()
    }
    return Result.from_dict({**result.to_dict(), "by_classifier": figures})


def file_of(dataset: str, method: str, memory_size: int) -> str:
    """The file a run belongs to, within a folder of such files.

    >>> file_of("cifar100", "scr+", 2000)
    'cifar100/scr-plus-2000.runs.json'
    """
    return f"{_plain(dataset)}/{_plain(plain_name(method))}-{memory_size}{ENDING}"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "unnamed"


def to_text(entries: Sequence[Entry]) -> str:
    """Runs as the text of a file."""
    shared: dict[str, dict[str, Any]] = {name: {} for name in SHARED}
    lines = [canonical_json(_line(entry, shared)) for entry in entries]
    heads = [
        f'"{name}":{{\n' + ",\n".join(f'"{key}":{canonical_json(value)}' for key, value in sorted(values.items())) + "}"
        for name, values in shared.items()
    ]
    return (
        f'{{"scrlearn_results":{FORMAT},\n"shared":{{\n'
        + ",\n".join(heads)
        + '\n},\n"runs":[\n'
        + ",\n".join(lines)
        + "\n]}\n"
    )


def _line(entry: Entry, shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    values = copy.deepcopy(slim(entry.result).to_dict())
    del values["config"]["seed"]  # it is a field of the result
    own = values["by_classifier"][values["classifier"]]
    for name in [name for name in values if name in own and canonical_json(values[name]) == canonical_json(own[name])]:
        del values[name]
    for name in SHARED:
        key = digest(values[name])[:NAME_LENGTH]
        shared[name][key] = values[name]
        values[name] = key
    artefacts = {name: base64.b64encode(data).decode() for name, data in sorted(entry.artefacts.items())}
    return {"date": entry.date, "result": values} | ({"artefacts": artefacts} if artefacts else {})


def from_document(document: Mapping[str, Any], path: object) -> list[Entry]:
    """The runs in a file that was read as JSON."""
    try:
        return [_entry(run, document["shared"]) for run in document["runs"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f'"{path}" is damaged: {error!r} is missing or is not what it was.') from error


def _entry(run: Mapping[str, Any], shared: Mapping[str, Mapping[str, Any]]) -> Entry:
    values = dict(run["result"])
    for name in SHARED:
        values[name] = copy.deepcopy(shared[name][values[name]])
    values["config"]["seed"] = values["seed"]
    values = {**values["by_classifier"][values["classifier"]], **values}
    artefacts = {name: base64.b64decode(data) for name, data in run.get("artefacts", {}).items()}
    return Entry(Result.from_dict(values), run["date"], artefacts)


def grouped(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Runs by the file they belong to, in the order in which they came."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        result = entry.result
        groups.setdefault(file_of(result.dataset, result.method, result.memory_size), []).append(entry)
    return groups
