"""Export: the file answers as the model does, says what its answers mean, and never appears when it is wrong."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import scrlearn
import scrlearn.export
from scrlearn import OnlineClassifier
from scrlearn.cli import app
from scrlearn.errors import CheckpointError, InputError, NotFittedError
from scrlearn.experiments import RunConfig, load_learner, run
from scrlearn.export import ExportError, export
from scrlearn.labels import decode

PAGE = Path(__file__).parent.parent / "docs" / "export.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
FORMATS = ["onnx", "torchscript"]
LABELS = ["cat", 7, True, 2.5, b"\x00", ("bird", 2)]
NCM = ("scores", "probabilities", "distances", "features")
SOFTMAX = ("scores", "probabilities", "features")


def small(channels: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8)
        )


def pictures(count: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Images N×8×8×C: a pattern for each class (place modulo 4), and noise."""
    patterns = np.random.default_rng(42).integers(0, 2, (4, 8, 8, channels))
    noise = np.random.default_rng(seed).integers(0, 100, (count, 8, 8, channels))
    return (noise + 150 * patterns[np.arange(count) % 4]).astype(np.uint8)


def taught(method: str = "scr", channels: int = 1, encoder: bool = True, labels=("a", "b", "c", "d"), **options):
    own = {"encoder": small(channels)} if encoder else {}
    given = {"memory_size": 40, "device": "cpu", "precision": "fp32", **own, **options}
    clf = OnlineClassifier(method, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return clf.partial_fit(pictures(60, channels), [labels[number % len(labels)] for number in range(60)])


def written(clf, path: Path, format: str):
    """Export; give what the file answers to images N×H×W×C, and what it says about itself."""
    needed(format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what torch says while it exports is of no use to anybody
        exported = export(clf, path, format)
    assert exported.path == path
    assert exported.bytes == path.stat().st_size
    assert exported.difference is not None
    assert exported.difference < 1e-4
    assert exported.images >= 32
    return opened(path, format)


def needed(format: str) -> None:
    if format == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(name)


def opened(path: Path, format: str):
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        about = json.loads(session.get_modelmeta().custom_metadata_map["scrlearn"])
        return (lambda x: dict(zip(names, session.run(None, {"images": nchw(x)}), strict=True))), about
    extra = {"scrlearn.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(path, _extra_files=extra)
    answer = lambda x: {name: value.numpy() for name, value in module(torch.from_numpy(nchw(x))).items()}  # noqa: E731
    return answer, json.loads(extra["scrlearn.json"])


def nchw(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory) -> Path:
    needed("onnx")
    return export(taught(), tmp_path_factory.mktemp("onnx") / "model.onnx").path


def check_answers(clf, answer, channels: int) -> None:
    """The file says what the classifier says, for batches of any size."""
    for count in (1, 2, 5, 33):
        x = pictures(count, channels, seed=count)
        given = answer(x)
        assert np.allclose(given["probabilities"], clf.predict_proba(x), atol=1e-5)
        assert np.allclose(given["features"], clf.embed(x), atol=1e-5)
        check_choices(clf, given["scores"], clf.predict(x))
        if "distances" in given:
            check_choices(clf, -given["distances"], clf.predict(x, classifier="ncm"))
            prototypes = clf.learner_.prototypes().prototypes[[*clf._index.values()]].numpy()
            seen, learner = clf.embed(x), clf.learner_
            if learner.centred or learner.projection_share:
                features = learner.compared(learner.features(torch.from_numpy(nchw(x))))
                seen = learner.prototypes().directions(features).detach().numpy()
            apart = np.linalg.norm(seen[:, None] - prototypes[None], axis=2)
            present = np.isfinite(given["distances"])
            assert np.allclose(given["distances"][present], apart[present], atol=2e-3)


def check_choices(clf, scores: np.ndarray, labels: np.ndarray) -> None:
    """The largest score belongs to the label, wherever the last digits do not decide; that must be nearly always."""
    first, second = np.sort(scores, axis=1)[:, :-3:-1].T
    clear = first - second > 1e-4
    assert clear.mean() > 0.9
    chosen = [list(clf.classes_)[place] for place in scores.argmax(1)]
    assert [chosen[i] for i in np.flatnonzero(clear)] == [labels[i] for i in np.flatnonzero(clear)]


# ------------------------------------------------------------------------------------------------- the same answers

CASES = [
    pytest.param(
        "onnx",
        "er",
        "softmax",
        3,
        {"averaging": 0.9, "mirror": True, "crops": True},
        id="onnx-er-softmax-averaged-views",
    ),
    *(
        pytest.param("onnx", method, classifier, channels, options, id=f"onnx-{name}", marks=pytest.mark.slow)
        for name, method, classifier, channels, options in (
            ("er-ncm-mirror", "er", "ncm", 3, {"mirror": True}),
            ("scr-ncm-centred", "scr", "ncm", 3, {"centred": True, "projection_share": 0.5}),
            ("scr-ncm-averaged", "scr", "ncm", 3, {"averaging": 0.9}),
            ("scr-softmax", "scr", "softmax", 1, {}),
            ("combined", "er", "combined", 1, {}),
            ("lda", "er", "lda", 1, {}),
        )
    ),
    *(
        pytest.param("torchscript", method, classifier, channels, options, id=f"{method}-{classifier}-{name}")
        for method in ("er", "scr")
        for classifier in ("softmax", "ncm")
        for name, channels, options in (
            ("grey", 1, {}),
            ("colour", 3, {}),
            ("mirror", 1, {"mirror": True}),
            ("crops", 1, {"mirror": True, "crops": True}),
            ("calibrated", 1, {"calibrated": True}),
            ("averaged", 3, {"averaging": 0.9}),
        )
    ),
    pytest.param("torchscript", "scr", "ncm", 3, {"encoder": False}, id="default-encoder"),
    pytest.param("torchscript", "er", "combined", 1, {}, id="combined"),
    pytest.param("torchscript", "scr", "lda", 3, {}, id="lda"),
    pytest.param("torchscript", "fine-tune", "ncm", 1, {"memory_size": 0}, id="no-memory-sdc"),
    pytest.param("torchscript", "icarl", "ncm", 1, {}, id="icarl"),
]


@pytest.mark.parametrize(("format", "method", "classifier", "channels", "options"), CASES)
def test_answers_are_the_models(tmp_path, format, method, classifier, channels, options) -> None:
    clf = taught(method, channels, classifier=classifier, **options)
    before = clf.digest()
    answer, about = written(clf, tmp_path / "model", format)
    check_answers(clf, answer, channels)
    assert clf.digest() == before
    outputs = NCM if classifier in ("ncm", "combined") else SOFTMAX
    assert tuple(answer(pictures(1, channels))) == outputs
    assert about == {
        "version": scrlearn.__version__,
        "image_shape": [channels, 8, 8],
        "classifier": classifier,
        "outputs": list(outputs),
        "labels": ["a", "b", "c", "d"],
    }


@pytest.mark.parametrize("option", ["mirror", "averaging"])
def test_the_options_change_the_answers(tmp_path, option) -> None:
    """Or the cases above would show nothing."""
    clf = taught(**{option: 0.9 if option == "averaging" else True})
    answer, _ = written(clf, tmp_path / "model.pt", "torchscript")
    x = pictures(20, seed=5)
    setattr(clf.learner_, {"mirror": "mirror", "averaging": "average"}[option], None)
    clf.learner_._changed()
    assert not np.allclose(answer(x)["probabilities"], clf.predict_proba(x), atol=1e-4)


def test_learning_goes_on_as_if_nothing_had_been_exported(tmp_path) -> None:
    exporting, other = taught("scr", encoder=False), taught("scr", encoder=False)
    export(exporting, tmp_path / "model.pt", "torchscript")
    for clf in (exporting, other):
        clf.partial_fit(pictures(20, seed=3), ["e"] * 20)
    assert exporting.digest() == other.digest()


def test_bfloat16_model_becomes_a_float32_file(tmp_path) -> None:
    clf = taught(encoder=False, precision="bf16")
    exported = export(clf, tmp_path / "model.pt", "torchscript")
    assert exported.difference < 1e-4
    assert 0 < exported.rounding < 0.5
    clf.save(tmp_path / "model.scr")
    answer, _ = opened(tmp_path / "model.pt", "torchscript")
    x = pictures(20, seed=1)
    given = answer(x)["probabilities"]
    assert given.dtype == np.float32
    gap = np.abs(given - clf.predict_proba(x)).max()
    assert 0 < gap < 0.1
    # what the same weights say in float32
    clf.learner_.network.bf16 = False
    clf.learner_._changed()
    assert np.allclose(given, clf.predict_proba(x), atol=1e-5)


@pytest.mark.device
def test_model_on_a_gpu(tmp_path) -> None:
    clf = taught(encoder=False, device="cuda", averaging=0.9, classifier="ncm")
    answer, _ = written(clf, tmp_path / "model.pt", "torchscript")
    x = pictures(20, seed=1)
    assert np.allclose(answer(x)["probabilities"], clf.predict_proba(x), atol=1e-3)


@pytest.mark.parametrize("format", FORMATS)
def test_no_image_of_the_memory_is_in_the_file(tmp_path, request, format) -> None:
    """What was learned from may be private; what is shipped is not."""
    path = request.getfixturevalue("onnx_file") if format == "onnx" else tmp_path / "model.pt"
    clf = taught()
    if format == "torchscript":
        export(clf, path, format)
    data = path.read_bytes()
    assert clf.learner_.network.encoder[4].bias.detach().numpy().tobytes() in data  # what is there is found like this
    for image in clf.learner_.memory.contents()[0].numpy():
        assert image.tobytes() not in data


def test_a_method_that_trains_when_asked(tmp_path) -> None:
    clf = taught("offline", epochs=1)
    with pytest.warns(UserWarning, match="before finish"):
        export(clf, tmp_path / "model.pt", "torchscript")
    answer, _ = opened(tmp_path / "model.pt", "torchscript")
    check_answers(clf, answer, 1)


# ------------------------------------------------------------------------------------------------- labels and classes


@pytest.mark.parametrize("format", FORMATS)
def test_labels_of_every_type_and_a_class_without_prototype(tmp_path, format) -> None:
    needed(format)
    clf = taught(labels=LABELS)
    with torch.no_grad():  # every image of the label 7 becomes one of "cat"
        stored = clf.learner_.memory.labels
        stored[stored == clf._index[7]] = clf._index["cat"]
    clf.learner_._changed()
    with pytest.warns(UserWarning, match="No image of 7 is left in memory, so the file can never predict it") as told:
        export(clf, tmp_path / "model", format)
    assert len(told) == 1
    answer, about = opened(tmp_path / "model", format)
    labels = [decode(label) for label in about["labels"]]
    assert labels == LABELS
    assert [type(label) for label in labels] == [type(label) for label in LABELS]
    given = answer(pictures(30, seed=2))
    place = labels.index(7)
    assert (given["scores"][:, place] == -np.inf).all()
    assert (given["distances"][:, place] == np.inf).all()
    assert (given["probabilities"][:, place] == 0).all()
    assert not (given["scores"].argmax(1) == place).any()
    with pytest.warns(UserWarning, match="No image of 7"):
        check_answers(clf, answer, 1)


@pytest.mark.parametrize("classifier", ["ncm", "softmax"])
def test_forgotten_class_is_not_in_the_file(tmp_path, classifier) -> None:
    clf = taught(classifier=classifier)
    clf.forget("b")
    clf.partial_fit(pictures(20, seed=4), ["new"] * 20)  # takes the number that became free
    answer, about = written(clf, tmp_path / "model.pt", "torchscript")
    assert about["labels"] == ["a", "c", "d", "new"] == clf.classes_.tolist()
    check_answers(clf, answer, 1)


def test_more_classes_than_the_head_began_with(tmp_path) -> None:
    clf = taught("er", labels=range(20), averaging=0.5)
    answer, about = written(clf, tmp_path / "model.pt", "torchscript")
    assert about["labels"] == list(range(20))
    check_answers(clf, answer, 1)


def test_label_that_no_file_can_hold(tmp_path) -> None:
    with pytest.raises(InputError, match=r"The label frozenset.* cannot be written"):
        export(taught(labels=[frozenset({1}), "b"]), tmp_path / "model.pt", "torchscript")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- files


def test_replaces_a_file_and_leaves_nothing_else(tmp_path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    export(taught(), path, "torchscript")
    assert path.read_bytes()[:2] == b"PK"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_disagrees_is_not_written(tmp_path, monkeypatch, request, format) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"old")
    other = request.getfixturevalue("onnx_file").read_bytes() if format == "onnx" else None
    if other is not None:  # what another model would say about the same images
        monkeypatch.setattr(scrlearn.export, "_to_onnx", lambda *given: other)
    else:
        honest = scrlearn.export._Graph.forward
        monkeypatch.setattr(scrlearn.export._Graph, "forward", lambda self, images: honest(self, images.flip(-1)))
    with pytest.raises(ExportError, match=r"does not answer as the model does.*Nothing was written"):
        export(taught(seed=1), path, format)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_weights_that_are_not_those_that_answer_are_found(tmp_path, monkeypatch) -> None:
    honest = scrlearn.export._in_float32

    def forgetful(learner):
        twin = honest(learner)
        twin.average = None  # as if nobody had thought of averaged weights
        return twin

    monkeypatch.setattr(scrlearn.export, "_in_float32", forgetful)
    with pytest.raises(ExportError, match="does not answer as the model does"):
        export(taught(averaging=0.99), tmp_path / "model.pt", "torchscript")
    assert not list(tmp_path.iterdir())


def test_batch_size_baked_into_the_graph_is_found(tmp_path) -> None:
    class Baked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x.flatten(1))
            return out + 1 if len(x) == 2 else out  # a trace keeps one of the two ways

    clf = OnlineClassifier(encoder=Baked(), memory_size=20, device="cpu", precision="fp32")
    clf.partial_fit(pictures(20), ["a", "b"] * 10)
    with pytest.raises(ExportError, match="other ways for other batches"):
        export(clf, tmp_path / "model.pt", "torchscript")
    assert not list(tmp_path.iterdir())


def test_onnx_names_no_file_of_this_machine(onnx_file) -> None:
    data = onnx_file.read_bytes()
    assert str(Path(scrlearn.__file__).parent).encode() not in data
    assert b"stack_trace" not in data


def test_encoder_that_cannot_be_written(tmp_path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.jit.is_tracing():
                raise RuntimeError("not to be traced")
            return self.linear(x.flatten(1))

    clf = OnlineClassifier(encoder=Counting(), memory_size=20, device="cpu").partial_fit(pictures(20), ["a", "b"] * 10)
    with pytest.raises(ExportError, match="Counting cannot be written as TorchScript: RuntimeError: not to be traced"):
        export(clf, tmp_path / "model.pt", "torchscript")
    assert not list(tmp_path.iterdir())


def test_missing_packages_name_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r'needs onnx and onnxscript.*pip install "scrlearn\[export\]"'):
        export(taught(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_without_onnxruntime_the_file_is_written_unchecked(tmp_path, monkeypatch) -> None:
    there = {"onnx", "onnxscript"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object() if name in there else None)
    monkeypatch.setattr(scrlearn.export, "_to_onnx", lambda *given: b"graph")
    with pytest.warns(UserWarning, match=r"not compared.*onnxruntime.*scrlearn\[export\]"):
        exported = export(taught(), tmp_path / "model.onnx")
    assert (exported.difference, exported.images) == (None, 0)
    assert "Checked" not in scrlearn.export.report(exported)
    assert exported.path.read_bytes() == b"graph"


def test_wrong_models_and_formats(tmp_path) -> None:
    with pytest.raises(InputError, match=r'There is no format "onx"\. Did you mean "onnx"'):
        export(taught(), tmp_path / "model", "onx")
    with pytest.raises(NotFittedError, match="Nothing has been learned"):
        export(OnlineClassifier(), tmp_path / "model", "torchscript")
    with pytest.raises(InputError, match="The model is a Linear"):
        export(nn.Linear(1, 1), tmp_path / "model", "torchscript")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        export(tmp_path / "none.scr", tmp_path / "model", "torchscript")
    clf = taught()
    for label in "abcd":
        clf.forget(label)
    with pytest.raises(NotFittedError, match="Every class has been forgotten"):
        export(clf, tmp_path / "model", "torchscript")
    assert not list(tmp_path.iterdir())


def test_model_that_diverged(tmp_path) -> None:
    clf = taught()
    with torch.no_grad():
        next(clf.learner_.network.encoder.parameters()).fill_(torch.nan)
    with pytest.raises(ExportError, match="not numbers"):
        export(clf, tmp_path / "model.pt", "torchscript")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ command line


@pytest.fixture(autouse=True)
def _warnings_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command line puts its own in place


def scr(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_command_with_a_classifier(tmp_path) -> None:
    needed("onnx")
    clf = taught(encoder=False)
    clf.save(tmp_path / "model.scr")
    text = scr("export", tmp_path / "model.scr", "--onnx").stdout
    assert f"{tmp_path / 'model.onnx'}: " in text
    assert "4 classes, images uint8 N×1×8×8" in text
    assert re.search(r"Checked on 64 images: the largest difference is \d", text)
    answer, _ = opened(tmp_path / "model.onnx", "onnx")
    check_answers(clf, answer, 1)


def test_command_with_a_run(tmp_path) -> None:
    how = {"limit": 10, "tasks": 2, "order": "shuffled", "device": "cpu", "precision": "fp32"}
    run(RunConfig(method="er", memory_size=100, **how), out=tmp_path / "run", pictures=False)
    model = tmp_path / "run" / "checkpoint.scr"
    out = tmp_path / "digits.pt"
    told = json.loads(scr("export", model, "--torchscript", "--out", out, "--json").stdout)
    assert told["path"] == str(out)
    assert told["difference"] < 1e-4
    assert told["format"] == "torchscript"
    learner, names = load_learner(model)
    answer, about = opened(out, "torchscript")
    assert about["labels"] == names
    x = pictures(9)
    given = answer(x)
    assert np.allclose(given["probabilities"], learner.probabilities(torch.from_numpy(nchw(x))).numpy(), atol=1e-5)


def test_command_with_a_services_state(tmp_path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    result = CliRunner().invoke(app, ["export", str(state), "--torchscript"])
    assert result.exit_code == 1
    assert "a directory without a snapshot of a service" in " ".join(result.output.split())
    labels = {"old": ("a", "b"), "new": ("a", "b", "c"), "unfinished": ("x", "y")}
    for name, place in {"new": 300, "old": 20, "unfinished": 400}.items():
        taught(encoder=False, labels=labels[name]).save(state / f"snapshot-{place:015d}-a.scr")
        if name != "unfinished":  # its note is written last
            (state / f"snapshot-{place:015d}-a.json").write_text("{}")
    result = CliRunner().invoke(app, ["export", str(state), "--torchscript", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["classes"] == 3
    assert (tmp_path / "state.pt").exists()


def test_command_says_what_is_wrong(tmp_path) -> None:
    model = taught().save(tmp_path / "own.scr")
    error = scr("export", model, "--torchscript", code=1).stderr
    assert "was saved with encoder = a torch.nn.modules.container.Sequential" in error
    assert "only models with the default encoder" in error
    assert "OnlineClassifier.load" in error
    for words in ([], ["--onnx", "--torchscript"]):
        assert "say which one" in scr("export", model, *words, code=2).stderr
    saved = model.read_bytes()
    assert "is the model itself" in scr("export", model, "--torchscript", "--out", model, code=1).stderr
    assert model.read_bytes() == saved
    default = taught(encoder=False).save(tmp_path / "default.scr")
    error = scr("export", default, "--torchscript", "--out", tmp_path / "none" / "model.pt", code=1).stderr
    assert "does not exist; create it" in " ".join(error.split())
    assert scr("export", default, "--torchscript", "--quiet").stdout == ""
    assert (tmp_path / "default.pt").exists()


def test_scores_of_many_thousands_are_compared_as_exactly_as_float32_holds_them() -> None:
    scores = np.array([[454_207.4, 454_207.1, -np.inf]], dtype=np.float32)
    assert 0.05 < scrlearn.export._last_digits(scores) < 0.06
    assert scrlearn.export._last_digits(np.array([[20.0]], dtype=np.float32)) < 1e-5
    scrlearn.export._check_difference(0.007, 0.05)
    with pytest.raises(ExportError, match="does not answer as the model does"):
        scrlearn.export._check_difference(0.007)


# -------------------------------------------------------------------------------------------------------- the page


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys) -> None:
    needed("onnx")
    monkeypatch.chdir(tmp_path)
    clf = taught()
    export(clf, "model.pt", "torchscript")
    picture = pictures(4, seed=9)[3, :, :, 0]
    exif = Image.Exif()
    exif[0x0112] = 6  # a photograph that is stored on its side, and is no square
    Image.fromarray(picture).resize((24, 16)).save("cat.png", exif=exif)
    picture = Image.open("cat.png")
    clf.set_params(image_size=8)
    blocks = sorted(BLOCKS, key=lambda block: "import export" not in block)  # the one that writes, first
    assert len(blocks) == 3
    for block in blocks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            exec(compile(block, str(PAGE), "exec"), {"clf": clf})
    difference, by_onnx, by_torch = capsys.readouterr().out.splitlines()
    assert float(difference) < 1e-4
    label, probability = by_onnx.split()
    assert label == clf.predict([picture])[0]
    assert float(probability) == pytest.approx(clf.predict_proba([picture]).max(), abs=1e-5)
    assert by_torch.startswith(str(clf.predict(np.zeros((1, 8, 8), dtype=np.uint8))[0]))
