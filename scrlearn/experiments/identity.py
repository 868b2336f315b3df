"""Which run is which: configurations that ask for the same figures have one key, whatever machine they ran on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from scrlearn.data.streams import DEFAULT_TASKS
from scrlearn.experiments.config import RunConfig
from scrlearn.learners import find_method
from scrlearn.learners.methods import PARTS

MACHINE = ("device", "engine")  # where and how a step runs, not what it computes
ALWAYS = ("dataset", "method", "memory_size", "seed")
KEY_LENGTH = 32


def identity(config: RunConfig) -> dict[str, Any]:
    """What decides the figures of a run and is not the default.

    Defaults are left out, so that asking for one by name changes nothing, and an option that a later version adds does
    not make strangers of the runs there are.

    >>> identity(RunConfig(method="scr", memory_size=2000, options={"temperature": 0.1, "review": True}, device="cpu"))
    {'dataset': 'digits', 'memory_size': 2000, 'method': 'scr', 'options': {'review': True}, 'seed': 0}
    """
    base, known = _defaults(config)
    values = config.to_dict()
    values["options"] = {
        name: _plain(value)
        for name, value in config.options.items()
        if name not in known or _plain(value) != _plain(base.get(name, known[name]))
    }
    if config.memory_size is None:
        values["memory_size"] = base.get("memory_size")
    if config.classifier == base.get("classifier"):
        values["classifier"] = None
    if config.tasks == DEFAULT_TASKS.get(config.dataset):
        values["tasks"] = None
    usual = _usual()
    return {
        name: _plain(values[name])
        for name in sorted(values)
        if name in ALWAYS or (name not in MACHINE and values[name] != usual[name])
    }


def _defaults(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the method as it stands in the table, and those that the parts chosen here take."""
    method = find_method(config.method)
    return method.parameters(), method.parameters(
        **{role: config.options[role] for role in PARTS.keys() & config.options.keys()}
    )


def _usual() -> dict[str, Any]:
    return {f.name: {} if f.name == "options" else f.default for f in dataclasses.fields(RunConfig)}


def _plain(value: Any) -> Any:
    """One way to write a number: 1 for 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def canonical_json(value: Any) -> str:
    """One text for equal values.

    >>> canonical_json({"b": [1, 2], "a": None})
    '{"a":null,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """A short name for a value that JSON can say."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:KEY_LENGTH]


def run_key(config: RunConfig) -> str:
    """The name of a run, the same on every machine.

    >>> run_key(RunConfig(engine="eager")) == run_key(RunConfig(tasks=5)) != run_key(RunConfig(seed=1))
    True
    """
    return digest(identity(config))


def family_key(config: RunConfig) -> str:
    """The name that runs share which differ in their seed alone.

    >>> family_key(RunConfig(seed=1)) == family_key(RunConfig(seed=2)) != family_key(RunConfig(method="er"))
    True
    """
    return digest({name: value for name, value in identity(config).items() if name != "seed"})


def kind_key(config: RunConfig) -> str:
    """The name that runs share which differ in their seed and memory size alone: their steps are alike.

    >>> kind_key(RunConfig(memory_size=20, seed=1)) == kind_key(RunConfig(memory_size=50)) != kind_key(RunConfig("er"))
    True
    """
    return digest({name: value for name, value in identity(config).items() if name not in ("seed", "memory_size")})


def describe(config: RunConfig, seed: bool = True) -> str:
    """A run in a line.

    >>> describe(RunConfig(method="scr", memory_size=200, options={"review": True}, seed=3))
    'scr on digits, memory 200, review, seed 3'
    """
    values = identity(config)
    memory = values["memory_size"]
    parts = [f"{config.method} on {config.dataset}"]
    parts += [f"memory {memory:,}"] if memory else []
    parts += variant(config)
    parts += [f"seed {config.seed}"] if seed else []
    return ", ".join(parts)


def variant(config: RunConfig) -> list[str]:
    """What is special about a run beside data set, method, memory size and seed.

    >>> variant(RunConfig(order="shuffled", classes_ahead=True, options={"temperature": 0.5, "review": True}))
    ['review', 'temperature 0.5', 'classes ahead', 'order shuffled']
    """
    values = identity(config)
    options = values.pop("options", {})
    rest = {name: value for name, value in values.items() if name not in ALWAYS}
    named = sorted(options.items(), key=lambda item: (item[0] != "review", item[0]))
    return [_phrase(name, value) for name, value in [*named, *rest.items()]]


def _phrase(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {value}"
