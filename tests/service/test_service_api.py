"""The service over HTTP: what it answers to good requests and to bad ones."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from pathlib import Path

import httpx
import numpy as np
import pytest
from service_tools import HERE, api, encoded, file_of, images_of, listening, open_service, pixels, png, teach

from scrlearn.service import docs_page, guard, page
from scrlearn.service.page import read_page
from scrlearn.service.settings import Limits

TOKEN = "0123456789abcdef-secret"
FORM = "multipart/form-data; boundary=b"


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A service that knows two classes; tests with it change nothing."""
    with api(tmp_path_factory.mktemp("taught") / "state") as client:
        for label in ("cat", "dog"):
            teach(client.service, label, 20)
        yield client


def problem(response, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert (document["status"], document["code"]) == (status, code)
    assert "Traceback" not in response.text
    return document["detail"]


# ------------------------------------------------------------------------------------------------ teaching and asking


def test_teach_by_form_and_ask_by_json(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        files = [("images", ("a.png", png("cat", n), "image/png")) for n in range(10)]
        files += [("images", ("b.png", png("dog", n), "image/png")) for n in range(10)]
        answer = client.post("/v1/learn?wait=20", files=files, data={"labels": ["cat"] * 10 + ["dog"] * 10})
        assert answer.json() == {"accepted": 20, "first": 1, "last": 20, "repeated": False, "learned": True}
        answer = client.post("/v1/predict", json={"images": encoded(png("dog", 12), png("cat", 12))}).json()
        assert [p["label"] for p in answer["predictions"]] == ["dog", "cat"]
        assert answer["model"] == 20
        first = answer["predictions"][0]
        assert not first["unknown"]
        assert [near["label"] for near in first["classes"]] == ["dog", "cat"]
        assert first["classes"][0]["distance"] < first["classes"][1]["distance"] <= 2
        assert sum(near["confidence"] for near in first["classes"]) == pytest.approx(1, abs=1e-5)
        assert first["confidence"] == first["classes"][0]["confidence"]


def test_one_label_stands_for_all_images(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        answer = client.post(
            "/v1/learn?wait=20", json={"images": encoded(png("cat"), png("cat", 1)), "labels": ["cat"]}
        )
        assert answer.json()["accepted"] == 2
        assert client.get("/v1/classes").json()["classes"][0] == {
            "label": "cat",
            "learned": 2,
            "stored": 2,
            "threshold": pytest.approx(2, abs=2),
        }


def test_nothing_learned_means_unknown(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        [answer] = client.post("/v1/predict", json={"images": encoded(png("cat"))}).json()["predictions"]
        assert answer == {"label": None, "unknown": True, "confidence": 0.0, "classes": [], "neighbours": []}
        for path in ("/v1/classes", "/v1/memory", "/v1/map", "/v1/state?digest=1"):
            assert client.get(path).status_code == 200


def test_what_is_near_nothing_is_unknown(taught: httpx.Client) -> None:
    noise = np.random.default_rng(5).integers(0, 256, (8, 8), dtype=np.uint8)
    strange = file_of(255 - pixels("cat")), file_of(noise)
    answers = taught.post("/v1/predict", json={"images": encoded(*strange, png("cat", 77))}).json()["predictions"]
    assert [answer["unknown"] for answer in answers] == [True, True, False]
    assert answers[0]["label"] is None
    assert all(near["distance"] > near["threshold"] for near in answers[0]["classes"])


def test_nearest_shows_stored_images(taught: httpx.Client) -> None:
    body = {"images": encoded(png("cat", 3))}
    [answer] = taught.post("/v1/nearest?k=3", json=body).json()["predictions"]
    assert [n["label"] for n in answer["neighbours"]] == ["cat"] * 3
    assert answer["neighbours"][0]["distance"] == pytest.approx(0, abs=1e-2)
    stored = taught.get("/v1/memory?limit=200").json()["images"]
    assert answer["neighbours"][0]["image"] == stored[answer["neighbours"][0]["slot"]]["image"]
    assert taught.post("/v1/predict", json=body).json()["predictions"][0]["neighbours"] == []


def test_memory_comes_in_pages(taught: httpx.Client) -> None:
    whole = taught.get("/v1/memory?limit=200").json()
    assert whole["total"] == len(whole["images"]) == 40
    page = taught.get("/v1/memory?offset=35&limit=10").json()
    assert page["images"] == whole["images"][35:]
    cats = taught.get("/v1/memory", params={"label": " cat "}).json()
    assert cats["total"] == 20
    assert {image["label"] for image in cats["images"]} == {"cat"}
    assert cats["images"][0]["image"].startswith("data:image/png;base64,")


def test_map_separates_the_classes_and_stays_put(taught: httpx.Client) -> None:
    drawn = taught.get("/v1/map").json()
    assert len(drawn["points"]) == 40
    assert 0 < drawn["explained"] <= 1
    middle = {
        label: np.mean([[p["x"], p["y"]] for p in drawn["points"] if p["label"] == label], axis=0)
        for label in ("cat", "dog")
    }
    spread = np.std([[p["x"], p["y"]] for p in drawn["points"] if p["label"] == "cat"])
    assert np.linalg.norm(middle["cat"] - middle["dog"]) > 2 * spread
    assert taught.get("/v1/map").json() == drawn


def test_state_says_how_things_stand(taught: httpx.Client) -> None:
    state = taught.get("/v1/state?digest=true").json()
    assert (state["status"], state["problems"], state["lost"], state["pending"]) == ("ok", [], 0, 0)
    assert (state["images"], state["classes"], state["stored"], state["accepted"]) == (40, 2, 40, 40)
    assert state["model"]["method"] == "er"
    assert state["digest"] == {"sequence": 40, "sha256": taught.service.replica.digest()}
    assert taught.get("/v1/state").json()["digest"] is None


def test_accuracy_before_learning_is_counted(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        teach(client.service, "cat", 10)
        teach(client.service, "dog", 10)
        before = client.get("/v1/state").json()["recent"]
        teach(client.service, "cat", 10, start=100)
        after = client.get("/v1/state").json()["recent"]
        assert before == {"images": 0, "right": 0}, "images of a class never met are not counted"
        assert after == {"images": 10, "right": 10}


def test_forgetting_a_class(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        teach(client.service, "cat", 10)
        teach(client.service, "a/b c?", 10)
        answer = client.delete("/v1/classes/a%2Fb%20c%3F").json()
        assert answer == {"label": "a/b c?", "sequence": 21, "erased": True, "repeated": False}
        assert [known["label"] for known in client.get("/v1/classes").json()["classes"]] == ["cat"]
        assert client.get("/v1/memory").json()["total"] == 10
        problem(client.delete("/v1/classes/a%2Fb%20c%3F"), 404, "not-found")
        [answer] = client.post("/v1/predict", json={"images": encoded(png("a/b c?"))}).json()["predictions"]
        assert answer["label"] is None or answer["label"] == "cat"
        teach(client.service, "a/b c?", 5)  # it can be learned again
        assert client.get("/v1/state").json()["classes"] == 2


# -------------------------------------------------------------------------------------------------------- idempotency


def test_a_repeated_key_is_learned_once(tmp_path: Path) -> None:
    body = {"images": encoded(png("cat")), "labels": ["cat"]}
    with api(tmp_path) as client:
        first = client.post("/v1/learn?wait=20", json=body, headers={"Idempotency-Key": "k1"}).json()
        again = client.post("/v1/learn?wait=20", json=body, headers={"Idempotency-Key": "k1"}).json()
        assert again == {**first, "repeated": True}
        other = {"images": encoded(png("cat")), "labels": ["dog"]}
        problem(client.post("/v1/learn", json=other, headers={"Idempotency-Key": "k1"}), 422, "key-reused")
        assert client.get("/v1/state").json()["images"] == 1
    with api(tmp_path) as client:
        again = client.post("/v1/learn?wait=20", json=body, headers={"Idempotency-Key": "k1"}).json()
        assert again == {**first, "repeated": True}
        assert client.get("/v1/state").json()["images"] == 1


def test_a_repeated_forget_gives_the_first_answer(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        teach(client.service, "cat", 3)
        first = client.delete("/v1/classes/cat", headers={"Idempotency-Key": "k"}).json()
        again = client.delete("/v1/classes/cat", headers={"Idempotency-Key": "k"}).json()
        assert again == {**first, "repeated": True}


@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "\x7f"])
def test_bad_keys(taught: httpx.Client, key: str) -> None:
    body = {"images": encoded(png("cat")), "labels": ["cat"]}
    problem(taught.post("/v1/learn", json=body, headers={"Idempotency-Key": key}), 422, "invalid")


# ------------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "malformed"),
        (b"{", 400, "malformed"),
        (b"\xff\xfe", 400, "malformed"),
        (b"[" * 100_000, 400, "malformed"),
        (b"[]", 422, "invalid"),
        (b"null", 422, "invalid"),
        (b"{}", 422, "invalid"),
        (b'{"images": [], "labels": []}', 422, "invalid"),
        (b'{"images": "x", "labels": ["a"]}', 422, "invalid"),
        (b'{"images": [1], "labels": ["a"]}', 422, "invalid"),
        (b'{"images": ["x"], "labels": [1]}', 422, "invalid"),
        (b'{"images": ["x"], "labels": ["a"], "more": 1}', 422, "invalid"),
        (b'{"images": ["*"], "labels": ["a"]}', 422, "bad-image"),
        (b'{"images": ["data:image/png,abc"], "labels": ["a"]}', 422, "bad-image"),
        (b'{"images": [""], "labels": ["a"]}', 422, "bad-image"),
        (b'{"images": ["aGVsbG8="], "labels": ["a"]}', 422, "bad-image"),
    ],
)
def test_bad_json(taught: httpx.Client, body: bytes, status: int, code: str) -> None:
    headers = {"content-type": "application/json"}
    problem(taught.post("/v1/learn", content=body, headers=headers), status, code)


@pytest.mark.parametrize(
    "label",
    [
        "",
        "  ",
        "x" * 101,
        "cat" + " " * 900 + "dog",
        "a\nb",
        "a\x00",
        "\ud800",
        "\u2028",
        ".",
        "..",
        "\u200b",
        "\ufeff \u202e",
    ],
    ids=lambda label: repr(label)[:12],
)
def test_bad_labels(taught: httpx.Client, label: str) -> None:
    body = json.dumps({"images": encoded(png("cat")), "labels": [label]})
    problem(taught.post("/v1/learn", content=body, headers={"content-type": "application/json"}), 422, "invalid")


def test_labels_are_trimmed_and_composed(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for label in ("é", " e\u0301 "):
            client.post("/v1/learn?wait=20", json={"images": encoded(png("cat")), "labels": [label]})
        assert [known["label"] for known in client.get("/v1/classes").json()["classes"]] == ["é"]


def test_numbers_of_images_and_labels_must_agree(taught: httpx.Client) -> None:
    body = {"images": encoded(*[png("cat")] * 3), "labels": ["a", "b"]}
    assert "3 images but 2 labels" in problem(taught.post("/v1/learn", json=body), 422, "invalid")
    body = {"images": encoded(png("cat"))}
    assert "1 images but 0 labels" in problem(taught.post("/v1/learn", json=body), 422, "invalid")


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code"),
    [
        ("text/plain", b"x", 415, "media-type"),
        ("", b"x", 415, "media-type"),
        ("multipart/form-data", b"x", 400, "malformed"),
        (FORM, b"", 400, "malformed"),
        (FORM, b"--c\r\n", 400, "malformed"),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="images"\r\n\r\nab', 400, "malformed"),
        (FORM, b"--b\r\n\r\nx\r\n--b--\r\n", 422, "invalid"),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n--b--\r\n', 422, "invalid"),
        (FORM, b"--b--\r\n", 422, "invalid"),
    ],
)
def test_bad_forms(taught: httpx.Client, content_type: str, body: bytes, status: int, code: str) -> None:
    problem(taught.post("/v1/learn", content=body, headers={"content-type": content_type}), status, code)


def test_a_form_of_too_many_parts(taught: httpx.Client) -> None:
    files = [("images", ("a.png", b"x", "image/png"))] * 200
    assert "parts" in problem(taught.post("/v1/learn", files=files, data={"labels": "a"}), 413, "too-large")


def test_a_label_that_is_no_text(taught: httpx.Client) -> None:
    files = [("images", ("a.png", png("cat"), "image/png")), ("labels", (None, b"\xff"))]
    assert "UTF-8" in problem(taught.post("/v1/learn", files=files), 422, "invalid")


@pytest.mark.parametrize("query", ["wait=-1", "wait=61", "wait=nan", "wait=x", "wait=inf"])
def test_bad_parameters(taught: httpx.Client, query: str) -> None:
    body = {"images": encoded(png("cat")), "labels": ["cat"]}
    assert "wait" in problem(taught.post(f"/v1/learn?{query}", json=body), 422, "invalid")


def test_unknown_paths_and_methods(taught: httpx.Client) -> None:
    problem(taught.get("/v1/nothing"), 404, "not-found")
    problem(taught.get("/page/../../app.py"), 404, "not-found")
    problem(taught.get("/page/..%2f..%2fapp.py"), 404, "not-found")
    response = taught.put("/v1/learn")
    problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "POST"


def test_an_error_inside_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path) as client:
        monkeypatch.setattr(client.service, "classes", lambda: 1 / 0)
        response = client.get("/v1/classes")
        assert "division" not in problem(response, 500, "internal")
        assert response.headers["x-content-type-options"] == "nosniff"


def test_an_answer_that_fails_is_an_error_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api(tmp_path) as client:
        body = {"images": encoded(png("cat"))}
        with monkeypatch.context() as patch:
            patch.setattr(client.service.replica, "answer", lambda *_: 1 / 0)
            problem(client.post("/v1/predict", json=body), 500, "internal")
        assert client.post("/v1/predict", json=body).status_code == 200


# ------------------------------------------------------------------------------------------------------------- limits


def test_a_large_body_is_refused(tmp_path: Path) -> None:
    with api(tmp_path, Limits(body_bytes=1000)) as client:
        problem(client.post("/v1/predict", content=b"x" * 1001), 413, "too-large")

        def chunks():
            yield from [b"x" * 600] * 2

        json_type = {"content-type": "application/json"}
        problem(client.post("/v1/predict", content=chunks(), headers=json_type), 413, "too-large")


def test_too_much_at_once_is_refused(tmp_path: Path) -> None:
    with api(tmp_path, Limits(bytes_in_flight=1000)) as client:
        response = client.post("/v1/predict", content=b"x" * 1001, headers={"content-type": "application/json"})
        problem(response, 429, "busy")
        assert response.headers["retry-after"] == "1"
        assert client.post("/v1/predict", json={"images": encoded(png("cat"))}).status_code == 200, "it was given back"


def test_too_many_images(tmp_path: Path) -> None:
    with api(tmp_path, Limits(images=3)) as client:
        problem(client.post("/v1/predict", json={"images": encoded(*[png("cat")] * 4)}), 413, "too-large")
        assert client.post("/v1/predict", json={"images": encoded(*[png("cat")] * 3)}).status_code == 200


def test_too_many_classes(tmp_path: Path) -> None:
    with api(tmp_path, Limits(classes=2)) as client:
        for label in ("a", "b"):
            client.post("/v1/learn", json={"images": encoded(png(label)), "labels": [label]})
        third = {"images": encoded(png("c")), "labels": ["c"]}
        problem(client.post("/v1/learn", json=third), 422, "too-many-classes")
        assert client.post("/v1/learn", json={"images": encoded(png("a")), "labels": ["a"]}).status_code == 200
        assert client.delete("/v1/classes/a").status_code == 200
        assert client.post("/v1/learn", json=third).status_code == 200, "a forgotten class makes room"


def test_learning_pushes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the learner is held up, images are accepted up to the limit and refused from there on."""
    with api(tmp_path, Limits(pending=5)) as client:
        held = threading.Event()
        turn = client.service.worker._turn
        monkeypatch.setattr(client.service.worker, "_turn", lambda: held.wait(20) and turn())
        body = {"images": encoded(png("cat")), "labels": ["cat"]}
        client.post("/v1/learn", json=body)  # the learner may be on its way with this one
        answers = [client.post("/v1/learn", json=body) for _ in range(8)]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        for answer in refused:
            problem(answer, 429, "busy")
            assert int(answer.headers["retry-after"]) >= 1
        assert client.post("/v1/predict", json={"images": encoded(png("cat"))}).status_code == 200
        held.set()
        last = max(answer.json()["last"] for answer in answers if answer.status_code == 200)
        assert client.service.worker.when_published(last).result(20)
        assert client.post("/v1/learn", json=body).status_code == 200


def test_asking_pushes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path, Limits(questions=4)) as client:
        asked, go_on = threading.Event(), threading.Event()
        answer = client.service.replica.answer

        def slow(*arguments):
            asked.set()
            go_on.wait(20)
            return answer(*arguments)

        monkeypatch.setattr(client.service.replica, "answer", slow)
        futures: list[Future] = [client.service.ask(images_of("cat", 1))]
        assert asked.wait(20)
        futures += [client.service.ask(images_of("cat", 2)) for _ in range(2)]
        response = client.post("/v1/predict", json={"images": encoded(png("cat"))})
        problem(response, 429, "busy")
        assert response.headers["retry-after"] == "1"
        go_on.set()
        assert [len(future.result(20).answers) for future in futures] == [1, 2, 2]


def test_too_many_requests_at_once(tmp_path: Path) -> None:
    with api(tmp_path, Limits(requests=0)) as client:
        problem(client.get("/v1/state"), 429, "busy")
        assert client.get("/healthz").status_code == 200


# ------------------------------------------------------------------------------------------------------------- access


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    with api(tmp_path, token=TOKEN) as client:
        for path in ("/v1/state", "/v1/memory", "/metrics"):
            response = client.get(path)
            problem(response, 401, "unauthorised")
            assert response.headers["www-authenticate"] == "Bearer"
        for given in (f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff"):
            problem(client.get("/v1/state", headers={"Authorization": given.encode("latin-1")}), 401, "unauthorised")
        problem(client.post("/v1/learn", content=b"x" * 10), 401, "unauthorised")
        assert client.get("/v1/state", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/v1/state", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
        for path in ("/", "/healthz", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        document = client.get("/openapi.json").json()
        assert document["security"] == [{"token": []}]
        asking = [path for path, ways in document["paths"].items() for way in ways.values() if "security" not in way]
        assert {*document["paths"]} - {*asking} == {"/healthz"}


def test_without_a_token_only_this_machine_is_answered(taught: httpx.Client) -> None:
    """Else any web site could reach a local service through its visitor's browser, by a name that points here."""
    for host in ("evil.example", "evil.example:8000", "192.168.0.7", "", "localhost.evil.example", "[::2]", "["):
        problem(taught.get("/v1/state", headers={"Host": host}), 403, "forbidden")
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000"):
        assert taught.get("/v1/state", headers={"Host": host}).status_code == 200


def test_pages_of_other_origins_cannot_teach(taught: httpx.Client) -> None:
    body = {"images": encoded(png("cat"))}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "http://["):
        problem(taught.post("/v1/predict", json=body, headers={"Origin": origin}), 403, "forbidden")
    assert taught.post("/v1/predict", json=body, headers={"Origin": str(taught.base_url)}).status_code == 200


def test_an_allowed_host(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        access = guard.Access(hosts=frozenset({"model.example"}))
        with listening(service, access) as address:
            assert httpx.get(f"{address}/v1/state", headers={"Host": "model.example"}).status_code == 200


def test_every_answer_has_security_headers(taught: httpx.Client) -> None:
    for response in (taught.get("/"), taught.get("/v1/state"), taught.get("/nothing"), taught.get("/metrics")):
        for name in guard.HEADERS:
            assert name in response.headers, (response.url, name)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]


# ----------------------------------------------------------------------------------------------------------- the rest


def test_metrics(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        teach(client.service, "cat", 12)
        client.post("/v1/predict", json={"images": encoded(png("cat"), png("cat"))})
        client.get("/nothing/at/all")
        text = client.get("/metrics").text
    values = dict(re.findall(r"^(\S+) ([-+.e\d]+)$", text, flags=re.MULTILINE))
    assert values["scrlearn_images_learned_total"] == "12.0"
    assert values["scrlearn_images_answered_total"] == "2.0"
    assert values["scrlearn_images_stored"] == "12.0"
    assert values["scrlearn_published_sequence"] == "12.0"
    assert values['scrlearn_requests_total{method="POST",path="/v1/predict",status="200"}'] == "1.0"
    assert values['scrlearn_requests_total{method="GET",path="other",status="404"}'] == "1.0"
    assert "nothing" not in text, "what strangers ask for must not become a label"


def test_the_description_is_complete_and_needs_no_network(taught: httpx.Client) -> None:
    document = taught.get("/openapi.json").json()
    expected = {
        "/v1/learn", "/v1/predict", "/v1/nearest", "/v1/classes", "/v1/classes/{label}", "/v1/memory", "/v1/map",
        "/v1/state", "/healthz", "/metrics",
    }  # fmt: skip
    assert expected <= document["paths"].keys()
    body = document["paths"]["/v1/learn"]["post"]["requestBody"]["content"]
    assert body.keys() == {"multipart/form-data", "application/json"}
    assert "application/problem+json" in document["paths"]["/v1/learn"]["post"]["responses"]["507"]["content"]
    assert "Retry-After" in document["paths"]["/v1/learn"]["post"]["responses"]["429"]["headers"]
    shown = taught.get("/docs")
    assert all(path in shown.text for path in expected)
    for name, about in (("images", "PNG, JPEG, WebP or BMP"), ("labels", "One for each image, in order")):
        assert f"<td><code>{name}</code></td><td>body</td><td>{about}" in shown.text
    assert "http://" not in shown.text.replace(HERE, "")
    assert "https://" not in shown.text
    assert "<script" not in shown.text
    assert shown.headers["content-security-policy"] == docs_page.POLICY


def test_the_page_is_served_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "page"
    files.mkdir()
    (files / "index.html").write_text("<p>hello</p>")
    (files / "app.js").write_text("1")
    monkeypatch.setattr(page, "FOLDER", files)
    monkeypatch.setattr("scrlearn.service.app.read_page", lambda: read_page(files))
    with api(tmp_path / "state") as client:
        (files / "app.js").write_text("changed later")
        assert client.get("/").text == "<p>hello</p>"
        script = client.get("/page/app.js")
        assert (script.text, script.headers["content-type"]) == ("1", "text/javascript; charset=utf-8")
        same = client.get("/page/app.js", headers={"If-None-Match": script.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")


def test_health_follows_the_learner(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert (client.head("/healthz").status_code, client.head("/healthz").content) == (200, b"")
        client.service.worker.failed = True
        assert client.get("/healthz").status_code == 503
        problem(client.post("/v1/learn", json={"images": encoded(png("a")), "labels": ["a"]}), 503, "learning-stopped")
        client.service.worker.failed = False


def test_answers_while_learning(tmp_path: Path) -> None:
    """On a real server, with learning going on: every answer comes from one whole copy of the model."""
    with open_service(tmp_path) as service, listening(service) as address, httpx.Client(base_url=address) as client:
        teach(service, "cat", 10)
        teach(service, "dog", 10)
        done = threading.Event()
        seen: list[tuple[int, str]] = []

        def ask() -> None:
            with httpx.Client(base_url=address) as other:
                while not done.is_set():
                    answer = (
                        other.post("/v1/predict", json={"images": encoded(png("dog", 5))}).raise_for_status().json()
                    )
                    seen.append((answer["model"], answer["predictions"][0]["label"]))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(40):
            body = {"images": encoded(png("cat", number), png("dog", number)), "labels": ["cat", "dog"]}
            client.post("/v1/learn", json=body).raise_for_status()
        assert service.worker.when_published(100).result(20)
        done.set()
        for thread in threads:
            thread.join()
        models = [model for model, _ in seen]
        assert max(models) > 20, "copies were exchanged while questions came"
        assert {label for _, label in seen} <= {"dog", None}


def test_a_body_that_does_not_come(tmp_path: Path) -> None:
    import socket

    limits = Limits(body_seconds=0.2)
    with open_service(tmp_path, limits) as service, listening(service) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\nab".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")
