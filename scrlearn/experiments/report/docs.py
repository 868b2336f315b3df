"""The published results, from the runs in ``results/`` and nothing else.

    python -m scrlearn.experiments.report.docs            # writes docs/results.md, its pictures, and parts of README.md
    python -m scrlearn.experiments.report.docs --check    # says what is out of date; exit code 1 if anything is

A picture is drawn again when what it shows has changed. ``results/figures.json`` holds a fingerprint of what each was
drawn from and of its files, so that the check needs to draw nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrlearn.errors import InputError
from scrlearn.experiments.exports import read_folder
from scrlearn.experiments.report.build import build, headline
from scrlearn.experiments.report.document import Document, Picture
from scrlearn.experiments.report.markdown import blocks, markdown
from scrlearn.experiments.report.notes import load_notes
from scrlearn.experiments.report.pictures import ENDINGS, save
from scrlearn.experiments.result import readable_json
from scrlearn.files import atomic_write

RUNS, NOTES, DRAWN = "results/runs", "results/notes.toml", "results/figures.json"
PAGE, PICTURES, README = "docs/results.md", "docs/images/results", "README.md"
BUILT = "<!-- built by `make results-docs` from results/: change nothing here -->\n"
BLOCK = re.compile(r"(<!-- results -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


@dataclass(frozen=True)
class Published:
    """What the files must be, given the runs."""

    page: str
    readme: str
    pictures: tuple[Picture, ...]


def published(root: Path) -> Published:
    """Read the runs, and say what the files must be."""
    entries = read_folder(root / RUNS)
    notes = load_notes(root / NOTES) if (root / NOTES).is_file() else []
    document: Document = build(entries, notes)
    block = blocks(headline(entries), PICTURES, f"[All results]({PAGE}).")
    readme = (root / README).read_text(encoding="utf-8")
    if len(BLOCK.findall(readme)) != 1:
        raise InputError(f'{README} must have the lines "<!-- results -->" and "<!-- end of results -->" once.')
    text = BUILT + markdown(document, Path(PICTURES).relative_to("docs").as_posix())
    return Published(text, BLOCK.sub(lambda m: f"{m[1]}\n{block}\n{m[3]}", readme), tuple(document.pictures()))


# ---------------------------------------------------------------------------------------------------------- pictures


def _fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _drawn(root: Path) -> dict[str, dict[str, str]]:
    """What was drawn, as it is written down."""
    path = root / DRAWN
    try:
        drawn: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f'"{path}" is no JSON: {error}. Remove it, and let `make results-docs` write it.') from error
    return drawn


def _is_current(root: Path, picture: Picture, drawn: Mapping[str, Any]) -> bool:
    known = drawn.get(picture.name, {})
    files = {ending: _fingerprint(root / PICTURES / f"{picture.name}.{ending}") for ending in ENDINGS}
    return bool(known == {"data": picture.fingerprint, **files}) and all(files.values())


def _strangers(root: Path, pictures: Sequence[Picture]) -> list[Path]:
    """Pictures in the folder that no page shows."""
    wanted = {f"{picture.name}.{ending}" for picture in pictures for ending in ENDINGS}
    there = [path for ending in ENDINGS for path in (root / PICTURES).glob(f"*.{ending}")]
    return sorted(path for path in there if path.name not in wanted)


# ------------------------------------------------------------------------------------------------------ check and write


def differences(root: Path) -> list[str]:
    """What is not as the runs want it, a sentence for each."""
    expected, found = published(root), []
    page = root / PAGE
    if not page.is_file() or page.read_text(encoding="utf-8") != expected.page:
        found.append(f"{PAGE} is not what {RUNS} gives.")
    if (root / README).read_text(encoding="utf-8") != expected.readme:
        found.append(f"The results in {README} are not what {RUNS} gives.")
    drawn = _drawn(root)
    for picture in expected.pictures:
        if not _is_current(root, picture, drawn):
            found.append(f"{PICTURES}/{picture.name} is missing, or drawn from something else than {RUNS}.")
    if drawn.keys() - {picture.name for picture in expected.pictures}:
        found.append(f"{DRAWN} names pictures that are not there any more.")
    return found + [f"{path.relative_to(root)} is shown nowhere." for path in _strangers(root, expected.pictures)]


def write(root: Path, redraw: bool = False) -> list[str]:
    """Write what is out of date; `redraw`: all pictures. Says what was written."""
    expected, drawn, said = published(root), _drawn(root), []
    now: dict[str, dict[str, str]] = {}
    for picture in expected.pictures:
        if redraw or not _is_current(root, picture, drawn):
            save(picture, root / PICTURES)
            said.append(f"{PICTURES}/{picture.name}")
        files = {ending: _fingerprint(root / PICTURES / f"{picture.name}.{ending}") for ending in ENDINGS}
        now[picture.name] = {"data": picture.fingerprint, **files}
    for path in _strangers(root, expected.pictures):
        path.unlink()
        said.append(f"{path.relative_to(root)} (removed)")
    texts = {PAGE: expected.page, README: expected.readme, DRAWN: readable_json(dict(sorted(now.items()))) + "\n"}
    for name, text in texts.items():
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text:
            atomic_write(root / name, text.encode())
            said.append(name)
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scrlearn.experiments.report.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    parser.add_argument("--redraw", action="store_true", help="draw all pictures again")
    parser.add_argument("--root", type=Path, default=Path(), help="the project's folder (default: this one)")
    given = parser.parse_args(arguments)
    if not given.check:
        for name in write(given.root, given.redraw):
            print(name)
        return 0
    wrong = differences(given.root)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    if wrong:
        print("Run `make results-docs`, and commit what it writes.", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
