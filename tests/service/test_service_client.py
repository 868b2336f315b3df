"""The client, and the command that it talks to."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image
from service_tools import encoded, listening, open_service, pixels, png
from typer.testing import CliRunner

from scrlearn.cli import app
from scrlearn.errors import InputError
from scrlearn.service import Client, ServiceError, serve
from scrlearn.service.client import _encode
from scrlearn.service.guard import Access
from scrlearn.service.run import read_token

ANSWER = {"accepted": 1, "first": 1, "last": 1, "repeated": False, "learned": False}


@contextlib.contextmanager
def scripted(*script: tuple[int, dict | None, dict]) -> Iterator[tuple[Client, list, list]]:
    """A server that gives these answers (status, document, headers) in turn; None: it hangs up without an answer."""
    requests: list = []
    answers = list(script)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((dict(self.headers), json.loads(body)))
            status, document, headers = answers.pop(0)
            if document is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    client = Client(f"http://127.0.0.1:{server.server_port}", retries=3)
    pauses: list[float] = []
    client._sleep = pauses.append
    try:
        yield client, requests, pauses
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_everything_through_the_client(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(png("cat", 2))
    with open_service(tmp_path / "state") as service, listening(service) as address:
        client = Client(address)
        assert client.healthy()
        cats = [tmp_path / "cat.png", str(tmp_path / "cat.png"), png("cat", 1), pixels("cat", 3)]
        cats += [Image.fromarray(pixels("cat", 4)), pixels("cat", 5)[..., None], np.stack([pixels("cat", 6)] * 3, -1)]
        assert client.learn(cats, "cat", wait=20)["learned"]
        assert client.learn([png("dog", n) for n in range(7)], ["dog"] * 7, wait=20)["last"] == 14
        assert [p["label"] for p in client.predict([png("cat", 5), pixels("dog", 5)])] == ["cat", "dog"]
        assert [n["label"] for n in client.nearest([png("dog", 9)], k=2)[0]["neighbours"]] == ["dog", "dog"]
        assert [known["label"] for known in client.classes()] == ["cat", "dog"]
        assert [image["slot"] for image in client.memory(page=3)] == list(range(14))
        assert len(list(client.memory("dog", page=7))) == 7
        assert len(client.map()["points"]) == 14
        assert client.forget("dog")["erased"]
        assert client.state(digest=True)["digest"]["sha256"] == service.replica.digest()
        with pytest.raises(ServiceError, match='no class "dog"') as caught:
            client.forget("dog")
        assert (caught.value.status, caught.value.code) == (404, "not-found")


def test_a_busy_service_is_asked_again_with_the_same_key() -> None:
    busy = (429, {"detail": "busy", "code": "busy"}, {"Retry-After": "2"})
    with scripted(busy, (503, {}, {}), (200, ANSWER, {})) as (client, requests, pauses):
        assert client.learn([b"x"], ["cat"]) == ANSWER
    keys = {headers["Idempotency-Key"] for headers, _ in requests}
    assert len(requests) == 3
    assert len(keys) == 1, "it is the same request"
    assert 2 <= pauses[0] <= 2.5, "the time the service asked for"
    assert 0 < pauses[1] <= 0.4


def test_a_lost_connection_is_tried_again_and_each_request_has_its_own_key() -> None:
    with scripted((0, None, {}), (200, ANSWER, {}), (200, ANSWER, {})) as (client, requests, _):
        client.learn([b"x"], ["cat"])
        client.learn([b"x"], ["cat"])
    keys = [headers["Idempotency-Key"] for headers, _ in requests]
    assert keys[0] == keys[1] != keys[2]


def test_a_refusal_is_not_sent_again() -> None:
    with scripted((422, {"detail": "Image 0 is empty.", "code": "bad-image"}, {})) as (client, requests, _):
        with pytest.raises(ServiceError, match="Image 0 is empty") as caught:
            client.predict([b""])
        assert (caught.value.code, len(requests)) == ("bad-image", 1)


def test_retries_come_to_an_end() -> None:
    with scripted(*[(503, {"detail": "no", "code": "stopping"}, {})] * 4) as (client, requests, _):
        with pytest.raises(ServiceError, match="no") as caught:
            client.predict([b"x"])
        assert (caught.value.status, len(requests)) == (503, 4)


def test_no_service_there() -> None:
    client = Client("http://127.0.0.1:9", retries=0)
    with pytest.raises(ServiceError, match="Is the service running there"):
        client.state()
    assert not client.healthy()


def test_what_cannot_be_sent() -> None:
    with pytest.raises(InputError, match="http"):
        Client("127.0.0.1:8000")
    with pytest.raises(InputError, match="float64"):
        Client().predict([np.zeros((8, 8))])


@pytest.mark.parametrize(
    "image",
    ["cat.png", Path("cat.png"), png("cat"), Image.new("L", (8, 8)), pixels("cat"), np.zeros((8, 8, 3), np.uint8)],
    ids=["name", "path", "bytes", "picture", "grey", "colour"],
)
def test_one_image_is_no_list_of_images(image: object) -> None:
    with pytest.raises(InputError, match=r"give \[image\]"):
        Client().predict(image)
    with pytest.raises(InputError, match=r"give \[image\]"):
        Client().learn(image, "cat")


def test_a_number_is_a_label_too() -> None:
    with scripted((200, ANSWER, {}), (200, ANSWER, {})) as (client, requests, _):
        client.learn([png("cat")], 7)
        client.learn([png("cat")] * 2, np.array([7, 8]))
    assert [body["labels"] for _, body in requests] == [["7"], ["7", "8"]]


def test_the_client_needs_neither_torch_nor_fastapi() -> None:
    program = "import sys; from scrlearn.service import Client; Client()\n"
    program += "assert not {'torch', 'fastapi', 'numpy'} & set(sys.modules), 'too much was imported'"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_service_itself_needs_no_web_framework() -> None:
    program = "import sys; import scrlearn.service.core\n"
    program += (
        "assert not {'fastapi', 'uvicorn', 'prometheus_client', 'pydantic'} & set(sys.modules), 'too much was imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -------------------------------------------------------------------------------------------------------- the command


def start(*options: object) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "scrlearn", "serve", "--port", "0", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    assert "Serving" in line
    return process, line.split()[-1]


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    options = ["--method", "er", "--memory", 20, "--image-size", 8, "--grey", "--encoder", "tiny_encoder:tiny"]
    options += ["--threads", 1, "--precision", "fp32", "-O", "learning_rate=0.05", "--token-file", token]
    process, address = start("--state", tmp_path / "state", *options)
    with process:
        assert Client(address, token.read_text().strip()).learn([png("cat")], ["cat"], wait=30)["learned"]
        with pytest.raises(ServiceError, match="Authorization: Bearer"):
            Client(address).state()
        headers = {"Authorization": f"Bearer {token.read_text().strip()}", "Idempotency-Key": "\x7f"}
        odd = httpx.post(f"{address}/v1/learn", json={"images": encoded(png("cat")), "labels": ["a"]}, headers=headers)
        assert (odd.status_code, odd.json()["code"]) == (422, "invalid"), "whatever parsers of HTTP are installed"
        second = CliRunner().invoke(app, ["serve", "--state", str(tmp_path / "state"), "--port", "0"])
        assert second.exit_code == 1
        assert "Another server" in second.output
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list((tmp_path / "state").glob("snapshot-*.scr")), "a snapshot was written at the end"
    settings = json.loads((tmp_path / "state" / "config.json").read_text())
    assert (settings["options"], settings["encoder"]) == ({"learning_rate": 0.05}, "tiny_encoder:tiny")


def test_a_signal_that_comes_as_soon_as_it_is_ready_ends_it(tmp_path: Path) -> None:
    program = "import os, signal, sys; from scrlearn.service import serve\n"
    program += "config = {'method': 'er', 'memory_size': 20, 'image_size': 8, 'device': 'cpu'}\n"
    program += "serve(sys.argv[1], config, port=0, ready=lambda _: os.kill(os.getpid(), signal.SIGTERM))"
    command = [sys.executable, "-c", program, str(tmp_path / "state")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def scr(*words: object) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, words)])
    assert result.exit_code in (1, 2), result.output
    return " ".join(result.output.split())


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert "a token is needed" in scr("--state", state, "--host", "0.0.0.0")
    assert "cannot be read" in scr("--state", state, "--token-file", tmp_path / "none")
    (tmp_path / "short").write_text("short")
    assert "at least 16" in scr("--state", state, "--token-file", tmp_path / "short")
    assert "NAME=VALUE" in scr("--state", state, "-O", "temperature")
    (tmp_path / "good").write_text("0123456789abcdef")
    assert "There is no host" in scr("--state", state, "--host", "a..b", "--token-file", tmp_path / "good")
    assert not state.exists(), "nothing was made"
    assert "There is no encoder" in scr("--state", state, "--port", 0, "--encoder", "resnet")
    assert 'no option "temprature"' in scr("--state", state, "--port", 0, "-O", "temprature=1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Choose another --port" in scr("--state", state, "--port", taken.getsockname()[1])


def test_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(" \n")
    with pytest.raises(InputError, match="empty"):
        read_token(path)
    path.write_text(" secret \n")
    path.chmod(0o644)
    assert read_token(path) == "secret"
    assert "chmod 600" in caplog.text
    caplog.clear()
    path.chmod(0o440)  # as systemd shows a credential that the service's user may read
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_token(path) == "secret"
    assert not caplog.text
    with pytest.raises(InputError, match="printable ASCII"):
        serve(tmp_path / "state", token="ä" * 20)
    assert not (tmp_path / "state").exists()


def sent(image: object) -> Image.Image:
    """What the service gets of an image."""
    return Image.open(io.BytesIO(base64.b64decode(_encode(image))))


def test_a_photograph_from_pillow_is_sent_upright() -> None:
    photograph = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    photograph.getexif()[0x0112] = 6  # to be turned by a quarter
    upright = photograph.transpose(Image.Transpose.ROTATE_270)
    assert np.array_equal(np.asarray(sent(photograph)), np.asarray(upright))


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "I", "I;16"]
)
def test_a_picture_of_any_mode_is_sent(mode: str) -> None:
    assert sent(Image.new(mode, (4, 6))).size == (4, 6)


def test_pictures_of_16_bits_keep_what_is_above_255(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 24).reshape(4, 6)
    for name, kind in (("small.tif", "<u2"), ("large.tif", ">u2")):
        Image.fromarray(values.astype(kind)).save(tmp_path / name)
        assert np.array_equal(np.asarray(sent(Image.open(tmp_path / name))), values.astype(np.uint16))
    Image.fromarray(values.astype(np.int32)).save(tmp_path / "long.tif")
    with pytest.raises(InputError, match="32 bits"):
        sent(Image.open(tmp_path / "long.tif"))


@pytest.mark.parametrize("image", [Image.new("F", (4, 6)), np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8))])
def test_an_image_that_cannot_be_sent_is_said(image: object) -> None:
    with pytest.raises(InputError, match=r"mode F cannot be sent|shape \((3, )?8, 8\)"):
        sent(image)


@pytest.mark.parametrize("label", [None, float("nan"), np.float32("nan")])
def test_a_missing_label_is_not_sent(label: object) -> None:
    with scripted((200, ANSWER, {})) as (client, requests, _):
        with pytest.raises(InputError, match="missing"):
            client.learn([b"x", b"y"], ["cat", label])
        assert requests == []


def test_a_number_is_forgotten_as_it_is_learned(tmp_path: Path) -> None:
    with open_service(tmp_path / "state") as service, listening(service) as address:
        client = Client(address)
        client.learn([png("5")], 5, wait=20)
        assert client.forget(5)["label"] == "5"


def test_a_token_is_never_shown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="token must be printable ASCII") as caught:
        Client(token="secret-secret\nsecret")
    assert "secret-secret" not in str(caught.value)
    assert Client(token="secret-secret\n").token == "secret-secret", "as a file has it"


def test_a_refusal_does_not_wait_for_the_body(tmp_path: Path) -> None:
    with open_service(tmp_path / "state") as service, listening(service, Access("a" * 32)) as address:
        place = urlsplit(address)
        with socket.create_connection((str(place.hostname), place.port or 80), timeout=10) as connection:
            connection.sendall(b"POST /v1/learn HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
            assert connection.recv(100).startswith(
                b"HTTP/1.1 401"
            )  # long before the thirty seconds that a body may take


@pytest.mark.parametrize(("token", "code"), [("b" * 32, "unauthorised"), ("a" * 32, "too-large")])
def test_a_refusal_of_a_large_request_is_heard(tmp_path: Path, token: str, code: str) -> None:
    """Not a connection that breaks while the request is being sent, which looks like a service that is not there."""
    with open_service(tmp_path / "state") as service, listening(service, Access("a" * 32)) as address:
        client = Client(address, token=token, retries=0)
        with pytest.raises(ServiceError) as caught:
            client.learn([bytes(18 << 20)], "cat")
        assert caught.value.code == code
