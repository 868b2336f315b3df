"""A report as one HTML file that asks nobody for anything: styles and pictures are inside."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping
from urllib.parse import quote

from scrlearn.experiments.report.document import Block, Cell, Code, Document, Missing, Picture, Section, Table, Text

LARGEST_SVG = 400_000  # a scatter plot of thousands of points is smaller as PNG
# nothing may be fetched, nor any script run, whatever a class or a note is called
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --front: #1c2226; --dim: #59636b; --line: #d5dbe0; --soft: #f4f6f8;
  --link: #005f94; --inside: #005f94; --above: #00704f; --below: #b04300; }
@media (prefers-color-scheme: dark) { :root { --back: #14181b; --front: #e4e9ed; --dim: #9aa7b1; --line: #343d44;
  --soft: #1d2327; --link: #6fc0ee; --inside: #6fc0ee; --above: #3fcfa2; --below: #ff9e5e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--front); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; margin: 0 0 .5rem; } h2 { margin: 3rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); font-size: 1.4rem; } h3 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
p { max-width: 50rem; } a { color: var(--link); }
nav ul { columns: 18rem; padding-left: 1.2rem; margin: 1rem 0; }
code { font: .9em ui-monospace, monospace; background: var(--soft); padding: .1em .3em; border-radius: 4px;
  overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .75rem 1rem; border-radius: 6px; overflow-x: auto; }
pre code { padding: 0; background: none; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
thead th { border-bottom: 2px solid var(--dim); white-space: nowrap; }
th[scope=row], thead th:first-child, .words { text-align: left; }
th[scope=row] { font-weight: 600; } td.words { min-width: 16rem; }
td span { display: block; white-space: nowrap; } td span + span { color: var(--dim); font-size: .86rem; }
td.words span { white-space: normal; }
.inside > span:first-child { color: var(--inside); } .above > span:first-child { color: var(--above); }
.below > span:first-child { color: var(--below); } .above, .below { font-weight: 600; }
.above span + span, .below span + span { font-weight: 400; }
.missing { border-left: 4px solid var(--dim); background: var(--soft); padding: .6rem 1rem; margin: 1rem 0;
  max-width: 60rem; }
figure { margin: 1.25rem 0 2rem; } figcaption { max-width: 50rem; font-size: .92rem; margin-top: .5rem; }
figure img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""


def page(document: Document, pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    """The whole page.

    Parameters
    ----------
    document
        The report.
    pictures
        For each picture's name its files by ending, "png" and "svg".
    """
    parts = [_section(section, pictures) for section in document.sections]
    links = [
        f'<li><a href="#{section.anchor}">{_text(section.title)}</a></li>'
        for section in document.sections
        if section.level == 2 and section.title != "About"
    ]
    title = html.escape(f"{document.title}: Supervised Contrastive Replay")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        + parts[0]
        + f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>\n'
        + "".join(parts[1:])
        + "</main>\n</body>\n</html>\n"
    )


def _section(section: Section, pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    heading = f'<h{section.level} id="{section.anchor}">{_text(section.title)}</h{section.level}>\n'
    content = "".join(_block(block, pictures) for block in section.blocks)
    return (heading if section.title != "About" else "") + content


def _text(text: str) -> str:
    """Text with its `code`, **bold** and [links](address), safe to stand on a page."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(f"<code>{html.escape(part[1:-1])}</code>" if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    safe = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"\[([^\]]+)\]\((https?://[^)\s]+)\)", r'<a href="\2" rel="noreferrer">\1</a>', safe)


def _block(block: Block, pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    match block:
        case Text(text):
            return f"<p>{_text(text)}</p>\n"
        case Code(lines):
            return f"<pre><code>{html.escape(chr(10).join(lines))}</code></pre>\n"
        case Missing():
            return f'<p class="missing">{_text(block.text)}</p>\n'
        case Table():
            return _table(block)
        case Picture():
            return _picture(block, pictures[block.name])


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col"{_words(table, i)}>{_text(name)}</th>' for i, name in enumerate(table.head))
    rows = "".join(
        f'<tr><th scope="row">{_text(str(row[0]))}</th>'
        + "".join(_cell(cell, _words(table, i)) for i, cell in enumerate(row[1:], 1))
        + "</tr>\n"
        for row in table.rows
    )
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n'


def _words(table: Table, column: int) -> str:
    return ' class="words"' if column in table.words else ""


def _cell(cell: str | Cell, words: str) -> str:
    lines = (cell,) if isinstance(cell, str) else cell.lines
    of = f' class="{cell.verdict}"' if isinstance(cell, Cell) and cell.verdict else words
    return f"<td{of}>{''.join(f'<span>{_text(line)}</span>' for line in lines if line)}</td>"


def _picture(picture: Picture, files: Mapping[str, bytes]) -> str:
    if len(files["svg"]) <= LARGEST_SVG:
        address = "data:image/svg+xml," + quote(files["svg"].decode(), safe=" ;:,=/()'@!*+$")
    else:
        address = "data:image/png;base64," + base64.b64encode(files["png"]).decode()
    made_by = f"Made by `{picture.command}`." if picture.command else ""
    caption = " ".join(part for part in (f"**{picture.title}.**", *picture.notes, made_by) if part)
    image = f'<img src="{address}" alt="{html.escape(picture.alt)}">'
    return f'<figure id="{picture.name}">{image}\n<figcaption>{_text(caption)}</figcaption></figure>\n'
