"""The page in a real browser: Chromium without a window, driven by Playwright.

Pictures for the documentation are taken when a folder for them is named: SCRLEARN_SCREENSHOTS=docs/images.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw
from service_tools import listening

from scrlearn.service.core import Service
from scrlearn.service.guard import Access

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
CONFIG = {
    "method": "scr",
    "memory_size": 200,
    "image_size": 16,
    "channels": 1,
    "device": "cpu",
    "precision": "fp32",
    "threads": 1,
}
TOKEN = "0123456789abcdef-secret"
SLOW = 60_000  # milliseconds; most things take a hundredth of it

if importlib.util.find_spec("playwright"):
    from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
else:
    pytest.skip("needs Playwright: pip install 'scrlearn[browser]'", allow_module_level=True)

Strokes = list[list[tuple[float, float]]]


# ------------------------------------------------------------------------------------------------ digits by hand


def curve(*points: tuple[float, float]) -> list[tuple[float, float]]:
    """A smooth line through points (Catmull-Rom)."""
    ends = [points[0], *points, points[-1]]
    line = []
    for a, b, c, d in zip(ends, ends[1:], ends[2:], ends[3:], strict=False):
        for step in range(8):
            t = step / 8
            w = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, -(t**2) + t**3)
            line.append(tuple(sum(k * p[i] for k, p in zip(w, (a, b, c, d), strict=True)) / 2 for i in (0, 1)))
    return [*line, points[-1]]  # type: ignore[list-item]


ROUND = [(0.5 + 0.2 * math.sin(t / 8 * math.tau), 0.5 - 0.3 * math.cos(t / 8 * math.tau)) for t in range(9)]
DIGITS: dict[str, Strokes] = {
    "zero": [curve(*ROUND)],
    "one": [[(0.38, 0.32), (0.52, 0.2), (0.52, 0.8)]],
    "two": [
        curve((0.33, 0.33), (0.42, 0.2), (0.62, 0.22), (0.66, 0.38), (0.5, 0.6), (0.32, 0.8)),
        [(0.32, 0.8), (0.7, 0.79)],
    ],
    "three": [
        curve((0.34, 0.27), (0.5, 0.2), (0.65, 0.3), (0.6, 0.44), (0.48, 0.49)),
        curve((0.48, 0.49), (0.64, 0.55), (0.67, 0.7), (0.5, 0.81), (0.33, 0.73)),
    ],
    "four": [[(0.56, 0.2), (0.3, 0.6), (0.72, 0.6)], [(0.58, 0.42), (0.58, 0.82)]],
    "seven": [[(0.3, 0.22), (0.7, 0.22), (0.46, 0.8)]],
}


def written(name: str, number: int = 0) -> Strokes:
    """A digit as a hand writes it, a little different each time."""
    chance = random.Random(f"{name}/{number}")
    slant, wide, high = chance.uniform(-0.15, 0.15), chance.uniform(0.85, 1.1), chance.uniform(0.9, 1.1)

    def bent(x: float, y: float) -> tuple[float, float]:
        x, y = x - 0.5, y - 0.5
        return 0.5 + wide * x - slant * y, 0.5 + high * y

    return [[bent(x, y) for x, y in stroke] for stroke in DIGITS[name]]


def picture(name: str, number: int) -> bytes:
    """The same as a PNG, as the page would send it."""
    strokes, size = written(name, number), 128
    xs, ys = zip(*(point for stroke in strokes for point in stroke), strict=True)
    side = max(max(xs) - min(xs), max(ys) - min(ys)) / 0.68
    left, top = (min(xs) + max(xs) - side) / 2, (min(ys) + max(ys) - side) / 2
    image = Image.new("L", (size, size), 255)
    pen = ImageDraw.Draw(image)
    for stroke in strokes:
        points = [((x - left) / side * size, (y - top) / side * size) for x, y in stroke]
        pen.line(points, fill=21, width=10, joint="curve")
        for x, y in (points[0], points[-1]):
            pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=21)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


# ------------------------------------------------------------------------------------------------ browser and service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses to run with it for root
    with sync_playwright() as playwright:
        found = [os.environ.get("SCRLEARN_BROWSER"), *map(shutil.which, NAMES), playwright.chromium.executable_path]
        path = next((path for path in found if path and Path(path).exists()), None)
        if path is None:
            pytest.skip(
                "needs Chromium: install it (apt install chromium, or playwright install chromium), or name the "
                "program in SCRLEARN_BROWSER"
            )
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Start a service, teach it digits, and open its page; nothing may come from elsewhere, nothing may go wrong."""
    undo: list[Callable[[], object]] = []
    asked: list[str] = []
    wrong: list[str] = []

    def start(taught: dict[str, int] | None = None, token: str | None = None, **options: Any) -> Page:
        service = Service(tmp_path / "state", CONFIG)
        undo.append(service.close)
        server = listening(service, Access(token))
        address = server.__enter__()
        undo.append(lambda: server.__exit__(None, None, None))
        teach(address, taught or {}, token)
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        undo.append(page.close)
        page.set_default_timeout(SLOW)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.address = address  # type: ignore[attr-defined]
        return page

    expect.set_options(timeout=SLOW)
    yield start
    for action in reversed(undo):
        action()
    assert {url for url in asked if not re.match(r"http://127\.0\.0\.1:\d+/|data:|blob:", url)} == set()
    # that the service refuses something is no error of the page
    assert [text for text in wrong if not re.search(r"responded with a status of (4\d\d|502|507)", text)] == []


def teach(address: str, taught: dict[str, int], token: str | None = None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=address, timeout=60, headers=headers) as client:
        for number in range(max(taught.values(), default=0)):
            names = [name for name, count in taught.items() if number < count]
            files = [("images", ("d.png", picture(name, number), "image/png")) for name in names]
            client.post("/v1/learn?wait=60", files=files, data={"labels": names}).raise_for_status()


def state(page: Page) -> dict[str, Any]:
    return httpx.get(f"{page.address}/v1/state?digest=true").json()  # type: ignore[attr-defined,no-any-return]


def draw(page: Page, name: str, number: int = 0) -> None:
    """Draw a digit with the mouse, and wait for what the page says of it."""
    box = page.locator("#pad").bounding_box()
    assert box is not None
    for stroke in written(name, number):
        (x, y), *more = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(x, y)
        page.mouse.down()
        for point in more:
            page.mouse.move(*point)
        page.mouse.up()
    answered(page)


def answered(page: Page) -> None:
    expect(page.locator("#teach-box")).to_be_visible()
    expect(verdict(page)).not_to_have_text("Looking…")


def verdict(page: Page) -> Locator:
    return page.locator("#verdict")


def chip(page: Page, label: str) -> Locator:
    return page.locator(f'#chips button[data-label="{label}"]')


def learned(page: Page, label: str) -> None:
    expect(page.locator("#taught")).to_have_text(f"Learned as “{label}”.")


def shoot(page: Page, name: str, **options: Any) -> None:
    """A picture for the documentation, where pictures are wanted."""
    if folder := os.environ.get("SCRLEARN_SCREENSHOTS"):
        page.mouse.move(0, 0)
        page.wait_for_timeout(800)  # movements come to rest
        page.screenshot(path=Path(folder) / f"service-{name}.png", **options)


# ------------------------------------------------------------------------------------------------ teaching


def test_draw_predict_teach_and_predict_right_after(visit: Open) -> None:
    page = visit()
    expect(verdict(page)).to_have_text("It knows nothing yet")
    draw(page, "zero")
    expect(verdict(page)).to_have_text("Unknown")
    page.get_by_label("Another label").fill("zero")
    page.get_by_role("button", name="Teach", exact=True).click()
    learned(page, "zero")
    expect(verdict(page)).to_have_text("zero")
    draw(page, "one")
    expect(verdict(page)).not_to_have_text("one")
    page.get_by_label("Another label").fill("one")
    page.get_by_label("Another label").press("Enter")
    learned(page, "one")
    expect(verdict(page)).to_have_text("one")
    for number in (1, 2):
        for name in ("zero", "one"):
            draw(page, name, number)
            chip(page, name).click()
            learned(page, name)
    draw(page, "zero", 3)
    expect(verdict(page)).to_have_text("zero")
    draw(page, "one", 3)
    expect(page.locator("#near li")).to_have_count(6)
    expect(page.locator("#bars li")).to_have_count(2)
    assert (state(page)["images"], state(page)["classes"]) == (6, 2)


def test_the_accuracy_the_classes_and_the_map_follow(visit: Open) -> None:
    page = visit({"zero": 4, "one": 4})
    before = state(page)["recent"]
    expect(page.locator("#f-accuracy")).to_have_text(f"{round(100 * before['right'] / before['images'])}\u00a0%")
    expect(page.locator("#classes li").first).to_contain_text("4 learned · 4 kept")
    expect(page.locator("#map")).to_have_attribute("aria-label", re.compile(r"8 images of 2 classes"))
    draw(page, "zero", 20)
    chip(page, "one").click()  # teach it a lie: the accuracy must fall
    learned(page, "one")
    expect(page.locator("#f-accuracy-note")).to_contain_text("▼ from")
    after = state(page)["recent"]
    assert after == {"images": before["images"] + 1, "right": before["right"]}
    expect(page.locator("#map")).to_have_attribute("aria-label", re.compile(r"9 images of 2 classes"))
    expect(page.locator("#classes li").nth(1)).to_contain_text("5 learned · 5 kept")
    expect(page.locator("#classes li").nth(1).locator("img")).to_have_count(5)
    expect(page.locator("#tray .thumb.wrong")).to_have_count(1)


def test_a_second_person_teaches_and_the_page_follows(visit: Open) -> None:
    page = visit({"zero": 2})
    expect(page.locator("#classes li")).to_have_count(1)
    teach(page.address, {"four": 3})  # type: ignore[attr-defined]
    expect(page.locator("#classes li")).to_have_count(2)
    expect(page.locator("#f-images")).to_have_text("5 images")


def test_a_class_is_forgotten_only_after_a_question(visit: Open) -> None:
    page = visit({"zero": 3, "one": 3})
    page.get_by_role("button", name="Forget one").click()
    dialog = page.get_by_role("dialog", name="Forget “one”?")
    expect(dialog).to_contain_text("3 images in memory")
    expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert state(page)["classes"] == 2
    page.get_by_role("button", name="Forget one").click()
    dialog.get_by_role("button", name="Forget it").click()
    expect(page.locator("#classes li")).to_have_count(1)
    expect(page.locator("#announce")).to_have_text("“one” is forgotten.")
    assert state(page)["classes"] == 1


def test_a_label_is_text_whatever_it_looks_like(visit: Open) -> None:
    page = visit()
    label = '<img src=x onerror="alert(1)"> a/b?'
    draw(page, "two")
    page.get_by_label("Another label").fill(label)
    page.get_by_label("Another label").press("Enter")
    learned(page, label)
    expect(verdict(page)).to_have_text(label)
    expect(page.locator("#classes li")).to_contain_text(label)
    page.get_by_role("button", name=f"Forget {label}").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#classes li")).to_have_count(0)


# ------------------------------------------------------------------------------------------------ images come in


def as_files(*named: tuple[str, bytes]) -> list[Any]:
    return [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in named]


def test_a_broken_file_is_said_and_the_others_are_answered(visit: Open) -> None:
    page = visit({"zero": 5, "one": 5})
    page.get_by_role("tab", name="Image").click()
    good, cut = picture("zero", 30), picture("one", 30)[:150]
    files = as_files(("good.png", good), ("cut.png", cut), ("notes.png", b"hello"), ("empty.png", b""))
    page.locator("#files").set_input_files(files)
    alert = page.get_by_role("alert").filter(has_text="cut.png")
    expect(alert).to_contain_text("cut.png is damaged or cut short")
    expect(alert).to_contain_text("notes.png is no PNG, JPEG, WebP or BMP file.")
    expect(alert).to_contain_text("empty.png is empty.")
    expect(verdict(page)).to_have_text("zero")
    expect(page.locator("#tray li")).to_have_count(1)
    alert.get_by_role("button", name="Close this message").click()
    expect(page.locator(".alert")).to_have_count(0)


def test_many_files_are_taught_with_one_click(visit: Open) -> None:
    page = visit({"zero": 3, "one": 3})
    page.locator("#files").set_input_files(as_files(*((f"{n}.png", picture("four", n)) for n in range(20))))
    expect(page.locator("#tray li")).to_have_count(20)
    answered(page)
    page.get_by_label("Teach all 20 images that have no label yet").check()
    page.get_by_label("Another label").fill("four")
    page.get_by_label("Another label").press("Enter")
    expect(page.locator("#taught")).to_have_text("Learned 20 images as “four”.")
    assert state(page)["images"] == 26
    expect(page.locator("#classes li").nth(2)).to_contain_text("20 learned · 20 kept")


def test_what_was_taught_before_a_failure_is_not_taught_again(visit: Open) -> None:
    page = visit({"zero": 3, "one": 3})
    keys: list[str] = []

    def lose_the_second_answer(route: Any) -> None:
        keys.append(route.request.headers["idempotency-key"])
        if len(keys) == 2:
            route.fetch()
            route.fulfill(status=502, body="proxy: the answer was lost")
        else:
            route.continue_()

    page.route("**/v1/learn*", lose_the_second_answer)
    page.locator("#files").set_input_files(as_files(*((f"{n}.png", picture("four", n)) for n in range(20))))
    expect(page.locator("#tray li")).to_have_count(20)
    answered(page)
    for number, message in ((20, "16 of 20 images were taught. The service answered with 502"), (4, None)):
        page.get_by_label(f"Teach all {number} images that have no label yet").check()
        page.get_by_label("Another label").fill("four")
        page.get_by_label("Another label").press("Enter")
        if message:
            expect(page.get_by_role("alert")).to_contain_text(message)
    expect(page.locator("#taught")).to_have_text("Learned 4 images as “four”.")
    assert keys[1] == keys[2] != keys[0]
    assert state(page)["images"] == 26, "each was learned once"


PUT = """([kind, data]) => {
  const file = new File([Uint8Array.from(data)], "put.png", { type: "image/png" });
  const transfer = new DataTransfer();
  transfer.items.add(file);
  const given = kind === "paste" ? { clipboardData: transfer } : { dataTransfer: transfer };
  const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
  document.body.dispatchEvent(new Kind(kind, { bubbles: true, cancelable: true, ...given }));
}"""


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_images_are_pasted_and_dropped(visit: Open, way: str) -> None:
    page = visit({"zero": 5, "one": 5})
    if way == "drop":
        page.evaluate(PUT, ["dragenter", []])
        expect(page.locator("#drop")).to_be_visible()
    page.evaluate(PUT, [way, list(picture("one", 40))])
    expect(verdict(page)).to_have_text("one")
    expect(page.locator("#drop")).to_be_hidden()


def test_a_huge_photograph_is_sent_small(visit: Open) -> None:
    page = visit({"zero": 2})
    noise = Image.frombytes("RGB", (2600, 2400), random.Random(0).randbytes(3 * 2600 * 2400))
    file = io.BytesIO()
    noise.save(file, "PNG")
    assert len(file.getvalue()) > 16 << 20, "more than the service takes"
    page.locator("#files").set_input_files(as_files(("huge.png", file.getvalue())))
    answered(page)
    expect(page.locator(".alert")).to_have_count(0)


def test_the_camera_takes_pictures(visit: Open) -> None:
    page = visit({"zero": 2}, permissions=["camera"])
    page.get_by_role("tab", name="Camera").click()
    page.get_by_role("button", name="Turn the camera on").click()
    page.get_by_role("button", name="Take a picture").click()
    answered(page)
    expect(page.get_by_role("button", name="Image 1, camera")).to_be_visible()
    page.get_by_role("tab", name="Draw").click()
    assert page.evaluate("document.getElementById('video').srcObject") is None, "the camera is off"


# ------------------------------------------------------------------------------------------------ demo


def test_the_demo_runs_to_its_end(visit: Open) -> None:
    page = visit({"zero": 3, "one": 3})
    before = state(page)
    page.get_by_role("link", name="Demo").click()
    page.get_by_role("button", name="Play the demo").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator("#demo-table tr")).to_have_count(6, timeout=200_000)
    expect(page.locator("#demo-batch img")).to_have_count(10)
    expect(page.locator("#demo-status")).to_contain_text("Finished", timeout=200_000)
    expect(page.locator("#demo-table tr")).to_have_count(10)
    expect(page.locator("#demo-chart path.curve")).to_have_count(2)
    scores = [int(text.rstrip("%").strip()) for text in page.locator(".score").all_inner_texts()]
    assert scores[0] > 85
    assert scores[1] < 20
    expect(page.locator(".rival.tune .tiles .lost")).to_have_count(9)
    expect(page.locator(".rival.scr .tiles .known")).to_have_count(10)
    shoot(page, "demo", full_page=True)
    after = state(page)
    for name in ("digest", "images", "accepted", "stored", "classes"):
        assert after[name] == before[name]


def test_the_demo_can_be_stopped_and_is_found_again(visit: Open) -> None:
    page = visit()
    page.get_by_role("link", name="Demo").click()
    page.get_by_role("button", name="Play the demo").click()
    expect(page.locator("#demo-chart path.curve")).to_have_count(2)
    page.reload()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#demo-status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Play it again")).to_be_visible()


# ------------------------------------------------------------------------------------------------ keyboard


def tab_to(page: Page, target: Locator) -> None:
    """Press Tab until this is reached."""
    for _ in range(60):
        if target.evaluate("node => node === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{target} cannot be reached with Tab")


def test_everything_by_keyboard(visit: Open) -> None:
    page = visit({"zero": 4})
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    pad = page.get_by_role("img", name="Drawing area")
    tab_to(page, page.get_by_role("tab", name="Draw"))
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Image")).to_be_focused()
    expect(page.get_by_role("button", name="Choose files")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    tab_to(page, pad)
    for key in ["ArrowUp"] * 5 + ["Space"] + ["ArrowDown"] * 10 + ["Space"]:
        page.keyboard.press(key)
    answered(page)
    expect(page.locator("#announce")).to_have_text(re.compile(r"It says zero|Unknown. Most like zero"))
    tab_to(page, page.get_by_label("Another label"))
    page.keyboard.type("bar")
    page.keyboard.press("Enter")
    learned(page, "bar")
    expect(page.locator("#announce")).to_contain_text("Learned as “bar”. It says bar")
    tab_to(page, page.get_by_role("img", name=re.compile("Map of the memory: 5 images")))
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_be_visible()
    expect(page.locator("#announce")).to_contain_text("of the memory")
    tab_to(page, page.get_by_role("button", name="Forget bar"))
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#announce")).to_have_text("“bar” is forgotten.")
    expect(page.locator("#classes li")).to_have_count(1)


def test_delete_clears_the_drawing(visit: Open) -> None:
    page = visit({"zero": 2})
    draw(page, "two")
    page.keyboard.press("Delete")
    expect(page.locator("#tray li")).to_have_count(0)
    expect(verdict(page)).to_have_text("What is it?")
    expect(page.locator("#pad-ghost")).to_be_visible()


# ------------------------------------------------------------------------------------------------ for everyone


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_barriers(visit: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = visit(dict.fromkeys(DIGITS, 3), color_scheme=scheme)

    def check() -> None:
        page.wait_for_timeout(400)  # colours that fade are measured when they have settled
        found = axe.run(page).response["violations"]
        assert [(v["id"], [n["target"] for n in v["nodes"]]) for v in found] == []

    check()
    draw(page, "two", 9)
    chip(page, "two").click()
    learned(page, "two")
    page.locator("#classes .class-name").first.click()
    check()
    page.locator("#files").set_input_files(as_files(("notes.png", b"hello")))
    expect(page.locator(".alert")).to_be_visible()
    page.get_by_role("tab", name="Image").click()
    check()
    page.get_by_role("button", name="Forget zero").click()
    check()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Demo").click()
    page.get_by_role("button", name="Play the demo").click()
    expect(page.locator("#demo-chart path.curve")).to_have_count(2)
    check()
    page.get_by_role("button", name="Stop").click()


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_it_fits_any_width(visit: Open, width: int) -> None:
    page = visit(dict.fromkeys(DIGITS, 2), viewport={"width": width, "height": 800})
    draw(page, "three", 5)
    for view in ("Teach", "Demo"):
        page.get_by_role("link", name=view).click()
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_dark_and_back(visit: Open) -> None:
    page = visit(color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Theme: automatic").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(colour)
    assert dark != light
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(colour) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(colour) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) == dark


# ------------------------------------------------------------------------------------------------ token and trouble


def test_the_token_is_asked_for(visit: Open) -> None:
    page = visit({"zero": 2}, token=TOKEN)
    dialog = page.get_by_role("dialog", name="A token is needed")
    field = dialog.get_by_label("Token", exact=True)
    expect(field).to_be_focused()
    field.fill("something else")
    field.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("That token was not accepted. Try again.")
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    field.fill(TOKEN)
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#classes li")).to_have_count(1)
    page.reload()
    expect(page.locator("#classes li")).to_have_count(1)
    assert page.evaluate("localStorage.length") == 1, "only the theme outlives the tab"


def test_a_service_that_is_gone_and_comes_back(visit: Open) -> None:
    page = visit({"zero": 2, "one": 2})
    expect(page.locator("#status-text")).to_have_text("ready")
    page.route("**/v1/**", lambda route: route.fulfill(status=502, body="proxy: nobody there"))
    expect(page.locator("#status-text")).to_have_text("not reachable")
    expect(page.get_by_role("alert")).to_contain_text("The service answered with 502")
    page.unroute("**/v1/**")
    expect(page.locator("#status-text")).to_have_text("ready")
    expect(page.locator(".alert")).to_have_count(0)


def test_a_busy_service_is_asked_again(visit: Open) -> None:
    page = visit({"zero": 2, "one": 2})
    refused: list[str] = []

    def busy(route: Any) -> None:
        refused.append(route.request.headers.get("idempotency-key", ""))
        if len(refused) < 3:
            route.fulfill(status=429, headers={"Retry-After": "1"}, json={"code": "busy", "detail": "Too busy."})
        else:
            route.continue_()

    page.route("**/v1/learn*", busy)
    draw(page, "one", 8)
    chip(page, "one").click()
    learned(page, "one")
    assert len(refused) == 3
    assert len(set(refused)) == 1, "the same request, so that it is learned once"


def test_what_the_service_complains_of_is_shown(visit: Open) -> None:
    page = visit({"zero": 2})
    page.route("**/v1/learn*", lambda route: route.fulfill(status=507, json={"code": "disk-full", "detail": "Full."}))
    draw(page, "zero", 5)
    chip(page, "zero").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was taught. Full.")
    assert state(page)["images"] == 2


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.skipif("SCRLEARN_SCREENSHOTS" not in os.environ, reason="takes pictures: set SCRLEARN_SCREENSHOTS=FOLDER")
def test_pictures_for_the_documentation(visit: Open) -> None:
    page = visit(dict.fromkeys(("zero", "one", "two", "three", "four"), 14), device_scale_factor=1.5)
    for number, name in enumerate(("zero", "four", "two", "one"), start=50):
        draw(page, name, number)
        chip(page, name).click()
        learned(page, name)
    draw(page, "three", 60)
    expect(page.locator("#near li")).to_have_count(6)
    shoot(page, "teach", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    shoot(page, "phone")
