from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "stream_memory.py"


@pytest.fixture
def main():
    threads = torch.get_num_threads()
    yield runpy.run_path(str(SCRIPT))["main"]
    torch.set_num_threads(threads)


def test_a_short_stream(main, capsys, tmp_path):
    result = main(["--images", "2500", "--memory", "50", "--method", "er", "--json", str(tmp_path / "figures.json")])
    assert [part["images"] for part in result["parts"]] == [2000, 2500]
    assert json.loads((tmp_path / "figures.json").read_text())["parts"] == result["parts"]
    # 1500 images of 64 bytes are nothing: what is left over here would be a leak
    assert abs(result["growth_mb"]) < 64
    printed = capsys.readouterr().out
    assert "times the first tenth's" in printed
    assert "2,500" in printed


def test_the_stream_is_the_same_each_time_and_never_held(main):
    script = runpy.run_path(str(SCRIPT))
    first, second = (list(script["blocks"](1500, 10, seed=0)) for _ in range(2))
    assert [len(labels) for _, labels in first] == [1000, 500]
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(first, second, strict=True))
