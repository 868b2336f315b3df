"""What tests of sweeps look at."""

from __future__ import annotations

from typing import Any

from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.executors import Outcome
from scrlearn.experiments.identity import run_key
from scrlearn.experiments.record import Moment
from scrlearn.experiments.store import Store


def figures(store: Store) -> dict[str, dict[str, Any]]:
    return {entry.key: entry.result.by_classifier for entry in store.query()}


class Notes:
    """A watcher that writes down what it hears."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, Moment]] = []
        self.outcomes: list[Outcome] = []
        self.passed_over: list[str] = []

    def moment(self, config: RunConfig, moment: Moment) -> None:
        self.moments.append((run_key(config), moment))

    def finished(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def passed(self, config: RunConfig) -> None:
        self.passed_over.append(run_key(config))
