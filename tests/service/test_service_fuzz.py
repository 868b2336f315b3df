"""Malformed requests by the thousand: each is answered, none with an error of the server's, and nothing grows."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import socket
import struct
import zlib
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from PIL import Image
from service_tools import api, encoded, file_of, png, teach

from scrlearn.service.core import resident_bytes
from scrlearn.service.settings import Limits

LIMITS = Limits(body_bytes=300_000, pixels=1_000_000, classes=20)
EXPECTED = {200, 304, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429}
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
PATHS = ("/v1/learn", "/v1/predict", "/v1/nearest")


def _giant(kind: str) -> bytes:
    """A small file whose header says that the picture is huge."""
    data = bytearray(file_of(np.zeros((24, 32, 3), np.uint8), kind, **({"lossless": True} if kind == "WEBP" else {})))
    if kind == "PNG":
        data[16:24] = struct.pack(">II", 60_000, 60_000)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", 60_000, 60_000)
    else:
        data[21:25] = struct.pack("<I", 16_382 | 16_382 << 14)
    return bytes(data)


class Fuzzer:
    """Good requests, damaged in every way it can think of; the same each time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        noise = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        self.files = [file_of(noise, kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")]
        self.files += [self._animated("PNG"), self._animated("WEBP"), self._animated("GIF"), b"", b"\x00" * 1000]
        self.files += [file_of(np.zeros((2000, 2000), np.uint8)), file_of(np.zeros((1, 20_000), np.uint8)), png("cat")]
        self.files += [_giant(kind) for kind in ("PNG", "BMP", "WEBP")]

    def _animated(self, kind: str) -> bytes:
        file = io.BytesIO()
        frames = [Image.new("RGB", (9, 7), (40 * n, 0, 0)) for n in range(4)]
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        return file.getvalue()

    def image(self) -> bytes:
        data = bytearray(self.random.choice(self.files))
        for _ in range(self.random.choice((0, 0, 1, 5))):
            if data:
                data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data[: self.random.randrange(len(data) + 1)] if self.random.random() < 0.2 else data)

    def text(self) -> str:
        pool = "ab/\\.%00\"'<>{}[]\t\n\x00\x7f\u202eé\U0001f600"
        return "".join(self.random.choice(pool) for _ in range(self.random.choice((0, 1, 5, 120))))

    def value(self, depth: int = 0) -> object:
        leaves = (None, True, -1, 1e308, 10**30, self.text(), encoded(self.image())[0], "data:image/png;base64,AAAA")
        kind = self.random.random()
        if kind < 0.15 and depth < 4:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        if kind < 0.2 and depth < 4:
            return {self.text(): self.value(depth + 1)}
        return self.random.choice(leaves)

    def request(self) -> httpx.Request:
        make = self.random.choice((self._json, self._form, self._query, self._path, self._raw))
        return self._demo() if self.random.random() < 0.02 else make()

    def _json(self) -> httpx.Request:
        good = {"images": encoded(*(self.image() for _ in range(self.random.randrange(4)))), "labels": ["cat"]}
        if self.random.random() < 0.5:
            good[self.random.choice(("images", "labels", "more"))] = self.value()  # type: ignore[assignment]
        body = json.dumps(good).encode()
        if self.random.random() < 0.3:
            body = body[: self.random.randrange(len(body))]
        return self._post(body, "application/json")

    def _form(self) -> httpx.Request:
        files = [("images", (self.text() or "x", self.image(), "image/png")) for _ in range(self.random.randrange(4))]
        form = httpx.Request("POST", "http://x", files=files, data={"labels": [self.text()]})
        body = bytearray(form.read())
        if body and self.random.random() < 0.5:
            body[self.random.randrange(len(body))] = self.random.randrange(256)
        if body and self.random.random() < 0.3:
            del body[self.random.randrange(len(body)) :]
        return self._post(bytes(body), form.headers.get("content-type", "multipart/form-data; boundary=x"))

    def _raw(self) -> httpx.Request:
        size = self.random.choice((0, 10, 1000, 400_000))
        kinds = ("application/json", "multipart/form-data; boundary=x", "multipart/form-data", "image/png", 'a/b; c="')
        return self._post(self.random.randbytes(size), self.random.choice(kinds))

    def _post(self, body: bytes, kind: str) -> httpx.Request:
        headers = {"Content-Type": kind}
        if self.random.random() < 0.2:
            headers["Idempotency-Key"] = self.random.choice(("", "k", "a b", "x" * 300))
        return httpx.Request("POST", self.random.choice(PATHS), content=body, headers=headers)

    def _demo(self) -> httpx.Request:
        method = self.random.choice(("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"))
        path = "/v1/demo" + self.random.choice(("", "", "", "/", "?a=b", "/" + quote(self.text(), safe="")))
        return httpx.Request(method, path, content=self.random.randbytes(self.random.choice((0, 10, 400_000))))

    def _query(self) -> httpx.Request:
        name = self.random.choice(("offset", "limit", "label", "digest", "wait", "k"))
        value = self.random.choice(("-1", "1e9", "nan", "9" * 400, self.text(), "0x1", ""))
        path = self.random.choice(("/v1/memory", "/v1/state", "/v1/map", "/v1/classes", "/metrics", "/", "/docs"))
        return httpx.Request("GET", path, params={name: value})

    def _path(self) -> httpx.Request:
        method = self.random.choice(("GET", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"))
        path = self.random.choice(("/v1/classes/", "/page/", "/v1/", "/"))
        safe = self.random.choice(("", "/", "/."))
        return httpx.Request(method, path + quote(self.text(), safe=safe))


@pytest.mark.parametrize("requests", [300, pytest.param(10_000, marks=SLOW)])
def test_malformed_requests(tmp_path: Path, requests: int) -> None:
    fuzzer = Fuzzer(seed=requests)
    with api(tmp_path, LIMITS) as client:
        teach(client.service, "cat", 20)
        statuses: dict[int, int] = {}
        before = unread = 0
        for number in range(requests):
            if number == requests // 2:
                before = resident_bytes()
            made = fuzzer.request()
            made = client.build_request(made.method, str(made.url), content=made.read(), headers=dict(made.headers))
            try:
                answer = client.send(made)
            except (httpx.RemoteProtocolError, httpx.WriteError):  # an answer to a body that was not read to its end
                unread += 1
                continue
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in EXPECTED, (made, answer.text)
            if answer.status_code >= 400 and made.method != "HEAD":
                assert answer.headers["content-type"] == "application/problem+json", answer.text
                assert answer.json()["code"]
        print(f"{requests} requests: {dict(sorted(statuses.items()))}, {unread} not read to their end")
        print(f"{(resident_bytes() - before) / 2**20:+.1f} MiB in the second half of them")
        assert len(statuses) >= 5, "the requests were of many kinds"
        assert unread < requests / 20
        assert resident_bytes() - before < 50 << 20, "memory does not grow"
        assert client.get("/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize("requests", [40, pytest.param(3000, marks=SLOW)])
def test_malformed_bytes(tmp_path: Path, requests: int) -> None:
    """What is hardly HTTP: bytes changed, taken out, put in, cut short, in the head as well."""
    rng = random.Random(requests)
    content = json.dumps({"images": encoded(png("cat"))}).encode()
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    head += str(len(content))
    statuses: dict[str, int] = {}
    with api(tmp_path, LIMITS) as client:
        teach(client.service, "cat", 20)
        for _ in range(requests):
            data = bytearray(head.encode() + b"\r\n\r\n" + content)
            for _ in range(rng.choice((1, 1, 3, 20))):
                place = rng.randrange(len(head) + 10 if rng.random() < 0.8 else len(data))
                data[place : place + rng.choice((0, 1, 1, 30))] = rng.randbytes(rng.choice((0, 1, 1, 5)))
            with socket.create_connection((client.base_url.host, client.base_url.port), timeout=0.1) as connection:
                connection.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
                answer = b""
                with contextlib.suppress(
                    TimeoutError, ConnectionResetError
                ):  # it waits for the rest, which never comes
                    answer = connection.recv(65536)
            status = answer[9:12].decode()
            statuses[status] = statuses.get(status, 0) + 1
            assert status in {"", *map(str, EXPECTED)}, answer
        print(f"{requests} requests: {statuses}")
        assert len(statuses) >= 3, "the requests were of many kinds"
        assert client.get("/healthz").json() == {"status": "ok"}


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")
@pytest.mark.parametrize("examples", [pytest.param(15, id="few"), pytest.param(500, marks=SLOW, id="many")])
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_the_description_is_kept(tmp_path: Path, examples: int, mode: str) -> None:
    """Requests made from the OpenAPI description, and against it: only answers that it names, in the form it says."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    with api(tmp_path, LIMITS) as client:
        teach(client.service, "cat", 20)
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        asked: dict[str, int] = {}
        for found in schema.get_all_operations():
            operation = found.ok()
            strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def one(case) -> None:
                answer = case.call(base_url=str(client.base_url))
                name = f"{case.method} {case.path}"
                asked[name] = asked.get(name, 0) + 1
                assert answer.status_code in EXPECTED, answer.text
                documented = case.operation.definition.raw["responses"]
                if answer.status_code not in (400, 405):
                    assert str(answer.status_code) in documented, (answer.status_code, answer.text)
                    case.operation.validate_response(answer)

            try:
                one()
            except Exception as error:
                if type(error).__name__ not in ("Unsatisfiable", "SkipTest", "Skipped"):
                    raise
        print(f"{sum(asked.values())} requests: {asked}")
        assert client.get("/healthz").json() == {"status": "ok"}
