"""The whole report from runs: sections put together, and the short form for the README."""

from __future__ import annotations

from collections.abc import Sequence

from scrlearn.evaluation import interval
from scrlearn.experiments.beyond import variant
from scrlearn.experiments.comparison import paper_figure, verdict
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.identity import describe
from scrlearn.experiments.protocol import COLUMNS, DATASETS, FIGURES, STUDY, config_for, paper
from scrlearn.experiments.report import beyond_paper, figures, table
from scrlearn.experiments.report.document import MARKS, Block, Cell, Document, Missing, Picture, Section, Table, Text
from scrlearn.experiments.report.notes import Note
from scrlearn.experiments.report.runs import Runs, command, figure_text, place_text, values_of
from scrlearn.experiments.store import Entry

TITLE = "Results"
HEADLINE_PICTURES = ("accuracy", "confusion")  # names of figures, those of the study where there are several


def build(entries: Sequence[Entry], notes: Sequence[Note] = ()) -> Document:
    """The report.

    Parameters
    ----------
    entries
        Runs of a store, as `Store.query` gives them.
    notes
        Explanations by people, as `load_notes` reads them.

    Example
    -------
    >>> [section.title for section in build([]).sections][:2]
    ['About', 'Table 1']
    """
    runs = Runs(entries)
    cells = table.all_figures(runs)
    parts = [
        *table.section(cells),
        table.outside_section(cells, notes, runs),
        *figures.sections(runs),
        *beyond_paper.sections(runs),
    ]
    return Document(TITLE, [_about(entries), *parts, _others(runs), _provenance(entries)])


def _about(entries: Sequence[Entry]) -> Section:
    text = (
        'The experiments of "Supervised Contrastive Replay" (Mai, Li, Kim, Sanner, CVPR-W 2021), run again by this '
        f"package: {len(entries):,} runs. Every figure on this page is computed from them; what has not been measured "
        "is said in its place, with the command that measures it. `scr report` builds the page from a result store."
    )
    return Section("About", [Text(text)])


# --------------------------------------------------------------------------------------------------- everything else


def _is_whole(config: RunConfig) -> bool:
    """Whether a run has learned the whole stream, and was tested on test images."""
    return config.limit is None and not config.holdout and config.first_tasks is None


def _others(runs: Runs) -> Section:
    """Configurations that no table or figure above shows."""
    rest = runs.rest()
    rows: list[Sequence[str | Cell]] = []
    for members in rest:
        config = members[0].config
        for classifier in sorted(members[0].result.by_classifier, reverse=True) if _is_whole(config) else ():
            if known := list(values_of(members, classifier).values()):
                ours, theirs = interval(known), paper_figure(config, classifier)
                where = "" if theirs is None else verdict(ours, theirs)
                mark = Cell((MARKS[where],), where) if where else ""
                name = describe(config, seed=False)
                rows.append([name, classifier, figure_text(ours), "" if theirs is None else str(theirs), mark])
    blocks: list[Block] = [Text("Runs that are in the store and in no table above.")] if rows else []
    if rows:
        blocks.append(Table(["configuration", "classifier", "average accuracy (%)", "paper", ""], rows))
    short = sum(len(members) for members in rest if not _is_whole(members[0].config))
    if short:
        blocks.append(Text(f"{short} runs on a part of the stream, or on held-out training images, are not shown."))
    return Section("Other configurations", blocks or [Text("There are none.")])


def _provenance(entries: Sequence[Entry]) -> Section:
    """Where the runs come from: machines, versions, dates."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        machine, versions = entry.result.machine, entry.result.versions
        parts = [f"{name} {versions[name]}" for name in sorted(versions, key=lambda name: (name != "scrlearn", name))]
        key = (f"{machine['name']} ({machine['device']}, {machine['precision']})", ", ".join(parts))
        groups.setdefault(key, []).append(entry)
    rows: list[list[str | Cell]] = []
    for (where, made_with), members in sorted(groups.items()):
        dates = sorted(entry.date[:10] for entry in members)
        span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        rows.append([where, str(len(members)), span, made_with])
    if not rows:
        return Section("How these were made", [Text("There are no runs yet.")])
    return Section("How these were made", [Table(["machine", "runs", "date", "versions"], rows, frozenset({3}))])


# ------------------------------------------------------------------------------------------------------- the short form


def headline(entries: Sequence[Entry]) -> list[Block]:
    """For the README: SCR in all cells of Table 1 beside the paper, `scr+` and the offline bound; two figures."""
    runs = Runs(entries)
    rows = [_headline_row(runs, *cell) for cell in COLUMNS]
    head = ["", "SCR in the paper", "SCR", "SCR with review", "`scr+`", "iid offline"]
    blocks: list[Block] = [
        Text(
            "Average accuracy at the end of the stream, in percent: mean ± 95% interval, in brackets the number of "
            "seeds. ● inside, ▲ above, ▼ below: where it lies against the paper's interval widened by ours. SCR is the "
            "paper's method; [`scr+`](docs/beyond.md) has the same encoder, the same memory and one pass too."
        ),
        Table(head, rows),
    ]
    if any(not cell.verdict for row in rows for cell in row if isinstance(cell, Cell)):
        blocks.append(Missing("SCR where it says “not yet”", command("table1", (), ["scr"])))
    if any(not runs.values(variant("scr+", *cell)) for cell in COLUMNS):
        blocks.append(Missing("`scr+` where it says “not yet”", command("beyond", (), ["scr+"])))
    if lacking := [name for name in DATASETS if not runs.values(config_for("offline", name), "softmax")]:
        blocks.append(Missing("iid offline where it says “not yet”", command("table1", lacking, ["offline"])))
    return blocks + [block for name in HEADLINE_PICTURES for block in _headline_picture(runs, name)]


def _headline_row(runs: Runs, dataset: str, size: int) -> list[str | Cell]:
    theirs = paper("scr", "ncm", dataset, size)
    assert theirs is not None  # Table 1 has it everywhere
    cells = []
    for review in (False, True):
        ours = runs.accuracy(config_for("scr", dataset, size, options={"review": True} if review else {}))
        where = "" if ours is None else verdict(ours, theirs)
        cells.append(Cell((f"{figure_text(ours)} {MARKS.get(where, '')}".strip(),), where))
    plus = runs.accuracy(variant("scr+", dataset, size))
    offline = runs.accuracy(config_for("offline", dataset), "softmax")
    return [place_text(dataset, size), str(theirs), *cells, figure_text(plus), figure_text(offline)]


def _headline_picture(runs: Runs, name: str) -> list[Block]:
    (figure,) = [one for one in FIGURES if one.name == name]
    blocks = figures.BUILDERS[name](figure, STUDY, runs)
    drawn: list[Block] = [block for block in blocks if isinstance(block, Picture)]
    missing = [block for block in blocks if isinstance(block, Missing)]
    return drawn or [Missing(f"{figure.title}: {one.what}", one.command) for one in missing]
