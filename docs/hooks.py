"""What mkdocs does besides turning pages into HTML: formulas, and tables that are generated from the code."""

from __future__ import annotations

from typing import Any

from extension import PagesAndDocstrings  # mkdocs looks for modules in the folder of this file
from generate import refreshed
from mkdocs.plugins import event_priority


@event_priority(100)
def on_config(config: Any) -> Any:
    """Let pages and docstrings have formulas; before mkdocstrings takes over the list of extensions."""
    config["markdown_extensions"].append(PagesAndDocstrings())
    return config


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Generate the tables anew, so that the site never shows old ones."""
    return refreshed(markdown)
