"""What the README says is true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from scrlearn.cli import app
from scrlearn.data import load
from scrlearn.learners import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_lines_of_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = load("digits")
    few = [i for i in range(200) if digits.train.labels[i] < 2]
    names = np.array(["zero", "one"])
    given = {
        "images": digits.train.images[few, 0].numpy(),
        "labels": names[digits.train.labels[few]],
        "new_images": digits.test.images[:3, 0].numpy(),
    }
    (program,) = blocks("python")
    exec(program, given)
    assert (tmp_path / "model.scr").exists()


def test_the_commands_exist() -> None:
    """Each `scr …` line has only options that the command has; each `make …` is a target."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text()
    for line in lines:
        if line.startswith("make "):
            assert re.search(rf"^{line.removeprefix('make ')}:", makefile, flags=re.MULTILINE), line
        if line.startswith("scr "):
            words = line.split()[1:]
            path = words[:2] if words[0] == "data" else words[:1]
            shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
            assert shown.exit_code == 0, line
            for option in re.findall(r"--[a-z-]+", line):
                assert option in shown.output, line
    assert {"make demo", "make test"} <= set(lines)


def test_the_table_of_methods_is_the_table_of_methods() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", README, flags=re.MULTILINE)
    said = {name: (title, paper) for name, title, paper in rows}
    assert said.keys() == METHODS.keys()
    for name, (title, paper) in said.items():
        assert title == METHODS[name].title
        assert paper.startswith(METHODS[name].reference)


def test_pictures_and_pages_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    assert (ROOT / "docs/images/demo.png").stat().st_size <= 200_000


def test_constraints_are_plain_versions() -> None:
    """PyPI alone must be able to serve them: no addresses, no paths, no local versions such as 1.0+cpu."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert any(line.startswith("torch==") for line in lines)
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -E '([^']+)' README.md", script)
    assert pattern is not None
    found = re.findall(pattern[1], README, flags=re.MULTILINE)
    assert sorted(found) == ["demo", "test"]
