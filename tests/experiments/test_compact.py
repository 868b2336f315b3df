"""Runs as small text files: what is left out, what comes back, and what a change of them looks like."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from report_factory import entries, entry
from result_factory import TINY, made_up, real_result
from typer.testing import CliRunner

from scrlearn.cli import app
from scrlearn.errors import CheckpointError, InputError
from scrlearn.experiments.compact import ENDING, file_of, shows_confusion, slim, to_text
from scrlearn.experiments.exports import add_path, export, read_export, read_folder
from scrlearn.experiments.protocol import config_for, runs_for
from scrlearn.experiments.store import Entry, Store

DATES = ("2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00")


def few() -> list[Entry]:
    return entries(runs_for("table1", ["cifar10"], ["er", "scr"], [200], seeds=2, review=False))


def test_all_but_confusion_matrices_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    store.add_entries([*few(), Entry(real_result(), DATES[0], {"memory": b"x"})])
    folder = export(store.query(), tmp_path / "runs")
    back = read_folder(folder)
    assert back == [dataclasses.replace(one, result=slim(one.result)) for one in store.query()]
    assert "confusion" in real_result().by_classifier["ncm"]
    assert not any("confusion" in figures for one in back for figures in one.result.by_classifier.values())
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.json")} == {
        "cifar10/er-200.runs.json",
        "cifar10/scr-200.runs.json",
        "digits/er-20.runs.json",
    }


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    folder = export(few(), tmp_path / "a")
    again = export(read_folder(folder)[::-1], tmp_path / "b")
    first, second = ({path.name: path.read_bytes() for path in there.rglob(f"*{ENDING}")} for there in (folder, again))
    assert len(first) == 2
    assert first == second


def test_confusion_matrices_that_a_figure_shows_stay(tmp_path: Path) -> None:
    shown = [entry(config_for(method, "cifar100", 2000, seed)) for method in ("er", "scr") for seed in (0, 1)]
    assert [shows_confusion(one.config) for one in shown] == [True, False, True, False]
    back = read_folder(export(shown, tmp_path / "runs"))
    kept = [
        (one.result.method, one.result.seed, classifier)
        for one in back
        for classifier, figures in one.result.by_classifier.items()
        if "confusion" in figures
    ]
    assert kept == [("er", 0, "softmax"), ("scr", 0, "ncm")]
    assert back[0].arrays("memory")["labels"].tolist() == shown[0].arrays("memory")["labels"].tolist()


def test_a_new_run_is_a_new_line(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    export([entry(config_for("er", "cifar10", 200, seed)) for seed in (0, 2)], folder)
    file = folder / file_of("cifar10", "er", 200)
    before = file.read_text().splitlines()
    export([entry(config_for("er", "cifar10", 200, 1))], folder)
    after = file.read_text().splitlines()
    added = [line for line in after if line not in before]
    assert len(after) == len(before) + 1
    assert len(added) == 1
    assert '"seed":1' in added[0]
    assert [line for line in after if line not in added] == before


def test_an_export_to_a_folder_keeps_what_is_there(tmp_path: Path) -> None:
    runs = few()
    folder = export(runs[:1], tmp_path / "runs")
    stays = (folder / file_of("cifar10", "er", 200)).stat().st_mtime_ns
    export(runs[:1], folder)  # nothing new: not written
    assert (folder / file_of("cifar10", "er", 200)).stat().st_mtime_ns == stays
    export(runs[1:], folder)
    assert len(read_folder(folder)) == len(runs)


def test_other_figures_are_told(tmp_path: Path) -> None:
    folder = export([Entry(made_up(accuracy=0.5), DATES[0])], tmp_path / "runs")
    with pytest.warns(UserWarning, match=r"50\.00% stays, 60\.00% is left out"):
        export([Entry(made_up(accuracy=0.6), DATES[1])], folder)
    assert read_folder(folder)[0].result.average_accuracy == 0.5


def test_a_complete_run_and_its_compact_form_are_the_same_run(tmp_path: Path) -> None:
    """Whichever comes first, and whichever has the artefacts: the matrices and the artefacts are both there."""
    full, compact = Entry(real_result(), DATES[1]), Entry(slim(real_result()), DATES[0], {"memory": b"x"})
    for number, pair in enumerate(([full, compact], [compact, full])):
        store = Store(tmp_path / f"{number}.db")
        store.add_entries(pair[:1])
        merged = store.add_entries(pair[1:])
        assert (merged.same, merged.conflicts) == (1, [])
        (one,) = store.query()
        assert one.result == real_result()
        assert dict(one.artefacts) == {"memory": b"x"}


def test_add_takes_a_folder_with_both_kinds(tmp_path: Path) -> None:
    export(few(), tmp_path / "all" / "runs")
    (tmp_path / "all" / "seed-0").mkdir()
    real_result().save(tmp_path / "all" / "seed-0" / "result.json")
    store = Store(tmp_path / "a.db")
    assert add_path(store, tmp_path / "all").new == len(few()) + 1
    assert store.has(TINY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no result\.json"):
        add_path(store, tmp_path / "empty")


def test_a_single_file(tmp_path: Path) -> None:
    file = export(few(), tmp_path / f"few{ENDING}")
    assert [one.key for one in read_export(file)] == [one.key for one in few()]


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out by `export`, back by `add` and by `merge`."""
    monkeypatch.chdir(tmp_path)
    Store("a.db").add_entries(few())
    for words in (
        ["export", "runs", "--store", "a.db"],
        ["add", "runs", "--store", "b.db"],
        ["merge", "runs", "a.db", "--store", "c.db"],
    ):
        result = CliRunner().invoke(app, ["results", *words])
        assert result.exit_code == 0, result.output
    assert "4 new, 4 there already, 0 there with other figures" in result.stdout
    assert Store("b.db").query() == [dataclasses.replace(one, result=slim(one.result)) for one in Store("a.db").query()]
    assert Store("c.db").query() == Store("a.db").query()


def test_damage_is_told(tmp_path: Path) -> None:
    document = json.loads(to_text(few()))
    del document["shared"]["config"]
    (tmp_path / f"x{ENDING}").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="is damaged: KeyError"):
        read_folder(tmp_path)


def test_a_run_that_is_there_twice_is_told(tmp_path: Path) -> None:
    for name in "ab":
        export(few()[:1], tmp_path / f"{name}{ENDING}")
    with pytest.raises(CheckpointError, match="both have the run er on cifar10, memory 200"):
        read_folder(tmp_path)
