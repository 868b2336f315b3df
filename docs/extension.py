"""What pages and docstrings have that Markdown has not: formulas, examples, and the headings of sections.

Formulas are drawn by Matplotlib when the site is built, as pictures inside the page, so that no script is fetched.
Understood are ``$$ … $$`` on lines of their own, and what docstrings use: ``.. math::`` and ``:math:`…` ``.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterator

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath

SIZE = 16
DOLLARS = re.compile(r"^ *\$\$\s*(.+?)\s*\$\$ *$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. math::[ \n]*(\S.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
ROLE = re.compile(r":math:`([^`]+)`")
SECTION = re.compile(r"^(Examples?|References|Notes|See Also)\n-{3,}$", re.MULTILINE)
FENCE = re.compile(r" *(```|~~~)")
LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


@functools.cache
def svg(latex: str, block: bool = True) -> str:
    """The formula as an SVG picture in the colour of the text around it; its source is what a screen reader reads."""
    source = " ".join(latex.split())
    plain = re.sub(r"\\[bB]igg?[lr]?(?![a-zA-Z])", "", source)  # Matplotlib has no fixed sizes of brackets
    plain = plain.replace(r"\tfrac", r"\frac")
    plain = re.sub(r"(\\sum_(?:\{[^{}]*\}|\w))", r"\1\\,", plain)  # and sets sums tight
    if block:
        plain = plain.replace(r"\frac", r"\dfrac")
    path = TextPath((0, 0), f"${plain}$", size=SIZE, prop=FontProperties(math_fontfamily="stix"))
    box = path.get_extents().padded(1)
    drawn = "".join(
        LETTERS[code] + ("" if code == Path.CLOSEPOLY else " ".join(f"{value:.2f}" for value in points))
        for points, code in path.iter_segments(curves=True, simplify=False)
    )
    width, height, below = box.width / SIZE, box.height / SIZE, -box.y0 / SIZE
    return (
        f'<svg class="formula" role="img" aria-label="{html.escape(source)}" '
        f'style="width:{width:.3f}em;height:{height:.3f}em;vertical-align:-{below:.3f}em" '
        f'viewBox="{box.x0:.2f} {-box.y1:.2f} {box.width:.2f} {box.height:.2f}">'
        f'<path transform="scale(1,-1)" fill="currentColor" d="{drawn}"/></svg>'
    )


class _Draw(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        """Put pictures in the place of formulas; code blocks have been put away before."""
        text = "\n".join(lines)
        for form in (DOLLARS, DIRECTIVE):
            text = form.sub(lambda found: f"\n\n{self._keep(found[1], block=True)}\n\n", text)
        return ROLE.sub(lambda found: self._keep(found[1], block=False), text).split("\n")

    def _keep(self, latex: str, block: bool) -> str:
        picture = svg(latex, block)
        stored: str = self.md.htmlStash.store(f'<div class="formula">{picture}</div>' if block else picture)
        return stored


class _Sections(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        """Sections that mkdocstrings leaves in the text: not headings of the page, and their examples are code."""
        text = SECTION.sub(lambda found: f"**{found[1]}:**\n", "\n".join(lines))
        return list(_fenced(text.split("\n")))


def _fenced(lines: list[str]) -> Iterator[str]:
    """Examples outside of code blocks, put into one."""
    outside, example = True, False
    for line in [*lines, ""]:
        if FENCE.match(line):
            outside = not outside
        if outside and not example and line.startswith(">>> "):
            example = True
            yield from ("", "```pycon")
        elif example and not line.strip():
            example = False
            yield "```"
        yield line


class PagesAndDocstrings(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Sections before code blocks are put away (25); formulas after that, before HTML is looked for (20)."""
        md.preprocessors.register(_Sections(md), "sections", 28)
        md.preprocessors.register(_Draw(md), "formulas", 22)
