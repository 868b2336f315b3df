"""Results for tests: one real run, and others made up from it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from scrlearn.experiments import Result, RunConfig, run

TINY = RunConfig(method="er", memory_size=20, limit=5, tasks=2, device="cpu", precision="fp32")


@functools.lru_cache(maxsize=1)
def real_result() -> Result:
    return run(TINY)


def made_up(seed: int = 0, accuracy: float = 0.5, template: Result | None = None, **changes: Any) -> Result:
    """The run with another seed, accuracy and settings."""
    result = template or real_result()
    config = RunConfig.from_dict(result.config).replace(seed=seed, **changes)
    figures = copy.deepcopy(result.by_classifier)
    for values in figures.values():
        values["average_accuracy"] = accuracy
    return dataclasses.replace(
        result,
        method=config.method,
        dataset=config.dataset,
        memory_size=config.memory_size,
        seed=seed,
        average_accuracy=accuracy,
        by_classifier=figures,
        config=config.to_dict(),
        method_options=config.all_options(len(result.class_names)),
    )
