"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import scrlearn
from scrlearn.checkpoint import load_checkpoint, save_checkpoint
from scrlearn.cli import app, main
from scrlearn.data import load
from scrlearn.errors import ScrlearnError
from scrlearn.experiments import Interrupted, runner
from scrlearn.experiments.folders import CHECKPOINT, PICTURES, RESULT, SUMMARY
from scrlearn.experiments.prediction import predict_files
from scrlearn.learners import METHODS

STREAM = ["--limit", "5", "--tasks", "2"]
TINY = ["run", "--method", "er", "--memory", "20", *STREAM, "--device", "cpu", "--precision", "fp32", "--no-pictures"]


@pytest.fixture(autouse=True)
def _warnings_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command line puts its own in place


def scr(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def line(text: str) -> str:
    """The text without the frames and breaks that depend on the terminal."""
    return " ".join(text.replace("│", " ").split())


# --------------------------------------------------------------------------------------------------------- the surface


def test_version_and_help() -> None:
    assert scr("--version").stdout == f"scr {scrlearn.__version__}\n"
    assert "Go on with the run" in line(scr("run", "--help").stdout)
    for command in ("run", "methods", "data", "predict", "demo"):
        assert command in scr("--help").stdout


def test_version_needs_no_torch() -> None:
    """What is asked for in passing must not wait for torch to load."""
    program = "import sys; from scrlearn.cli import main; sys.argv = ['scr', '--version']\n"
    program += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "words",
    [
        ["runn"],
        ["run", "--seeds", "0"],
        ["run", "--memory", "-1"],
        ["run", "--resume"],
        ["run", "--overwrite"],
        ["run", "--out", "x", "--resume", "--overwrite"],
        ["run", "--option", "temperature"],
        ["run", "--seed", "one"],
        ["predict", "model.scr"],
        ["data", "check"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(words: list[str]) -> None:
    result = scr(*words, code=2)
    assert result.stdout == ""
    assert "scr" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --method sdr", 'There is no method "sdr". Did you mean "scr"?'),
        ("run --dataset digit", 'There is no data set "digit". Did you mean "digits"?'),
        ("run --quiet -O temprature=1", 'Method "scr" has no option "temprature". Did you mean "temperature"?'),
        ("run --quiet --classifier softmaxx", 'There is no classifier "softmaxx". Did you mean "softmax"?'),
        ("run --quiet -O temperature=hot", "temperature is 'hot'; expected a number, such as 0.1."),
        ("run --quiet -O review=no", "review is 'no'; expected true or false."),
        ("run --quiet --order random", 'There is no class order "random".'),
        ("run --quiet --device cuda:99", "cuda"),
        ("methods sdr", 'Did you mean "scr"?'),
        ("data check cifar", 'Did you mean "cifar10"?'),
        ("data download mini-imagenet --data-root nowhere", "no official place"),
        ("run --dataset folder:nowhere", "nowhere"),
        ("predict nothing.scr image.png", 'There is no checkpoint at "nothing.scr".'),
    ],
)
def test_errors_are_one_line(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = scr(*words.split(), code=1)
    errors = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert result.stderr.rstrip().endswith(errors[0])
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["--memory-batch 7 -O memory_batch=5", "--review -O review=false", "-O temperature=0.1 -O temperature=0.2"],
)
def test_nobody_has_to_guess_which_of_two_values_counted(words: str) -> None:
    assert "was given twice" in " ".join(scr("run", *words.split(), code=2).stderr.split())


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRLEARN_DEBUG", "1")
    assert "sdr" in str(scr("run", "--method", "sdr", code=1).exception)


# ------------------------------------------------------------------------------------------------------------------ run


def test_run_writes_what_it_says(tmp_path: Path) -> None:
    words = [word for word in TINY if word != "--no-pictures"]
    result = scr(*words, "--out", tmp_path)
    assert "er on digits, memory 20: seed 0" in line(result.stdout)
    assert "task 2/2" in result.stderr
    saved = json.loads((tmp_path / RESULT).read_text())
    assert f"{100 * saved['average_accuracy']:.1f}" in result.stdout
    assert {RESULT, CHECKPOINT, *PICTURES} <= {path.name for path in tmp_path.iterdir()}


def test_json_alone_on_standard_output() -> None:
    result = scr(*TINY, "--json")
    values = json.loads(result.stdout)
    assert values["method"] == "er"
    assert values["seconds"]["total"] > 0
    quiet = scr(*TINY, "--json", "--quiet")
    again = json.loads(quiet.stdout)
    assert quiet.stderr == ""
    assert {**again, "seconds": 0} == {**values, "seconds": 0}
    assert scr(*TINY, "--quiet").output == ""


def test_options_arrive() -> None:
    words = "--memory-batch 3 --review --classes-ahead -O learning_rate=0.05 -O retrieve=random --blurry 0.2"
    more = "--imbalance 2 --order shuffled --seed 4 --batch-size 4 --no-drop-last --image-size 12 --classifier ncm"
    values = json.loads(scr(*TINY, *words.split(), *more.split(), "--json", "--quiet").stdout)
    config = values["config"]
    assert config["options"] == {"learning_rate": 0.05, "retrieve": "random", "memory_batch": 3, "review": True}
    assert config["classes_ahead"] is True
    assert (config["blurry"], config["imbalance"], config["order"], config["seed"]) == (0.2, 2.0, "shuffled", 4)
    assert (config["batch_size"], config["drop_last"], config["image_size"]) == (4, False, 12)
    assert values["review"] is True
    assert values["classifier"] == "ncm"
    assert json.loads(scr(*TINY, "--no-review", "--json", "-q").stdout)["config"]["options"] == {"review": False}


def test_several_seeds(tmp_path: Path) -> None:
    result = scr(*TINY, "--seed", 3, "--seeds", 2, "--out", tmp_path)
    assert "2 seeds, mean ± 95% interval" in line(result.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed-3", "seed-4", SUMMARY]
    assert "is complete" in scr(*TINY, "--seed", 3, "--seeds", 2, "--out", tmp_path, "--resume").stderr
    more = scr(*TINY, "--seed", 3, "--seeds", 3, "--out", tmp_path, "--resume")  # one is still to be run
    assert "is complete" not in more.stderr
    assert "no checkpoint" not in more.stderr
    assert "3 seeds" in line(more.stdout)
    both = json.loads(scr(*TINY, "--seed", 3, "--seeds", 2, "--json", "-q").stdout)
    assert [values["seed"] for values in both["results"]] == [3, 4]
    mean = both["summary"]["by_classifier"]["softmax"]["average_accuracy"]["mean"]
    assert mean == pytest.approx(sum(values["average_accuracy"] for values in both["results"]) / 2)


def test_stopped_and_gone_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads(scr(*TINY, "--json", "-q").stdout)
    command = [*TINY, "--out", str(tmp_path / "a run"), "--json", "-q"]
    with monkeypatch.context() as patch:
        patch.setattr(runner.Session, "_stop_if_asked", _stop_at_second_save())
        patch.setattr(sys, "argv", ["scr", *command])
        stopped = scr(*command, "--checkpoint-seconds", 0, code=130)
    assert stopped.stdout == ""
    assert "Stopped after 2 of 10 batches" in stopped.stderr
    assert f"Go on with: scr {' '.join(TINY)} --out '{tmp_path / 'a run'}' --json -q --resume" in stopped.stderr
    refused = scr(*command, code=1)
    assert "--resume" in refused.stderr
    changed = scr(*command, "--resume", "--seed", 1, code=1)
    assert "seed 0 there, 1 here" in changed.stderr
    resumed = json.loads(scr(*command, "--resume").stdout)
    assert {**resumed, "seconds": 0} == {**expected, "seconds": 0}
    assert json.loads(scr(*command, "--resume").stdout) == resumed
    assert "is complete" in scr(*TINY, "--out", tmp_path / "a run", "--resume").stderr
    assert "finished run" in scr(*command, code=1).stderr
    assert json.loads(scr(*command, "--overwrite", "--seed", 1).stdout)["seed"] == 1


def test_a_script_of_ones_own_goes_on_as_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*TINY, "--out", str(tmp_path / "run"), "-q"]
    monkeypatch.setattr(runner.Session, "_stop_if_asked", _stop_at_second_save())
    monkeypatch.setattr(sys, "argv", ["my_method.py", *command])
    stopped = scr(*command, "--checkpoint-seconds", 0, code=130)
    assert f"Go on with: python my_method.py {' '.join(command)} --resume" in stopped.stderr


def _stop_at_second_save():
    saves = []

    def stop(session: runner.Session) -> None:
        saves.append(1)
        if len(saves) == 2:
            raise Interrupted(session.folder / CHECKPOINT, session.position.step, 10, 2)

    return stop


def test_nothing_to_resume_starts(tmp_path: Path) -> None:
    result = scr(*TINY, "--out", tmp_path / "new", "--resume")
    assert "no checkpoint" in result.stderr
    assert (tmp_path / "new" / RESULT).exists()


def test_interrupted_before_anything_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("scrlearn.experiments.run", interrupted)
    assert "Interrupted." in scr(*TINY, code=130).stderr


def test_stored_only_is_said() -> None:
    result = scr(*["fine-tune" if word == "er" else word for word in TINY])
    assert "never trained on" in result.stdout


def test_main_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scr", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert scrlearn.__version__ in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- methods and data


def test_methods() -> None:
    table = line(scr("methods").stdout)
    for method in METHODS.values():
        assert method.name in table
    listed = json.loads(scr("methods", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(METHODS)
    assert listed[0]["options"] == METHODS["scr"].parameters()


def test_one_method() -> None:
    shown = line(scr("methods", "scr").stdout)
    for name in METHODS["scr"].parameters():
        assert name in shown
    assert json.loads(scr("methods", "scr", "--json").stdout)["options"]["temperature"] == 0.1


def test_data_list(tmp_path: Path) -> None:
    assert "mini-imagenet" in scr("data", "list").stdout
    listed = json.loads(scr("data", "list", "--json", "--data-root", tmp_path).stdout)
    present = {entry["name"]: entry["present"] for entry in listed}
    assert present == {"digits": True, "cifar10": False, "cifar100": False, "mini-imagenet": False}


def test_data_check(tmp_path: Path) -> None:
    assert "10 classes, 1,442 training images" in scr("data", "check", "digits").stdout
    assert json.loads(scr("data", "check", "digits", "--json").stdout)["ok"] is True
    result = scr("data", "check", "cifar10", "--data-root", tmp_path, code=1)
    assert str(tmp_path) in line(result.stderr)
    bad = scr("data", "check", "cifar10", "--data-root", tmp_path, "--json", code=1)
    assert json.loads(bad.stdout)["ok"] is False


def test_data_download() -> None:
    assert "part of the package" in scr("data", "download", "digits").stdout


# ------------------------------------------------------------------------------------------------------------- predict


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    test = load("digits").test
    paths = []
    for i in range(6):
        image = Image.fromarray(test.images[i, 0].numpy()).resize((16, 16))
        paths.append(folder / f"{int(test.labels[i])} number {i}.png")
        image.convert("RGB").save(paths[-1])
    return paths


def test_predict_with_a_run(tmp_path: Path, images: list[Path]) -> None:
    scr(*TINY, "--out", tmp_path, "-q")
    lines = scr("predict", tmp_path / CHECKPOINT, *images).stdout.splitlines()
    assert [text.split("\t")[2] for text in lines] == [str(path) for path in images]
    answers = json.loads(scr("predict", tmp_path / CHECKPOINT, *images, "--json").stdout)
    assert [f"{a['label']}\t{a['probability']:.3f}\t{a['file']}" for a in answers] == lines
    assert all(0 < a["probability"] <= 1 and a["label"] in "0123456789" for a in answers)


def test_predict_where_there_is_no_such_device_as_the_models(
    tmp_path: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run or a classifier on a GPU has saved is asked on a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scr(*TINY, "--out", tmp_path, "-q")
    train = load("digits").train
    clf = scrlearn.OnlineClassifier("er", memory_size=50, device="cpu").partial_fit(
        train.images[:30], train.labels[:30]
    )
    clf.save(tmp_path / "model.scr")
    for model, place in ((tmp_path / CHECKPOINT, "machine"), (tmp_path / "model.scr", "params")):
        here = scr("predict", model, *images).stdout
        state, about = load_checkpoint(model)
        about = {**about, place: {**about[place], "device": "cuda"}}
        save_checkpoint(model, {**state, "generator": torch.zeros(16, dtype=torch.uint8)}, about)
        assert scr("predict", model, *images).stdout == here
        assert scr("predict", model, *images, "--device", "cpu").stdout == here
        assert "no CUDA device" in scr("predict", model, *images, "--device", "cuda", code=1).stderr
        exported = scr("export", model, "--torchscript", "--out", tmp_path / "model.pt", "--json")
        assert json.loads(exported.stdout)["difference"] < 1e-3


def test_predict_with_a_saved_classifier(tmp_path: Path, images: list[Path]) -> None:
    train = load("digits").train
    clf = scrlearn.OnlineClassifier("er", memory_size=50, device="cpu", precision="fp32")
    names = np.array(["zero", "one", "two"])
    few = [i for i in range(150) if train.labels[i] < 3]
    clf.partial_fit(train.images[few], names[train.labels[few]])
    clf.save(tmp_path / "model.scr")
    answers = json.loads(scr("predict", tmp_path / "model.scr", *images, "--json").stdout)
    assert len(answers) == len(images)
    assert {a["label"] for a in answers} <= set(names)
    same = [np.asarray(Image.fromarray(train.images[i, 0].numpy())) for i in few[:5]]
    for i, image in enumerate(same):  # an image of the size that was learned goes in as it is
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    files = [tmp_path / f"{i}.png" for i in range(5)]
    answers = json.loads(scr("predict", tmp_path / "model.scr", *files, "--json").stdout)
    expected = clf.predict_proba(np.stack(same))
    assert [a["label"] for a in answers] == clf.classes_[expected.argmax(1)].tolist()
    np.testing.assert_allclose([a["probability"] for a in answers], expected.max(1), atol=1e-5)


def test_predict_what_is_no_image(tmp_path: Path, images: list[Path]) -> None:
    scr(*TINY, "--out", tmp_path, "-q")
    (tmp_path / "text.png").write_text("no image")
    asked = (images[0], tmp_path / "text.png", images[1], images[1])
    result = scr("predict", tmp_path / CHECKPOINT, *asked, code=1)
    assert "text.png" in result.stderr
    assert result.stdout == scr("predict", tmp_path / CHECKPOINT, images[0], images[1], images[1]).stdout
    assert len(json.loads(scr("predict", tmp_path / CHECKPOINT, *asked, "--json", code=1).stdout)) == 3
    with pytest.raises(ScrlearnError, match=r"text\.png"):
        predict_files(tmp_path / CHECKPOINT, asked)
    assert "gone.png" in scr("predict", tmp_path / CHECKPOINT, tmp_path / "gone.png", code=1).stderr
