"""Copies of the model on a real Ray instance: they follow the learner, answer as it does, and are replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from service_tools import encoded, images_of, listening, open_service, png
from tiny_encoder import tiny

from scrlearn.errors import InputError
from scrlearn.service.client import Client
from scrlearn.service.core import Service
from scrlearn.service.ray_serve import Board, RayPlan, predictors
from scrlearn.service.run import serve

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'scrlearn[ray]'"
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def small_ray() -> Iterator[Any]:
    import ray

    small = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    ray.init(address="local", log_to_driver=False, **small)
    try:
        yield ray
    finally:
        ray.shutdown()


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def learn(client: httpx.Client, label: str, count: int, start: int = 0) -> dict[str, Any]:
    body = {"images": encoded(*(png(label, start + n) for n in range(count))), "labels": [label] * count}
    answer = client.post("/v1/learn", params={"wait": 60}, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask(client: httpx.Client, *labels: str, path: str = "/v1/predict") -> dict[str, Any]:
    answer = client.post(path, json={"images": encoded(*(png(label, 200) for label in labels))})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def replica_actors(ray: Any) -> dict[str, Any]:
    named = ray.util.list_named_actors(all_namespaces=True)
    found = [actor for actor in named if "Predictor" in actor["name"]]
    return {actor["name"]: ray.get_actor(actor["name"], namespace=actor["namespace"]) for actor in found}


def same(told: dict[str, Any], service: Service, *labels: str) -> bool:
    """Whether the answers are those of the learner's own copy, digit for digit, and name the right classes first."""
    answers = service.replica.answer(torch.cat([images_of(label, 1, 200) for label in labels]))
    mine = [(a.label, a.confidence, [vars(near) for near in a.classes]) for a in answers]
    theirs = [(p["label"], p["confidence"], p["classes"]) for p in told["predictions"]]
    return mine == theirs and [p["classes"][0]["label"] for p in told["predictions"]] == [*labels]


@needs_ray
@pytest.mark.slow
def test_copies_follow_answer_and_are_replaced(ray_folder: Path, tmp_path: Path) -> None:
    with (
        small_ray() as ray,
        open_service(tmp_path / "state") as service,
        predictors(service, RayPlan(replicas=2), tiny()) as answerer,
        listening(service) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        assert ask(client, "cat")["predictions"][0]["unknown"]  # answered before any copy is there
        until(lambda: len(answerer.places()) == 2)
        for label in ("cat", "dog"):
            assert learn(client, label, 20)["learned"]
        # every copy has learned what was acknowledged as learned
        assert set(client.get("/v1/state").json()["replicas"].values()) == {40}
        here = service.answerer._replica  # type: ignore[attr-defined]
        service.answerer._replica = lambda: pytest.fail("the learner answered itself")  # type: ignore[attr-defined]
        for _ in range(8):
            told = ask(client, "cat", "dog")
            assert told["model"] == 40
            assert same(told, service, "cat", "dog")
        near = ask(client, "dog", path="/v1/nearest?k=3")["predictions"][0]["neighbours"]
        mine = service.replica.answer(images_of("dog", 1, 200), 3)[0].neighbours
        assert [(n["slot"], n["label"], n["distance"]) for n in near] == [(n.slot, n.label, n.distance) for n in mine]
        assert near[0]["image"].startswith("data:image/png;base64,")
        service.answerer._replica = here  # type: ignore[attr-defined]
        assert client.get("/metrics").text.count("scrlearn_images_answered_total 18.0") == 1

        before, names = replica_actors(ray), set(answerer.places())
        assert len(before) == 2
        ray.kill(next(iter(before.values())))
        for _ in range(8):  # still answered, and right
            assert same(ask(client, "cat", "dog"), service, "cat", "dog")
        until(lambda: len(answerer.places()) == 2 and set(answerer.places()) != names)  # another has taken its place
        assert learn(client, "owl", 10)["learned"]
        assert set(answerer.places().values()) == {50}
        for _ in range(8):
            told = ask(client, "owl", "cat")
            assert told["model"] == 50
            assert same(told, service, "owl", "cat")
        for actor in replica_actors(ray).values():
            ray.kill(actor)
        assert same(ask(client, "dog"), service, "dog")  # whoever answers now


@needs_ray
@pytest.mark.slow
def test_on_the_command_line(ray_folder: Path, tmp_path: Path) -> None:
    words = ["serve", "--state", "state", "--method", "er", "--memory", "40", "--image-size", "8", "--grey"]
    words += ["--classifier", "ncm", "--threads", "1", "--port", "0", "--ray", "local", "--replicas", "1"]
    command = [sys.executable, "-m", "scrlearn", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        client = Client(address)
        until(lambda: bool(client.state()["replicas"]))
        for label in ("cat", "dog"):
            assert client.learn([png(label, n) for n in range(20)], label, wait=60)["learned"]
        assert [answer["label"] for answer in client.predict([png("cat", 200), png("dog", 200)])] == ["cat", "dog"]
        assert list(client.state()["replicas"].values()) == [40]
        digest = client.state(digest=True)["digest"]
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    with Service(tmp_path / "state") as service:  # without Ray it goes on from the same state
        assert {"sequence": service.replica.sequence, "sha256": service.replica.digest()} == digest


def test_no_ray_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'scrlearn\[ray\]'"):
        serve(tmp_path / "state", port=0, ray=RayPlan())
    assert not (tmp_path / "state").exists()


def test_the_learner_is_in_the_cluster() -> None:
    with pytest.raises(InputError, match="with auto or HOST:PORT"):
        RayPlan("ray://head:10001")


def test_without_ray_nothing_is_told_of_replicas(tmp_path: Path) -> None:
    with open_service(tmp_path / "state") as service:
        assert service.state()["replicas"] is None


def test_the_board_tells_of_what_is_newer_only() -> None:
    import asyncio

    async def story() -> None:
        board = Board()
        assert await board.look() == (None, {})
        waiting = asyncio.create_task(board.after("a", -1))
        await board.publish(3, ["three"])
        assert await waiting == (3, ["three"])
        assert await board.after("a", 0) == (3, ["three"])
        assert (await board.look())[1] == {"a": 0}  # one without a model does not answer
        assert await board.after("a", 3) is None
        assert await board.look() == (3, {"a": 3})

    asyncio.run(story())
