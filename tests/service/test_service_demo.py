"""The demonstration: SCR beside fine-tuning, in a process of its own, apart from the model that is served."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_tools import api, teach

from scrlearn.service import demo_stream
from scrlearn.service.demo import COMMAND, Demo, DemoState
from scrlearn.service.problems import Problem

PRINT = "import json; from scrlearn.service.demo_stream import events\n"
SHORT = [sys.executable, "-c", PRINT + "for e in [*events(limit=10), {'status': 'finished'}]: print(json.dumps(e))"]
FOREVER = [sys.executable, "-c", 'import time; print(\'{"status": "running"}\', flush=True); time.sleep(600)']


@pytest.fixture
def started() -> Iterator[list[Demo]]:
    """Demonstrations that a test starts; ended after it."""
    demos: list[Demo] = []
    yield demos
    for demo in demos:
        demo.close()


def until(demo: Demo, *statuses: str) -> DemoState:
    """Wait for a status."""
    tick = threading.Event()
    while demo.state().status not in statuses:
        tick.wait(0.02)
    return demo.state()


# ------------------------------------------------------------------------------------------------ the stream


@pytest.fixture(scope="module")
def short() -> list[dict]:
    return [*demo_stream.events(limit=30)]


def test_classes_come_one_after_the_other(short: list[dict]) -> None:
    first, *steps = short
    assert [known["label"] for known in first["classes"]] == [str(n) for n in range(10)]
    assert first["total"] == 300 == steps[-1]["images"]
    assert [step["label"] for step in steps] == [str(n) for n in range(10) for _ in range(3)]
    assert all(len(step["batch"]) == 10 for step in steps)
    assert steps[0]["batch"][0].startswith("data:image/png;base64,")


def test_both_are_asked_about_all_classes_seen_so_far(short: list[dict]) -> None:
    points = [step["point"] for step in short if "point" in step]
    assert [point["classes"] for point in points] == [n for n in range(1, 11) for _ in range(2)]
    known = [step["known"] for step in short if "known" in step]
    assert [len(k["scr"]) for k in known] == [point["classes"] for point in points]
    assert points[0]["accuracy"] == {"scr": 1.0, "fine-tune": 1.0}, "with one class everything is right"


def test_fine_tuning_forgets_and_scr_does_not(short: list[dict]) -> None:
    end = short[-1]
    assert end["known"]["fine-tune"][:9] == [0.0] * 9
    assert end["known"]["fine-tune"][9] == 1.0
    assert end["point"]["accuracy"]["scr"] > 3 * end["point"]["accuracy"]["fine-tune"]


def test_the_process_ends_when_nobody_reads() -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018
    assert json.loads(process.stdout.readline())["status"] == "running"
    process.stdout.close()
    with process.stderr as errors:
        assert "Traceback" not in errors.read()
    assert process.wait(60) == 0


# ------------------------------------------------------------------------------------------------ running it


def test_it_runs_to_its_end(started: list[Demo]) -> None:
    demo = Demo(SHORT)
    started.append(demo)
    assert demo.state() == DemoState()
    assert demo.start().status == "starting"
    end = until(demo, "finished", "failed")
    assert (end.status, end.detail, end.images, end.total) == ("finished", None, 100, 100)
    assert [point.classes for point in end.points] == [*range(1, 11)]
    assert end.seconds > 0
    assert demo.state() == end, "the clock has stopped"


def test_one_at_a_time_and_again(started: list[Demo]) -> None:
    demo = Demo(FOREVER)
    started.append(demo)
    demo.start()
    until(demo, "running")
    process = demo._process
    assert demo.start().status == "running"
    assert demo._process is process
    assert demo.stop().status == "stopped"
    assert process is not None
    assert process.poll() is not None
    assert demo.stop().status == "stopped"
    demo.start()
    assert until(demo, "running").detail is None


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("raise SystemExit(3)", 60.0, "ended too early"),
        ("import time; time.sleep(600)", 0.3, "longer than 0.3 seconds"),
    ],
)
def test_a_process_that_fails_is_said(started: list[Demo], code: str, seconds: float, reason: str) -> None:
    demo = Demo([sys.executable, "-c", code], seconds)
    started.append(demo)
    demo.start()
    failed = until(demo, "failed")
    assert reason in str(failed.detail)
    assert demo.start().status == "starting", "another try is possible"


def test_lines_that_are_no_events_are_a_failure(started: list[Demo]) -> None:
    demo = Demo([sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(600)"])
    started.append(demo)
    demo.start()
    assert "cannot be read" in str(until(demo, "failed").detail)


def test_a_process_that_cannot_be_started_is_said() -> None:
    failed = Demo(["/no/such/program"]).start()
    assert failed.status == "failed"
    assert "No process could be started" in str(failed.detail)


def test_after_the_end_of_the_service_none_begins() -> None:
    demo = Demo(FOREVER)
    demo.close()
    with pytest.raises(Problem, match="being stopped"):
        demo.start()


# ------------------------------------------------------------------------------------------------ over HTTP


def test_over_http_it_leaves_the_served_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrlearn.service.app.Demo", lambda: Demo(SHORT))
    with api(tmp_path) as client:
        teach(client.service, "cat", 10)
        before = client.get("/v1/state?digest=true").json()
        assert client.get("/v1/demo").json()["status"] == "idle"
        assert client.post("/v1/demo").json()["status"] == "starting"
        while client.get("/v1/demo").json()["status"] in ("starting", "running"):
            threading.Event().wait(0.05)
        end = client.get("/v1/demo").json()
        assert end["status"] == "finished"
        assert end["points"][-1]["accuracy"].keys() == {"scr", "fine-tune"}
        after = client.get("/v1/state?digest=true").json()
        for name in ("digest", "images", "accepted", "stored", "classes"):
            assert after[name] == before[name]


def test_over_http_it_can_be_stopped_and_needs_the_token(tmp_path: Path) -> None:
    token = "0123456789abcdef-secret"
    with api(tmp_path, token=token) as client:
        for method in ("GET", "POST", "DELETE"):
            assert client.request(method, "/v1/demo").status_code == 401
        client.headers["Authorization"] = f"Bearer {token}"
        assert client.post("/v1/demo").json()["status"] == "starting"
        assert client.delete("/v1/demo").json()["status"] == "stopped"
        assert client.get("/v1/demo").json()["status"] == "stopped"


def test_it_is_described(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        described = client.get("/openapi.json").json()["paths"]["/v1/demo"]
        assert described.keys() == {"get", "post", "delete"}
        assert "/v1/demo" in client.get("/docs").text


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_the_end_of_the_service_is_the_end_of_the_demo(tmp_path: Path) -> None:
    command = ["serve", "--state", str(tmp_path / "s"), "--port", "0", "--image-size", "8", "--grey", "--device", "cpu"]
    server = subprocess.Popen([sys.executable, "-m", "scrlearn", *command], stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        assert httpx.post(f"{address}/v1/demo", timeout=60).json()["status"] == "starting"
        tasks = Path(f"/proc/{server.pid}/task").glob("*/children")
        [child] = [pid for task in tasks for pid in task.read_text().split()]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_the_whole_demonstration(started: list[Demo]) -> None:
    demo = Demo()
    started.append(demo)
    demo.start()
    end = until(demo, "finished", "failed")
    assert (end.status, end.images) == ("finished", 1400)
    assert end.points[-1].accuracy["scr"] > 0.85
    assert end.points[-1].accuracy["fine-tune"] < 0.15
