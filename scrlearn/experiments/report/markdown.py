"""A report as Markdown, for GitHub and for mkdocs."""

from __future__ import annotations

from collections.abc import Iterable

from scrlearn.experiments.report.document import Block, Cell, Code, Document, Missing, Picture, Table, Text


def markdown(document: Document, pictures: str) -> str:
    """The whole page.

    Parameters
    ----------
    document
        The report.
    pictures
        The folder of its pictures, as the page shall name it.
    """
    parts = [f"# {document.title}\n"]
    for section in document.sections:
        heading = [] if section.title == "About" else [f"{'#' * section.level} {section.title}\n"]
        parts += [*heading, blocks(section.blocks, pictures)]
    return "\n".join(parts)


def blocks(some: Iterable[Block], pictures: str, link: str = "") -> str:
    """Blocks one after the other; `link`: where a picture leads to, if not to its SVG."""
    return "\n".join(_block(block, pictures, link) for block in some)


def _block(block: Block, pictures: str, link: str) -> str:
    match block:
        case Text(text):
            return f"{text}\n"
        case Code(lines):
            return "\n".join(["```bash", *lines, "```", ""])
        case Missing():
            return f"> {block.text}\n"
        case Table():
            return _table(block)
        case Picture():
            return _picture(block, pictures, link)


def _table(table: Table) -> str:
    aligned = ["---" if i == 0 or i in table.words else "---:" for i in range(len(table.head))]
    lines = [table.head, aligned, *([_cell(cell) for cell in row] for row in table.rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(cell: str | Cell) -> str:
    text = cell if isinstance(cell, str) else "<br>".join(line for line in cell.lines if line)
    return text.replace("|", "\\|")


def _picture(picture: Picture, folder: str, link: str) -> str:
    image = f"![{picture.alt}]({folder}/{picture.name}.png)"
    made_by = f"Made by `{picture.command}`." if picture.command else ""
    more = link or f"[SVG]({folder}/{picture.name}.svg)"
    caption = " ".join(part for part in (f"**{picture.title}.**", *picture.notes, made_by, more) if part)
    return f"{image}\n\n{caption}\n"
