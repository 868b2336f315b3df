"""The page about the service: its commands run as they stand there."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from scrlearn.service.commands import serve
from scrlearn.service.settings import Limits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_five_commands_and_the_client(tmp_path: Path) -> None:
    for name, colour in {"cat1": 200, "cat2": 210, "dog1": 30, "dog2": 40, "who": 35}.items():
        Image.linear_gradient("L").point(lambda v, c=colour: (v + c) % 256).convert("RGB").save(
            tmp_path / f"{name}.jpg"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    install, serve, *curl = (
        re.search(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)[1].replace("8000", str(port)).splitlines()
    )
    assert install == "pip install 'scrlearn[serve]'"
    assert len(curl) == 3
    server = subprocess.Popen(
        [sys.executable, "-m", "scrlearn", *serve.removesuffix(" &").split()[1:], "--port", str(port)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)  # whatever goes wrong; one that has ended already does not mind
        # at once, as when all five are pasted: the first one waits until the service is there
        answers = [
            json.loads(subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, capture_output=True).stdout)
            for line in curl
        ]
        assert [answer["learned"] for answer in answers[:2]] == [True, True]
        expected = json.loads(re.search(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)[1])
        assert answers[2].keys() == expected.keys()
        assert answers[2]["model"] == expected["model"]
        assert answers[2]["predictions"][0].keys() == expected["predictions"][0].keys()
        assert answers[2]["predictions"][0]["classes"][0].keys() == expected["predictions"][0]["classes"][0].keys()
        program = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1].replace("8000", str(port))
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_the_limits_are_those_of_the_code() -> None:
    limits = Limits()
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| \d{3} \|$", PAGE, flags=re.MULTILINE))
    assert rows["images in a request"] == f"{limits.images}"
    assert rows["body of a request"] == f"{limits.body_bytes >> 20} MiB"
    assert rows["pixels of an image"] == f"{limits.pixels // 10**6} million"
    assert rows["characters of a label"] == f"{limits.label_length}"
    assert rows["classes"] == f"{limits.classes:,}"
    assert rows["images accepted and not yet learned"] == f"{limits.pending:,}"
    assert rows["images waiting for an answer"] == f"{limits.questions}"
    assert rows["bytes being sent at once"] == f"{limits.bytes_in_flight >> 20} MiB"
    assert rows["requests at once"] == f"{limits.requests}"
    assert rows["time a body may take to arrive"] == f"{limits.body_seconds:g} s"
    assert f"{limits.keys:,} keys" in PAGE
    assert limits.key_seconds == 7 * 86400
    assert f"after {limits.snapshot_images:,} images, or {limits.snapshot_seconds:g} seconds" in PAGE
    assert f"{limits.reserve_bytes >> 20} MiB are left free" in PAGE


@pytest.mark.parametrize("name", ["scrlearn.service", "Containerfile"])
def test_the_deployed_command_has_these_options(name: str) -> None:
    known = {f"--{parameter.replace('_', '-')}" for parameter in inspect.signature(serve).parameters}
    command = next(
        line for line in (ROOT / "deploy" / name).read_text().splitlines() if line.startswith(("ExecStart", "ENTRY"))
    )
    assert set(re.findall(r"--[a-z-]+", command)) == {"--state", "--host", "--port", "--token-file"} <= known


def test_the_container_is_made_of_what_is_there_and_run_as_the_page_says() -> None:
    lines = (ROOT / "deploy" / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    commands = [line.removeprefix("#").strip() for line in lines if line.startswith("#   podman")]
    assert "\n".join(commands) in PAGE
    # the token can be read by the user that the service runs as, and by nobody else
    [user] = [re.search(r"--uid (\d+)", line)[1] for line in lines if "useradd" in line]
    assert f"target=token,uid={user},mode=0400" in commands[-1]
    assert any(line.startswith("ENTRYPOINT") and '"--token-file", "/run/secrets/token"' in line for line in lines)
