"""What was saved stays what it was when the defaults of its method change in a later version."""

import dataclasses

import numpy as np
import pytest

from scrlearn import OnlineClassifier
from scrlearn.errors import CheckpointError
from scrlearn.experiments import RunConfig, run
from scrlearn.experiments.identity import describe, run_key
from scrlearn.experiments.result import Result
from scrlearn.experiments.runner import load_learner
from scrlearn.experiments.store import Store
from scrlearn.learners import METHODS

RANDOM = np.random.default_rng(0)
IMAGES, LABELS = RANDOM.integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 3
THEN = {"momentum": 0.9, "orthogonal": 0.02, "update": "balanced", "classifier": "softmax", "memory_size": 30}


@pytest.fixture
def change(monkeypatch):
    """Let ER have other defaults, and let it have its own again."""

    def to(options):
        own = METHODS["er"]
        monkeypatch.setitem(METHODS, "er", dataclasses.replace(own, options={**own.options, **options}))

    return to


def test_a_classifier_goes_on_with_the_defaults_it_had(tmp_path, change, monkeypatch):
    change(THEN)
    clf = OnlineClassifier("er", memory_batch=5, device="cpu").partial_fit(IMAGES, LABELS)
    clf.save(tmp_path / "model.scr")
    expected = clf.partial_fit(IMAGES[:20], LABELS[:20]).digest()
    monkeypatch.undo()
    again = OnlineClassifier.load(tmp_path / "model.scr")
    assert again.get_params()["orthogonal"] == 0.02
    assert again.get_params()["memory_batch"] == 5
    assert again.partial_fit(IMAGES[:20], LABELS[:20]).digest() == expected
    again.save(tmp_path / "again.scr")
    assert OnlineClassifier.load(tmp_path / "again.scr").digest() == expected


@pytest.mark.parametrize("method", ["scr+", "a-gem", "icarl"])
def test_nothing_is_given_where_nothing_has_changed(tmp_path, method):
    clf = OnlineClassifier(method, memory_size=20, device="cpu")
    clf.save(tmp_path / "model.scr")
    assert OnlineClassifier.load(tmp_path / "model.scr").get_params() == clf.get_params()


def digits(**settings):
    common = {"limit": 5, "memory_size": None, "precision": "fp32", "device": "cpu"}
    return RunConfig("digits", "er", **{**common, **settings})


def test_a_result_is_not_taken_for_one_of_today(tmp_path, change, monkeypatch):
    change(THEN)
    asked = digits(options={"memory_batch": 5})
    then = run(asked, out=tmp_path / "run", pictures=False)
    assert then.run_config() == asked
    monkeypatch.undo()
    found = Result.load(tmp_path / "run" / "result.json").run_config()
    assert found.options == {"momentum": 0.9, "orthogonal": 0.02, "update": "balanced", "memory_batch": 5}
    assert (found.classifier, found.memory_size) == (None, 30)
    assert run_key(found) != run_key(asked)
    assert "orthogonal 0.02" in describe(found)
    assert run(found, pictures=False).accuracy_matrix == then.accuracy_matrix
    with pytest.raises(CheckpointError, match=r"another configuration.*orthogonal"):
        run(asked, out=tmp_path / "run", resume=True)


def test_a_store_has_both_runs(tmp_path, change, monkeypatch):
    store, asked = Store(tmp_path / "runs.db"), digits(memory_size=30)
    change({"momentum": 0.9})
    then = run(asked, pictures=False)
    store.add(then)
    assert store.has(asked)
    assert len(store.seeds(asked)) == 1
    monkeypatch.undo()
    assert not store.has(asked)
    assert store.get(asked) is None
    assert store.seeds(asked) == []
    assert str(store.add(run(asked, pictures=False))).startswith("1 new, 0 there already, 0 ")
    assert store.has(asked)
    named = asked.replace(options={"momentum": 0.9})
    entry = store.get(named)
    assert entry is not None
    assert entry.result.accuracy_matrix == then.accuracy_matrix
    assert len(store) == 2


def test_a_run_that_was_stopped_says_what_has_changed(tmp_path, change, monkeypatch):
    change(THEN)
    run(digits(), out=tmp_path / "run", pictures=False)
    expected, names = load_learner(tmp_path / "run" / "checkpoint.scr")
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.undo()
    found, again = load_learner(tmp_path / "run" / "checkpoint.scr")
    assert names == again
    assert found.orthogonal == expected.orthogonal == 0.02
    with pytest.raises(CheckpointError, match=r"another configuration.*orthogonal"):
        run(digits(), out=tmp_path / "run", resume=True)


def test_a_service_goes_on_with_the_defaults_it_had(change, monkeypatch):
    pytest.importorskip("pydantic")
    from scrlearn.service import ModelConfig
    from scrlearn.service.model import make_model

    change(THEN)
    text = ModelConfig("er", image_size=8, channels=1, device="cpu").resolved().to_json()
    monkeypatch.undo()
    learner = make_model(ModelConfig.from_json(text)).check((1, 8, 8)).get_params()
    assert {name: learner[name] for name in ("orthogonal", "momentum", "update")} == {
        "orthogonal": 0.02,
        "momentum": 0.9,
        "update": "balanced",
    }
