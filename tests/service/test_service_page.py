"""The files of the page: whole, from nowhere else, within the policy, and readable in both themes."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from service_tools import api

from scrlearn.service.guard import HEADERS
from scrlearn.service.page import FOLDER, read_page

ROOT = Path(__file__).parents[2]
FILES = {name: file.content.decode() for name, file in read_page().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
HTML, STYLE = FILES["index.html"], FILES["style.css"]


class Elements(HTMLParser):
    """All elements with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


ELEMENTS = Elements(HTML).found
IDS = [attributes["id"] for _, attributes in ELEMENTS if "id" in attributes]


def test_every_file_is_packaged_and_served(tmp_path: Path) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["scrlearn"]
    packaged = {path for pattern in patterns for path in (ROOT / "scrlearn").glob(pattern)}
    assert {FOLDER / name for name in FILES} <= packaged
    with api(tmp_path) as client:
        start = client.get("/")
        assert start.headers["content-type"] == "text/html; charset=utf-8"
        assert start.headers["content-security-policy"] == HEADERS["content-security-policy"]
        assert start.text == HTML
        for name in FILES:
            assert client.get(f"/page/{name}").status_code == 200


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in FILES.items():
        addresses = re.findall(
            r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"')]*", re.sub(r"^\s*//.*$", "", text, flags=re.M)
        )
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
        assert "@import" not in text


def test_nothing_is_inline() -> None:
    """The policy would refuse it."""
    for tag, attributes in ELEMENTS:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")], tag
        assert tag != "script" or "src" in attributes
    for name, text in SCRIPTS.items():
        assert not re.search(r"\binnerHTML|\bouterHTML|insertAdjacentHTML|\beval\(|new Function", text), name
        assert 'setAttribute("style"' not in text


def test_references_lead_somewhere() -> None:
    assert len(IDS) == len(set(IDS))
    for tag, attributes in ELEMENTS:
        for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls", "list"):
            for target in (attributes.get(name) or "").split():
                assert target in IDS, (tag, name, target)
        for name in ("src", "href"):
            address = attributes.get(name) or ""
            if address.startswith("page/"):
                assert address.removeprefix("page/") in FILES
    for name, text in SCRIPTS.items():
        for target in re.findall(r'from "\./([\w.]+)"', text):
            assert target in FILES, (name, target)
        for target in re.findall(r'byId\("([\w-]+)"\)', text):
            assert target in IDS, (name, target)
    used = {target for text in SCRIPTS.values() for target in re.findall(r'from "\./([\w.]+)"', text)}
    assert used | {"app.js"} == SCRIPTS.keys(), "no file is left over"


def test_what_is_imported_is_exported() -> None:
    for name, text in SCRIPTS.items():
        for names, target in re.findall(r'import \{([^}]+)\} from "\./([\w.]+)"', text):
            for wanted in re.split(r"[,\s]+", names.strip()):
                exported = rf"^export (?:const|let|class|(?:async )?function) {wanted}\b"
                assert not wanted or re.search(exported, SCRIPTS[target], flags=re.M), (name, wanted, target)


# ------------------------------------------------------------------------------------------------ contrast


def colours(theme: int) -> dict[str, str]:
    """The named colours of a theme (0: light, 1: dark)."""
    pairs = r"light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)"
    found = {m[1]: m.groups()[1 + theme] for m in re.finditer(rf"--([\w-]+): {pairs}", STYLE)}
    return found | {m[1]: m.groups()[1 + theme] for m in re.finditer(rf"\.(k\d) \{{ color: {pairs}", STYLE)}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_measured_as_it_should_be() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_signs_stand_out(theme: int) -> None:
    """WCAG 2.2: 4.5 for text, 3 for signs, the edges of controls and the mark of focus."""
    c = colours(theme)
    for ground in ("ground", "raised", "sunk"):
        for text in ("text", "pale", "accent"):
            assert contrast(c[text], c[ground]) >= 4.5, (text, ground)
        assert contrast(c["edge"], c[ground]) >= 3 or ground == "sunk"
    assert contrast(c["on-accent"], c["accent"]) >= 4.5
    assert contrast(c["on-bad"], c["bad"]) >= 4.5
    assert contrast(c["text"], c["bad-soft"]) >= 4.5
    for number in range(8):
        for ground in ("ground", "raised"):
            assert contrast(c[f"k{number}"], c[ground]) >= 3, f"k{number} on {ground}"


def test_no_two_classes_look_the_same() -> None:
    """Colours repeat after 8 classes, shapes after 7: 56 classes differ, and neighbours in both."""
    count = int(re.search(r"const COLOURS = (\d+)", SCRIPTS["palette.js"])[1])
    shapes = re.search(r"const SHAPES = \[([^\]]+)\]", SCRIPTS["palette.js"])[1].count('"') // 2
    assert len({(n % count, n % shapes) for n in range(count * shapes)}) == count * shapes == 56
    assert sorted(k for k in colours(0) if re.fullmatch(r"k\d", k)) == [f"k{n}" for n in range(count)]
