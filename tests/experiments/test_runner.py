"""A configuration becomes a result, the same every time, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from scrlearn import devices
from scrlearn.checkpoint import load_checkpoint, save_checkpoint
from scrlearn.data import ArrayImages, Dataset, load
from scrlearn.engine import Position, train
from scrlearn.errors import CheckpointError, InputError
from scrlearn.evaluation import NO_ANSWER, interval
from scrlearn.experiments import Interrupted, Result, RunConfig, evaluate, load_learner, run, run_seeds, runner, summary
from scrlearn.experiments.folders import CHECKPOINT, PICTURES, RESULT, SUMMARY
from scrlearn.experiments.record import Moment
from scrlearn.experiments.result import readable_json
from scrlearn.experiments.stopping import stop_requests
from scrlearn.learners import METHODS

WHOLE = load("digits")
# a third of the test images: measuring takes most of the time of a short run
DIGITS = Dataset("digits", WHOLE.train, ArrayImages(WHOLE.test.images[::3], WHOLE.test.labels[::3]), WHOLE.class_names)
SHORT = RunConfig(method="er", memory_size=30, limit=10, precision="fp32", device="cpu")  # ten steps


def plain(config: RunConfig = SHORT, **how) -> Result:
    return run(config, dataset=DIGITS, pictures=False, **how)


def without_times(result: Result) -> str:
    return readable_json({name: value for name, value in result.to_dict().items() if name != "seconds"})


def bytes_without_times(path: Path) -> bytes:
    text, count = re.subn(rb'"seconds": \{[^}]*\}', b"", path.read_bytes())
    assert count == 1
    return text


class Dies(BaseException):
    """Stands for `kill -9` inside one process: nothing may catch it to tidy up."""


def die_at_save(monkeypatch: pytest.MonkeyPatch, number: int, *, before: bool) -> None:
    """The process ends at the save of this number: before it, or right after."""
    saves, real = [], runner.save_checkpoint

    def save(*arguments) -> None:
        saves.append(1)
        if len(saves) == number and before:
            raise Dies
        real(*arguments)
        if len(saves) == number:
            raise Dies

    monkeypatch.setattr(runner, "save_checkpoint", save)


def run_and_die(number: int, out: Path, config: RunConfig = SHORT, *, before: bool = False, **how) -> None:
    """A run that saves after every batch and dies at the save of this number."""
    with pytest.MonkeyPatch.context() as patch:
        die_at_save(patch, number, before=before)
        with pytest.raises(Dies):
            plain(config, out=out, checkpoint_seconds=0, **how)
    assert not (out / RESULT).exists()


# ------------------------------------------------------------------------------------------------------ configuration


def test_config_survives_json() -> None:
    config = SHORT.replace(options={"memory_batch": 5, "retrieve": "random"}, classes_ahead=True, order="shuffled")
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "sdr"}, 'no method "sdr". Did you mean "scr"'),
        ({"engine": "grahp"}, 'no engine "grahp". Did you mean "graph"'),
        ({"methd": "scr"}, 'no setting "methd". Did you mean "method"'),
        ({"options": {"memory_size": 5}}, "has a field of its own: RunConfig(memory_size=…) (--memory)"),
        ({"options": {"encoder": "mine"}}, "make_learner(encoder=…)"),
        ({"options": {"augment": print}}, "JSON"),
    ],
)
def test_bad_config(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        RunConfig.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"temprature": 1}}, "temprature"),
        ({"options": {"memory_batch": "many"}}, "memory_batch"),
        ({"tasks": 11}, "1 to 10 tasks"),
        ({"order": "random"}, 'no class order "random"'),
        ({"memory_size": 0, "classifier": "ncm", "options": {"prototypes": "memory"}}, "memory_size"),
        ({"dataset": "digit"}, 'Did you mean "digits"'),
    ],
)
def test_bad_options_change_nothing(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run(SHORT.replace(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_reach_the_learner() -> None:
    config = SHORT.replace(method="scr", options={"temperature": 0.3, "memory_batch": 7}, classes_ahead=True)
    result = plain(config.replace(limit=5, options={**config.options, "probe": True}))
    assert result.method_options["temperature"] == 0.3
    assert result.method_options["classes_ahead"] == 10
    assert sorted(result.by_classifier) == ["ncm", "softmax"]
    learner = config.make_learner((1, 8, 8), 10)
    assert learner.objective.temperature == 0.3
    assert learner.memory_batch == 7
    assert config.replace(classes_ahead=3).learner_options(10)["classes_ahead"] == 3


# ------------------------------------------------------------------------------------------------------------- results


def test_result_holds_what_was_measured() -> None:
    """The accuracy matrix equals plain predictions task by task, for both classifiers of one training run."""
    expected: dict[str, list[list[float]]] = {"softmax": [], "ncm": []}
    stream, learner = SHORT.make_stream(DIGITS), SHORT.make_learner((1, 8, 8), 10)

    class Watch:
        def batch_learned(self, position, loss) -> None:
            pass

        def task_ended(self, task) -> None:
            for name, rows in expected.items():
                rows.append([])
                for other in stream.tasks:
                    predicted = learner.predict(DIGITS.test.read(other.test), name)
                    rows[-1].append(float((predicted == stream.test_labels[other.test]).double().mean()))

        def finishing(self, step, steps) -> None:
            pass

        def stream_ended(self) -> None:
            pass

    train(learner, stream, Watch())
    result = plain()
    assert result.classifier == "softmax"
    for name, rows in expected.items():
        figures = result.by_classifier[name]
        np.testing.assert_allclose(figures["accuracy_matrix"], rows, atol=1e-12)
        assert np.triu(figures["accuracy_matrix"], 1).sum() == 0  # no class can be named before it came
        confusion = np.array(figures["confusion"])
        assert confusion.sum() == len(DIGITS.test)
        np.testing.assert_allclose(np.diag(confusion) / confusion.sum(1), figures["per_class_accuracy"])
        assert figures["average_accuracy"] == pytest.approx(np.mean(rows[-1]))
    assert result.average_accuracy == result.by_classifier["softmax"]["average_accuracy"]
    assert result.by_classifier["ncm"]["classes_without_prototype"] == 0
    assert (result.images, result.steps, result.memory_size) == (100, 10, 30)


def test_one_pass_for_all_classifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, learner = SHORT.make_stream(DIGITS), SHORT.make_learner((1, 8, 8), 10)
    for x, y in stream.batches(0):
        learner.learn(x, y)
    learner.prototypes()
    seen = []
    real = learner.features
    monkeypatch.setattr(learner, "features", lambda x: seen.append(len(x)) or real(x))
    answers = evaluate(learner, stream)
    met = stream.test_labels < 2
    assert sum(seen) == met.sum()
    for name in ("softmax", "ncm"):
        assert (answers[name][~met.numpy()] == NO_ANSWER).all(), "classes that could not be named are not asked about"
        own = learner.predict(DIGITS.test.read(met.nonzero().flatten()), name)
        np.testing.assert_array_equal(answers[name][met.numpy()], own.numpy())


def test_nothing_to_ask_about() -> None:
    stream, learner = SHORT.make_stream(DIGITS), SHORT.make_learner((1, 8, 8), 10)
    x, y = next(iter(stream.batches(0)))
    learner.learn(x, y)
    learner.forget(0)
    learner.forget(1)
    assert (evaluate(learner, stream)["softmax"] == NO_ANSWER).all()


def test_classifier_changes_what_stands_first_and_nothing_else() -> None:
    one, other = plain(), plain(SHORT.replace(classifier="ncm"))
    assert one.by_classifier == other.by_classifier
    assert other.average_accuracy == one.by_classifier["ncm"]["average_accuracy"]


def test_what_the_memory_is_for() -> None:
    tiny = SHORT.replace(limit=5, tasks=2)
    assert plain(tiny).memory_use == "replayed"
    for method in ("fine-tune", "ewc++", "lwf"):
        assert plain(tiny.replace(method=method)).memory_use == "prototypes only"
    assert plain(tiny.replace(method="fine-tune", options={"review": True})).memory_use == "replayed"
    assert plain(tiny.replace(method="fine-tune", memory_size=0)).memory_use == "none"


def test_result_survives_its_file(tmp_path: Path) -> None:
    result = plain(out=tmp_path)
    assert Result.load(tmp_path / RESULT) == result
    assert result.run_config() == SHORT
    values = json.loads((tmp_path / RESULT).read_text())
    needed = "method classifier dataset memory_size seed accuracy_matrix average_accuracy forgetting seconds config"
    assert {*needed.split(), "versions"} <= values.keys()
    (tmp_path / RESULT).write_text(json.dumps(values | {"format": 99}))
    with pytest.raises(CheckpointError, match="newer"):
        Result.load(tmp_path / RESULT)
    (tmp_path / RESULT).write_text('{"method": ')
    with pytest.raises(CheckpointError, match="no JSON"):
        Result.load(tmp_path / RESULT)


def test_task_without_test_images() -> None:
    """What cannot be measured is null in the file and left out of the means."""
    keep = DIGITS.test.labels < 8
    test = ArrayImages(DIGITS.test.images[keep], DIGITS.test.labels[keep])
    dataset = Dataset("digits", DIGITS.train, test, DIGITS.class_names)
    result = run(SHORT.replace(limit=5), dataset=dataset)
    assert [row[4] for row in result.accuracy_matrix] == [None] * 5
    assert result.average_accuracy == pytest.approx(np.mean(result.accuracy_matrix[-1][:4]))
    assert json.loads(readable_json(result.to_dict())) == result.to_dict()


# ----------------------------------------------------------------------------------------------- same seed, same bits


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    config = SHORT.replace(method="scr", limit=5)
    plain(config, out=tmp_path / "a")
    torch.rand(3)  # what happened before must not matter
    plain(config, out=tmp_path / "b", checkpoint_seconds=0, progress=lambda moment: None)
    assert bytes_without_times(tmp_path / "a" / RESULT) == bytes_without_times(tmp_path / "b" / RESULT)
    assert without_times(plain(config.replace(seed=1))) != without_times(plain(config))


def test_a_seed_alone_and_among_others(tmp_path: Path) -> None:
    results = run_seeds(SHORT, range(5), dataset=DIGITS, out=tmp_path / "five", pictures=False)
    plain(SHORT.replace(seed=3), out=tmp_path / "alone")
    alone, among = tmp_path / "alone" / RESULT, tmp_path / "five" / "seed-3" / RESULT
    assert bytes_without_times(alone) == bytes_without_times(among)
    figures = json.loads((tmp_path / "five" / SUMMARY).read_text())
    expected = interval([result.average_accuracy for result in results])
    assert figures["by_classifier"]["softmax"]["average_accuracy"]["mean"] == expected.mean
    assert summary(results)["softmax"]["average_accuracy"] == expected


def test_seeds_that_are_no_seeds() -> None:
    with pytest.raises(InputError, match="each once"):
        run_seeds(SHORT, [1, 1])
    other = plain(SHORT.replace(limit=5, tasks=2))
    with pytest.raises(InputError, match="limit"):
        summary([plain(SHORT.replace(limit=6, tasks=2)), other])


# ----------------------------------------------------------------------------------------------- stopping and going on


@pytest.fixture(scope="module")
def uninterrupted() -> str:
    return without_times(plain())


@pytest.mark.parametrize("before", [True, False], ids=["before the save", "after the save"])
@pytest.mark.parametrize("number", sorted(random.Random(7).sample(range(1, 16), 4)))
def test_dies_and_goes_on(
    number: int, before: bool, uninterrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten batches and five task ends make fifteen saves; the run dies at some of them, twice."""
    run_and_die(number, tmp_path, before=before)
    with monkeypatch.context() as patch:
        die_at_save(patch, 2, before=before)
        try:
            plain(out=tmp_path, checkpoint_seconds=0, resume=True)
        except Dies:
            assert not (tmp_path / RESULT).exists()
    assert without_times(plain(out=tmp_path, resume=True)) == uninterrupted


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_goes_on_exactly(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"epochs": 2, "batch": 8} if method == "offline" else {}
    config = SHORT.replace(
        method=method, memory_size=None if method == "offline" else 12, limit=4, tasks=3, batch_size=4, options=options
    )
    expected = plain(config, out=tmp_path / "whole", checkpoint_seconds=0)
    assert expected.average_accuracy is not None
    number = random.Random(method).randrange(2, 14)
    run_and_die(number, tmp_path / "stopped", config)
    resumed = plain(config, out=tmp_path / "stopped", resume=True)
    assert without_times(resumed) == without_times(expected)


def test_offline_stops_while_it_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHORT.replace(method="offline", memory_size=None, limit=4, tasks=2, options={"epochs": 4, "batch": 10})
    expected = plain(config)
    assert expected.accuracy_matrix[0] == [None, None]
    run_and_die(4 + 2 + 5, tmp_path, config)  # four batches, two tasks, then inside the training
    assert without_times(plain(config, out=tmp_path, resume=True)) == without_times(expected)


def test_learner_state_is_that_of_the_run_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(out=tmp_path / "whole")
    run_and_die(8, tmp_path / "stopped")
    plain(out=tmp_path / "stopped", resume=True)
    whole, names = load_learner(tmp_path / "whole" / CHECKPOINT)
    stopped, _ = load_learner(tmp_path / "stopped" / CHECKPOINT)
    assert names == list(DIGITS.class_names)
    x = DIGITS.test.read(torch.arange(50))
    assert torch.equal(whole.scores(x), stopped.scores(x))
    assert torch.equal(whole.generator.get_state(), stopped.generator.get_state())


def test_signal_finishes_the_batch_and_saves(uninterrupted: str, tmp_path: Path) -> None:
    """SIGINT and SIGTERM, one after the other, in the middle of a run; the old handlers come back."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number, step in ((signal.SIGINT, 3), (signal.SIGTERM, 7)):

        def send(moment: Moment, number: int = number, step: int = step) -> None:
            if moment.step == step and not moment.at_task_end:
                os.kill(os.getpid(), number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "PROGRESS_SECONDS", 0)
            with pytest.raises(Interrupted) as stopped:
                plain(out=tmp_path, progress=send, resume=True)
        assert (stopped.value.step, stopped.value.steps, stopped.value.signal_number) == (step, 10, number)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert without_times(plain(out=tmp_path, resume=True)) == uninterrupted


def test_second_signal_acts_at_once() -> None:
    with stop_requests(active=True) as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_runs_in_a_thread(tmp_path: Path, uninterrupted: str) -> None:
    """Where signals cannot be watched, everything else works."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(plain(out=tmp_path)))
    thread.start()
    thread.join()
    assert without_times(results[0]) == uninterrupted


def test_full_disk_keeps_the_last_checkpoint(
    uninterrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, real = [], runner.save_checkpoint

    def save(*arguments) -> None:
        saves.append(1)
        if len(saves) == 5:
            raise OSError(errno.ENOSPC, "no space left", str(tmp_path / CHECKPOINT))
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "save_checkpoint", save)
        with pytest.raises(OSError, match="no space"):
            plain(out=tmp_path, checkpoint_seconds=0)
    assert without_times(plain(out=tmp_path, resume=True)) == uninterrupted


def test_folder_that_holds_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_and_die(2, tmp_path)
    with pytest.raises(InputError, match=r"was stopped.*--resume"):
        plain(out=tmp_path)
    with pytest.raises(CheckpointError, match="memory_size 30 there, 40 here; seed 0 there, 1 here"):
        plain(SHORT.replace(seed=1, memory_size=40), out=tmp_path, resume=True)
    result = plain(out=tmp_path, resume=True)
    with pytest.raises(InputError, match=r"finished run.*--resume"):
        plain(out=tmp_path)
    before = (tmp_path / RESULT).read_bytes()
    assert plain(out=tmp_path, resume=True) == result
    assert (tmp_path / RESULT).read_bytes() == before
    with pytest.raises(CheckpointError, match="seed 0 there, 1 here"):
        plain(SHORT.replace(seed=1), out=tmp_path, resume=True)
    assert plain(SHORT.replace(seed=1), out=tmp_path, overwrite=True).seed == 1
    with pytest.raises(InputError, match="not both"):
        plain(out=tmp_path, overwrite=True, resume=True)


def test_overwriting_never_leaves_the_old_result_beside_a_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(out=tmp_path)
    (tmp_path / "mine.txt").write_text("keep")
    run_and_die(1, tmp_path, SHORT.replace(seed=1), before=True, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]


def test_other_data_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_and_die(2, tmp_path)
    labels = DIGITS.train.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    changed = Dataset("digits", ArrayImages(DIGITS.train.images, labels), DIGITS.test, DIGITS.class_names)
    with pytest.raises(CheckpointError, match="not the one that the run"):
        run(SHORT, dataset=changed, out=tmp_path, resume=True)


def test_foreign_and_damaged_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_and_die(2, tmp_path)
    path = tmp_path / CHECKPOINT
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="part of it is missing"):
        plain(out=tmp_path, resume=True)
    assert path.read_bytes() == whole[: len(whole) // 2]
    save_checkpoint(path, {}, {"kind": "OnlineClassifier"})
    with pytest.raises(CheckpointError, match="not the checkpoint of a run"):
        plain(out=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="not the checkpoint of a run"):
        load_learner(path)


def test_other_versions_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_and_die(2, tmp_path)
    monkeypatch.setattr(runner, "versions", lambda: {"scrlearn": "9.9"})
    with pytest.warns(UserWarning, match="another version of scrlearn"):
        plain(out=tmp_path, resume=True)


def change_machine(path: Path, **changes: object) -> None:
    """Let a checkpoint say that its run was made on another machine."""
    state, about = load_checkpoint(path)
    config = {**about["config"], **{name: "auto" for name in changes if name in about["config"]}}
    save_checkpoint(path, state, {**about, "config": config, "machine": {**about["machine"], **changes}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"threads": 99}, rf"another number of threads \(99, here {torch.get_num_threads()}\)"),
        ({"name": "abacus"}, "another processor .abacus"),
    ],
)
def test_what_may_change_the_bits_is_said(change: dict, said: str, tmp_path: Path, uninterrupted: str) -> None:
    run_and_die(2, tmp_path)
    change_machine(tmp_path / CHECKPOINT, **change)
    with pytest.warns(UserWarning, match=said):
        assert without_times(plain(out=tmp_path, resume=True)) == uninterrupted


def test_nothing_is_said_on_the_same_machine(tmp_path: Path) -> None:
    run_and_die(2, tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The run in")
        plain(out=tmp_path, resume=True)


@pytest.mark.parametrize(("name", "there"), [("precision", "bf16"), ("device", "cuda")])
def test_another_device_or_precision_is_refused(
    name: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    auto = SHORT.replace(**{name: "auto"})
    run_and_die(2, tmp_path, auto)
    change_machine(tmp_path / CHECKPOINT, **{name: there})
    with pytest.raises(CheckpointError, match=f"Ask for --{name} {there}"):
        plain(auto, out=tmp_path, resume=True)


def test_auto_is_what_the_run_was_made_with(tmp_path: Path) -> None:
    auto = SHORT.replace(precision="auto", device="auto")
    run_and_die(2, tmp_path, auto)
    made = load_checkpoint(tmp_path / CHECKPOINT)[1]["machine"]
    result = plain(auto.replace(precision=made["precision"], device=made["device"]), out=tmp_path, resume=True)
    assert plain(auto, out=tmp_path, resume=True) == result
    other = "fp32" if made["precision"] == "bf16" else "bf16"
    with pytest.raises(CheckpointError, match=f"precision '{made['precision']}' there, '{other}' here"):
        plain(auto.replace(precision=other), out=tmp_path, resume=True)


@pytest.mark.parametrize("method", ["scr", "ewc++", "lwf", "icarl", "offline"])
def test_a_run_made_on_a_gpu_answers_without_one(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its random numbers, its device and its precision do not exist here."""
    options = {"epochs": 1} if method == "offline" else {}
    plain(SHORT.replace(method=method, limit=4, tasks=2, options=options), out=tmp_path)
    path = tmp_path / CHECKPOINT
    here, names = load_learner(path)
    state, about = load_checkpoint(path)
    machine = {**about["machine"], "device": "cuda", "precision": "bf16"}
    about = {**about, "config": {**about["config"], "device": "cuda", "precision": "auto"}, "machine": machine}
    save_checkpoint(path, {**state, "generator": torch.zeros(16, dtype=torch.uint8)}, about)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: False)
    x = DIGITS.test.read(torch.arange(50))
    for device in ("auto", "cpu", torch.device("cpu")):
        moved, same = load_learner(path, device)
        assert same == names
        assert (moved.device.type, moved.precision) == ("cpu", "fp32")
        assert torch.equal(moved.scores(x), here.scores(x))
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: True)
    assert load_learner(path)[0].precision == "bf16"
    with pytest.raises(InputError, match="no CUDA device"):
        load_learner(path, "cuda")


@pytest.mark.device
def test_a_run_on_a_gpu_answers_on_the_cpu(tmp_path: Path) -> None:
    plain(SHORT.replace(device="cuda"), out=tmp_path)
    there, here = load_learner(tmp_path / CHECKPOINT)[0], load_learner(tmp_path / CHECKPOINT, "cpu")[0]
    assert (there.device.type, here.device.type) == ("cuda", "cpu")
    x = DIGITS.test.read(torch.arange(50))
    torch.testing.assert_close(there.scores(x).cpu(), here.scores(x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.device)])
def test_several_stopped_together_go_on(device: str, tmp_path: Path) -> None:
    """All are saved where one is stopped; on a GPU each with the steps that are still under way."""
    configs = [SHORT.replace(device=device, seed=seed) for seed in range(4)]
    whole = runner.run_together(configs, outs=[None] * 4, dataset=DIGITS)
    outs = [tmp_path / str(seed) for seed in range(4)]

    def stop(moment: Moment) -> None:
        if moment.run == 2 and moment.task == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        runner.run_together(configs, outs=outs, dataset=DIGITS, progress=stop, pictures=False)
    assert all((out / CHECKPOINT).is_file() for out in outs)
    again = runner.run_together(configs, outs=outs, dataset=DIGITS, resume=True, pictures=False)
    assert [result.by_classifier for result in again] == [result.by_classifier for result in whole]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    old, young = tmp_path / f".{CHECKPOINT}.aa.tmp", tmp_path / f".{CHECKPOINT}.bb.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    plain(SHORT.replace(limit=5, tasks=2), out=tmp_path)
    assert not old.exists()
    assert young.exists()  # somebody may be writing it


def test_out_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        plain(out=tmp_path / "file")


def test_stream_position_of_a_task_end() -> None:
    """Going on after a task's last batch but before its end does the end, and does it once."""
    stream, calls = SHORT.make_stream(DIGITS), []

    class Fake:
        def learn(self, x, y):
            calls.append(len(x))
            return torch.zeros(())

        def end_task(self) -> None:
            calls.append("end")

        def finish(self, progress) -> None:
            calls.append("finish")

    class Quiet:
        def batch_learned(self, position, loss) -> None:
            pass

        def task_ended(self, task) -> None:
            pass

        def finishing(self, step, steps) -> None:
            pass

        def stream_ended(self) -> None:
            calls.append("over")

    train(Fake(), stream, Quiet(), Position(3, 2))
    assert calls == ["end", 10, 10, "end", "finish", "over"]
    calls.clear()
    train(Fake(), stream, Quiet(), Position(5, 0))
    assert calls == ["finish", "over"]


# ----------------------------------------------------------------------------------------------- progress and pictures


def test_loss_is_fetched_only_when_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[Moment] = []
    monkeypatch.setattr(runner, "PROGRESS_SECONDS", float("inf"))
    plain(progress=moments.append)
    assert [moment.at_task_end for moment in moments] == [True] * 5
    assert all(moment.loss is None for moment in moments)
    assert [moment.task for moment in moments] == [1, 2, 3, 4, 5]
    assert moments[-1].accuracy is not None
    moments.clear()
    monkeypatch.setattr(runner, "PROGRESS_SECONDS", 0)
    plain(progress=moments.append)
    assert [moment.step for moment in moments if not moment.at_task_end] == list(range(1, 11))
    assert all(moment.loss is not None for moment in moments if not moment.at_task_end)
    assert all(moment.images_per_second for moment in moments if not moment.at_task_end)


def test_pictures(tmp_path: Path) -> None:
    run(SHORT.replace(limit=5, tasks=2), dataset=DIGITS, out=tmp_path)
    for name in PICTURES:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_time_spent_among_other_methods_is_not_told_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [RunConfig(method=method, memory_size=20, limit=30) for method in ("er", "fine-tune")]
    looks = []

    def stop(session: runner.Session) -> None:
        looks.append(1)
        if len(looks) == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner.Session, "_stop_if_asked", stop)
        with pytest.raises(KeyboardInterrupt):
            runner.run_together(configs, outs=[tmp_path / "er", tmp_path / "other"], checkpoint_seconds=0)
    (went_on,) = runner.run_together(configs[:1], outs=[tmp_path / "er"], resume=True)
    (alone,) = runner.run_together(configs[:1], outs=[None])
    assert went_on.seconds["alike"] < went_on.seconds["side_by_side"] == 1
    assert alone.seconds["alike"] == alone.seconds["side_by_side"] == 1


def test_seconds_go_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_and_die(10, tmp_path)
    from scrlearn.checkpoint import read_meta

    before = read_meta(tmp_path / CHECKPOINT)["seconds"]["training"]
    assert plain(out=tmp_path, resume=True).seconds["training"] > before > 0


# ----------------------------------------------------------------------------------------------------- real processes


def scr(out: Path, *more: str) -> list[str]:
    run_it = f"run --method er --memory 30 --limit 40 --checkpoint-seconds 0 --no-pictures --quiet --out {out}"
    return [sys.executable, "-m", "scrlearn", *run_it.split(), *more]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("never")
    subprocess.run(scr(out), check=True)
    return bytes_without_times(out / RESULT)


def stop_and_go_on(out: Path, number: int, wait: float, never_stopped: bytes) -> None:
    process = subprocess.Popen(scr(out), stderr=subprocess.PIPE, text=True)
    while not (out / CHECKPOINT).exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(number)
    _, errors = process.communicate()
    if number == signal.SIGINT and not (out / RESULT).exists():
        assert process.returncode == 130, errors
        assert "Go on with: scr run --method er" in errors
        assert errors.rstrip().endswith("--resume")
    subprocess.run(scr(out, "--resume"), check=True)
    assert bytes_without_times(out / RESULT) == never_stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "kill -9"])
def test_process_stopped_and_gone_on(number: int, never_stopped: bytes, tmp_path: Path) -> None:
    stop_and_go_on(tmp_path / "run", number, 0.0, never_stopped)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "kill -9"])
def test_process_stopped_at_random_points(number: int, never_stopped: bytes, tmp_path: Path) -> None:
    chance = random.Random(11)
    for attempt in range(6):
        out = tmp_path / str(attempt)
        stop_and_go_on(out, number, chance.uniform(0, 2), never_stopped)
        shutil.rmtree(out)


@pytest.mark.slow
def test_process_killed_again_and_again(never_stopped: bytes, tmp_path: Path) -> None:
    """Killed at random moments, loading and saving included, until it happens to get through."""
    chance, out = random.Random(5), tmp_path / "run"
    for _ in range(8):
        process = subprocess.Popen(scr(out, "--resume"))
        try:
            process.wait(chance.uniform(0.5, 8))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    subprocess.run(scr(out, "--resume"), check=True)
    assert bytes_without_times(out / RESULT) == never_stopped
