"""The runs that measure scr+: parts, ablations, and the cells of Table 1."""

from collections import Counter

import pytest

from scrlearn.errors import InputError
from scrlearn.experiments import RunConfig, protocol
from scrlearn.experiments.beyond import DEFAULT_SEEDS, TARGETS, ablations_of, parts_of, runs_for
from scrlearn.experiments.identity import run_key
from scrlearn.learners import METHODS


def options_of(config):
    """Every option of the run with its value, but for the head that comes with the classifier that is asked."""
    return {name: value for name, value in config.all_options(10).items() if name != "probe"}


def test_the_parts_are_what_the_preset_adds():
    parts = parts_of("scr+")
    assert set(parts) == {
        "averaging",
        "centred",
        "mirror",
        "crops",
        "cross_entropy_weight",
        "update",
        "momentum",
        "weight_decay",
        "mix_after",
        "orthogonal",
        "calibrated",
    }
    assert set(parts["momentum"]) == {"momentum", "learning_rate"}  # chosen together
    assert set(parts["cross_entropy_weight"]) == {
        "cross_entropy_weight",
        "classifier",
    }  # one trains what the other asks
    together = {name: value for options in parts.values() for name, value in options.items()}
    built = options_of(RunConfig(method="scr", classifier=together.pop("classifier"), options=together))
    assert built == options_of(RunConfig(method="scr+"))
    with pytest.raises(InputError, match='"er" is not built from another method'):
        parts_of("er")


def test_each_part_is_added_and_taken_away():
    runs = ablations_of("scr+", "cifar10", 500, seed=3, order="shuffled")
    parts = parts_of("scr+")
    assert list(runs) == [
        "scr",
        *(f"scr + {part}" for part in parts),
        "scr+",
        *(f"scr+ − {part}" for part in parts),
    ]
    assert len({run_key(config) for config in runs.values()}) == len(runs)
    scr, plus = options_of(runs["scr"]), options_of(runs["scr+"])
    for part, options in parts.items():
        added, without = options_of(runs[f"scr + {part}"]), options_of(runs[f"scr+ − {part}"])
        assert {name for name in added if added[name] != scr[name]} == set(options)
        assert {name for name in without if without[name] != plus[name]} == set(options)
        assert all(without[name] == scr[name] and added[name] == plus[name] for name in options)
    for config in runs.values():
        assert (config.dataset, config.memory_size, config.seed, config.order) == ("cifar10", 500, 3, "shuffled")


def test_every_ablation_can_be_built():
    for name, config in ablations_of("scr+", "digits", 20).items():
        assert config.make_learner((1, 8, 8), 10).classifiers, name


def test_the_table_has_all_nine_cells():
    runs = runs_for("beyond")
    cells = Counter((config.dataset, config.memory_size) for config in runs)
    assert set(cells) == set(protocol.COLUMNS)
    assert set(cells.values()) == {2 * 10}


def test_the_baseline_is_the_run_of_the_reproduction():
    ours = {run_key(config) for config in runs_for("beyond", methods=["scr"])}
    theirs = {run_key(config) for config in protocol.runs_for("table1", methods=["scr"], review=False)}
    assert ours == theirs


def test_runs_are_narrowed_down():
    assert len(runs_for("beyond-ablations")) == 2 * 24 * 5
    runs = runs_for("beyond", ["cifar100"], ["scr+"], [2000, 5000], [7, 8], order="shuffled", limit=20)
    assert len(runs) == 2 * 2
    assert {config.seed for config in runs} == {7, 8}
    assert all(config.order == "shuffled" and config.limit == 20 for config in runs)
    assert all("review" in config.options for config in runs_for("beyond", review=True, seeds=1))
    assert not any("review" in config.options for config in runs_for("beyond", review=False, seeds=1))


def test_the_wide_runs_have_the_full_encoder():
    runs = runs_for("beyond-wide", ["cifar10"], seeds=1)
    assert {config.memory_size for config in runs} == {200, 500, 1000}
    assert {config.method for config in runs} == {"scr+wide"}
    wide, usual = METHODS["scr+wide"].parameters(), METHODS["scr+"].parameters()
    assert wide == {**usual, "width": 64}


def test_targets_have_seeds():
    assert set(DEFAULT_SEEDS) == set(TARGETS)
    assert not set(TARGETS) & set(protocol.TARGETS)
    assert all(method in METHODS for method in ("scr", "scr+"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("byond",), 'Did you mean "beyond"'),
        (("beyond", ["cifar"]), 'no data set "cifar"'),
        (("beyond", None, ["er"]), 'no method "er" in this study'),
        (("beyond", None, None, [123]), "Nothing of beyond is left"),
    ],
)
def test_mistakes_are_told(arguments, message):
    with pytest.raises(InputError, match=message):
        runs_for(*arguments)
