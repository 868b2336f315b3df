"""The paper's protocol as data."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from scrlearn.data import DEFAULT_TASKS
from scrlearn.errors import InputError
from scrlearn.experiments import protocol
from scrlearn.experiments.identity import run_key
from scrlearn.experiments.protocol import (
    ABLATIONS,
    COLUMNS,
    DATASETS,
    FIGURES,
    RECIPES,
    ROWS,
    TARGETS,
    artefacts_for,
    runs_for,
)


@pytest.mark.parametrize(
    ("method", "classifier", "dataset", "memory", "text"),
    [
        ("scr", "ncm", "mini-imagenet", 1000, "24.1 ± 0.6"),
        ("scr", "ncm", "cifar100", 2000, "32.8 ± 0.7"),
        ("scr", "ncm", "cifar10", 1000, "65.7 ± 0.6"),
        ("aser", "ncm", "mini-imagenet", 5000, "21.1 ± 0.3"),
        ("aser", "softmax", "cifar10", 500, "39.8 ± 1.7"),
        ("mir", "ncm", "cifar100", 1000, "16.4 ± 0.4"),
        ("gss", "softmax", "mini-imagenet", 5000, "14.5 ± 2.2"),
        ("er", "softmax", "cifar10", 200, "22.4 ± 1.1"),
        ("a-gem", "ncm", "cifar10", 500, "29.0 ± 1.8"),
        ("lwf", "softmax", "cifar100", 5000, "13.9 ± 0.5"),
        ("ewc++", "softmax", "mini-imagenet", 2000, "4.5 ± 0.2"),
        ("offline", "softmax", "cifar10", 200, "81.7 ± 0.1"),
        ("fine-tune", "softmax", "cifar100", 1000, "5.8 ± 0.3"),
    ],
)
def test_cells_of_table_1(method: str, classifier: str, dataset: str, memory: int, text: str) -> None:
    assert str(protocol.paper(method, classifier, dataset, memory)) == text


def test_table_1_is_complete() -> None:
    assert len(ROWS) == 15
    assert len(COLUMNS) == 9
    for row in ROWS:
        assert list(row.cells) == COLUMNS
        assert all(0 < cell.half_width < cell.mean < 1 and cell.n == 10 for cell in row.cells.values())
    assert {row.method for row in ROWS} == set(RECIPES)
    assert [row.title for row in ROWS[-4:]] == ["MIR-NCM", "ASER_μ", "ASER_μ-NCM", "SCR"]


def test_the_gains_that_the_paper_computes() -> None:
    """Its last row: SCR against the second best of each column. A mistyped figure would not add up."""
    best = {row.classifier: row for row in ROWS if row.method == "scr"}["ncm"]
    others = [row for row in ROWS if row.method not in ("scr", "offline")]
    gains = [100 * (best.cells[c].mean - max(row.cells[c].mean for row in others)) for c in COLUMNS]
    assert [round(gain, 1) for gain in gains] == [6.3, 10.1, 13.3, 4.6, 7.6, 8.2, 14.5, 15.9, 15.4]


def test_no_figure_where_the_paper_has_none() -> None:
    assert protocol.paper("scr", "softmax", "cifar100", 2000) is None
    assert protocol.paper("scr", "ncm", "cifar100", 200) is None
    assert protocol.paper("icarl", "ncm", "cifar100", 2000) is None


def test_tasks_are_those_of_the_field() -> None:
    assert {name: split.tasks for name, split in DATASETS.items()} == {name: DEFAULT_TASKS[name] for name in DATASETS}


# --------------------------------------------------------------------------------------------------------------- runs


def test_runs_of_table_1() -> None:
    runs = runs_for("table1")
    assert len(runs) == len({run_key(config) for config in runs}) == 729
    counts = Counter((config.dataset, config.method) for config in runs)
    for dataset in DATASETS:
        assert counts[dataset, "scr"] == 2 * 3 * 10
        assert counts[dataset, "er"] == 3 * 10
        assert counts[dataset, "lwf"] == 10
        assert counts[dataset, "offline"] == 3
    assert {config.order for config in runs} == {"natural"}


def test_options_of_the_reproduction() -> None:
    runs = {(config.method, config.dataset): config for config in runs_for("table1", seeds=1, review=False)}
    assert {config.classes_ahead for (method, _), config in runs.items() if method != "scr"} == {True}
    assert runs["scr", "cifar10"].classes_ahead is False
    assert [runs["aser", d].options["per_class"] for d in ("cifar10", "cifar100", "mini-imagenet")] == [9, 2, 3]
    assert runs["ewc++", "cifar10"].options == {"strength": 0}
    assert runs["scr", "cifar10"].options == {}
    assert {config.options.get("review", False) for config in runs_for("table1", methods=["scr"])} == {False, True}
    assert {config.options["review"] for config in runs_for("table1", methods=["scr"], review=True)} == {True}


def test_only_what_is_asked_for() -> None:
    runs = runs_for("table1", ["cifar10", "cifar100"], ["er", "fine-tune"], [1000], [4, 7], order="shuffled", limit=3)
    assert sorted({(c.dataset, c.method, c.memory_size, c.seed) for c in runs}) == [
        ("cifar10", "er", 1000, 4),
        ("cifar10", "er", 1000, 7),
        ("cifar10", "fine-tune", 500, 4),
        ("cifar10", "fine-tune", 500, 7),
        ("cifar100", "er", 1000, 4),
        ("cifar100", "er", 1000, 7),
        ("cifar100", "fine-tune", 2000, 4),
        ("cifar100", "fine-tune", 2000, 7),
    ]
    assert {(config.order, config.limit) for config in runs} == {("shuffled", 3)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target": "table2"}, 'Did you mean "table1"'),
        ({"datasets": ["cifar"]}, 'no data set "cifar". Did you mean'),
        ({"methods": ["scrr"]}, 'Did you mean "scr"'),
        ({"memory": [300]}, "no memory size 300 there; it has 200, 500"),
        ({"datasets": ["cifar10"], "memory": [5000]}, "it has 200, 500, 1000"),
        ({"seeds": []}, "one or more"),
        ({"seeds": [1, 1]}, "each once"),
        ({"target": "ablations", "methods": ["er"]}, "Nothing of ablations is left"),
    ],
)
def test_what_the_paper_has_not(wrong: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        runs_for(**{"target": "table1", **wrong})


def test_ablations_share_the_run_with_the_papers_own_choices() -> None:
    runs = runs_for("ablations", seeds=2)
    assert len(runs) == 2 * (sum(len(ablation.choices) for ablation in ABLATIONS) - len(ABLATIONS) + 1)
    assert {(config.dataset, config.memory_size, config.method) for config in runs} == {("cifar100", 2000, "scr")}
    table = {run_key(config) for config in runs_for("table1", ["cifar100"], ["scr"], [2000], 2)}
    assert len(table & {run_key(config) for config in runs}) == 2
    for ablation in ABLATIONS:
        assert ablation.chosen in ablation.choices


def test_ablations_elsewhere_have_the_settings_of_that_data_set() -> None:
    for dataset, per_class in (("cifar10", 9), ("cifar100", 2), ("mini-imagenet", 3)):
        found = {config.options.get("per_class") for config in runs_for("ablations", [dataset], seeds=1)}
        assert found == {None, per_class}


def test_every_choice_makes_a_learner() -> None:
    """On smaller images, because that is quick; the options are those of the paper."""
    for config in runs_for("ablations", seeds=1) + runs_for("table1", ["cifar100"], memory=[1000], seeds=1):
        learner = config.replace(device="cpu").make_learner((3, 8, 8), 100)
        assert learner.classifier in learner.classifiers
        for name in ("memory_batch", "review"):
            assert getattr(learner, name, None) == config.options.get(name, getattr(learner, name, None))


def test_figures_are_made_of_table_1s_runs() -> None:
    table = {run_key(config) for config in runs_for("table1")}
    figures = runs_for("figures")
    assert {run_key(config) for config in figures} <= table
    assert {config.seed for config in figures} == set(range(5))
    assert [figure.number for figure in FIGURES] == [1, 2, 3, 4, 5, 6]
    assert not any(config.options.get("review") for config in figures)
    assert len(runs_for("figures", ["cifar10"], ["er"])) == 2 * 5  # bars with 500, the curve with 200


def test_the_whole_paper_is_its_parts() -> None:
    """Each run once, data set by data set."""
    parts = [set(map(run_key, runs_for(target))) for target in TARGETS]
    whole = runs_for("paper")
    keys = list(map(run_key, whole))
    assert len(keys) == len(set(keys)) < sum(map(len, parts))
    assert set(keys) == set().union(*parts)
    datasets = [config.dataset for config in whole]
    assert [name for name, _ in groupby(datasets)] == list(DATASETS)


@pytest.mark.parametrize(
    ("wanted", "ablations"),
    [({}, True), ({"datasets": ["cifar100"]}, True), ({"datasets": ["cifar10"]}, False), ({"methods": ["er"]}, False)],
)
def test_the_whole_paper_has_ablations_where_the_paper_has_them(wanted: dict, ablations: bool) -> None:
    made = {run_key(config) for config in runs_for("paper", seeds=1, **wanted)}
    of_the_study = {run_key(config) for config in runs_for("ablations", seeds=1) if config.options}
    assert made & of_the_study == (of_the_study if ablations else set())


def test_seeds_from_the_first_on() -> None:
    assert {config.seed for config in runs_for("figures", ["cifar10"], first_seed=20)} == set(range(20, 25))
    whole = runs_for("paper", ["cifar100"], ["scr"], [2000], first_seed=10)
    assert {config.seed for config in whole} == set(range(10, 20))
    assert {config.seed for config in whole if "temperature" in config.options} == set(range(10, 15))


def test_artefacts_are_made_where_a_figure_needs_them() -> None:
    wanted = [config for config in runs_for("figures") + runs_for("ablations") if artefacts_for(config)]
    assert sorted((c.method, c.dataset, c.memory_size, c.seed) for c in wanted) == [
        ("aser", "cifar100", 2000, 0),
        ("er", "cifar100", 2000, 0),
        ("mir", "cifar100", 2000, 0),
        ("scr", "cifar100", 2000, 0),
        ("scr", "cifar100", 2000, 0),  # the paper's own choice among the ablations: the same run
    ]
    shuffled = [config for config in runs_for("figures", order="shuffled", limit=5) if artefacts_for(config)]
    assert len(shuffled) == 4
