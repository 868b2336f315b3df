"""The figures of the paper and its ablations, from runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrlearn.experiments.protocol import ABLATIONS, FIGURES, RECIPES, STUDY, Ablation, Figure, config_for, paper
from scrlearn.experiments.report.document import Block, Code, Missing, Picture, Section, Text
from scrlearn.experiments.report.runs import (
    Runs,
    command,
    has_own_time,
    place_text,
    seconds_of,
    seeds_text,
    values_of,
)
from scrlearn.experiments.store import Entry

Place = tuple[str, int]
Found = dict[str, list[Entry]]  # runs by method
CLASSIFIERS = {"softmax": "softmax", "ncm": "nearest class mean"}


def sections(runs: Runs) -> list[Section]:
    """A section for each figure of the paper, and one for the ablations."""
    found = []
    for figure in FIGURES:
        blocks = [block for place in figure.places for block in BUILDERS[figure.name](figure, place, runs)]
        found.append(Section(f"Figure {figure.number}: {_lower(figure.title)}", blocks))
    return [*found, ablations(runs)]


def _lower(title: str) -> str:
    return title[0].lower() + title[1:]


def _find(figure: Figure, place: Place, runs: Runs, keep: Callable[[Entry], bool] = lambda entry: True) -> Found:
    """The runs of a figure's methods that have what it shows."""
    found = {method: [e for e in runs.seeds(config_for(method, *place)) if keep(e)] for method in figure.methods}
    return {method: entries for method, entries in found.items() if entries}


def _titles(methods: Sequence[str]) -> str:
    return ", ".join(RECIPES[method].title for method in methods)


def _made_by(place: Place, methods: Sequence[str]) -> str:
    memory = [place[1]] if any(RECIPES[method].replays for method in methods) else []
    return command("figures", [place[0]], methods, memory)


def _with_missing(
    figure: Figure, place: Place, found: Found, picture: Callable[[], Picture], but: Sequence[str] = ()
) -> list[Block]:
    """The picture if there is anything to show, and what is missing in it, but for some that are told elsewhere."""
    lacking = [method for method in figure.methods if method not in found and method not in but]
    where = f"{_titles(lacking)} on {place_text(*place)}"
    blocks: list[Block] = [picture()] if found else []
    return [*blocks, Missing(where, _made_by(place, lacking))] if lacking else blocks


def _name(figure: Figure, place: Place) -> str:
    """Of the files: with the place where the paper has several."""
    return figure.name if len(figure.places) == 1 else f"{figure.name}-{place[0]}"


def _one_seed(found: Found) -> str:
    """Which seeds a picture of single runs shows."""
    seeds = {RECIPES[method].title: entries[0].result.seed for method, entries in found.items()}
    if len(set(seeds.values())) == 1:
        return f"Seed {next(iter(seeds.values()))}."
    return f"Seeds: {', '.join(f'{name} {seed}' for name, seed in seeds.items())}."


# ---------------------------------------------------------------------------------------------------- one for each


def _tsne(figure: Figure, place: Place, runs: Runs) -> list[Block]:
    """The paper's figure, and beside it the same of images that nobody has trained on."""
    memory = (_name(figure, place), "memory", "the memory", "each image in the memory")
    test = (f"{_name(figure, place)}-test", "test", "test images", "each of up to 2,000 test images")
    return [block for panel in (memory, test) for block in _map(figure, place, runs, *panel)]


def _map(figure: Figure, place: Place, runs: Runs, name: str, artefact: str, images: str, points: str) -> list[Block]:
    found = _find(figure, place, runs, lambda entry: artefact in entry.artefacts)

    def picture() -> Picture:
        arrays = {RECIPES[method].title: entries[0].arrays(artefact) for method, entries in found.items()}
        shares = [f"{title} {float(one['alike'][0]):.0%}" for title, one in arrays.items() if "alike" in one]
        said = f" Nearest other image of the same class, by the embeddings: {', '.join(shares)}." if shares else ""
        return Picture(
            name,
            "memory maps",
            {"maps": {title: [one["places"].tolist(), one["labels"].tolist()] for title, one in arrays.items()}},
            f"t-SNE of {images} at the end of the stream, {place_text(*place)}",
            f"Scatter plots, one for each of {_titles(list(found))}: a point for {points}; where points of one class "
            "lie together, the encoder has learned to tell it apart.",
            [f"Each class has its colour and marker. {_one_seed(found)}{said}"],
            _made_by(place, figure.methods),
        )

    return _with_missing(figure, place, found, picture)


def _confusion(figure: Figure, place: Place, runs: Runs) -> list[Block]:
    found = _find(figure, place, runs, lambda e: "confusion" in e.result.by_classifier[e.result.classifier])

    def picture() -> Picture:
        results = {method: entries[0].result for method, entries in found.items()}
        first = next(iter(results.values()))
        alike = {method: one for method, one in results.items() if one.class_names == first.class_names}
        data = {
            "matrices": {
                f"{RECIPES[method].title}, {CLASSIFIERS[one.classifier]}": one.by_classifier[one.classifier][
                    "confusion"
                ]
                for method, one in alike.items()
            },
            "class_names": first.class_names,
            "task_sizes": [len(task) for task in first.tasks],
        }
        return Picture(
            _name(figure, place),
            "confusions",
            data,
            f"Confusion matrices at the end of the stream, {place_text(*place)}",
            f"Heat maps of {_titles(list(alike))}: rows are true classes, columns predicted ones, in the order in "
            "which the stream brought them. A dark last block of columns is bias to the newest task, a dark diagonal "
            "is right answers.",
            [_one_seed({method: found[method] for method in alike})],
            _made_by(place, figure.methods),
        )

    return _with_missing(figure, place, found, picture)


def _head(figure: Figure, place: Place, runs: Runs) -> list[Block]:
    found = _find(figure, place, runs, lambda e: "head_weights" in e.result.by_classifier.get("softmax", {}))

    def picture() -> Picture:
        (method, entries), *_ = found.items()
        weights = [entry.result.by_classifier["softmax"]["head_weights"] for entry in entries]
        new, old = ([[task[i] for task in run] for run in weights] for i in range(2))
        return Picture(
            _name(figure, place),
            "head weights",
            {"new": new, "old": old, "title": f"{RECIPES[method].title}, {place_text(*place)}"},
            f"Mean weight of {RECIPES[method].title}'s last layer, {place_text(*place)}",
            "Two lines over the tasks: the mean weight of the softmax layer for the classes of the newest task, and "
            "for those of all tasks before it. The gap between them is the bias to the newest task.",
            [f"Bands are 95% intervals. {seeds_text({method: len(entries)})}"],
            _made_by(place, figure.methods),
        )

    return _with_missing(figure, place, found, picture)


def _softmax_ncm(figure: Figure, place: Place, runs: Runs) -> list[Block]:
    found = _find(figure, place, runs, lambda entry: {"softmax", "ncm"} <= entry.result.by_classifier.keys())

    def picture() -> Picture:
        both = ("softmax", "ncm")
        bars = {
            RECIPES[method].title: [list(values_of(entries, classifier).values()) for classifier in both]
            for method, entries in found.items()
        }
        published: dict[str, list[Any]] = {}
        for method in found:
            theirs = [paper(method, classifier, *place) for classifier in both]
            published[RECIPES[method].title] = [None if one is None else [one.mean, one.half_width] for one in theirs]
        return Picture(
            _name(figure, place),
            "softmax and ncm",
            {"title": place_text(*place), "bars": bars, "paper": published},
            f"Softmax against the nearest class mean, {place_text(*place)}",
            f"Two bars for each of {_titles(list(found))}: average accuracy of the same runs with the softmax layer "
            "and with the nearest class mean. Diamonds are the paper's figures.",
            [f"Both classifiers answer from the same runs. {_counts(found)}"],
            _made_by(place, figure.methods),
        )

    return _with_missing(figure, place, found, picture)


def _counts(found: Mapping[str, Sequence[Entry]]) -> str:
    return seeds_text({RECIPES[method].title: len(entries) for method, entries in found.items()})


def _accuracy(figure: Figure, place: Place, runs: Runs) -> list[Block]:
    found = _find(figure, place, runs, lambda entry: "ncm" in entry.result.by_classifier)

    def picture() -> Picture:
        curves = {
            RECIPES[method].title: [entry.result.by_classifier["ncm"]["average_over_time"] for entry in entries]
            for method, entries in sorted(found.items(), key=lambda item: item[0] != "scr")  # the strongest colour
        }
        return Picture(
            _name(figure, place),
            "accuracy over tasks",
            {"title": place_text(*place), "curves": curves},
            f"Average accuracy on the tasks seen, {place_text(*place)}",
            f"A line for each of {_titles(list(found))}: accuracy on all tasks seen so far, after each task, with the "
            "nearest class mean.",
            [f"All with the nearest class mean; bands are 95% intervals. {_counts(found)}"],
            _made_by(place, figure.methods),
        )

    return _with_missing(figure, place, found, picture)


def _run_time(figure: Figure, place: Place, runs: Runs) -> list[Block]:
    everywhere = _find(figure, place, runs, has_own_time)
    machines = Counter({(e.result.machine["name"], m): 1 for m, entries in everywhere.items() for e in entries})
    by_machine = Counter(name for name, _ in machines)
    # one machine for all bars: the one that has run the most methods
    machine = min(by_machine, key=lambda name: (-by_machine[name], name), default="")
    found = {m: [e for e in entries if e.result.machine["name"] == machine] for m, entries in everywhere.items()}
    found = {method: entries for method, entries in found.items() if entries}

    def picture() -> Picture:
        seconds = {RECIPES[method].title: list(map(seconds_of, entries)) for method, entries in found.items()}
        beside = sorted({int(e.result.seconds.get("side_by_side", 1)) for entries in found.values() for e in entries})
        span = str(beside[0]) if len(beside) == 1 else f"{beside[0]} to {beside[-1]}"
        days = sorted({entry.date[:10] for entries in found.values() for entry in entries})
        told = [
            f"Seconds of the machine for a run; {span} ran side by side, and what they took is divided by their "
            f"number. {_counts(found)}"
        ]
        if len(days) > 1:
            told.append(f"Made from {days[0]} to {days[-1]}: what ran later may be faster for that.")
        return Picture(
            _name(figure, place),
            "run times",
            {"title": f"{place_text(*place)}, {machine}", "seconds": seconds},
            f"Run time, training and inference, {place_text(*place)}, on {machine}",
            f"A bar for each of {_titles(list(found))}: seconds for a whole run.",
            told,
            _made_by(place, figure.methods),
        )

    made = _find(figure, place, runs)
    timeless = [method for method in made if method not in everywhere]
    blocks = _with_missing(figure, place, found, picture, but=timeless)
    if timeless:
        again = f"{_made_by(place, timeless)} --store again.db"
        why = "made while runs of other methods took turns with them on the device, and so without a time of their own"
        blocks.append(Text(f"Left out are {_titles(timeless)}: {why}. Made again, each method by itself: `{again}`"))
    return blocks


BUILDERS: dict[str, Callable[[Figure, Place, Runs], list[Block]]] = {
    "tsne": _tsne,
    "confusion": _confusion,
    "head-weights": _head,
    "softmax-ncm": _softmax_ncm,
    "accuracy": _accuracy,
    "run-time": _run_time,
}

# ------------------------------------------------------------------------------------------------------------ ablations


def ablations(runs: Runs) -> Section:
    """The four ablations of SCR."""
    blocks: list[Block] = [
        Text(f"One choice of SCR changed at a time, on {place_text(*STUDY)}, without review."),
        Code([command("ablations")]),
    ]
    lacking = []
    for ablation in ABLATIONS:
        choices = {
            label: list(runs.values(config_for("scr", *STUDY, options=options)).values())
            for label, options in ablation.choices.items()
        }
        found = {label: values for label, values in choices.items() if values}
        if found.keys() - {ablation.chosen}:  # the paper's own choice alone compares nothing
            blocks.append(_ablation(ablation, found))
        if len(found) < len(choices):
            lacking.append(f"{_lower(ablation.title)} {', '.join(label for label in choices if label not in found)}")
    if lacking:
        blocks.append(Missing("; ".join(lacking), command("ablations")))
    return Section("Figure 7: ablations of SCR", blocks)


def _ablation(ablation: Ablation, found: Mapping[str, Sequence[float]]) -> Picture:
    kind = "A line over the values" if ablation.ordered else "A bar for each alternative"
    return Picture(
        f"ablation-{ablation.name}",
        "ablation",
        {
            "title": ablation.title,
            "choices": found,
            "chosen": ablation.chosen,
            "ordered": ablation.ordered,
            "xlabel": _lower(ablation.title),
        },
        f"{ablation.title} of SCR, {place_text(*STUDY)}",
        f"{kind} of {_lower(ablation.title)}: average accuracy at the end of the stream.",
        [seeds_text({label: len(values) for label, values in found.items()}), f"The paper says: {ablation.paper}."],
        command("ablations"),
    )
