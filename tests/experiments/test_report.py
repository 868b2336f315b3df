"""The report: every figure in it comes from the runs, and what they lack is said."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_factory import entries, entry
from scipy import stats
from typer.testing import CliRunner

from scrlearn.cli import app
from scrlearn.errors import InputError
from scrlearn.experiments import RunConfig, beyond, protocol
from scrlearn.experiments.executors import LocalDevice
from scrlearn.experiments.exports import export
from scrlearn.experiments.identity import run_key
from scrlearn.experiments.protocol import ABLATIONS, FIGURES, ROWS, Figure, Split, config_for, runs_for
from scrlearn.experiments.report import Note, build, docs, headline, load_notes, read_runs, write
from scrlearn.experiments.report.document import Block, Cell, Document, Missing, Picture, Table, Text
from scrlearn.experiments.report.figures import BUILDERS
from scrlearn.experiments.report.markdown import markdown
from scrlearn.experiments.report.pictures import KINDS, draw
from scrlearn.experiments.report.runs import Runs, seconds_of
from scrlearn.experiments.reproduce import sweep
from scrlearn.experiments.store import Entry, Store

ROOT = Path(__file__).parents[2]


def everything() -> list[RunConfig]:
    """What all commands of the report make, with two seeds; each run once."""
    found = [config for target in protocol.TARGETS for config in runs_for(target, seeds=2)]
    found += [config for target in beyond.TARGETS for config in beyond.runs_for(target, seeds=2)]
    unique: dict[str, RunConfig] = {}
    for config in found:
        unique.setdefault(run_key(config), config)
    return list(unique.values())


@pytest.fixture(scope="module")
def full() -> list[Entry]:
    return entries(everything())


@pytest.fixture(scope="module")
def written(full: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a complete store, as files."""
    folder = tmp_path_factory.mktemp("report")
    write(build(full), folder)
    return folder


def blocks(document: Document, kind: Any) -> list[Any]:
    return [block for section in document.sections for block in section.blocks if isinstance(block, kind)]


def section(document: Document, title: str) -> list[Block]:
    (found,) = [one for one in document.sections if one.title == title]
    return list(found.blocks)


def rows(document: Document, title: str) -> dict[str, list[Cell]]:
    (table,) = [block for block in section(document, title) if isinstance(block, Table)]
    return {str(row[0]): list(row[1:]) for row in table.rows}  # type: ignore[arg-type]


def commands(document: Document) -> set[str]:
    found = [block.command for block in blocks(document, Missing)] + [p.command for p in blocks(document, Picture)]
    return {command for command in found if command}


def planned(command: str) -> set[str]:
    """The keys of the runs that a command would make."""
    words = shlex.split(command)
    assert words[0] == "scr"
    result = CliRunner().invoke(app, [*words[1:], "--dry-run", "--json", "--store", "none.db"])
    assert result.exit_code == 0, result.output
    return {run["key"] for run in json.loads(result.stdout)["runs"]}


# ------------------------------------------------------------------------------------------------------------- Table 1


def test_table_1_has_the_means_and_intervals_of_the_runs(full: list[Entry]) -> None:
    seeds = [entry(config_for("mir", "cifar10", 500, seed), 0.3 + 0.01 * seed) for seed in range(4)]
    document = build([*(one for one in full if one.result.method != "mir"), *seeds])
    values = np.array([one.result.by_classifier["ncm"]["average_accuracy"] for one in seeds])
    half = stats.t.ppf(0.975, 3) * values.std(ddof=1) / 2
    cell = rows(document, "CIFAR-10")["MIR-NCM"][1]
    assert cell.lines[0].startswith(f"{100 * values.mean():.1f} ± {100 * half:.1f} (4) ")
    assert cell.lines[1] == "paper 40.9 ± 1.5"


def test_marks(full: list[Entry]) -> None:
    """Against the paper's 32.8 ± 0.7."""
    for accuracy, mark in ((0.328, "inside"), (0.36, "above"), (0.28, "below")):
        seeds = [entry(config_for("scr", "cifar100", 2000, seed), accuracy) for seed in range(3)]
        cells = rows(build(seeds), "CIFAR-100")
        assert cells["SCR"][1].verdict == mark
        assert mark in cells["SCR"][1].lines[0]
        assert cells["SCR with review"][1].lines[0] == "not yet"
        assert cells["SCR"][0].verdict == ""


def test_every_cell_of_the_paper_is_there(full: list[Entry]) -> None:
    document = build(full)
    shown = [
        cell
        for title in ("Mini-ImageNet", "CIFAR-100", "CIFAR-10")
        for row in rows(document, title).values()
        for cell in row
    ]
    shown += [cell for row in rows(document, "Without replay").values() for cell in row]
    replaying = sum(protocol.RECIPES[row.method].replays for row in ROWS)
    assert len(shown) == 9 * (replaying + 1) + 3 * (len(ROWS) - replaying)  # SCR is there with review too
    assert all(cell.verdict and not cell.lines[0].startswith("not yet") for cell in shown)
    paper = {str(interval) for row in ROWS for interval in row.cells.values()}
    assert {cell.lines[1].removeprefix("paper ") for cell in shown} == paper


def test_one_seed_has_no_interval() -> None:
    cell = rows(build([entry(config_for("er", "cifar10", 200))]), "CIFAR-10")["ER"][0]
    assert re.fullmatch(r"\d\d\.\d \(1\) \S \w+", cell.lines[0])


# ----------------------------------------------------------------------------------------------------- what is missing


def test_an_empty_store_has_no_figure_of_ours() -> None:
    document = build([])
    assert blocks(document, Picture) == []
    for title in ("Without replay", "Mini-ImageNet", "CIFAR-100", "CIFAR-10"):
        for row in rows(document, title).values():
            assert {cell.lines[0] for cell in row} == {"not yet"}
    assert len(section(document, "How these were made")) == 1


def test_commands_for_what_is_missing_make_all_of_it(full: list[Entry]) -> None:
    """And all commands are real ones."""
    made = set().union(*(planned(command) for command in commands(build([]))))
    wanted = {one.key for one in full if one.config.method != "scr+wide"}  # the wide encoder is extra
    assert wanted <= made


@pytest.mark.parametrize("method", ["er", "scr", "lwf"])
def test_a_missing_method_is_named_with_its_command(full: list[Entry], method: str) -> None:
    rest = [one for one in full if (one.result.method, one.result.dataset) != (method, "cifar100")]
    gone = [one.key for one in full if (one.result.method, one.result.dataset) == (method, "cifar100")]
    document = build(rest)
    found = blocks(document, Missing)
    assert found
    title = protocol.RECIPES[method].title
    assert any(title in one.what for one in found)
    assert set(gone) <= set().union(*(planned(one.command) for one in found))


def test_a_complete_store_lacks_nothing(full: list[Entry]) -> None:
    assert blocks(build(full), Missing) == []


def test_figures_need_what_runs_of_today_have() -> None:
    """Runs without the arrays a figure shows are no figure."""
    configs = [config_for(method, "cifar100", 2000) for method in ("er", "scr")]
    bare = []
    for one in entries(configs):
        for figures in one.result.by_classifier.values():
            figures.pop("confusion", None)
            figures.pop("head_weights", None)
        bare.append(Entry(one.result, one.date))
    names = {picture.name for picture in build(bare).pictures()}
    assert names == {"softmax-ncm-cifar100", "accuracy-cifar100", "run-time"}


def test_what_reproduce_writes_is_what_figures_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs, through the sweep and the store, drawn: the paper's figures, about digits."""
    place = ("digits", 20)
    monkeypatch.setitem(protocol.DATASETS, "digits", Split("Digits", 5, (20, 30, 40)))
    mine = [Figure(f.number, f.name, f.title, ("er",), (place,), f.artefacts) for f in FIGURES]
    monkeypatch.setattr(protocol, "FIGURES", tuple(mine))
    store = Store(tmp_path / "results.db")
    report = sweep([config_for("er", *place, device="cpu", precision="auto")], store, LocalDevice())
    assert report.finished == 1
    runs = Runs(store.query())
    for figure in mine:
        pictures = BUILDERS[figure.name](figure, place, runs)
        assert len(pictures) == max(1, len(figure.artefacts))
        for picture in pictures:
            assert isinstance(picture, Picture), picture
            assert draw(picture).axes


# ------------------------------------------------------------------------------------------------------------- figures


def pictures(runs: list[Entry]) -> dict[str, Picture]:
    return {picture.name: picture for picture in build(runs).pictures()}


def test_all_figures_of_the_paper_are_drawn(written: Path) -> None:
    names = {path.name for path in (written / "figures").iterdir()}
    stems = {name.rpartition(".")[0] for name in names}
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("png", "svg")}
    wanted = {f.name if len(f.places) == 1 else f"{f.name}-{place[0]}" for f in FIGURES for place in f.places}
    wanted |= {"tsne-test"} | {f"ablation-{ablation.name}" for ablation in ABLATIONS}
    assert wanted | {f"beyond-{name}" for name in protocol.DATASETS} == stems
    for path in (written / "figures").iterdir():
        assert path.stat().st_size > 5000


def test_each_figure_says_which_command_makes_its_runs(full: list[Entry]) -> None:
    keys = {one.key: one for one in full}
    for name, picture in pictures(full).items():
        made = planned(picture.command)
        assert made & keys.keys(), name
        methods = {keys[key].result.method for key in made if key in keys}
        if name in {figure.name for figure in FIGURES}:
            (figure,) = [one for one in FIGURES if one.name == name]
            assert methods == set(figure.methods)


def test_data_of_figures_is_that_of_the_runs(full: list[Entry]) -> None:
    found = pictures(full)
    er = [one for one in full if one.config == config_for("er", "cifar100", 2000, one.result.seed)]
    scr = [one for one in full if one.config == config_for("scr", "cifar100", 2000, one.result.seed)]
    assert len(er) == len(scr) == 2
    places, labels = found["tsne"].data["maps"]["SCR"]
    np.testing.assert_array_equal(places, scr[0].arrays("memory")["places"])
    np.testing.assert_array_equal(labels, scr[0].arrays("memory")["labels"])
    places, labels = found["tsne-test"].data["maps"]["ER"]
    np.testing.assert_array_equal(places, er[0].arrays("test")["places"])
    assert "ER 75%, MIR 75%, ASER_μ 75%, SCR 75%" in found["tsne-test"].notes[0]
    matrices = found["confusion"].data["matrices"]
    assert matrices["ER, softmax"] == er[0].result.by_classifier["softmax"]["confusion"]
    assert matrices["SCR, nearest class mean"] == scr[0].result.by_classifier["ncm"]["confusion"]
    heads = [one.result.by_classifier["softmax"]["head_weights"] for one in er]
    assert found["head-weights"].data["new"] == [[new for new, _ in run] for run in heads]
    assert found["head-weights"].data["old"] == [[old for _, old in run] for run in heads]
    curves = found["accuracy-cifar100"].data["curves"]
    assert next(iter(curves)) == "SCR"
    assert curves["ER"] == [one.result.by_classifier["ncm"]["average_over_time"] for one in er]
    bars = found["softmax-ncm-cifar100"].data
    assert bars["bars"]["ER"] == [
        [one.result.by_classifier[classifier]["average_accuracy"] for one in er] for classifier in ("softmax", "ncm")
    ]
    assert bars["paper"]["ER"] == [[0.146, pytest.approx(0.004)], [0.209, pytest.approx(0.006)]]
    hot = [one.result.average_accuracy for one in full if one.config.options.get("temperature") == 1.0]
    assert found["ablation-temperature"].data["choices"]["1.0"] == hot


def test_fingerprints_tell_data_apart(full: list[Entry]) -> None:
    before, after = pictures(full), pictures([one for one in full if one.result.seed == 0])
    assert {name: picture.fingerprint for name, picture in pictures(full).items()} == {
        name: picture.fingerprint for name, picture in before.items()
    }
    alike = {name for name in before if before[name].fingerprint == after[name].fingerprint}
    assert alike == {"tsne", "tsne-test", "confusion"}  # those show one seed
    assert len({picture.fingerprint for picture in before.values()}) == len(before)
    assert {picture.kind for picture in before.values()} == set(KINDS)


def test_run_times_are_those_of_one_machine_and_shared_by_runs_side_by_side() -> None:
    here = entries(config_for(method, "cifar100", 2000) for method in ("er", "scr"))
    there = [entry(config_for(method, "cifar100", 2000), name="Other GPU") for method in ("mir",)]
    data = pictures([*here, *there])["run-time"]
    assert data.data["seconds"].keys() == {"ER", "SCR"}
    seconds = here[0].result.seconds
    assert data.data["seconds"]["ER"] == [(seconds["training"] + seconds["evaluation"]) / 2]
    assert "Test GPU" in data.title
    assert "2 ran side by side" in data.notes[0]


def test_run_times_of_several_days_are_said_to_be_so() -> None:
    of_a_day = entries(config_for(method, "cifar100", 2000) for method in ("er", "scr"))
    assert not any("Made from" in note for note in pictures(of_a_day)["run-time"].notes)
    earlier = dataclasses.replace(of_a_day[0], date="2020-02-03T04:05:06+00:00")
    notes = pictures([earlier, of_a_day[1]])["run-time"].notes
    assert f"Made from 2020-02-03 to {of_a_day[1].date[:10]}: what ran later may be faster for that." in notes


def beside_others(one: Entry) -> Entry:
    """The same run, but made while another kind of run took turns with it."""
    seconds = {**one.result.seconds, "alike": 1}
    return dataclasses.replace(one, result=dataclasses.replace(one.result, seconds=seconds))


def test_runs_that_took_turns_with_others_have_no_time() -> None:
    config = {method: config_for(method, "cifar100", 2000) for method in ("er", "mir", "scr")}
    mixed = [beside_others(one) for one in entries([config["er"]])]
    own = entries([config["scr"]])
    blocks = section(build([*mixed, *own]), "Figure 6: run time, training and inference")
    data = pictures([*mixed, *own])["run-time"]
    assert data.data["seconds"].keys() == {"SCR"}
    left_out = next(block.text for block in blocks if isinstance(block, Text) and "Left out" in block.text)
    assert "Left out are ER" in left_out
    assert "MIR" not in left_out  # that was not run at all
    missing = next(block for block in blocks if isinstance(block, Missing))
    assert "MIR" in missing.what
    assert "ER," not in missing.what


# ---------------------------------------------------------------------------------------------------------- scr+


def test_gains_are_over_the_same_seeds() -> None:
    base = {0: 0.30, 1: 0.32, 2: 0.31}
    better = {1: 0.40, 2: 0.41, 7: 0.60}
    runs = [entry(config_for("scr", "cifar100", 2000, seed), value) for seed, value in base.items()]
    plus = RunConfig(dataset="cifar100", method="scr+", memory_size=2000)
    runs += [entry(plus.replace(seed=seed), value) for seed, value in better.items()]
    measured = {(one.result.method, one.result.seed): one.result.average_accuracy for one in runs}
    gains = [(measured["scr+", seed] or 0) - (measured["scr", seed] or 0) for seed in (1, 2)]
    table = next(block for block in section(build(runs), "Beyond the paper") if isinstance(block, Table))
    row = next(row for row in table.rows if row[0] == "CIFAR-100, M = 2k")
    cell = row[list(table.head).index("`scr+`")]
    assert isinstance(cell, Cell)
    assert cell.lines[0].endswith("(3)")
    assert cell.lines[1].startswith(f"+{100 * np.mean(gains):.1f} ± ")


def test_times_are_compared_where_both_ran_on_one_day() -> None:
    """The engine becomes faster: older runs of the one say nothing of newer runs of the other."""
    days = {"scr": ("2026-01-01", "2026-01-02"), "scr+": ("2026-01-02", "2026-01-03")}
    runs = []
    for method, dates in days.items():
        for seed, day in enumerate(dates):
            config = RunConfig(dataset="cifar100", method=method, memory_size=2000, seed=seed)
            runs.append(dataclasses.replace(entry(config, 0.3), date=f"{day}T10:00:00+00:00"))
    shared = [one for one in runs if one.date.startswith("2026-01-02")]
    seconds = {one.result.method: seconds_of(one) for one in shared}
    assert len(seconds) == 2
    together = [beside_others(one) for one in runs]
    for some, said in (
        (runs, f"time {seconds['scr+'] / seconds['scr']:.2f}"),
        (runs[:1] + runs[2:], ""),
        (together, ""),
    ):
        table = next(block for block in section(build(some), "Beyond the paper") if isinstance(block, Table))
        row = next(row for row in table.rows if row[0] == "CIFAR-100, M = 2k")
        cell = row[list(table.head).index("`scr+`")]
        assert isinstance(cell, Cell)
        assert ("time" in cell.lines[1]) == bool(said)
        assert cell.lines[1].endswith(said)


def test_parts_of_scr_plus(full: list[Entry]) -> None:
    tables = [block for block in section(build(full), "The parts of scr+") if isinstance(block, Table)]
    assert [table.head[0] for table in tables] == ["CIFAR-100, M = 2k", "CIFAR-10, M = 0.5k"]
    assert {str(row[0]).replace(" ", "_") for row in tables[0].rows} == set(beyond.parts_of("scr+"))


def test_shuffled_order_and_the_rest_are_shown() -> None:
    plus = beyond.runs_for("beyond", ["cifar100"], None, [2000], 1, order="shuffled")
    other = [config_for("er", "cifar10", 200, order="shuffled"), config_for("er", "cifar10", 200, limit=5)]
    document = build(entries([*plus, *other]))
    assert Text("Class order: shuffled by the seed.") in section(document, "Beyond the paper")
    said = section(document, "Other configurations")
    (table,) = [block for block in said if isinstance(block, Table)]
    assert {row[0] for row in table.rows} == {"er on cifar10, memory 200, classes ahead, order shuffled"}
    assert [row[3] for row in table.rows] == ["22.4 ± 1.1", "30.8 ± 2.0"]
    assert any(isinstance(block, Text) and block.text.startswith("1 runs on a part") for block in said)


# --------------------------------------------------------------------------------------------------------------- notes


def below(runs: int = 3) -> list[Entry]:
    return [entry(config_for("scr", "mini-imagenet", 2000, seed), 0.25) for seed in range(runs)]


def why(notes: list[Note], runs: list[Entry]) -> dict[str, str]:
    return {name: str(row[-1]) for name, row in rows(build(runs, notes), "Outside the paper's interval").items()}


def test_a_figure_outside_waits_for_its_explanation() -> None:
    assert why([], below()) == {"SCR, Mini-ImageNet, M = 2k": "not explained yet"}
    inside = build(entries(config_for("scr", "cifar10", 1000, seed) for seed in range(4)))
    assert [type(block) for block in section(inside, "Outside the paper's interval")] == [Text]


def test_notes_stand_beside_their_figure_with_figures_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "notes.toml"
    path.write_text(
        "[[note]]\n"
        'method = "scr"\ndataset = "mini-imagenet"\nreview = false\n'
        'text = "It is {ours}, not {paper} ({difference}); shuffled {other}, at M = 1k {small}."\n'
        'figures.other = { order = "shuffled" }\nfigures.small = { memory = 1000 }\n'
        '[[note]]\nmethod = "er"\ntext = "Not about this one."\n'
    )
    shuffled = [entry(config_for("scr", "mini-imagenet", 2000, seed, order="shuffled"), 0.31) for seed in range(2)]
    said = why(load_notes(path), [*below(), *shuffled])["SCR, Mini-ImageNet, M = 2k"]
    mean = 100 * np.mean([one.result.average_accuracy or 0 for one in shuffled])
    ours = r"It is 2\d\.\d ± \d\.\d \(3\), not 30\.6 ± 0\.5 \(−\d\.\d\)"
    assert re.fullmatch(rf"{ours}; shuffled {mean:.1f} ± \d+\.\d \(2\), at M = 1k not yet\.", said)


def benchmark_note(folder: Path, figure: str, lines: object) -> list[Note]:
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "sharpness.json").write_text(json.dumps(lines))
    path = folder / "notes.toml"
    path.write_text(f'[[note]]\nmethod = "scr"\ntext = "Sharpened it is {{sharp}}."\nfigures.sharp = {figure}\n')
    return load_notes(path)


def test_notes_have_figures_of_benchmarks(tmp_path: Path) -> None:
    found = {"ncm": {"mean": 0.2884, "interval": 0.0081}, "seeds": 4}
    other = {"ncm": {"mean": 0.5, "interval": 0.1}, "seeds": 4}
    lines = [
        {"method": "scr", "amount": 0.6, "review": False, **found},
        {"method": "scr", "amount": 0.6, "review": True, **other},
        {"method": "scr", "amount": 0.0, "review": False, **other},
        {"method": "er", "amount": 0.6, "review": False, **other},
    ]
    notes = benchmark_note(tmp_path, '{ file = "benchmarks/sharpness.json", amount = 0.6 }', {"runs": lines})
    assert why(notes, below())["SCR, Mini-ImageNet, M = 2k"] == "Sharpened it is 28.8 ± 0.8 (4)."


@pytest.mark.parametrize(
    ("figure", "lines", "message"),
    [
        ('{ file = "benchmarks/other.json" }', {"runs": []}, "other.json.*cannot be read"),
        ('{ file = "benchmarks/sharpness.json" }', {"rows": []}, "cannot be read"),
        ('{ file = "benchmarks/sharpness.json" }', {"runs": []}, "0 runs"),
        ('{ file = "benchmarks/sharpness.json" }', {"runs": 2 * [{"method": "scr", "review": False}]}, "2 runs"),
    ],
)
def test_a_benchmark_without_that_figure_is_told(tmp_path: Path, figure: str, lines: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        why(benchmark_note(tmp_path, figure, lines), below())


def test_a_note_about_a_figure_inside_is_shown_too() -> None:
    note = Note("Everything went well.", method="scr")
    inside = entries(config_for("scr", "cifar10", 1000, seed) for seed in range(4))
    said = section(build(inside, [note]), "Outside the paper's interval")
    assert said[-1] == Text("**SCR, CIFAR-10, M = 1k**: Everything went well.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("note = 1", "has one"),
        ("[[note]]", "no text"),
        ("[[nots]]\ntext = 'x'", "tables"),
        ("[[note]]\ntext = 'x'\nmetod = 'scr'", 'Did you mean "method"'),
        ("[[note]]\ntext = 'x'\nmethod = 'scf'", 'Did you mean "scr"'),
        ("[[note]]\ntext = 'x'\nmemory = '2000'", "expected a value like 0"),
        ("[[note]]\ntext = 'it is {our}'", 'Did you mean "ours"'),
        ("[[note]]\ntext = 'x {y}'\nfigures.y = { sed = 1 }", '"sed"'),
        ("[[note]]\ntext = 'we found 28.6 here'", r'typed by hand \("28\.6"\)'),
        ("[[note]]\ntext = 'two points, 2 points less'", "typed by hand"),
        ("[[note]]\ntext = '5 % less'", "typed by hand"),
        ("[[note", "no TOML"),
    ],
)
def test_mistakes_in_notes_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "notes.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_notes(tmp_path / "notes.toml")


def test_settings_and_versions_are_no_typed_figures(tmp_path: Path) -> None:
    text = "With temperature 0.1, kornia 0.4.1 or torch 2.11.0, M = 2k and 10 seeds, see Eq. 3."
    (tmp_path / "notes.toml").write_text(f"[[note]]\ntext = '{text}'\n")
    assert load_notes(tmp_path / "notes.toml")[0].text == text


# ------------------------------------------------------------------------------------------------------------- the page


class Tags(HTMLParser):
    """What a page is made of: every tag with its attributes, and whether all are closed."""

    VOID = frozenset({"meta", "img", "br", "link", "!doctype"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def parsed(path: Path) -> Tags:
    tags = Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    assert tags.open == []
    return tags


def test_the_page_stands_alone(written: Path) -> None:
    tags = parsed(written / "index.html")
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in tags.found}
    addresses = [value or "" for _, of in tags.found for name, value in of.items() if name in ("src", "href", "srcset")]
    assert all(address.startswith(("data:image/", "#")) for address in addresses)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", tags.text)
    policies = [of["content"] for tag, of in tags.found if tag == "meta" and "http-equiv" in of]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert "prefers-color-scheme: dark" in tags.text
    ids = {of["id"] for _, of in tags.found if "id" in of}
    assert {address[1:] for address in addresses if address.startswith("#")} <= ids


def test_all_pictures_are_on_the_page(full: list[Entry], written: Path) -> None:
    images = [of for tag, of in parsed(written / "index.html").found if tag == "img"]
    assert len(images) == len(list((written / "figures").glob("*.png"))) == len(pictures(full))
    for image in images:
        assert len(image["alt"] or "") > 40
        kind, _, data = (image["src"] or "").partition(",")
        if kind == "data:image/png;base64":
            assert base64.b64decode(data).startswith(b"\x89PNG")
        else:
            assert kind == "data:image/svg+xml"


def test_the_page_and_the_markdown_say_the_same(full: list[Entry], written: Path) -> None:
    page, text = parsed(written / "index.html").text, (written / "report.md").read_text(encoding="utf-8")
    figures = re.compile(r"\d+\.\d ± \d+\.\d \(\d+\)")
    assert sorted(figures.findall(page)) == sorted(figures.findall(text))
    assert len(figures.findall(text)) > 120
    for mark in ("● inside", "▲ above", "▼ below"):
        assert page.count(mark) == text.count(mark)
    for name in re.findall(r"\((figures/[^)]+)\)", text):
        assert (written / name).is_file()


def test_marks_are_words_and_not_colours_alone(written: Path) -> None:
    html = (written / "index.html").read_text(encoding="utf-8")
    cells = re.findall(r'<td class="(inside|above|below)"><span>([^<]*)', html)
    assert cells
    assert all(verdict in text for verdict, text in cells)


def test_what_people_write_cannot_become_code(tmp_path: Path) -> None:
    note = Note('<script>alert(1)</script> `<b>` **bold** [x](javascript:alert(1)) [y](https://example.org/"onload=)')
    write(build(below(), [note]), tmp_path)
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; <code>&lt;b&gt;</code> <strong>bold</strong>" in html
    links = [of.get("href") for tag, of in parsed(tmp_path / "index.html").found if tag == "a"]
    assert not any((link or "").startswith("javascript") for link in links)


def test_tables_of_the_markdown_are_whole(written: Path) -> None:
    """As many cells in every row as in the head."""
    width = rows = 0
    for line in (written / "report.md").read_text(encoding="utf-8").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert cells in (0, width) or width == 0, line
        width, rows = cells, rows + (cells > 0)
    assert rows > 10


def test_the_same_runs_give_the_same_report(tmp_path: Path) -> None:
    runs = entries(config_for(method, "cifar10", 200, seed) for method in ("er", "scr") for seed in (0, 1))
    write(build(runs), tmp_path / "a")
    write(build(runs[::-1]), tmp_path / "b")
    names = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(names) > 2
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


# ------------------------------------------------------------------------------------------------------- command line


def scr(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_report_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'no results at "results.db"' in scr("report", code=1).stderr
    Store("results.db").add_entries(below(2))
    assert scr("report").stdout == "2 runs, 1 picture. Open report/index.html, or read report/report.md.\n"
    export(below(3), "more")
    Path("notes.toml").write_text("[[note]]\ntext = 'We do not know.'\n")
    words = ["--store", "results.db", "--store", "more", "--out", "both", "--notes", "notes.toml"]
    said = json.loads(scr("report", *words, "--json").stdout)
    assert (said["runs"], said["page"], said["markdown"]) == (3, "both/index.html", "both/report.md")
    assert "We do not know." in Path("both/report.md").read_text(encoding="utf-8")
    assert scr("report", "--quiet").output == ""
    assert "--store" not in Path("report/report.md").read_text(encoding="utf-8")
    Path("results.db").rename("my runs.db")
    scr("report", "--store", "my runs.db")
    commands = re.findall(r"`(scr reproduce [^`]*)`", Path("report/report.md").read_text(encoding="utf-8"))
    assert commands
    assert all(command.endswith(" --store 'my runs.db'") for command in commands)
    Path("file").touch()
    assert "a report goes to a folder" in scr("report", "--store", "more", "--out", "file", code=1).stderr


def test_runs_from_several_places_are_there_once(tmp_path: Path) -> None:
    Store(tmp_path / "a.db").add_entries(below(2))
    export(below(3), tmp_path / "b.json.gz")
    export(below(1), tmp_path / "c")
    assert len(read_runs([tmp_path / name for name in ("a.db", "b.json.gz", "c")])) == 3
    assert len(read_runs([tmp_path / "a.db"])) == 2


@pytest.mark.parametrize(
    ("target", "method", "count"),
    [("beyond", "scr+", 180), ("beyond-ablations", "scr+", 240), ("beyond-wide", "scr+wide", 45)],
)
def test_reproduce_knows_the_study_of_scr_plus(target: str, method: str, count: int, tmp_path: Path) -> None:
    words = ["reproduce", target, "--dry-run", "--json", "--store", tmp_path / "none.db"]
    plan = json.loads(scr(*words).stdout)
    assert {run["key"] for run in plan["runs"]} == {run_key(config) for config in beyond.runs_for(target)}
    assert plan["wanted"] == count
    few = json.loads(scr(*words, "--datasets", "cifar10", "--methods", method, "--memory", 500, "--seeds", 1).stdout)
    assert {run["config"]["method"] for run in few["runs"]} == {method}
    assert {run["config"]["memory_size"] for run in few["runs"]} == {500}


def test_reproduce_runs_the_study_of_scr_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol.DATASETS, "digits", Split("Digits", 5, (20,)))
    options = ["--limit", 5, "--device", "cpu", "--precision", "fp32", "--seeds", 1, "--store", tmp_path / "a.db"]
    report = json.loads(scr("reproduce", "beyond", "--datasets", "digits", "--json", "--quiet", *options).stdout)
    assert (report["wanted"], report["finished"], report["failed"]) == (2, 2, [])
    assert {one.result.method for one in Store(tmp_path / "a.db").query()} == {"scr", "scr+"}


def test_unknown_targets_are_told(tmp_path: Path) -> None:
    assert 'Did you mean "beyond-wide"' in " ".join(scr("reproduce", "beyond-wid", code=1).stderr.split())


# ------------------------------------------------------------------------------------------------ what is published


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with results."""
    root = tmp_path_factory.mktemp("project")
    runs = entries(config_for(method, "cifar100", 2000, seed) for method in ("er", "scr") for seed in (0, 1))
    export(runs, root / docs.RUNS)
    (root / "docs").mkdir()
    (root / "docs" / "beyond.md").write_text("# y\n")  # what the README's results lead to
    (root / "README.md").write_text("# x\n\n<!-- results -->\n<!-- end of results -->\n\nmore\n")
    (root / docs.NOTES).write_text("[[note]]\nmethod = 'er'\ntext = 'Because.'\n")
    docs.write(root)
    return root


@pytest.fixture
def project(published: Path, tmp_path: Path) -> Path:
    """One to change."""
    return Path(shutil.copytree(published, tmp_path / "project"))


def test_what_is_written_is_what_is_checked(project: Path) -> None:
    assert docs.differences(project) == []
    assert docs.write(project) == []
    assert docs.main(["--check", "--root", str(project)]) == 0
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# x\n\n<!-- results -->\n")
    assert readme.endswith("<!-- end of results -->\n\nmore\n")
    assert len(re.findall(r"^!\[.*\]\((.*)\)$", readme, flags=re.MULTILINE)) == 2
    for name in re.findall(r"\]\(([^)]+)\)", readme):
        assert (project / name).is_file()


def change_a_run(project: Path) -> None:
    file = next((project / docs.RUNS).rglob("scr*"))
    file.write_text(re.sub(r'"average_accuracy":0\.\d+', '"average_accuracy":0.11', file.read_text(), count=1))


def change_the_shown_matrix(project: Path) -> None:
    file = next((project / docs.RUNS).rglob("er*"))
    file.write_text(re.sub(r'"confusion":\[\[\d+', '"confusion":[[99', file.read_text(), count=1))


def change_a_note(project: Path) -> None:
    (project / docs.NOTES).write_text("[[note]]\nmethod = 'er'\ntext = 'For another reason.'\n")


def change_the_page(project: Path) -> None:
    page = project / docs.PAGE
    page.write_text(page.read_text(encoding="utf-8").replace("SCR", "SCR!", 1), encoding="utf-8")


def change_the_readme(project: Path) -> None:
    path = project / "README.md"
    path.write_text(re.sub(r"\d\d\.\d ± ", "99.9 ± ", path.read_text(encoding="utf-8"), count=1), encoding="utf-8")


def change_a_picture(project: Path) -> None:
    (project / docs.PICTURES / "confusion.png").write_bytes(b"another one")


def remove_a_picture(project: Path) -> None:
    (project / docs.PICTURES / "tsne.svg").unlink()


def add_a_picture(project: Path) -> None:
    (project / docs.PICTURES / "mine.png").write_bytes(b"mine")


def remove_the_runs(project: Path) -> None:
    shutil.rmtree(project / docs.RUNS)


CHANGES = {
    change_a_run: "page readme",
    change_the_shown_matrix: "confusion",
    change_a_note: "page",
    change_the_page: "page",
    change_the_readme: "readme",
    change_a_picture: "confusion",
    remove_a_picture: "tsne",
    add_a_picture: "mine",
    remove_the_runs: "page readme",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_told_and_mended(change: Any, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(project)
    told = " ".join(docs.differences(project))
    words = {"page": "docs/results.md is not", "readme": "README.md are not"}
    for word in CHANGES[change].split():
        assert words.get(word, word) in told
    assert docs.main(["--check", "--root", str(project)]) == 1
    assert "make results-docs" in capsys.readouterr().err
    docs.main(["--root", str(project)])
    assert docs.differences(project) == []


def test_only_what_has_changed_is_drawn(project: Path) -> None:
    change_the_shown_matrix(project)
    assert docs.write(project) == [f"{docs.PICTURES}/confusion", docs.DRAWN]
    assert len(docs.write(project, redraw=True)) == len(json.loads((project / docs.DRAWN).read_text()))


def test_a_readme_without_its_marks_is_refused(project: Path) -> None:
    (project / "README.md").write_text("# x\n")
    with pytest.raises(InputError, match="must have the lines"):
        docs.write(project)


def test_the_published_results_are_those_of_the_runs() -> None:
    """As `make results-docs-check`, on this very project."""
    assert docs.differences(ROOT) == []
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 5_000_000


def headings(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith("#"))


def test_the_headline_needs_no_heading_and_names_scr_plus_and_offline(full: list[Entry]) -> None:
    found = headline(full)
    (table,) = [block for block in found if isinstance(block, Table)]
    assert len(table.rows) == 9
    assert {"SCR", "SCR with review", "`scr+`", "iid offline"} <= set(table.head)
    assert [block.name for block in found if isinstance(block, Picture)] == ["accuracy-cifar100", "confusion"]
    assert not any(isinstance(block, Missing) for block in found)
    assert not any(math.isnan(float(str(row[1]).split()[0])) for row in table.rows)
    assert list(headings(markdown(Document("x", []), "y"))) == ["# x"]


def test_the_headline_says_how_to_measure_what_is_not_there(full: list[Entry]) -> None:
    def commands(kept: list[Entry]) -> list[str]:
        return [block.command for block in headline(kept) if isinstance(block, Missing)]

    without_offline = [e for e in full if (e.result.method, e.result.dataset) != ("offline", "cifar10")]
    assert commands(without_offline) == ["scr reproduce table1 --datasets cifar10 --methods offline"]
    without_review = [e for e in full if not (e.result.review and e.result.dataset == "cifar100")]
    assert commands(without_review) == ["scr reproduce table1 --methods scr"]
