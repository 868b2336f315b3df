"""The search: what it proposes, what it keeps, and that it never looks at the test."""

import builtins
import itertools
import json
import shlex
import sys

import pytest
from typer.testing import CliRunner

from scrlearn import cli, experiments
from scrlearn.cli_tune import FIRST_SEED
from scrlearn.data import load
from scrlearn.errors import InputError
from scrlearn.experiments import RunConfig
from scrlearn.experiments import tune as module
from scrlearn.experiments.tune import (
    SPACES,
    Nobody,
    SearchStopped,
    default_space,
    run_command,
    tune,
    with_values,
)
from scrlearn.learners import METHODS

pytest.importorskip("optuna")

DIGITS = load("digits")
CONFIG = RunConfig(method="er", memory_size=20, seed=100, limit=10, precision="fp32", device="cpu")
SPACE = {"learning_rate": (0.01, 0.03, 0.1, 0.3), "momentum": (0.0, 0.5, 0.9), "memory_batch": (5, 10, 20)}


class Outcome:
    """As much of a result as the search looks at."""

    def __init__(self, accuracy):
        self.average_accuracy = accuracy
        self.by_classifier = {"softmax": {"average_accuracy": accuracy}, "ncm": {"average_accuracy": accuracy / 2}}


class Measured:
    """Stands for the runs: the accuracy is a known function of the options and the seed."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(module, "run_all", self.all)

    def all(self, configs, dataset, **how):
        """Several at once: each is measured as it would be alone."""
        trials = itertools.groupby(configs, key=lambda config: config.replace(seed=0))
        return [
            result
            for config, same in trials
            for result in self(config, [one.seed for one in same], dataset=dataset, **how)
        ]

    def __call__(self, config, seeds, **how):
        self.calls.append((config, list(seeds), how))
        o = config.options
        accuracy = 0.8 - abs(o["learning_rate"] - 0.03) - 0.1 * o["momentum"] - 0.01 * abs(o["memory_batch"] - 10)
        return [Outcome(accuracy + 0.001 * (seed % 3 - 1)) for seed in seeds]

    @property
    def tried(self):
        return [dict(config.options) for config, _, _ in self.calls]


@pytest.fixture
def measured(monkeypatch):
    return Measured(monkeypatch)


def search(path, config=CONFIG, space=SPACE, **how):
    return tune(config, space, study=path / "study.db", dataset=DIGITS, **how)


# ---------------------------------------------------------------- what is run


def test_trials_run_on_the_first_tasks_with_images_held_out(measured, tmp_path):
    search(tmp_path, trials=2, seeds=3)
    for config, seeds, how in measured.calls:
        assert (config.first_tasks, config.holdout) == (2, 0.1)  # of five tasks
        assert seeds == [100, 101, 102]
        assert how["dataset"].held_out == 0.1
    search(tmp_path, CONFIG.replace(first_tasks=3, holdout=0.2, tasks=10), trials=1, seeds=[5])
    config, seeds, how = measured.calls[-1]
    assert (config.first_tasks, config.holdout, seeds) == (3, 0.2, [5])
    assert how["dataset"].held_out == 0.2


def test_the_defaults_come_first_where_the_space_has_them(measured, tmp_path):
    search(tmp_path, trials=1)
    assert measured.tried[0] == {"learning_rate": 0.1, "momentum": 0.0, "memory_batch": 10}
    search(tmp_path, space={"learning_rate": (0.01, 0.02), "momentum": (0.0,), "memory_batch": (10,)}, trials=1)
    assert measured.tried[1]["learning_rate"] in (0.01, 0.02)


def test_no_choice_is_run_twice_and_a_small_space_is_tried_whole(measured, tmp_path):
    space = {"learning_rate": (0.01, 0.03), "momentum": (0.0, 0.9), "memory_batch": (10,)}
    found = search(tmp_path, space=space, trials=50)
    assert len(found.trials) == len(measured.calls) == 4
    assert len({json.dumps(tried) for tried in measured.tried}) == 4
    assert found.best.values == {"learning_rate": 0.03, "momentum": 0.0, "memory_batch": 10}


def test_it_comes_near_the_best_of_the_space(measured, tmp_path):
    found = search(tmp_path, trials=20)
    assert len(found.trials) == 20
    assert len({json.dumps(trial.values) for trial in found.trials}) == 20
    best = found.best
    assert best.interval.mean >= 0.75  # the best there is has 0.8, the defaults 0.73
    assert found.trials[0].interval.mean == pytest.approx(0.73)
    assert best.by_classifier["ncm"] == pytest.approx([accuracy / 2 for accuracy in best.accuracies])
    later = [trial.interval.mean for trial in found.trials[10:]]
    assert sum(later) > sum(trial.interval.mean for trial in found.trials[:10])  # it learns from what it has seen
    assert [t.interval.mean for t in found.ranking] == sorted((t.interval.mean for t in found.trials), reverse=True)


@pytest.mark.parametrize("at_once", [1, 5])
def test_evenly_means_that_every_value_is_tried_equally_often(measured, tmp_path, at_once):
    found = search(tmp_path / str(at_once), trials=24, sampler="even", at_once=at_once)
    assert len({json.dumps(trial.values) for trial in found.trials}) == 24
    for name, values in SPACE.items():
        for done in (6, 12, 24):
            counts = [sum(trial.values[name] == value for trial in found.trials[:done]) for value in values]
            assert max(counts) - min(counts) <= 2
    again = search(tmp_path / f"{at_once} again", trials=24, sampler="even")
    assert [trial.values for trial in again.trials] == [trial.values for trial in found.trials]


def test_effects_are_those_of_a_sum(tmp_path, monkeypatch):
    """The stand-in adds up one figure for each option; differences between values are found exactly."""
    measured = Measured(monkeypatch)
    effects = search(tmp_path, trials=20, sampler="even").effects
    assert {name: tuple(values) for name, values in effects.items()} == SPACE
    rate, momentum, batch = effects["learning_rate"], effects["momentum"], effects["memory_batch"]
    assert rate[0.03] - rate[0.3] == pytest.approx(0.27)
    assert rate[0.03] - rate[0.01] == pytest.approx(0.02)
    assert momentum[0.0] - momentum[0.9] == pytest.approx(0.09)
    assert batch[10] - batch[5] == pytest.approx(0.05)
    assert batch[10] - batch[20] == pytest.approx(0.1)
    # and each is the mean of the trials, had they all had that value
    shifted = [trial.interval.mean for trial in search(tmp_path, trials=20, sampler="even").trials]
    had = [call["momentum"] for call in measured.tried]
    assert momentum[0.0] == pytest.approx(sum(m + 0.1 * v for m, v in zip(shifted, had, strict=True)) / 20)


def test_a_sampler_that_is_none(tmp_path):
    with pytest.raises(InputError, match=r'no sampler "tpx".*"tpe"'):
        search(tmp_path, sampler="tpx")


def test_bad_trials_are_given_up_after_the_first_seed(measured, tmp_path):
    found = search(tmp_path, trials=15, prune=True)
    given_up = [trial for trial in found.trials if trial.pruned]
    assert given_up
    assert not any(trial.pruned for trial in found.trials[:5])
    assert all(len(trial.accuracies) == (1 if trial.pruned else 3) for trial in found.trials)
    assert not set(map(id, found.ranking)) & set(map(id, given_up))
    assert sum(len(seeds) for _, seeds, _ in measured.calls) == 3 * 15 - 2 * len(given_up)


# ---------------------------------------------------------------- stopping and going on


def test_the_same_seed_proposes_the_same(measured, tmp_path):
    first = search(tmp_path / "a", trials=14)
    again = search(tmp_path / "b", trials=14)
    other = search(tmp_path / "c", trials=14, sampler_seed=1)
    assert [t.values for t in first.trials] == [t.values for t in again.trials]
    assert [t.values for t in first.trials] != [t.values for t in other.trials]


def test_stopped_and_resumed_it_proposes_what_it_would_have(measured, tmp_path, monkeypatch):
    whole = search(tmp_path / "whole", trials=16)

    def interrupted(configs, dataset, **how):
        if len(measured.calls) in (16 + 3, 16 + 13):
            measured.calls.append((configs[0], [], how))
            raise KeyboardInterrupt
        return measured.all(configs, dataset, **how)

    monkeypatch.setattr(module, "run_all", interrupted)
    for done in (3, 12):
        with pytest.raises(SearchStopped, match=f"Stopped after {done} of 16 trials"):
            search(tmp_path / "stopped", trials=16)
    resumed = search(tmp_path / "stopped", trials=16)
    assert [t.values for t in resumed.trials] == [t.values for t in whole.trials]
    assert [t.accuracies for t in resumed.trials] == [t.accuracies for t in whole.trials]


@pytest.mark.parametrize("how", [{}, {"at_once": 2}, {"prune": True}])
def test_of_several_memory_sizes_the_mean_counts(measured, tmp_path, monkeypatch, how):
    """The accuracy here rises with the memory, by as much for every choice."""

    def all_of(configs, dataset, **how):
        results = measured.all(configs, dataset, **how)
        return [Outcome(r.average_accuracy + c.memory_size / 1000) for r, c in zip(results, configs, strict=True)]

    monkeypatch.setattr(module, "run_all", all_of)
    found = search(tmp_path, trials=6, seeds=2, memory_sizes=[10, 30], **how)
    assert {config.memory_size for config, _, _ in measured.calls} == {10, 30}
    alone = search(tmp_path / "alone", CONFIG.replace(memory_size=20), trials=6, seeds=2, **how)
    for both, one in zip(found.trials, alone.trials, strict=True):
        assert both.accuracies == pytest.approx(one.accuracies)
        assert both.by_classifier["ncm"] == pytest.approx(one.by_classifier["ncm"])
    assert found.chosen.memory_size == 30
    before = len(measured.calls)
    assert len(search(tmp_path, trials=6, seeds=2, memory_sizes=[10, 30], **how).trials) == 6
    assert len(measured.calls) == before  # all there
    with pytest.raises(InputError, match="each once"):
        search(tmp_path, memory_sizes=[10, 10])


def test_trials_at_once_know_nothing_of_each_other(measured, tmp_path):
    found = search(tmp_path, trials=10, seeds=2, at_once=4)
    assert len({str(t.values) for t in found.trials}) == 10
    assert [len(t.accuracies) for t in found.trials] == [2] * 10
    assert found.trials[0].values == search(tmp_path / "alone", trials=1, seeds=2).trials[0].values
    for trial in found.trials:  # each has its own figures
        alone = [measured(with_values(CONFIG, trial.values), [seed])[0].average_accuracy for seed in (1000, 1001)]
        assert list(trial.accuracies) == pytest.approx(alone)


def test_trials_at_once_stopped_and_resumed(measured, tmp_path, monkeypatch):
    whole = search(tmp_path / "whole", trials=11, at_once=4)
    kept, real = [], module.Book.keep

    def killed(self, trial):
        if len(kept) == 6:
            kept.append(None)
            raise KeyboardInterrupt
        kept.append(trial)
        real(self, trial)

    monkeypatch.setattr(module.Book, "keep", killed)
    with pytest.raises(SearchStopped, match="Stopped after 6 of 11"):
        search(tmp_path / "stopped", trials=11, at_once=4)
    resumed = search(tmp_path / "stopped", trials=11, at_once=4)
    assert [t.values for t in resumed.trials] == [t.values for t in whole.trials]


def test_a_small_space_at_once_is_tried_whole(measured, tmp_path):
    space = {**SPACE, "learning_rate": [0.1], "memory_batch": [10]}
    found = search(tmp_path, space=space, trials=30, at_once=8)
    assert len(found.trials) == len(SPACE["momentum"])


def test_at_once_and_giving_up_early_exclude_each_other(measured, tmp_path):
    for wrong in ({"at_once": 2, "prune": True}, {"at_once": 0}):
        with pytest.raises(InputError, match="at_once is"):
            search(tmp_path, **wrong)


def test_a_finished_search_is_found_again(measured, tmp_path):
    found = search(tmp_path, trials=5)
    calls = len(measured.calls)
    assert search(tmp_path, trials=5) == found
    assert len(measured.calls) == calls
    more = search(tmp_path, trials=7)
    assert more.trials[:5] == found.trials
    assert len(measured.calls) == calls + 2


@pytest.mark.parametrize(
    "change",
    [
        {"config": CONFIG.replace(memory_size=30)},
        {"config": CONFIG.replace(holdout=0.3)},
        {"space": {**SPACE, "momentum": (0.0, 0.9)}},
        {"seeds": 2},
        {"sampler_seed": 3},
        {"sampler": "even"},
        {"prune": True},
    ],
)
def test_searches_that_differ_lie_side_by_side(measured, tmp_path, change):
    search(tmp_path, trials=2)
    calls = len(measured.calls)
    search(tmp_path, trials=1, **change)
    assert len(measured.calls) > calls
    assert len(search(tmp_path, trials=2).trials) == 2


def test_a_trial_that_fails_ends_the_search_and_is_tried_again(measured, tmp_path, monkeypatch):
    search(tmp_path, trials=2)

    def fails(configs, dataset, **how):
        raise InputError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_all", fails)
        with pytest.raises(InputError, match="no such thing"):
            search(tmp_path, trials=3)
    assert len(search(tmp_path, trials=3).trials) == 3


def test_two_at_once_on_one_search_are_refused(measured, tmp_path, monkeypatch):
    real = module.run_all

    def meanwhile(configs, dataset, **how):
        with pytest.raises(InputError, match="Another process works on this search"):
            search(tmp_path, trials=9)
        assert len(search(tmp_path, trials=1, sampler_seed=7).trials) == 1  # another search in the same file
        return real(configs, dataset, **how)

    def once(*given, **how):
        monkeypatch.setattr(module, "run_all", real)
        return meanwhile(*given, **how)

    monkeypatch.setattr(module, "run_all", once)
    assert len(search(tmp_path, trials=2).trials) == 2
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".lock"] == []


def test_who_watches_is_told_of_every_trial(measured, tmp_path):
    class Watching(Nobody):
        def __init__(self):
            self.told = []

        def started(self, number, values):
            self.told.append(("started", number))

        def ended(self, trial):
            self.told.append(("ended", trial.number))

    search(tmp_path, trials=1)
    watching = Watching()
    search(tmp_path, trials=2, watcher=watching)
    assert watching.told == [("ended", 0), ("started", 1), ("ended", 1)]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "The space is empty"),
        ({"temprature": (0.1,)}, 'no option "temprature"'),
        ({"temperature": (0.1,)}, 'Method "er" has no option "temperature"'),
        ({"learning_rate": ()}, "The values of learning_rate are"),
        ({"learning_rate": (0.1, 0.1)}, "each once"),
        ({"learning_rate": ([0.1],)}, "cannot be searched"),
        ({"memory_size": (10, 20)}, "has a field of its own"),
        ({"momentum": (0.5, 0.9), "learning_rate": (0.1, "much")}, "learning_rate is 'much'"),
        ({"classifier": ("ncm", "knn")}, 'no classifier "knn"'),
    ],
)
def test_spaces_that_cannot_be_searched(space, message, measured, tmp_path):
    with pytest.raises(InputError, match=message):
        search(tmp_path, space=space)
    assert not list(tmp_path.iterdir())
    assert not measured.calls


def test_parts_and_their_options_can_be_searched(measured, tmp_path):
    with pytest.raises(InputError, match='no option "candidates"'):  # random retrieval has no candidates
        search(tmp_path, space={"retrieve": ("mir", "random"), "candidates": (20, 50)})
    module._check_space(CONFIG, {"retrieve": ("mir",), "candidates": (20, 50), "classifier": ("ncm", "combined")})


def test_trials_and_seeds_are_needed(measured, tmp_path):
    for how in ({"trials": 0}, {"seeds": 0}, {"seeds": []}):
        with pytest.raises(InputError, match="1 or more of each"):
            search(tmp_path, **how)


def test_without_optuna_it_says_what_to_install(monkeypatch, tmp_path):
    real = builtins.__import__

    def fails(name, *more, **others):
        if name == "optuna":
            raise ImportError("No module named 'optuna'", name="optuna")
        return real(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(InputError, match=r'needs optuna.*pip install "scrlearn\[tune\]"'):
        search(tmp_path)


def test_a_file_that_is_no_study(tmp_path):
    (tmp_path / "study.db").write_text("no database at all, but long enough to be read as one" * 10)
    with pytest.raises(InputError, match="cannot be used as a study"):
        search(tmp_path)


# ---------------------------------------------------------------- tables and commands


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_space_of_its_options(method):
    config = RunConfig(method=method)
    module._check_space(config, default_space(method))
    usual = METHODS[method].parameters()
    assert all(usual[name] in values for name, values in SPACES[method].items())  # so the defaults come first


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        RunConfig(method="scr+", order="shuffled", options={"review": True, "update": "gss", "averaging": 0.99}),
        RunConfig(classes_ahead=True, drop_last=False, classifier="combined", tasks=10, batch_size=5, blurry=0.1),
        RunConfig(holdout=0.2, first_tasks=2, imbalance=2.0, image_size=8, engine="eager"),
    ],
)
def test_the_command_runs_the_same_configuration(config, monkeypatch):
    asked = []
    monkeypatch.setattr(experiments, "run", lambda config, **how: asked.append(config) or exit(0))
    words = run_command(config)
    assert words[:2] == ["scr", "run"]
    CliRunner().invoke(cli.app, [*words[1:], "--quiet"])
    assert asked == [config]


def test_the_chosen_run_is_on_the_whole_stream(measured, tmp_path):
    found = search(tmp_path, trials=1, config=CONFIG.replace(options={"review": True}))
    assert (found.chosen.holdout, found.chosen.first_tasks, found.chosen.seed) == (0.0, None, 0)
    assert dict(found.chosen.options) == {"review": True, "learning_rate": 0.1, "momentum": 0.0, "memory_batch": 10}
    assert with_values(CONFIG, {"classifier": "lda"}).classifier == "lda"


TINY = [
    "tune",
    "--method",
    "fine-tune",
    "--memory",
    "10",
    "--limit",
    "5",
    "--seeds",
    "2",
    "--trials",
    "2",
    "--device",
    "cpu",
    "--precision",
    "fp32",
]


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scr"])
    words = [*TINY, "--space", "learning_rate=0.05,0.1", "--space", "mirror=true,false"]
    result = CliRunner().invoke(cli.app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (tmp_path / "tuning.db").is_file()
    assert found["config"]["seed"] == FIRST_SEED
    assert (found["config"]["first_tasks"], found["config"]["holdout"]) == (2, 0.1)
    assert found["trials"][0]["values"] == {"learning_rate": 0.1, "mirror": False}
    assert [len(trial["accuracies"]) for trial in found["trials"]] == [2, 2]
    assert "trial 2 of 2" in result.stderr
    again = CliRunner().invoke(cli.app, words)
    assert again.exit_code == 0
    assert found["command"] in again.stdout
    assert "on the first 2 tasks with 10% held out" in " ".join(again.stdout.split())
    assert shlex.split(found["command"])[:2] == ["scr", "run"]


def test_the_command_that_is_printed_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRLEARN_DATA", raising=False)
    words = [
        *TINY,
        "--space",
        "learning_rate=0.05",
        "--data-root",
        "some where",
        "--no-drop-last",
        "--split",
        "shuffled",
    ]
    for program, expected in (("/bin/scr", ["scr"]), ("my_method.py", ["python", "my_method.py"])):
        monkeypatch.setattr(sys, "argv", [program])
        found = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
        assert (found["config"]["drop_last"], found["config"]["split"]) == (False, "shuffled")
        command = shlex.split(found["command"])
        assert command[: len(expected) + 1] == [*expected, "run"]
        assert command[-2:] == ["--data-root", "some where"]
        assert "--no-drop-last" in command


def test_several_memory_sizes_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "--memory", "10,20", "--trials", "1", "--space", "learning_rate=0.1"]
    found = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert found["memory_sizes"] == [10, 20]
    assert [len(trial["accuracies"]) for trial in found["trials"]] == [2]
    alone = [
        json.loads(CliRunner().invoke(cli.app, [*words, "--memory", size, "--json"]).stdout) for size in ("10", "20")
    ]
    mean = sum(one["trials"][0]["mean"] for one in alone) / 2
    assert found["trials"][0]["mean"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "learning_rate"], "is not NAME=V1,V2"),
        (["--space", "momentum=0", "--space", "momentum=0.9"], "was given twice"),
        (["--holdout", "0"], "above 0"),
        (["--memory", "10,some"], "neither a number nor several"),
        (["--space", "momentun=0,0.9"], "momentun"),
    ],
)
def test_mistakes_on_the_command_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, [*TINY, *words])
    assert result.exit_code in (1, 2)
    assert message in result.stderr.replace("\n", " ")
    assert not (tmp_path / "tuning.db").exists()
