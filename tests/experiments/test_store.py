"""The result store: what is put in comes out, once, whoever writes and from wherever it comes."""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import os
import signal
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_factory import TINY, made_up, real_result

from scrlearn.errors import CheckpointError, InputError
from scrlearn.experiments import Result, RunConfig, run
from scrlearn.experiments import exports as exports_module
from scrlearn.experiments.artefacts import pack
from scrlearn.experiments.exports import add_path, export, read_export
from scrlearn.experiments.folders import RESULT
from scrlearn.experiments.identity import family_key, identity, run_key
from scrlearn.experiments.store import SCHEMA, Entry, Store, StoreError
from scrlearn.learners import METHODS
from scrlearn.memory import RETRIEVALS

DATES = ("2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results.db")


# ------------------------------------------------------------------------------------------------------------ identity


def test_the_machine_and_named_defaults_make_no_other_run() -> None:
    plain = RunConfig(dataset="cifar100", method="scr")
    same = [
        plain.replace(device="cuda:1", engine="eager"),
        plain.replace(tasks=10),
        plain.replace(memory_size=2000, classifier="ncm"),
        plain.replace(options={"memory_batch": 100, "review": False, "retrieve": "random", "temperature": 0.1}),
    ]
    assert {run_key(config) for config in same} == {run_key(plain)}


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"tasks": 5},
        {"order": "shuffled"},
        {"memory_size": 1000},
        {"precision": "fp32"},
        {"classes_ahead": True},
        {"options": {"review": True}},
        {"options": {"memory_batch": 10}},
        {"options": {"retrieve": "aser"}},
        {"options": {"retrieve": "aser", "per_class": 2}},
    ],
)
def test_what_changes_figures_makes_another_run(changes: dict[str, Any]) -> None:
    plain = RunConfig(dataset="cifar100", method="scr")
    assert run_key(plain.replace(**changes)) != run_key(plain)
    assert (family_key(plain.replace(**changes)) == family_key(plain)) == (changes == {"seed": 1})


def test_a_number_has_one_way_to_be_written() -> None:
    one, also_one = RunConfig(options={"temperature": 1}), RunConfig(options={"temperature": 1.0})
    assert run_key(one) == run_key(also_one)


def test_keys_do_not_change_from_version_to_version() -> None:
    """A key that changes makes strangers of all runs in all stores there are."""
    config = RunConfig(
        dataset="cifar10", method="aser", memory_size=200, seed=3, options={"per_class": 9}, classes_ahead=True
    )
    assert identity(config) == {
        "classes_ahead": True,
        "dataset": "cifar10",
        "memory_size": 200,
        "method": "aser",
        "options": {"per_class": 9},
        "seed": 3,
    }
    assert run_key(config) == "94232efe47cb2e0fdb26c53a64bb3414"


# --------------------------------------------------------------------------------------------------------- in and out


def test_what_is_put_in_comes_out(store: Store) -> None:
    artefact = {"labels": np.arange(4, dtype=np.int32), "places": np.ones((4, 2), np.float32)}
    assert store.add(real_result(), {"memory": pack(artefact)}, DATES[0]).new == 1
    entry = store.get(TINY)
    assert entry is not None
    assert entry.result == real_result()
    assert entry.date == DATES[0]
    assert {name: array.tolist() for name, array in entry.arrays("memory").items()} == {
        "labels": [0, 1, 2, 3],
        "places": [[1, 1]] * 4,
    }
    with pytest.raises(InputError, match="no artefact"):
        entry.arrays("mammory")


def test_tables_can_be_read_without_this_package(store: Store) -> None:
    store.add(real_result())
    with sqlite3.connect(store.path) as db:
        rows = db.execute(
            "SELECT method, seed, classifier, average_accuracy, accuracy_matrix FROM runs JOIN accuracies USING (key)"
        ).fetchall()
    found = {row[2]: row for row in rows}
    for classifier, figures in real_result().by_classifier.items():
        method, seed, _, accuracy, matrix = found[classifier]
        assert (method, seed, accuracy) == ("er", 0, figures["average_accuracy"])
        assert json.loads(matrix) == figures["accuracy_matrix"]


def test_has_and_get(store: Store) -> None:
    store.add(made_up(seed=1))
    assert store.has(TINY.replace(seed=1))
    assert store.has(TINY.replace(seed=1, device="auto", engine="eager"))
    assert not store.has(TINY.replace(seed=1), ["memory"])
    assert not store.has(TINY)
    assert store.get(TINY) is None


def test_query(store: Store) -> None:
    for seed in range(3):
        store.add(made_up(seed))
    store.add(made_up(0, memory_size=40))
    store.add(made_up(0, method="fine-tune", order="shuffled"))
    assert len(store) == len(store.query()) == 5
    assert [entry.result.seed for entry in store.query(method="er", memory_size=20)] == [0, 1, 2]
    assert len(store.query(seed=[1, 2])) == 2
    assert len(store.query(method=None, order="shuffled")) == 1
    assert [entry.result.seed for entry in store.seeds(TINY.replace(seed=7))] == [0, 1, 2]
    with pytest.raises(InputError, match='by "metod"'):
        store.query(metod="er")


def test_find_and_remove(store: Store) -> None:
    for seed in range(2):
        store.add(made_up(seed), {"memory": b"x"})
    key = run_key(TINY)
    assert store.find(key[:12]).result.seed == 0
    for wrong in ("", "zzzz", "_" * 32):
        with pytest.raises(InputError, match="begins with"):
            store.find(wrong)
    assert store.remove([key, "nobody"]) == 1
    assert not store.has(TINY)
    with sqlite3.connect(store.path) as db:  # nothing of it stays behind
        for table in ("accuracies", "artefacts"):
            assert db.execute(f"SELECT count(*) FROM {table} WHERE key = ?", (key,)).fetchone() == (0,)


# ------------------------------------------------------------------------------------------------------- files refused


@pytest.mark.parametrize("own", [{"method": "my-own"}, {"method": "er", "options": {"retrieve": "my-own"}}])
def test_a_run_of_somebodys_own_method_shuts_nobody_out(
    store: Store, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "my-own", dataclasses.replace(METHODS["er"], name="my-own"))
        patch.setitem(RETRIEVALS, "my-own", RETRIEVALS["random"])
        strange = made_up(**own)
        store.add(strange)
        key = run_key(strange.run_config())
        assert len(store.query()) == 1
    store.add(made_up(seed=1))
    with pytest.warns(UserWarning, match=r"1 of the runs in .* left out: There is no .*my-own"):
        assert [entry.result.seed for entry in store.query()] == [1]
    with pytest.warns(UserWarning, match="left out"), pytest.raises(InputError, match="not known here"):
        store.find(key)
    assert store.remove([store.full_key(key[:8])]) == 1
    assert len(store) == 1


def test_missing_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no result store"):
        Store(tmp_path / "none.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_store(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("these are no results, and never were" * 100)
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE recipes (name)")
    for name, message in (("text.db", "not a result store, or is damaged"), ("other.db", "not a result store")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(StoreError, match=message):
            Store(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(("version", "advice"), [(SCHEMA + 1, "newer scrlearn"), (SCHEMA - 1, "export it")])
def test_other_versions(store: Store, version: int, advice: str) -> None:
    store.add(real_result())
    with sqlite3.connect(store.path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreError, match=f"version {version}.*{advice}"):
        Store(store.path)


# --------------------------------------------------------------------------------------------------------- the same run


def test_the_same_run_again(store: Store) -> None:
    store.add(made_up(), date=DATES[1])
    merged = store.add(made_up(), date=DATES[0])
    assert (merged.new, merged.same, merged.conflicts, len(store)) == (0, 1, [], 1)
    assert store.query()[0].date == DATES[0]


def test_the_same_run_with_other_figures(store: Store) -> None:
    store.add(made_up(accuracy=0.5), date=DATES[0])
    merged = store.add(made_up(accuracy=0.6), date=DATES[1])
    assert (merged.new, merged.same, len(store)) == (0, 0, 1)
    assert str(merged.conflicts[0]) == (
        "er on digits, memory 20, limit 5, precision fp32, tasks 2, seed 0: 50.00% stays, 60.00% is left out"
    )
    assert store.query()[0].result.average_accuracy == 0.5


def test_of_two_versions_the_newer_stays(store: Store) -> None:
    newer = made_up(accuracy=0.6)
    newer = dataclasses.replace(newer, versions={**newer.versions, "scrlearn": "0.10.0"})
    store.add(made_up(accuracy=0.5), date=DATES[0])
    store.add(newer, date=DATES[1])
    assert store.query()[0].result.average_accuracy == 0.6


def test_a_run_with_its_artefacts_is_worth_more(store: Store) -> None:
    """Else a figure that needs them would have the run made again and again."""
    store.add(made_up(accuracy=0.5), date=DATES[0])
    store.add(made_up(accuracy=0.6), {"memory": b"x"}, DATES[1])
    assert store.has(TINY, ["memory"])


Runs = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0.25, 0.5]),
        st.sampled_from(DATES),
        st.dictionaries(st.sampled_from(["memory", "head"]), st.sampled_from([b"x", b"y"]), max_size=1),
    ),
    max_size=4,
)


def filled(path: Path, runs: list[tuple[int, float, str, dict[str, bytes]]]) -> Store:
    store = Store(path)
    store.add_entries(Entry(made_up(seed, accuracy), date, artefacts) for seed, accuracy, date, artefacts in runs)
    return store


@settings(max_examples=15, deadline=None)
@given(Runs, Runs)
def test_merging_is_commutative_and_idempotent(ours: list[Any], theirs: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a, b = filled(Path(folder) / "a.db", ours), filled(Path(folder) / "b.db", theirs)
        ab, ba = Store(Path(folder) / "ab.db"), Store(Path(folder) / "ba.db")
        assert ab.merge(a).new == len(a)
        merged = ab.merge(b)
        ba.merge(b)
        ba.merge(a.path)
        once = ab.query()
        assert once == ba.query()
        seeds = {run[0] for run in ours}, {run[0] for run in theirs}
        assert len(once) == len(seeds[0] | seeds[1])
        assert merged.same + len(merged.conflicts) == len(seeds[0] & seeds[1])
        ab.merge(b)
        assert ab.merge(ab.path).conflicts == []
        assert ab.query() == once


# --------------------------------------------------------------------------------------------------------- many writers


def write_many(path: str, template: Result, seeds: range, start: Any) -> None:
    start.wait()
    for seed in seeds:
        Store(path).add(made_up(seed, template=template), {"memory": bytes(1000)})


def test_many_writers_from_the_first_moment_on(tmp_path: Path) -> None:
    """All begin at once, before there is a file, and half of what each writes is written by its neighbour too."""
    path, context = tmp_path / "results.db", multiprocessing.get_context("fork")
    start = context.Barrier(4)
    ranges = [range(first, first + 12) for first in (0, 6, 12, 18)]
    processes = [context.Process(target=write_many, args=(str(path), real_result(), seeds, start)) for seeds in ranges]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(entry.result.seed for entry in Store(path).query()) == list(range(30))
    assert [file.name for file in tmp_path.iterdir()] == ["results.db"]


def write_for_ever(path: str, template: Result, said: Any) -> None:
    store = Store(path)
    for seed in range(10**6):
        store.add(made_up(seed, template=template))
        said.send(seed)


def test_killed_writer_leaves_what_it_has_written(tmp_path: Path) -> None:
    path, context = tmp_path / "results.db", multiprocessing.get_context("fork")
    hears, says = context.Pipe()
    process = context.Process(target=write_for_ever, args=(str(path), real_result(), says))
    process.start()
    last = 0
    while last < 8:
        last = hears.recv()
    os.kill(process.pid, signal.SIGKILL)  # the process of this test
    process.join()
    seeds = sorted(entry.result.seed for entry in Store(path).query())
    assert seeds == list(range(len(seeds)))
    assert len(seeds) > last
    assert Store(path).add(made_up(10**6)).new == 1


# -------------------------------------------------------------------------------------------------------------- exports


@pytest.fixture
def three(store: Store) -> Store:
    store.add(made_up(0, 0.25), {"memory": pack({"labels": np.arange(3)})}, DATES[0])
    store.add(made_up(1, 0.5), date=DATES[1])
    store.add(made_up(0, 0.75, order="shuffled", options={"memory_batch": 5}), date=DATES[1])
    return store


@pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
def test_json_holds_everything(three: Store, tmp_path: Path, name: str) -> None:
    file = export(three.query(), tmp_path / name)
    again = Store(tmp_path / "again.db")
    assert add_path(again, file).new == 3
    assert again.query() == three.query()
    assert export(again.query(), tmp_path / f"2{name}").read_bytes() == file.read_bytes()


def test_csv(three: Store, tmp_path: Path) -> None:
    with export(three.query(), tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["classifier"] for row in rows} == {"softmax", "ncm"}
    assert {(row["seed"], row["order"], float(row["average_accuracy"])) for row in rows} == {
        ("0", "natural", 0.25),
        ("1", "natural", 0.5),
        ("0", "shuffled", 0.75),
    }
    own = next(row for row in rows if row["own_classifier"] == "True")
    assert json.loads(own["accuracy_matrix"]) == real_result().accuracy_matrix
    assert {row["options"] for row in rows} == {"{}", '{"memory_batch":5}'}
    assert {json.loads(row["config"])["limit"] for row in rows} == {TINY.limit}  # no row passes for a whole stream


def test_parquet(three: Store, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = parquet.read_table(export(three.query(), tmp_path / "all.parquet")).to_pylist()
    assert rows == list(exports_module.rows(three.query()))


@pytest.mark.parametrize("name", ["all.csv", "all.parquet"])
def test_tables_of_runs_that_name_other_packages(three: Store, tmp_path: Path, name: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    other = made_up(7)
    three.add(dataclasses.replace(other, versions={**other.versions, "triton": "3.0"}))
    file = export(three.query(), tmp_path / name)
    if name.endswith("csv"):
        with file.open() as text:
            rows = list(csv.DictReader(text))
    else:
        rows = parquet.read_table(file).to_pylist()
    assert {(int(row["seed"]), row["version_triton"] or "") for row in rows} == {(0, ""), (1, ""), (7, "3.0")}


def test_parquet_without_pyarrow(three: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        export(three.query(), tmp_path / "all.parquet")
    assert not (tmp_path / "all.parquet").exists()


def test_export_to_an_unknown_form(three: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.csv, \.json, \.json\.gz, \.parquet"):
        export(three.query(), tmp_path / "all.xlsx")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "no JSON.*come in from"),
        (b"[1, 2]", "no export"),
        (b'{"a": 1}', "no export"),
        (b'{"scrlearn_results": 99}', "newer"),
    ],
)
def test_files_that_are_no_export(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_export(tmp_path / "x.json")


# ------------------------------------------------------------------------------------------------- runs made elsewhere


def test_folders_of_runs_come_in(store: Store, tmp_path: Path) -> None:
    for seed in range(2):
        run(TINY.replace(seed=seed), out=tmp_path / "runs" / f"seed-{seed}", pictures=False)
    assert add_path(store, tmp_path / "runs").new == 2
    assert add_path(store, tmp_path / "runs" / "seed-0" / RESULT).same == 1
    entry = store.get(TINY)
    assert entry is not None
    assert entry.result == Result.load(tmp_path / "runs" / "seed-0" / RESULT)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no result\.json"):
        add_path(store, tmp_path / "empty")


def test_artefacts_come_with_a_folder(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports_module, "artefacts_for", lambda config: ("memory",))
    run(TINY, out=tmp_path / "run", pictures=False)
    add_path(store, tmp_path / "run")
    arrays = store.query()[0].arrays("memory")
    assert arrays["places"].shape == (20, 2)
    assert set(arrays["labels"].tolist()) <= set(range(10))
