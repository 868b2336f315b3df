"""Table 1: our figures beside the paper's, and where the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scrlearn.evaluation import Interval
from scrlearn.experiments.comparison import verdict
from scrlearn.experiments.protocol import DATASET_ORDER, DATASETS, RECIPES, ROWS, Row, config_for
from scrlearn.experiments.report.document import MARKS, Block, Cell, Code, Missing, Section, Table, Text
from scrlearn.experiments.report.notes import Note
from scrlearn.experiments.report.runs import Runs, command, difference_text, figure_text, place_text, size_text


@dataclass(frozen=True)
class Comparison:
    """One figure of Table 1: ours, if there is one, and the paper's."""

    row: Row
    dataset: str
    size: int
    review: bool
    ours: Interval | None
    paper: Interval

    @property
    def title(self) -> str:
        """The row."""
        return f"{self.row.title} with review" if self.review else self.row.title

    @property
    def place(self) -> str:
        """The column."""
        return place_text(self.dataset, self.size if RECIPES[self.row.method].replays else None)

    @property
    def verdict(self) -> str:
        """Where ours lies against the paper's, "" if there is none."""
        return "" if self.ours is None else verdict(self.ours, self.paper)

    @property
    def difference(self) -> Interval | None:
        """Ours minus the paper's."""
        if self.ours is None:
            return None
        return Interval(self.ours.mean - self.paper.mean, float("nan"), self.ours.n)

    def cell(self) -> Cell:
        """As it stands in the table."""
        mark = f" {MARKS[self.verdict]}" if self.verdict else ""
        return Cell((f"{figure_text(self.ours)}{mark}", f"paper {self.paper}"), self.verdict)


def all_figures(runs: Runs) -> list[Comparison]:
    """Every figure of Table 1, by row and then by column."""
    return [figure for row in ROWS for review in _reviews(row) for figure in _row_figures(runs, row, review)]


def _reviews(row: Row) -> tuple[bool, ...]:
    return (False, True) if row.method == "scr" else (False,)


def _row_figures(runs: Runs, row: Row, review: bool) -> Iterator[Comparison]:
    for dataset in DATASET_ORDER:
        for size in DATASETS[dataset].memory if RECIPES[row.method].replays else [DATASETS[dataset].middle]:
            config = config_for(row.method, dataset, size, options={"review": True} if review else {})
            ours = runs.accuracy(config, row.classifier)
            yield Comparison(row, dataset, size, review, ours, row.cells[dataset, size])


def section(figures: Sequence[Comparison]) -> list[Section]:
    """Table 1 as four tables: the bounds and methods without replay, and the others for each data set."""
    counts = {name: sum(figure.verdict == name for figure in figures) for name in MARKS}
    measured = sum(counts.values())
    text = (
        "Average accuracy over all tasks at the end of the stream, in percent: our mean ± 95% Student-t interval, in "
        "brackets the number of seeds, and below it the paper's. A mark says where our mean lies against the paper's "
        "interval widened by ours: ● inside, ▲ above, ▼ below. "
        f"Of {len(figures)} figures {measured} are measured: {counts['inside']} inside, {counts['above']} above, "
        f"{counts['below']} below."
    )
    still = [figure for figure in figures if not RECIPES[figure.row.method].replays]
    bounds = Table(["method", *(DATASETS[name].title for name in DATASET_ORDER)], _rows(still))
    sections = [
        Section("Table 1", [Text(text), Code([command("table1")])]),
        Section("Without replay", [bounds, *missing(still)], level=3),
    ]
    for dataset in DATASET_ORDER:
        here = [figure for figure in figures if figure.dataset == dataset and RECIPES[figure.row.method].replays]
        head = ["method", *(f"M = {size_text(size)}" for size in DATASETS[dataset].memory)]
        sections.append(Section(DATASETS[dataset].title, [Table(head, _rows(here)), *missing(here)], level=3))
    return sections


def _rows(figures: Sequence[Comparison]) -> list[list[str | Cell]]:
    rows: dict[str, list[str | Cell]] = {}
    for figure in figures:
        rows.setdefault(figure.title, [figure.title]).append(figure.cell())
    return list(rows.values())


def missing(figures: Sequence[Comparison]) -> list[Missing]:
    """What is not measured of these, and the command for it."""
    lacking: dict[str, list[Comparison]] = {}
    measured: set[str] = set()
    for figure in figures:
        review = " with review" if figure.review else ""
        run = RECIPES[figure.row.method].title + review  # one run has the figures of both classifiers
        if figure.ours is None:
            lacking.setdefault(run, []).append(figure)
        else:
            measured.add(run)
    if not lacking:
        return []
    names = [f"{run} ({_columns(members)})" if run in measured else run for run, members in lacking.items()]
    every = [figure for members in lacking.values() for figure in members]
    sizes = {figure.size for figure in every if RECIPES[figure.row.method].replays}
    datasets, methods = [figure.dataset for figure in every], [figure.row.method for figure in every]
    return [Missing(", ".join(names), command("table1", datasets, methods, sorted(sizes)))]


def _columns(figures: Sequence[Comparison]) -> str:
    replays = RECIPES[figures[0].row.method].replays
    return ", ".join(dict.fromkeys(f"M = {size_text(f.size)}" if replays else f.place for f in figures))


def outside_section(figures: Sequence[Comparison], notes: Sequence[Note], runs: Runs) -> Section:
    """The figures that are not inside, each with what is known about why."""
    rows: list[Sequence[str | Cell]] = []
    for figure in figures:
        if figure.verdict in ("above", "below"):
            why = " ".join(note.text_for(figure, runs) for note in notes if note.is_about(figure))
            mark = Cell((MARKS[figure.verdict],), figure.verdict)
            ours, difference = figure_text(figure.ours), difference_text(figure.difference)
            name = f"{figure.title}, {figure.place}"
            rows.append([name, ours, str(figure.paper), difference, mark, why or "not explained yet"])
    blocks: list[Block] = []
    if rows:
        head = ["figure", "ours", "paper", "difference", "", "why"]
        blocks.append(Table(head, rows, frozenset({5})))
    else:
        blocks.append(Text("No figure that is measured lies outside the paper's interval widened by ours."))
    return Section("Outside the paper's interval", [*blocks, *_remarks(figures, notes, runs)])


def _remarks(figures: Sequence[Comparison], notes: Sequence[Note], runs: Runs) -> list[Text]:
    """Notes that are about figures inside the interval alone."""
    remarks = []
    for note in notes:
        about = [figure for figure in figures if figure.verdict and note.is_about(figure)]
        if about and all(figure.verdict == "inside" for figure in about):
            names = "; ".join(f"{figure.title}, {figure.place}" for figure in about)
            remarks.append(Text(f"**{names}**: {note.text_for(about[0], runs)}"))
    return remarks
