"""Killed at any moment, the service stands at the bit-identical model again."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_harness import Harness


@pytest.mark.parametrize(
    "kills",
    [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=lambda kills: f"{kills}-kills",
)
def test_killed_while_taught_and_asked(tmp_path: Path, kills: int) -> None:
    harness = Harness(tmp_path, seed=kills)
    for _ in range(kills):
        harness.life(requests=harness.random.choice((0, 1, 5, 20, 40)))
    state = harness.settle()
    assert state["lost"] == 0
    assert state["notes"] == []
    harness.check(state)
    seen = f"{harness.answers} answers, {len(harness.digests)} models compared"
    print(f"{kills} kills: {len(harness.acknowledged)} requests with {state['images']} images, {seen}")
    assert harness.answers > 0
    assert state["disk_bytes"] < 2_000_000
