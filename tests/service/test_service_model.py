"""The copies that answer: as the classifier does, with thresholds, a map, and questions taken together."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from service_tools import CONFIG, images_of, open_service, teach
from tiny_encoder import tiny

from scrlearn.errors import InputError
from scrlearn.learners.base import NCM_TEMPERATURE, Learner
from scrlearn.service import worker
from scrlearn.service.answers import Answerer
from scrlearn.service.encoders import make_encoder
from scrlearn.service.journal import Item
from scrlearn.service.model import (
    BORROWED,
    ROOM,
    Cartographer,
    Replica,
    ServedClassifier,
    directions,
    make_model,
    thresholds,
)
from scrlearn.service.problems import Problem
from scrlearn.service.settings import ModelConfig

SHAPE = (1, 8, 8)


def taught(*labels: str, count: int = 12, **config: object) -> ServedClassifier:
    model = make_model(ModelConfig(**{**CONFIG, **config}), tiny())
    for label in labels:
        images = images_of(label, count)
        for start in range(0, count, 10):
            model.learn([Item("image", label, bytes(image.numpy())) for image in images[start : start + 10]], SHAPE)
    return model


@pytest.mark.parametrize(
    ("method", "classifier", "options"),
    [
        ("er", "ncm", {}),
        ("er", "softmax", {}),
        ("er", "ncm", {"centred": True}),
        ("scr", "ncm", {"centred": True, "projection_share": 0.5}),
        ("er", "ncm", {"crops": True, "mirror": True}),
        ("er", "ncm", {"calibrated": True, "crops": True}),
        ("er", "softmax", {"calibrated": True}),
        ("scr+", None, {"memory_batch": 20}),
        ("scr+", "lda", {"memory_batch": 20}),
    ],
)
def test_a_copy_answers_as_the_classifier_does(method: str, classifier: str | None, options: dict[str, object]) -> None:
    model = taught("cat", "dog", "owl", method=method, classifier=classifier, options=options)
    replica = Replica(model, 36)
    asked = torch.cat([images_of(label, 3, start=100) for label in ("owl", "cat", "fox")])
    answers = replica.answer(asked, neighbours=4)
    assert [answer.classes[0].label for answer in answers] == model.predict(asked).tolist()
    columns = model.classes_.tolist()
    probabilities = model.predict_proba(asked)
    if classifier == "ncm":  # the same, at the temperature that the memory gives
        assert replica.temperature != NCM_TEMPERATURE
        powers = probabilities ** (NCM_TEMPERATURE / replica.temperature)
        probabilities = powers / powers.sum(1, keepdims=True)
    for answer, row in zip(answers, probabilities, strict=True):
        assert {near.label for near in answer.classes} == {*columns}
        for near in answer.classes:
            assert near.confidence == pytest.approx(row[columns.index(near.label)], abs=1e-4)
    expected = model.nearest(asked, k=4)
    assert [[n.slot for n in answer.neighbours] for answer in answers] == expected.indices.tolist()
    found = [[n.distance for n in answer.neighbours] for answer in answers]
    assert np.allclose(found, expected.distances, atol=1e-5)
    stored = model.memory_
    assert [replica.name(slot) for slot in range(36)] == stored.labels.tolist()


def test_distances_are_to_the_prototypes() -> None:
    model = taught("cat", "dog")
    replica = Replica(model, 24)
    [answer] = replica.answer(images_of("cat", 1))
    stored = model.memory_
    features = model.embed(stored.images)
    assert {near.label for near in answer.classes} == {"cat", "dog"}
    for near in answer.classes:
        mean = features[stored.labels == near.label].mean(0)
        mean /= np.linalg.norm(mean)
        asked = model.embed(images_of("cat", 1))[0]
        assert near.distance == pytest.approx(np.linalg.norm(asked - mean), abs=1e-4)
        closest = np.linalg.norm(features[stored.labels == near.label] - asked, axis=1).min()
        assert near.nearest == pytest.approx(closest, abs=2e-3)


def test_thresholds_leave_each_image_out() -> None:
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(40, 6, generator=generator), dim=1)
    labels = torch.tensor([0] * 20 + [1] * 15 + [3] * 4 + [4])
    nearest: dict[int, list[float]] = {number: [] for number in range(5)}
    away: dict[int, list[float]] = {number: [] for number in range(5)}
    for i in range(39):
        others = [j for j in range(40) if labels[j] == labels[i] and j != i]
        nearest[int(labels[i])].append(min(float((features[i] - features[j]).norm()) for j in others))
        away[int(labels[i])].append(float((features[i] - F.normalize(features[others].sum(0), dim=0)).norm()))

    def spread(distances: dict[int, list[float]], number: int) -> float:
        everything = np.square(np.concatenate(list(distances.values()))).mean()
        mine = np.square(distances[number]).sum()
        return float(np.sqrt((mine + BORROWED * everything) / (len(distances[number]) + BORROWED)))

    relative = [distance / spread(nearest, number) for number, found in nearest.items() for distance in found]
    floors = set()
    for quantile in (0.0, 1.0):
        for number, found in enumerate(thresholds(features, labels, 5, quantile).tolist()):
            limit, floor = spread(nearest, number) * np.quantile(relative, quantile) * ROOM, spread(away, number)
            assert found == pytest.approx(max(limit, floor), abs=1e-5)
            floors.add(bool(limit < floor))
    assert floors == {True, False}


def test_a_single_image_of_each_class_sets_no_threshold() -> None:
    assert torch.isinf(thresholds(torch.eye(3), torch.tensor([0, 1, 2]), 3, 0.95)).all()
    replica = Replica(taught("cat", "dog", count=1), 2)
    answers = replica.answer(images_of("fox", 2))
    assert all(answer.label in ("cat", "dog") for answer in answers)
    assert answers[0].classes[0].threshold is None


def test_most_stored_images_are_known() -> None:
    model = taught("cat", "dog", "owl", count=13)
    stored = torch.from_numpy(model.memory_.images).permute(0, 3, 1, 2)
    known = [answer.label is not None for answer in Replica(model, 39, quantile=0.95).answer(stored)]
    assert np.mean(known) >= 0.95


def test_a_class_without_stored_images_is_not_near() -> None:
    """A memory of one image cannot hold both classes."""
    model = taught("cat", "dog", memory_size=1)
    replica = Replica(model, 24)
    assert sorted(replica.counts().values()) == [0, 1]
    [answer] = replica.answer(images_of("cat", 1))
    [there] = [label for label, count in replica.counts().items() if count]
    assert answer.classes[0].label == there
    assert [near.distance is None for near in answer.classes] == [False, True]
    assert answer.classes[1].confidence == 0


@pytest.mark.parametrize("classifier", ["ncm", "combined", "lda"])
def test_when_every_image_was_taken_out_nothing_is_known(classifier: str) -> None:
    """And teaching goes on."""
    model = taught("cat", "dog", memory_size=1, method="scr+", classifier=classifier, options={"memory_batch": 20})
    [there] = [label for label, count in Replica(model, 24).counts().items() if count]
    model.forget(there)
    [answer] = Replica(model, 25).answer(images_of("cat", 1))
    assert answer.label is None
    model.learn([Item("image", "owl", bytes(images_of("owl", 1).numpy()))], SHAPE)
    [answer] = Replica(model, 26).answer(images_of("owl", 1))
    assert answer.classes[0].confidence > 0


def test_a_copy_looks_at_the_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = taught("cat", "dog", count=10, method="scr+", options={"memory_batch": 20, "crops": False})
    looked = []
    whole = Learner.look_whole
    monkeypatch.setattr(Learner, "look_whole", lambda self, x: looked.append(len(x)) or whole(self, x))
    Replica(model, 20)
    assert sum(looked) == 20 + 40  # the images, and the blends of them


# ------------------------------------------------------------------------------------------------------------ the map


def test_directions_are_the_main_ones() -> None:
    points = np.random.default_rng(0).normal(size=(500, 5)) * [5, 3, 1, 0.5, 0.1]
    points -= points.mean(0)
    basis, explained = directions(points.T @ points, None)
    _, singular, rows = np.linalg.svd(points)
    assert np.allclose(np.abs(basis.T), np.abs(rows[:2]), atol=1e-8)
    assert explained == pytest.approx((singular[:2] ** 2).sum() / (singular**2).sum())


def test_the_map_turns_back_to_where_it_was() -> None:
    """When two directions change places, or turn round, the points stay."""
    before, _ = directions(np.diag([9.1, 9.0, 1.0, 0.5]), None)
    now = np.diag([9.0, 9.1, 1.0, 0.5])  # the second direction is the first one now
    alone, _ = directions(now, None)
    after, _ = directions(now, before)
    assert np.abs(alone - before).max() == 1
    assert np.allclose(after, before)
    assert np.allclose(directions(now, -before)[0], -before)


def test_one_feature_makes_a_line() -> None:
    basis, explained = directions(np.array([[2.0]]), None)
    assert basis.tolist() == [[1.0, 0.0]]
    assert explained == 1


def test_a_map_is_drawn_once_for_each_copy() -> None:
    model = taught("cat", "dog")
    cartographer = Cartographer()
    first = Replica(model, 24)
    drawn = cartographer.draw(first)
    assert cartographer.draw(first) is drawn
    assert cartographer.draw(Replica(model, 25)) is not drawn
    assert np.allclose(cartographer.draw(Replica(model, 26)).points, drawn.points), "the same features, the same places"


# ----------------------------------------------------------------------------------------------------- asked together


class _Slow:
    """A copy that answers when it is told to, and remembers how much it was asked at once."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), threading.Event()
        self.batches: list[int] = []

    def answer(self, images: torch.Tensor, neighbours: int) -> list[object]:
        self.asked.set()
        self.go.wait(20)
        self.batches.append(len(images))
        return Replica(make_model(ModelConfig(**CONFIG), tiny()), 0).answer(images)


def test_questions_are_answered_together() -> None:
    slow = _Slow()
    answerer = Answerer(lambda: slow, most=100, batch=8)  # type: ignore[arg-type, return-value]
    first = answerer.ask(images_of("cat", 1))
    assert slow.asked.wait(20)
    futures = [answerer.ask(images_of("cat", 3)) for _ in range(5)]
    assert answerer.waiting == 15
    gone = answerer.ask(images_of("cat", 1))
    assert gone.cancel()
    slow.go.set()
    assert [len(future.result(20).answers) for future in (first, *futures)] == [1, 3, 3, 3, 3, 3]
    answerer.stop()
    assert slow.batches == [1, 6, 6, 3]
    assert answerer.answered == 16
    with pytest.raises(Problem, match="being stopped"):
        answerer.ask(images_of("cat", 1))


def test_one_large_question_is_taken_when_nothing_waits() -> None:
    with_replica = Replica(make_model(ModelConfig(**CONFIG), tiny()), 0)
    answerer = Answerer(lambda: with_replica, most=4, batch=4)
    assert len(answerer.ask(images_of("cat", 20)).result(20).answers) == 20
    answerer.stop()


# ----------------------------------------------------------------------------------------------------------- the rest


def test_images_of_another_shape_are_refused(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        with pytest.raises(InputError, match="shape"):
            service.learn(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["cat"])
        with pytest.raises(InputError, match="uint8"):
            service.learn(torch.zeros(1, 1, 8, 8), ["cat"])
        with pytest.raises(Problem, match="1 images but 2 labels"):
            service.learn(images_of("cat", 1), ["cat", "dog"])


def test_after_the_end_nothing_is_accepted(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    teach(service, "cat", 1)
    service.close()
    with pytest.raises(Problem, match="being stopped"):
        service.learn(images_of("cat", 1), ["cat"])


def test_whoever_waits_is_let_go(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        waiting = service.worker.when_published(100)
        service.release()
        assert waiting.result(10) is False


def test_a_copy_goes_when_nobody_needs_it() -> None:
    """With its images and weights, and at once: copies come often, and garbage is looked for seldom."""
    replica = Replica(taught("cat", "dog"), 24)
    learner = replica.model.learner_
    parts = [weakref.ref(part) for part in (learner, learner.network, learner.memory)]
    gc.disable()
    try:
        del replica, learner
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


def test_memory_goes_back_when_all_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(worker, "give_back_memory", lambda: given_back.put(None))
    with open_service(tmp_path) as service:
        for start in (0, 10):
            teach(service, "cat", 10, start)
            given_back.get(timeout=10)
        service.worker.wake()
        assert service.ask(images_of("cat", 1)).result(10).answers
    assert given_back.empty(), "not again when nothing was learned"


def test_encoders_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    encoder = make_encoder(ModelConfig(encoder="tiny_encoder:tiny"))
    assert encoder is not None
    assert encoder(torch.zeros(2, 1, 8, 8)).shape == (2, 16)
    for name, said in {
        "tiny_encoder:nothing": "nothing",
        "no_such_module:x": "no_such_module",
        "os:getcwd": "gave a str",
        ":x": "no encoder",
    }.items():
        with pytest.raises(InputError, match=said):
            make_encoder(ModelConfig(encoder=name))


@pytest.mark.parametrize(
    ("field", "value"), [("channels", 2), ("memory_size", 0), ("image_size", 1.5), ("seed", -1), ("batch_size", True)]
)
def test_settings_are_checked(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        ModelConfig(**{field: value})
