"""Progress bars for work that takes a while, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(
    text: str, total: int | None, *, show: bool, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; the function it gives advances it. Nothing is shown where no terminal is.

    >>> with progress_bar("Reading", 10, show=False) as advance:
    ...     advance(10)
    """
    console = Console(stderr=True)
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda amount: progress.advance(task, amount)
