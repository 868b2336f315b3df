"""A report before it is written: sections of text, tables and pictures, the same for a web page and for Markdown.

Text may hold `code`, **bold** and [links](address), as in Markdown, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scrlearn.experiments.identity import digest

MARKS = {"inside": "● inside", "above": "▲ above", "below": "▼ below"}


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Code:
    """Commands, a line for each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Missing:
    """What the store has not, and the command that makes it."""

    what: str
    command: str

    @property
    def text(self) -> str:
        """In a sentence."""
        return f"Not measured yet: {self.what}: `{self.command}`"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: lines of text, and where it lies against the paper, if that is known."""

    lines: tuple[str, ...]
    verdict: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first cell of a row is its name. `words`: columns with sentences and not figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A picture: `data` is what it is drawn from, as JSON can say it, and `kind` how (see `pictures.KINDS`).

    Parameters
    ----------
    name
        Of its files.
    kind, data
        How it is drawn, and from what.
    title
        What it shows, in a line.
    alt
        What there is to see, for those who cannot.
    notes
        Sentences under it.
    command
        What makes the runs that it shows.
    """

    name: str
    kind: str
    data: Mapping[str, Any]
    title: str
    alt: str
    notes: Sequence[str] = ()
    command: str = ""

    @property
    def fingerprint(self) -> str:
        """Of what it is drawn from: equal fingerprints, equal pictures."""
        return digest({"kind": self.kind, "data": self.data})


Block = Text | Code | Missing | Table | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]
    level: int = 2

    @property
    def anchor(self) -> str:
        """Its address on the page, made as mkdocs and GitHub make it.

        >>> Section("Softmax against NCM, all of it", []).anchor
        'softmax-against-ncm-all-of-it'
        """
        kept = "".join(letter for letter in self.title.lower() if letter.isalnum() or letter in " -_")
        return "-".join(kept.split())


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    sections: Sequence[Section] = field(default_factory=list)

    def pictures(self) -> Iterator[Picture]:
        """All pictures in it, in order."""
        for section in self.sections:
            yield from (block for block in section.blocks if isinstance(block, Picture))

    def with_store(self, store: str) -> Document:
        """The same with commands that put runs into this store.

        >>> document = Document("Some", [Section("One", [Missing("SCR", "scr reproduce table1")])])
        >>> document.with_store("my.db").sections[0].blocks[0].text
        'Not measured yet: SCR: `scr reproduce table1 --store my.db`'
        """
        sections = [
            replace(part, blocks=[_with_store(block, store) for block in part.blocks]) for part in self.sections
        ]
        return replace(self, sections=sections)


def _with_store(block: Block, store: str) -> Block:
    def command(text: str) -> str:
        return f"{text} --store {store}" if text.startswith("scr reproduce") and "--store" not in text else text

    if isinstance(block, Code):
        return replace(block, lines=[command(line) for line in block.lines])
    return replace(block, command=command(block.command)) if isinstance(block, Missing | Picture) else block
