"""`scr+` beside SCR and the offline bound, and what each of its parts is worth."""

from __future__ import annotations

from collections.abc import Sequence

from scrlearn.data.streams import Order
from scrlearn.evaluation import Interval, interval
from scrlearn.experiments.beyond import STUDIES, ablations_of, parts_of, variant
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.protocol import COLUMNS, DATASETS, config_for
from scrlearn.experiments.report.document import Block, Cell, Missing, Picture, Section, Table, Text
from scrlearn.experiments.report.runs import (
    Runs,
    command,
    difference_text,
    figure_text,
    has_own_time,
    place_text,
    seconds_of,
    size_text,
)

ORDERS: tuple[Order, ...] = ("natural", "shuffled")
SHOWN = ("scr", "scr+", "scr+ wide")
TITLES = {"scr": "SCR", "scr+": "`scr+`", "scr+ wide": "`scr+wide`"}


def sections(runs: Runs) -> list[Section]:
    """The comparison in every cell of Table 1, and the ablations."""
    blocks: list[Block] = [
        Text(
            "`scr+` is SCR with averaged weights and more: the same encoder, memory and memory batch, in one pass. "
            "One gradient step for a batch, as in SCR; `scr+wide` has the full ResNet18. All with "
            "their own classifier, without review. Below each figure: the gain over SCR in points (the mean over seeds "
            "of the difference between the runs of one seed), and, where both ran on the same day, the machine's time "
            "for a run, SCR's being 1."
        )
    ]
    for order in ORDERS:
        blocks += comparison(runs, order)
    return [Section("Beyond the paper", blocks), Section("The parts of scr+", _parts(runs), level=3)]


def gain(runs: Runs, better: RunConfig, base: RunConfig) -> Interval | None:
    """Mean difference over the seeds that both have."""
    ours, theirs = runs.values(better), runs.values(base)
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return interval(differences) if differences else None


def _time(runs: Runs, slower: RunConfig, base: RunConfig) -> str:
    """How many times as long, on the same machine and the same day: the engine becomes faster as time goes by.

    Empty where nobody can say, as of runs of both that took turns on one device.
    """
    means = []
    for config in (slower, base):
        alike: dict[tuple[str, str], list[float]] = {}
        for entry in filter(has_own_time, runs.seeds(config)):
            alike.setdefault((entry.result.machine["name"], entry.date[:10]), []).append(seconds_of(entry))
        means.append({name: sum(values) / len(values) for name, values in alike.items()})
    both = means[0].keys() & means[1].keys()
    if not both:
        return ""
    last = max(both, key=lambda place: (place[1], place[0]))
    return f"{means[0][last] / means[1][last]:.2f}" if means[1][last] else ""


def comparison(runs: Runs, order: Order) -> list[Block]:
    """A table of the cells that were measured, and bars for each data set."""
    there = {name: [cell for cell in COLUMNS if runs.values(variant(name, *cell, order=order))] for name in SHOWN}
    shown = [name for name in SHOWN if there[name]]
    measured = [cell for cell in COLUMNS if any(cell in there[name] for name in SHOWN if name != "scr")]
    if not measured:
        return [Missing("`scr+`", command("beyond"))] if order == "natural" else []
    rows = [_row(runs, cell, shown, order) for cell in (COLUMNS if order == "natural" else measured)]
    by_seed = " by the seed" if order == "shuffled" else ""
    head = ["data set and memory", *(TITLES[name] for name in shown), "iid offline"]
    blocks: list[Block] = [Text(f"Class order: {order}{by_seed}."), Table(head, rows)]
    if order == "natural":
        lacking = [place_text(*cell) for cell in COLUMNS if cell not in there["scr+"]]
        blocks += [Missing(f"`scr+` on {'; '.join(lacking)}", command("beyond"))] if lacking else []
        blocks += [_picture(runs, dataset, shown) for dataset in _datasets(measured)]
    return blocks


def _row(runs: Runs, cell: tuple[str, int], shown: Sequence[str], order: Order) -> list[str | Cell]:
    base = variant("scr", *cell, order=order)
    row: list[str | Cell] = [place_text(*cell)]
    for name in shown:
        config = variant(name, *cell, order=order)
        gained = "" if name == "scr" else difference_text(gain(runs, config, base))
        time = "" if name == "scr" else _time(runs, config, base)
        row.append(Cell((figure_text(runs.accuracy(config)), f"{gained}, time {time}" if time else gained)))
    return [*row, figure_text(runs.accuracy(config_for("offline", cell[0], order=order), "softmax"))]


def _datasets(cells: Sequence[tuple[str, int]]) -> list[str]:
    return list(dict.fromkeys(dataset for dataset, _ in cells))


def _picture(runs: Runs, dataset: str, shown: Sequence[str]) -> Picture:
    sizes = DATASETS[dataset].memory
    groups = {
        TITLES[name].replace("`", ""): [list(runs.values(variant(name, dataset, size)).values()) for size in sizes]
        for name in shown
    }
    offline = list(runs.values(config_for("offline", dataset), "softmax").values())
    if offline:
        groups["iid offline"] = [offline] * len(sizes)
    return Picture(
        f"beyond-{dataset}",
        "bars",
        {
            "title": place_text(dataset),
            "names": [size_text(size) for size in sizes],
            "groups": groups,
            "xlabel": "images in memory",
        },
        f"scr+ beside SCR, {place_text(dataset)}",
        f"Bars for {', '.join(groups)} at each memory size: average accuracy at the end of the stream.",
        [],
        command("beyond", [dataset]),
    )


def _parts(runs: Runs) -> list[Block]:
    blocks: list[Block] = [
        Text("Each part added to SCR alone, and taken away from `scr+` alone; in points, over the same seeds.")
    ]
    for dataset, size in STUDIES:
        configs = ablations_of("scr+", dataset, size)
        rows = []
        for part in parts_of("scr+"):
            added, without = configs[f"scr + {part}"], configs[f"scr+ − {part}"]
            if runs.values(added) or runs.values(without):
                rows.append(
                    [
                        part.replace("_", " "),
                        figure_text(runs.accuracy(added)),
                        difference_text(gain(runs, added, configs["scr"])),
                        figure_text(runs.accuracy(without)),
                        difference_text(gain(runs, without, configs["scr+"])),
                    ]
                )
        if rows:
            head = [place_text(dataset, size), "SCR with it", "against SCR", "`scr+` without it", "against `scr+`"]
            blocks.append(Table(head, rows))
        if lacking := [name.replace("_", " ") for name, config in configs.items() if not runs.values(config)]:
            what = f"{', '.join(lacking)} on {place_text(dataset, size)}"
            blocks.append(Missing(what, command("beyond-ablations", [dataset])))
    return blocks
