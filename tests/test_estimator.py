from __future__ import annotations

import copy
import datetime
import errno
import gc
import pickle
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError as SklearnNotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score, learning_curve
from sklearn.utils.validation import check_is_fitted
from torch import nn

import scrlearn.checkpoint
from scrlearn import OnlineClassifier
from scrlearn.classifiers import NearestClassMean
from scrlearn.errors import CheckpointError, InputError, NotFittedError
from scrlearn.estimator import _new_indices
from scrlearn.learners import METHODS, Learner
from scrlearn.memory.random import RandomRetrieval


def small(features: int = 8) -> nn.Module:
    """A tiny encoder for 8×8 grey images, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, features), nn.ReLU())


def classifier(method: str = "er", **options) -> OnlineClassifier:
    options = {"memory_size": 30, "encoder": small(), "device": "cpu", "precision": "fp32", **options}
    return OnlineClassifier(method, **options)


def stream(classes: list, per_class: int = 8, seed: int = 0) -> tuple[np.ndarray, list]:
    """Noisy images, a bright row for each class, shuffled."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 60, (len(classes) * per_class, 8, 8), dtype=np.uint8)
    for number in range(len(images)):
        images[number, hash_of(classes[number % len(classes)]) % 8] = 250
    order = random.permutation(len(images))
    return images[order], [classes[number % len(classes)] for number in order]


def hash_of(label: object) -> int:
    return sum(repr(label).encode())


IMAGES, LABELS = stream(["ant", "bee", "cat"])
MORE, MORE_LABELS = stream(["bee", "dog"], seed=1)


def fitted(method: str = "er", **options) -> OnlineClassifier:
    return classifier(method, **options).partial_fit(IMAGES, LABELS)


class TestConventions:
    def test_the_constructor_only_stores(self):
        encoder = small()
        clf = OnlineClassifier("er", encoder=encoder, memory_size=7, momentum=0.5)
        params = clf.get_params()
        assert params["encoder"] is encoder
        assert (params["method"], params["memory_size"], params["momentum"], params["seed"]) == ("er", 7, 0.5, 0)

    def test_defaults(self):
        assert OnlineClassifier().get_params() == {
            "method": "scr",
            "memory_size": None,
            "encoder": None,
            "classifier": None,
            "batch_size": 10,
            "device": "auto",
            "precision": "auto",
            "seed": 0,
            "image_size": None,
            "engine": "auto",
        }

    def test_clone_is_unfitted_and_equal(self):
        clf = fitted(learning_rate=0.05)
        twin = clone(clf)
        with pytest.raises(NotFittedError):
            _ = twin.classes_
        theirs, mine = twin.get_params(), clf.get_params()
        assert theirs.pop("encoder") is not mine.pop("encoder")
        assert theirs == mine
        assert twin.partial_fit(IMAGES, LABELS).digest() == clf.digest()

    def test_set_params_covers_options(self):
        clf = classifier(temperature=0.2, method="scr").set_params(temperature=0.3, memory_size=5, projection="linear")
        assert (clf.memory_size, clf.get_params()["temperature"], clf.get_params()["projection"]) == (5, 0.3, "linear")
        clf.set_params(method="er", temperature=None, projection=None).fit(IMAGES, LABELS)
        assert clf.learner_.memory.capacity == 5

    def test_set_params_changes_nothing_when_a_name_is_wrong(self):
        clf = classifier()
        with pytest.raises(InputError, match='Method "er" has no option "sed"'):
            clf.set_params(memory_size=99, sed=1)
        with pytest.raises(InputError, match='There is no method "sr"'):
            clf.set_params(memory_size=99, method="sr")
        assert clf.memory_size == 30

    def test_repr_shows_options(self):
        assert repr(OnlineClassifier("er", momentum=0.5)) == "OnlineClassifier(method='er', momentum=0.5)"

    def test_shown_in_a_notebook(self):
        assert "OnlineClassifier" in fitted()._repr_html_()
        assert "OnlineClassifier" in classifier()._repr_html_()

    def test_is_a_classifier_that_knows_whether_it_is_fitted(self):
        clf = classifier()
        assert is_classifier(clf)
        assert not hasattr(clf, "classes_")
        with pytest.raises(SklearnNotFittedError):
            check_is_fitted(clf)
        check_is_fitted(clf.partial_fit(IMAGES, LABELS))

    def test_fit_starts_afresh(self):
        clf = fitted().fit(MORE, MORE_LABELS)
        assert set(clf.classes_) == {"bee", "dog"}
        assert clf.digest() == classifier().partial_fit(MORE, MORE_LABELS).digest()

    def test_fit_that_fails_leaves_what_was_learned(self):
        clf = fitted()
        before = clf.digest()
        with pytest.raises(InputError):
            clf.set_params(memory_size=-1).fit(MORE, MORE_LABELS)
        assert clf.digest() == before

    def test_cross_validation_and_search(self):
        images, labels = stream([0, 1], per_class=12)
        assert cross_val_score(classifier(), images, labels, cv=2).shape == (2,)
        sizes, *scores = learning_curve(
            classifier(), images, labels, train_sizes=[0.5, 1.0], cv=2, exploit_incremental_learning=True
        )
        assert [score.shape for score in scores] == [(len(sizes), 2)] * 2
        assert np.isfinite(scores).all()
        search = GridSearchCV(classifier(), {"learning_rate": [0.01, 0.1], "method": ["er", "fine-tune"]}, cv=2)
        assert search.fit(images, np.array(labels)).best_params_["method"] in ("er", "fine-tune")

    def test_probabilities_that_scikit_learn_scores(self):
        images, labels = stream(["ant", "bee", "cat"], per_class=20)
        assert labels[0] != "ant"  # the first to come is not the first of the alphabet
        clf, truth = classifier("scr"), np.array(labels)
        columns = cross_val_predict(clf, images, truth, cv=3, method="predict_proba")
        assert np.mean(np.unique(truth)[columns.argmax(1)] == truth) > 0.9
        assert cross_val_score(clf, images, truth == "cat", cv=3, scoring="roc_auc").min() > 0.9

    def test_classes_are_sorted_after_fit_and_the_columns_with_them(self, tmp_path):
        names = ["cat", "ant", "bee"]
        images, labels = stream(names)
        clf, other = classifier().fit(images, labels), classifier().partial_fit(images, labels)
        assert clf.classes_.tolist() == sorted(names)
        assert clf.digest() == other.digest()
        assert clf.predict(images).tolist() == other.predict(images).tolist()
        order = [other.classes_.tolist().index(name) for name in clf.classes_]
        assert np.array_equal(clf.predict_proba(images), other.predict_proba(images)[:, order])
        more, theirs = stream(["asp", "bee"])
        assert clf.partial_fit(more, theirs).classes_.tolist() == [*sorted(names), "asp"]
        clf.save(tmp_path / "model.scr")
        loaded = OnlineClassifier.load(tmp_path / "model.scr", encoder=small())
        assert np.array_equal(loaded.predict_proba(images), clf.predict_proba(images))

    def test_labels_that_have_no_order_stay_as_they_came(self):
        assert classifier().fit(IMAGES[:3], ["b", 1, "a"]).classes_.tolist() == ["b", 1, "a"]

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1, 2], r"shape \(2,\); expected one number for each of 3 images"),
            ([[1], [2], [3]], r"shape \(3, 1\)"),
            (["a", "b", "c"], "no number"),
            ([0, 0, 0], "not all of them 0"),
            ([1, -1, 1], "0 or more"),
            ([1, float("nan"), 1], "0 or more"),
        ],
    )
    def test_wrong_sample_weights(self, weights, message):
        with pytest.raises(InputError, match=message):
            fitted().score(IMAGES[:3], LABELS[:3], sample_weight=weights)

    def test_import_is_light(self):
        code = "import scrlearn, sys; assert scrlearn.__version__; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_unknown_attribute_of_the_package(self):
        with pytest.raises(AttributeError, match="no attribute 'Classifier'"):
            _ = scrlearn.Classifier


class TestLearning:
    def test_batches_are_cut_in_order(self, monkeypatch):
        clf = classifier().partial_fit(IMAGES[:1], LABELS[:1])
        seen = []
        monkeypatch.setattr(clf.learner_, "learn", lambda x, y: seen.append((x, y)) or torch.zeros(()))
        clf.partial_fit(np.concatenate([IMAGES, IMAGES[:1]]), [*LABELS, LABELS[0]])
        assert [len(x) for x, _ in seen] == [10, 10, 5]
        assert np.array_equal(torch.cat([x for x, _ in seen])[:, 0], np.concatenate([IMAGES, IMAGES[:1]]))
        numbers = torch.cat([y for _, y in seen])
        assert [clf.classes_[number] for number in numbers] == [*LABELS, LABELS[0]]

    def test_one_call_or_many_are_the_same(self):
        many = classifier()
        for start in range(0, len(IMAGES), 10):
            many.partial_fit(IMAGES[start : start + 10], LABELS[start : start + 10])
        assert many.digest() == fitted().digest()

    def test_every_form_of_images_is_the_same(self):
        wanted = fitted().digest()
        for images in (torch.from_numpy(IMAGES)[:, None], [Image.fromarray(i) for i in IMAGES], IMAGES[..., None]):
            assert classifier().partial_fit(images, LABELS).digest() == wanted

    def test_it_learns(self):
        images, labels = stream(["ant", "bee", "cat", "dog"], per_class=100)
        for method in ("scr", "er"):
            clf = classifier(method, memory_size=100).partial_fit(images, labels)
            assert clf.score(*stream(["ant", "bee", "cat", "dog"], seed=5)) > 0.9

    def test_the_default_encoder(self):
        clf = OnlineClassifier(memory_size=20, device="cpu").partial_fit(IMAGES[:12], LABELS[:12])
        assert clf.embed(IMAGES[:2]).shape == (2, 160)
        assert clf.predict_proba(IMAGES[:2]).shape == (2, 3)

    def test_new_classes_join_at_any_time(self):
        clf = fitted().partial_fit(MORE, MORE_LABELS)
        assert clf.classes_.tolist() == [*dict.fromkeys([*LABELS, *MORE_LABELS])]
        assert clf.predict_proba(MORE).shape == (len(MORE), 4)

    def test_many_classes(self):
        labels = [f"class {number % 40}" for number in range(80)]
        clf = classifier().partial_fit(np.repeat(IMAGES[:20], 4, axis=0), labels)
        assert len(clf.classes_) == 40
        np.testing.assert_allclose(clf.predict_proba(IMAGES).sum(1), 1, rtol=1e-5)

    @pytest.mark.parametrize("labels", [[1, "a", (2, "b")], [True, False], [0.5, 1.5], [("x", 1), ("y", 2)], [b"x", 3]])
    def test_labels_of_any_kind_come_back(self, labels):
        images, names = stream(labels)
        clf = classifier().partial_fit(images, names)
        assert {*clf.classes_.tolist()} == {*labels}
        assert {*map(type, clf.predict(images).tolist())} <= {*map(type, labels)}

    def test_numpy_labels_are_plain_ones(self):
        plain = classifier().partial_fit(IMAGES, list(map(len, LABELS)))
        arrays = classifier().partial_fit(IMAGES, np.array(list(map(len, LABELS))))
        assert plain.digest() == arrays.digest()
        assert plain.partial_fit(MORE, torch.full((len(MORE),), 3)).classes_.tolist() == [3]

    def test_images_are_resized_where_asked(self):
        big = [Image.fromarray(image).resize((20, 30)) for image in IMAGES]
        clf = classifier(image_size=8).partial_fit(big, LABELS).partial_fit(MORE, MORE_LABELS)
        assert clf.learner_.image_shape == (1, 8, 8)
        assert clf.predict(big[:3]).shape == (3,)

    def test_image_size_may_come_later(self):
        clf = fitted()
        wide = np.repeat(IMAGES, 2, axis=2)
        with pytest.raises(InputError, match=r"set_params\(image_size=\(8, 8\)\)"):
            clf.predict(wide)
        assert clf.set_params(image_size=(8, 8)).predict(wide).shape == (len(wide),)

    def test_single_images_through_batch_norm(self):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        clf = classifier("fine-tune", encoder=encoder, batch_size=1).partial_fit(IMAGES[:5], LABELS[:5])
        norm = clf.learner_.network.encoder[2]
        assert norm.running_mean.abs().sum() == 0
        # a larger batch is normalised by its own statistics again
        clf.set_params(batch_size=10).partial_fit(IMAGES, LABELS)
        assert norm.running_mean.abs().sum() > 0

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_single_images_through_batch_norm_after_a_task(self, method):
        """Teachers and averages are copies of the encoder, and take them too."""
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        options = {"epochs": 1, "batch": 1} if method == "offline" else {"averaging": 0.9, "momentum": 0.5}
        clf = classifier(method, encoder=encoder, batch_size=1, **options)
        clf.partial_fit(IMAGES[:5], LABELS[:5]).end_task().partial_fit(IMAGES[5:8], LABELS[5:8]).finish()
        assert np.isfinite(clf.predict_proba(IMAGES)).all()

    def test_the_persons_encoder_is_left_alone(self):
        encoder = small()
        before = copy.deepcopy(encoder.state_dict())
        fitted(encoder=encoder)
        assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
        assert encoder[1]._forward_hooks == {}

    def test_frozen_weights_stay(self):
        encoder = small()
        encoder[1].requires_grad_(False)
        clf = fitted(encoder=encoder)
        assert torch.equal(clf.learner_.network.encoder[1].weight, encoder[1].weight)

    def test_end_task_and_finish_pass_through(self):
        clf = classifier("scr", review=True, memory_size=200).end_task().finish()
        images, labels = stream(["ant", "bee"], per_class=60)
        clf.partial_fit(images, labels)
        before = clf.digest()
        assert clf.end_task().digest() != before
        assert clf.learner_.tasks == 1

    def test_a_policy_object_is_not_shared(self):
        clf = fitted(retrieve=RandomRetrieval())
        assert clf.learner_.retrieve is not clf.get_params()["retrieve"]

    def test_an_augmentation_of_your_own(self):
        calls = []

        def mirror(x, generator):
            calls.append(x.shape)
            return x.flip(-1)

        clf = fitted("scr", augment=mirror)
        assert calls
        assert clf.digest() != fitted("scr").digest()

    def test_changed_options_need_a_fresh_start(self):
        clf = fitted().set_params(memory_size=40, learning_rate=0.2)
        before = clf.digest()
        for act in (lambda: clf.partial_fit(MORE, MORE_LABELS), lambda: clf.save("unused")):
            with pytest.raises(
                InputError, match=r"memory_size, learning_rate\. .* set_params\(memory_size=30, learning_rate=None\)"
            ):
                act()
        assert clf.digest() == before
        clf.set_params(memory_size=30, learning_rate=None).partial_fit(MORE, MORE_LABELS)
        assert clf.set_params(memory_size=40).fit(MORE, MORE_LABELS).learner_.memory.capacity == 40

    def test_diverging_is_said(self):
        with pytest.warns(UserWarning, match="no longer a finite number"):
            fitted(learning_rate=1e30)

    def test_answers_that_are_no_numbers_are_said(self):
        """A last step can ruin the weights behind a loss that was still finite."""
        clf = fitted()
        clf.learner_.weights[0].data.fill_(float("nan"))
        clf.learner_._changed()
        for ask in (clf.predict, clf.predict_proba):
            with pytest.warns(UserWarning, match=r"no numbers.*is lost"):
                ask(IMAGES)

    def test_progress_goes_to_stderr(self, capsys):
        classifier().partial_fit(IMAGES, LABELS, progress=True)
        out, err = capsys.readouterr()
        assert out == ""
        assert "24/24" in err

    def test_progress_changes_nothing(self):
        assert classifier().partial_fit(IMAGES, LABELS, progress=True).digest() == fitted().digest()

    def test_a_step_that_fails_leaves_its_classes_unknown(self, monkeypatch):
        clf = fitted()

        def fail(x, y):
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(clf.learner_, "learn", fail)
            with pytest.raises(MemoryError):
                clf.partial_fit(MORE, MORE_LABELS)
        assert "dog" not in clf.classes_
        assert "dog" in clf.partial_fit(MORE, MORE_LABELS).classes_

    def test_a_step_that_is_interrupted_keeps_the_labels_of_what_it_stored(self, monkeypatch):
        clf = classifier().partial_fit(IMAGES[:2], ["ant", "ant"])
        learner = clf.learner_
        with monkeypatch.context() as patch:
            advance = learner.advance

            def interrupted(images):
                advance(images)
                raise KeyboardInterrupt

            patch.setattr(learner, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                clf.partial_fit(IMAGES[2:4], ["bee", "bee"])
        clf.partial_fit(IMAGES[4:6], ["cat", "cat"])
        stored = {image.tobytes(): label for image, label in zip(*clf.memory_, strict=True)}
        wanted = zip(IMAGES[:6], ["ant", "ant", "bee", "bee", "cat", "cat"], strict=True)
        assert stored == {image.tobytes(): label for image, label in wanted}

    @pytest.mark.parametrize("where", ["learn", "advance"])
    def test_a_first_step_that_fails_leaves_nothing(self, where, monkeypatch):
        clf = classifier()

        def fail(*_):
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Learner, where, fail)
            with pytest.raises(MemoryError):
                clf.partial_fit(IMAGES, LABELS)
        assert not clf.__sklearn_is_fitted__()
        assert clf.partial_fit(IMAGES, LABELS).digest() == fitted().digest()

    def test_nothing_is_left_behind(self):
        clf = fitted("scr")

        def tensors() -> int:
            gc.collect()
            return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

        clf.partial_fit(IMAGES, LABELS).predict(IMAGES)
        before = tensors()
        for _ in range(10):
            clf.partial_fit(IMAGES, LABELS).predict(IMAGES)
        assert tensors() == before


class TestSameSeedSameBits:
    def test_same_seed(self):
        assert fitted().digest() == fitted().digest()
        assert fitted().digest() != fitted(seed=1).digest()

    def test_the_global_generator_does_not_matter_and_is_left_alone(self):
        encoder = nn.Sequential(small(), nn.Dropout(0.5))
        digests = set()
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            digests.add(fitted(encoder=encoder).digest())
            assert torch.equal(torch.get_rng_state(), before)
        assert len(digests) == 1

    def test_threads_with_a_classifier_each_do_not_disturb_one_another(self):
        class Slow(nn.Module):
            def forward(self, x):
                time.sleep(0.001)  # the others have their turn
                return x

        encoder = nn.Sequential(Slow(), small(), nn.Dropout(0.5))

        def learn(seed):
            clf = OnlineClassifier("scr", memory_size=30, encoder=encoder, device="cpu", precision="fp32", seed=seed)
            return clf.partial_fit(IMAGES, LABELS).digest()

        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(learn, [0, 1, 0, 1]))
        assert together == [learn(0), learn(1)] * 2

    def test_answers_change_nothing(self):
        clf = fitted("scr")
        before = clf.digest()
        clf.predict(IMAGES), clf.predict_proba(IMAGES), clf.embed(IMAGES), clf.nearest(IMAGES), clf.memory_
        assert clf.digest() == before
        assert clf.partial_fit(MORE, MORE_LABELS).digest() == fitted("scr").partial_fit(MORE, MORE_LABELS).digest()

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda clf: pickle.loads(pickle.dumps(clf))])
    def test_a_copy_goes_its_own_way(self, copied):
        clf = fitted()
        before = clf.digest()
        twin = copied(clf).partial_fit(MORE, MORE_LABELS)
        assert clf.digest() == before
        assert clf.partial_fit(MORE, MORE_LABELS).digest() == twin.digest()


class TestAnswers:
    def test_predictions_follow_probabilities(self):
        for method in ("scr", "er"):
            clf = fitted(method)
            probabilities = clf.predict_proba(IMAGES)
            assert probabilities.dtype == np.float32
            np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
            assert (clf.predict(IMAGES) == clf.classes_[probabilities.argmax(1)]).all()

    def test_both_classifiers_from_one_training(self):
        clf = fitted()
        assert (clf.predict(IMAGES, classifier="softmax") == clf.predict(IMAGES)).all()
        assert (clf.predict(IMAGES, classifier="ncm") == fitted(classifier="ncm").predict(IMAGES)).all()
        with pytest.raises(InputError, match='build it with classifier="softmax"'):
            fitted("scr").predict(IMAGES, classifier="softmax")
        with pytest.raises(InputError, match=r'There is no classifier "nmc"\. Did you mean "ncm"'):
            clf.predict(IMAGES, classifier="nmc")

    def test_classes_cannot_be_changed_by_accident(self):
        with pytest.raises(ValueError, match="read-only"):
            fitted().classes_[0] = "x"

    def test_score(self):
        clf = fitted()
        right = clf.predict(IMAGES) == np.array(LABELS)
        assert clf.score(IMAGES, LABELS) == right.mean()
        assert clf.score(IMAGES, LABELS, np.arange(len(right))) == pytest.approx(np.average(right, weights=range(24)))
        assert clf.score(IMAGES, ["never learned"] * len(IMAGES)) == 0
        assert clf.score(IMAGES, LABELS, classifier="ncm") == (
            (clf.predict(IMAGES, classifier="ncm") == np.array(LABELS)).mean()
        )

    def test_embed(self):
        features = fitted().embed(IMAGES)
        assert (features.shape, features.dtype) == ((24, 8), np.float32)
        np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-5)

    def test_memory_goes_in_again(self):
        images, labels = fitted().memory_
        assert (images.shape, images.dtype, labels.shape) == ((24, 8, 8, 1), np.uint8, (24,))
        pairs = {(image.tobytes(), label) for image, label in zip(images, labels, strict=True)}
        assert pairs == {(image.tobytes(), label) for image, label in zip(IMAGES, LABELS, strict=True)}
        assert classifier().partial_fit(images, labels).classes_.size == 3

    def test_memory_is_a_copy(self):
        clf = fitted()
        clf.memory_.images[:] = 0
        assert clf.memory_.images.any()

    def test_nearest(self):
        clf = fitted()
        images, _ = clf.memory_
        indices, distances = clf.nearest(images, k=3)
        assert indices.shape == distances.shape == (24, 3)
        assert (np.diff(distances, axis=1) >= 0).all()
        features = clf.embed(images)
        for row, (places, far) in enumerate(zip(indices, distances, strict=True)):
            wanted = np.linalg.norm(features - features[row], axis=1)
            np.testing.assert_allclose(far, np.sort(wanted)[:3], atol=2e-3)
            np.testing.assert_allclose(wanted[places], far, atol=2e-3)
        assert clf.nearest(images[:1], k=1000).indices.shape == (1, 24)

    def test_nearest_follows_what_is_learned(self):
        clf = fitted()
        clf.nearest(IMAGES)
        clf.partial_fit(MORE, MORE_LABELS)
        distances = clf.nearest(clf.memory_.images, k=1).distances
        assert (distances < 2e-3).all()

    def test_prototypes_are_computed_once_after_each_change(self, monkeypatch):
        calls = []
        fit = NearestClassMean.fit

        def counted(*arguments):
            calls.append(1)
            return fit(*arguments)

        monkeypatch.setattr(NearestClassMean, "fit", counted)
        clf = fitted("scr")
        assert len(calls) == 0
        clf.predict(IMAGES), clf.predict_proba(IMAGES), clf.score(IMAGES, LABELS)
        assert len(calls) == 1
        clf.partial_fit(MORE, MORE_LABELS).predict(IMAGES)
        assert len(calls) == 2
        clf.forget("dog")
        clf.predict(IMAGES)
        assert len(calls) == 3

    @pytest.mark.parametrize(
        "ask",
        [
            lambda clf: clf.predict(IMAGES),
            lambda clf: clf.predict_proba(IMAGES),
            lambda clf: clf.score(IMAGES, LABELS),
            lambda clf: clf.embed(IMAGES),
            lambda clf: clf.nearest(IMAGES),
            lambda clf: clf.classes_,
            lambda clf: clf.memory_,
            lambda clf: clf.forget("ant"),
        ],
    )
    def test_nothing_learned_yet(self, ask):
        with pytest.raises(NotFittedError, match="Nothing has been learned yet"):
            ask(classifier())

    @pytest.mark.parametrize("answering", ["ncm", "combined", "lda"])
    def test_a_class_without_stored_images_is_said_once(self, answering):
        images = np.repeat(IMAGES, 4, axis=0)
        clf = classifier("fine-tune", classifier=answering, memory_size=2)
        with pytest.warns(UserWarning, match="left in memory") as caught:
            clf.partial_fit(images, list(range(len(images)))).predict(IMAGES)
        assert len(caught) == 1
        assert ", ..." in str(caught[0].message)
        assert 'so would update="balanced"' in str(caught[0].message)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            probabilities = clf.predict_proba(IMAGES)
            clf.partial_fit(images[:10], [0] * 10)
        assert (probabilities > 0).any(0).sum() <= 2
        assert {*clf.predict(IMAGES)} <= {*clf.memory_.labels}


class TestForgetting:
    def test_the_softmax_layer_needs_no_image(self):
        clf = classifier("er", memory_size=1, classifier="softmax", calibrated=True).partial_fit(IMAGES, LABELS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clf.forget(clf.memory_.labels[0])
            assert len(clf.memory_.labels) == 0
            assert {*clf.predict(IMAGES)} <= {*clf.classes_}

    def test_a_class_is_gone(self):
        for method in ("scr", "er"):
            clf = fitted(method)
            kept = (clf.memory_.labels == "bee").sum()
            assert clf.forget("bee") == kept > 0
            assert "bee" not in clf.classes_
            assert "bee" not in clf.memory_.labels
            assert "bee" not in clf.predict(IMAGES)
            probabilities = clf.predict_proba(IMAGES)
            assert probabilities.shape == (24, 2)
            np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
            assert clf.score(IMAGES[:1], ["bee"]) == 0

    def test_its_name_and_images_are_not_in_the_file(self, tmp_path):
        clf = fitted()
        image = IMAGES[LABELS.index("bee")].tobytes()
        assert image in clf.save(tmp_path / "model").read_bytes()
        clf.forget("bee")
        data = clf.save(tmp_path / "model").read_bytes()
        assert b'"ant"' in data.replace(b"\\", b"")
        assert b"bee" not in data
        assert image not in data

    def test_learned_again(self):
        clf = fitted()
        clf.forget("bee")
        clf.partial_fit(MORE, MORE_LABELS)
        assert {*clf.classes_[2:].tolist()} == {"bee", "dog"}
        images, labels = stream(["ant", "bee", "cat", "dog"], per_class=60)
        assert clf.partial_fit(images, labels).score(*stream(["bee"], seed=3)) > 0.9

    def test_the_order_of_probabilities_follows_classes(self):
        clf = fitted()
        clf.forget("bee")
        clf.partial_fit(MORE, MORE_LABELS)
        numbers = [clf.learner_.predict(torch.from_numpy(IMAGES)[:, None])[row].item() for row in range(24)]
        names = {number: name for name, number in clf._index.items()}
        assert clf.predict(IMAGES).tolist() == [names[number] for number in numbers]

    def test_numbers_are_used_again(self):
        assert _new_indices({"a": 0, "c": 2}, ["x", "a", "y", "x"]) == {"x": 1, "y": 3}
        clf = fitted()
        for _ in range(30):
            clf.forget("bee")
            clf.partial_fit(IMAGES[:2], ["bee", "bee"])
        assert clf.learner_.network.head.capacity == 16

    def test_all_forgotten(self):
        clf = fitted()
        for name in clf.classes_:
            clf.forget(name)
        assert clf.classes_.shape == (0,)
        with pytest.raises(NotFittedError, match="Every class has been forgotten"):
            clf.predict(IMAGES)
        with pytest.raises(NotFittedError, match="The memory is empty"):
            clf.nearest(IMAGES)
        assert clf.partial_fit(IMAGES, LABELS).predict(IMAGES).shape == (24,)

    def test_unknown_class(self):
        clf = fitted()
        before = clf.digest()
        with pytest.raises(InputError, match=r'There is no class .bea. to forget\. Did you mean "bee"'):
            clf.forget("bea")
        with pytest.raises(InputError, match=r"There is no class 3 to forget\. See classes_"):
            clf.forget(3)
        assert clf.digest() == before


def pixels(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.uint8)


BAD_BATCHES = {
    "floats": (pixels(2, 8, 8) / 255, ["a", "b"], "pixels must be uint8"),
    "NaN pixels": (np.full((2, 8, 8), np.nan), ["a", "b"], "Some pixels are NaN"),
    "another size": (pixels(2, 9, 9), ["a", "b"], r"1×9×9 .* earlier ones were 1×8×8"),
    "more channels": (pixels(2, 8, 8, 3), ["a", "b"], "number of channels must stay the same"),
    "a single image": (pixels(8, 8), ["a"], r"give images\[None\]"),
    "five dimensions": (pixels(1, 2, 8, 8, 1), ["a"], "no batch of images"),
    "no images": (pixels(0, 8, 8), [], "no images in this batch"),
    "an empty list": ([], [], "no images in this batch"),
    "sizes that differ": ([pixels(8, 8), pixels(7, 8)], ["a", "b"], r"images\[1\] is 1×7×8"),
    "fewer labels": (pixels(2, 8, 8), ["a"], "2 images but 1 labels"),
    "more labels": (pixels(2, 8, 8), ["a", "b", "c"], "2 images but 3 labels"),
    "NaN label": (pixels(2, 8, 8), ["a", float("nan")], r"labels\[1\] is nan: the label is missing"),
    "None label": (pixels(2, 8, 8), [None, "a"], r"labels\[0\] is None: the label is missing"),
    "unhashable label": (pixels(2, 8, 8), ["a", ["b"]], "cannot be hashed"),
    "one string": (pixels(2, 8, 8), "ab", "one string"),
    "one-hot labels": (pixels(2, 8, 8), np.eye(2), "one-hot"),
    "the last of many": ([*IMAGES, pixels(9, 9)], [*LABELS, "a"], r"images\[24\] is 1×9×9"),
}


class TestBadInput:
    @pytest.mark.parametrize(("images", "labels", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
    def test_nothing_changes(self, images, labels, message):
        clf = fitted()
        before = clf.digest()
        for act in (clf.partial_fit, clf.score):
            with pytest.raises(InputError, match=message):
                act(images, labels)
            assert clf.digest() == before

    @pytest.mark.parametrize("name", [name for name in BAD_BATCHES if name not in ("another size", "more channels")])
    def test_a_first_batch_builds_nothing(self, name):
        images, labels, _ = BAD_BATCHES[name]
        clf = classifier()
        with pytest.raises(InputError):
            clf.partial_fit(images, labels)
        assert not clf.__sklearn_is_fitted__()
        assert clf.partial_fit(IMAGES, LABELS).digest() == fitted().digest()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "scd"}, 'There is no method "scd". Did you mean "scr"'),
            ({"method": "er", "momentun": 0.5}, 'Method "er" has no option "momentun". Did you mean "momentum"'),
            ({"method": "er", "temperature": 0.5}, 'Method "er" has no option "temperature"'),
            ({"method": "er", "retrieve": "randon"}, 'no retrieve policy "randon". Did you mean "random"'),
            ({"method": "er", "image_shape": (1, 8, 8)}, 'has no option "image_shape"'),
        ],
    )
    def test_unknown_names_are_said_at_once(self, options, message):
        with pytest.raises(InputError, match=message):
            OnlineClassifier(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"memory_size": 0}, "give memory_size ≥ 1"),
            ({"memory_size": -5}, "memory_size is -5; it must be a whole number, 0 or more"),
            ({"memory_size": "many"}, "memory_size is 'many'"),
            ({"memory_size": 10.5}, "memory_size is 10.5"),
            ({"batch_size": 0}, "batch_size is 0; it must be a whole number, 1 or more"),
            ({"batch_size": True}, "batch_size is True"),
            ({"seed": None}, "seed is None"),
            ({"seed": -1}, "seed is -1"),
            ({"image_size": 0}, "image_size is 0"),
            ({"image_size": (8, 8, 1)}, r"image_size is \(8, 8, 1\)"),
            ({"device": "gpu"}, '"gpu" is no device'),
            ({"precision": "fp8"}, 'no precision "fp8"'),
            ({"classifier": "knn"}, 'no classifier "knn"'),
            ({"learning_rate": -1.0}, "learning_rate is -1.0"),
            ({"learning_rate": "fast"}, "learning_rate is .fast.; expected a number, such as 0.1"),
            ({"encoder": "resnet"}, r"encoder is a str; it must be a torch\.nn\.Module"),
            ({"encoder": nn.Linear(3, 3)}, "does not take 1×8×8 images"),
            ({"encoder": nn.Conv2d(1, 2, 3)}, r"must map images N×C×H×W to vectors N×d"),
            (
                {"method": "fine-tune", "memory_size": 0, "classifier": "ncm", "prototypes": "memory"},
                "cannot answer here",
            ),
            ({"method": "scr", "projection": "none", "encoder": nn.Flatten()}, "nothing to train"),
        ],
    )
    def test_bad_values_are_said_when_learning_begins(self, options, message):
        clf = classifier(**options)
        with pytest.raises(InputError, match=message):
            clf.partial_fit(IMAGES, LABELS)
        assert not clf.__sklearn_is_fitted__()

    def test_bad_questions(self):
        clf = fitted()
        before = clf.digest()
        with pytest.raises(InputError, match="k is 0"):
            clf.nearest(IMAGES, k=0)
        for ask in (clf.predict, clf.predict_proba, clf.embed, clf.nearest):
            with pytest.raises(InputError, match="earlier ones were 1×8×8"):
                ask(pixels(2, 9, 9))
        assert clf.digest() == before


class Stop(nn.Module):
    """Another architecture with as many features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


class TestFiles:
    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_goes_on_exactly(self, method, tmp_path):
        whole, stopped = fitted(method), fitted(method)
        stopped.save(tmp_path / "model.scr")
        resumed = OnlineClassifier.load(tmp_path / "model.scr", encoder=small())
        assert resumed.digest() == stopped.digest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for clf in (whole, resumed):
                clf.end_task().partial_fit(MORE, MORE_LABELS).finish()
            assert resumed.digest() == whole.digest()
            assert (resumed.predict_proba(IMAGES) == whole.predict_proba(IMAGES)).all()
        assert (resumed.classes_ == whole.classes_).all()

    def test_with_every_moving_part(self, tmp_path):
        encoder = nn.Sequential(small(), nn.Dropout(0.3), nn.BatchNorm1d(8))
        options = {"momentum": 0.9, "averaging": 0.9, "learning_rate": 0.01, "encoder": encoder}
        whole, stopped = fitted(**options), fitted(**options)
        resumed = OnlineClassifier.load(stopped.save(tmp_path / "model"), encoder=encoder)
        for clf in (whole, resumed):
            clf.partial_fit(MORE, MORE_LABELS)
        assert resumed.digest() == whole.digest()
        assert (resumed.predict(IMAGES) == whole.predict(IMAGES)).all()

    @pytest.mark.parametrize("name", ["memory_size", "memory_batch", "updates_per_batch"])
    def test_numbers_of_numpy_are_as_good_as_pythons(self, name, tmp_path):
        clf, plain = fitted(**{name: np.int64(2)}), fitted(**{name: 2})
        assert clf.digest() == plain.digest()
        resumed = OnlineClassifier.load(clf.save(tmp_path / "model"), encoder=small())
        assert resumed.partial_fit(MORE, MORE_LABELS).digest() == plain.partial_fit(MORE, MORE_LABELS).digest()

    def test_parameters_come_back(self, tmp_path):
        clf = OnlineClassifier("scr", memory_size=np.int64(9), image_size=(8, 8), device="cpu", temperature=0.3, seed=4)
        clf.partial_fit(IMAGES[:3], LABELS[:3])
        back = OnlineClassifier.load(clf.save(tmp_path / "model"))
        assert back.get_params() == clf.get_params()
        assert type(back.memory_size) is int
        back.partial_fit(IMAGES, LABELS)

    def test_the_built_in_encoder_needs_nothing(self, tmp_path):
        clf = OnlineClassifier("er", memory_size=9, device="cpu").partial_fit(IMAGES[:12], LABELS[:12])
        back = OnlineClassifier.load(clf.save(tmp_path / "model"))
        assert (back.predict_proba(IMAGES) == clf.predict_proba(IMAGES)).all()

    def test_before_anything_was_learned(self, tmp_path):
        back = OnlineClassifier.load(classifier(encoder=None, momentum=0.5).save(tmp_path / "model"))
        assert back.get_params() == classifier(encoder=None, momentum=0.5).get_params()
        assert not back.__sklearn_is_fitted__()

    def test_labels_keep_their_types(self, tmp_path):
        labels = ["a", 1, 2.5, ("b", 3, (4.0, "c")), b"d\x00", "ä\ud800", float("inf"), False]
        clf = classifier().partial_fit(IMAGES[: len(labels)], labels)
        back = OnlineClassifier.load(clf.save(tmp_path / "model"), encoder=small())
        assert back.classes_.tolist() == labels
        assert list(map(type, back.classes_)) == list(map(type, labels))

    def test_a_label_that_cannot_be_saved_is_named(self, tmp_path):
        labels = ["a", datetime.date(2024, 1, 2)]
        clf = classifier().partial_fit(IMAGES[:2], labels)
        with pytest.raises(InputError, match=r"The label datetime\.date\(2024, 1, 2\) cannot be saved: .* is a date"):
            clf.save(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_encoder_missing_or_not_fitting(self, tmp_path):
        path = fitted().save(tmp_path / "model")
        with pytest.raises(CheckpointError, match=r"saved with encoder = a torch\.nn\.modules\.container\.Sequential"):
            OnlineClassifier.load(path)
        with pytest.raises(CheckpointError, match=r"encoder\.1\.weight \(9, 64\) ≠ \(8, 64\)"):
            OnlineClassifier.load(path, encoder=small(9))
        with pytest.raises(CheckpointError, match=r"encoder\.1\.weight missing ≠ \(8, 64\).* and 1 more"):
            OnlineClassifier.load(path, encoder=Stop())
        frozen = small().requires_grad_(False)
        with pytest.raises(CheckpointError, match="Other parameters of the encoder were frozen"):
            OnlineClassifier.load(path, encoder=frozen)

    def test_callables_are_given_again(self, tmp_path):
        def mirror(x, generator):
            return x.flip(-1)

        whole, stopped = fitted("scr", augment=mirror), fitted("scr", augment=mirror)
        path = stopped.save(tmp_path / "model")
        with pytest.raises(CheckpointError, match=r"saved with augment = a builtins\.function.* augment=\.\.\."):
            OnlineClassifier.load(path, encoder=small())
        resumed = OnlineClassifier.load(path, encoder=small(), augment=mirror)
        for clf in (whole, resumed):
            clf.partial_fit(MORE, MORE_LABELS)
        assert resumed.digest() == whole.digest()
        with pytest.raises(CheckpointError, match="temperature is stored in"):
            OnlineClassifier.load(path, encoder=small(), augment=mirror, temperature=0.2)

    def test_a_future_version(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(scrlearn.checkpoint, "FORMAT", 99)
            path = fitted().save(tmp_path / "model")
        with pytest.raises(CheckpointError, match="has format 99"):
            OnlineClassifier.load(path, encoder=small())

    def test_something_else(self, tmp_path):
        with pytest.raises(CheckpointError, match="There is no checkpoint"):
            OnlineClassifier.load(tmp_path / "nothing")
        whole = fitted().save(tmp_path / "model").read_bytes()
        (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="a part of it is missing"):
            OnlineClassifier.load(tmp_path / "half", encoder=small())
        scrlearn.checkpoint.save_checkpoint(tmp_path / "run", {}, {"kind": "run"})
        with pytest.raises(CheckpointError, match="holds no OnlineClassifier, but run"):
            OnlineClassifier.load(tmp_path / "run")

    def test_parameters_that_do_not_fit_the_state(self, tmp_path):
        clf = fitted()
        path = clf.save(tmp_path / "model")
        state, meta = scrlearn.checkpoint.load_checkpoint(path)
        meta["params"]["memory_size"] = 3
        scrlearn.checkpoint.save_checkpoint(path, state, meta)
        with pytest.raises(CheckpointError, match="cannot be loaded: The saved memory holds 24 images"):
            OnlineClassifier.load(path, encoder=small())

    def test_a_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        clf = fitted()
        path = clf.save(tmp_path / "model.scr")
        before, old = clf.digest(), path.read_bytes()
        clf.partial_fit(MORE, MORE_LABELS)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("scrlearn.files.os.fsync", full)
            with pytest.raises(OSError, match="no space left"):
                clf.save(path)
        assert path.read_bytes() == old
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.scr"]
        assert OnlineClassifier.load(path, encoder=small()).digest() == before

    def test_a_file_from_a_machine_with_another_device(self, tmp_path):
        clf = fitted()
        path = clf.save(tmp_path / "model")
        state, meta = scrlearn.checkpoint.load_checkpoint(path)
        state["generator"] = torch.zeros(16, dtype=torch.uint8)  # as a CUDA generator's
        meta["params"]["device"] = "cuda:7"
        scrlearn.checkpoint.save_checkpoint(path, state, meta)
        if not torch.cuda.is_available():
            back = OnlineClassifier.load(path, encoder=small())
            assert back.device == "auto"
        again = [OnlineClassifier.load(path, encoder=small(), device="cpu") for _ in range(2)]
        assert (again[0].predict(IMAGES) == clf.predict(IMAGES)).all()
        assert len({one.partial_fit(MORE, MORE_LABELS).digest() for one in again}) == 1


class CountingRunner:
    """Stands for a GraphRunner where there is no GPU: runs the functions, and counts them."""

    def __init__(self, learner):
        self.learner, self.ran = learner, []

    def __call__(self, function, *inputs):
        self.ran.append((function.__name__, len(inputs[0])))
        return self.learner.run_directly(function, *inputs)


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr("scrlearn.estimator.GraphRunner", CountingRunner)
    monkeypatch.setattr("scrlearn.estimator.why_not_graph", lambda learner: None)


class TestEngine:
    def test_steps_and_answers_go_through_the_graphs(self, graphs):
        clf = fitted(encoder=None, memory_size=20)
        assert clf.learner_.runner.ran == [("step", 10), ("step", 10), ("step", 4)]
        clf.predict(IMAGES[:5])
        assert clf.learner_.runner.ran[3:] == [("look", 5)]
        assert clf.digest() == fitted(encoder=None, memory_size=20, engine="eager").digest()

    def test_parts_of_your_own_are_not_recorded_unless_asked_for(self, graphs):
        assert not isinstance(fitted().learner_.runner, CountingRunner)
        assert not isinstance(fitted(encoder=None, retrieve=RandomRetrieval()).learner_.runner, CountingRunner)
        assert len(fitted(engine="graph").learner_.runner.ran) == 3

    def test_it_can_be_changed_at_any_time(self, graphs):
        clf = fitted(engine="eager")
        clf.set_params(engine="graph").partial_fit(MORE, MORE_LABELS)
        runner = clf.learner_.runner
        assert len(runner.ran) == 2
        clf.set_params(engine="eager").partial_fit(MORE, MORE_LABELS)
        assert len(runner.ran) == 2
        other = fitted().partial_fit(MORE, MORE_LABELS).partial_fit(MORE, MORE_LABELS)
        assert clf.digest() == other.digest()

    def test_it_is_a_parameter_like_others(self, graphs, tmp_path):
        clf = fitted(engine="graph")
        assert clone(clf).engine == "graph"
        back = OnlineClassifier.load(clf.save(tmp_path / "model"), encoder=small())
        assert back.engine == "graph"
        assert isinstance(back.learner_.runner, CountingRunner)
        assert back.learner_.runner.learner is back.learner_
        assert clf.fit(IMAGES, LABELS).learner_.runner.learner is clf.learner_

    def test_without_a_gpu_it_says_why_and_goes_on(self):
        with pytest.warns(UserWarning, match="Running eagerly: graphs need CUDA") as said:
            clf = classifier(engine="graph").partial_fit(IMAGES, LABELS)
        assert said[0].filename == __file__
        assert clf.digest() == fitted().digest()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fitted()
            fitted(engine="eager")

    def test_a_wrong_name(self):
        with pytest.raises(InputError, match=r'no engine "grahp"\. Did you mean "graph"'):
            fitted(engine="grahp")
        clf = fitted()
        with pytest.raises(InputError, match="no engine"):
            clf.set_params(engine="grahp", memory_size=3)
        assert (clf.engine, clf.memory_size) == ("auto", 30)


class TestStreamsWithoutTasks:
    def test_a_gem_projects_from_the_start(self):
        clf = fitted("a-gem")
        assert clf.learner_.projects
        assert not fitted("a-gem", from_start=False).learner_.projects
        assert "from_start" not in clf.get_params()

    @pytest.mark.parametrize("method", ["ewc++", "lwf", "icarl"])
    def test_a_method_that_lives_on_tasks_says_so_once(self, method):
        clf = fitted(method)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clf.partial_fit(IMAGES, LABELS)  # nothing new
        with pytest.warns(UserWarning, match=r"end_task\(\)") as said:
            clf.partial_fit(MORE, MORE_LABELS)
        assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clf.partial_fit(*stream(["eel", "fox"]))

    @pytest.mark.parametrize("method", ["scr", "er", "a-gem", "fine-tune", "lwf"])
    def test_nothing_is_said_to_others(self, method):
        clf = fitted(method)
        if method == "lwf":
            clf.end_task()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clf.partial_fit(MORE, MORE_LABELS)


@pytest.mark.device
@pytest.mark.parametrize("method", METHODS)
def test_graphs_give_the_bits_of_eager_steps(method, tmp_path):
    options = {"memory_size": 30, "device": "cuda", "batch_size": 4}
    options |= {"epochs": 2, "batch": 8} if method == "offline" else {"memory_batch": 8}
    both = [OnlineClassifier(method, engine=engine, **options) for engine in ("eager", "graph")]
    for clf in both:
        for _ in range(4):
            clf.partial_fit(IMAGES, LABELS).end_task()
        clf.partial_fit(*stream([f"class {number}" for number in range(30)]))  # the head grows
        clf.forget("bee")
        for _ in range(4):
            clf.partial_fit(MORE[:7], MORE_LABELS[:7])  # 4 and 3
        clf.finish()
    eager, graph = both
    assert graph.learner_.runner.recordings
    assert graph.digest() == eager.digest()
    for _ in range(4):
        assert np.array_equal(graph.predict_proba(MORE), eager.predict_proba(MORE))
    back = OnlineClassifier.load(graph.save(tmp_path / "model"))
    twin = copy.deepcopy(graph)
    for clf in (eager, back, twin):
        clf.partial_fit(IMAGES, LABELS).finish()
    assert back.digest() == twin.digest() == eager.digest()


@pytest.mark.device
@pytest.mark.parametrize("method", ["scr", "er"])
def test_to_the_gpu_and_back(method, tmp_path):
    options = {"memory_size": 30, "precision": "fp32"}
    clf = OnlineClassifier(method, device="cpu", **options).partial_fit(IMAGES, LABELS)
    path = clf.save(tmp_path / "model")
    there = OnlineClassifier.load(path, device="cuda")
    np.testing.assert_allclose(there.predict_proba(IMAGES), clf.predict_proba(IMAGES), atol=1e-3)
    there.partial_fit(torch.from_numpy(MORE)[:, None].cuda(), MORE_LABELS)
    back = OnlineClassifier.load(there.save(path), device="cpu")
    np.testing.assert_allclose(back.predict_proba(MORE), there.predict_proba(MORE), atol=1e-3)
    assert (back.memory_.images == there.memory_.images).all()
    resumed = OnlineClassifier.load(path)
    for one in (there, resumed):
        one.partial_fit(IMAGES, LABELS)
    assert resumed.digest() == there.digest()


@pytest.mark.device
def test_dropout_on_the_gpu_follows_the_seed():
    encoder = nn.Sequential(small(), nn.Dropout(0.5))
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        digests.add(fitted(encoder=encoder, device="cuda").digest())
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050"])
def test_timm_encoders(name, tmp_path):
    timm = pytest.importorskip("timm")
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    encoder = timm.create_model(name, pretrained=False, num_classes=0)
    # 5 = 4 + 1: the last batch is a single image, whose maps end at 1×1
    clf = OnlineClassifier("er", encoder=encoder, memory_size=10, batch_size=4, device="cpu")
    clf.partial_fit(images, list("aabba"))
    assert clf.embed(images).shape == (5, encoder.num_features if name == "resnet18" else encoder.head_hidden_size)
    back = OnlineClassifier.load(clf.save(tmp_path / "model"), encoder=timm.create_model(name, num_classes=0))
    for one in (clf, back):
        one.partial_fit(images, list("ccaab"))
    assert back.digest() == clf.digest()
