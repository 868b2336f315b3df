"""Tables that are generated from the code, so that pages cannot say something else than it does.

    python docs/generate.py            # writes them into the pages
    python docs/generate.py --check    # says which pages are out of date; exit code 1 if any is

In a page, a table stands between ``<!-- generated: WHAT -->`` and ``<!-- end -->``; WHAT is a line of `TABLES`, with
its argument. What an option means is taken from the docstring of the class that has it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
HELP_DEFAULT = re.compile(r"\s*[\[(]default: (.+?)[\])]")


# ---------------------------------------------------------------- docstrings


def documented(owner: type) -> dict[str, str]:
    """What the docstring of a class says about each of its parameters."""
    lines = (inspect.getdoc(owner) or "").splitlines()
    rules = [i for i, line in enumerate(lines) if line and set(line) == {"-"}]
    meanings: dict[str, list[str]] = {}
    for rule, following in zip(rules, [*rules, len(lines) + 1][1:], strict=True):
        if lines[rule - 1] != "Parameters":
            continue
        names: list[str] = []
        for line in lines[rule + 1 : following - 1]:
            if line and not line.startswith(" "):
                names = [name.strip() for name in line.split(",")]
                meanings |= {name: [] for name in names}
            elif line:
                for name in names:
                    meanings[name].append(line.strip())
    return {name: " ".join(text) for name, text in meanings.items()}


def summary(owner: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(owner) or "").split("\n\n")[0].replace("\n", " ")


# ---------------------------------------------------------------- tables


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page_of(method: str) -> str:
    """The name of a method's page."""
    from scrlearn.learners.methods import plain_name

    return f"{plain_name(method)}.md"


def options(method: str) -> str:
    """Every option of a method with its default and its meaning, those of its own parts first."""
    from scrlearn.learners import find_method
    from scrlearn.learners.methods import PARTS, _classes, _signature

    spec = find_method(method)
    defaults = spec.parameters()
    learners = {f"learner {owner.__name__}": owner for owner in _classes(spec.learner)}
    parts = {role: known[defaults[role]] for role, known in PARTS.items() if role in defaults}
    own = {name for owner in learners.values() for name in _signature(owner)}
    said: dict[str, dict[str, str]] = {}
    for role, owner in {**parts, **learners}.items():
        meanings = documented(owner)
        for name in _signature(owner):
            # what a part has in common with the learner, the learner explains; what a learner passes on, its base
            if name in defaults and name in meanings and not (role in parts and name in own):
                said.setdefault(name, {})[role] = meanings[name]
    if unexplained := sorted(defaults.keys() - said.keys()):
        raise SystemExit(f"No docstring of {method}'s classes says what {', '.join(unexplained)} is (Parameters).")
    rows = [(f"`{name}`", f"`{defaults[name]!r}`", _meaning(name, roles)) for name, roles in said.items()]
    return table(("option", "default", "what it is"), rows)


def _meaning(name: str, said: dict[str, str]) -> str:
    """What an option is; where two parts use it differently, what it is for each."""
    from scrlearn.learners.methods import PARTS

    if name in PARTS:
        return f"{next(iter(said.values()))} {choices(PARTS[name])}"
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return " ".join(f"*{role}*: {meaning}" for role, meaning in said.items())


def choices(known: Mapping[str, type]) -> str:
    """The names of a part, for a person to choose from."""
    return "One of " + ", ".join(f"`{name}`" for name in known) + "."


def methods(_: str) -> str:
    """Every method: where it comes from, what it answers with, what it is made of."""
    from scrlearn.learners import METHODS

    rows = []
    for method in METHODS.values():
        values = method.parameters()
        made_of = [f"`{values[role]}`" for role in ("objective", "retrieve", "update") if role in values]
        source = f"{method.title} ({method.reference}, {method.year})"
        rows.append(
            (
                f"[`{method.name}`]({page_of(method.name)})",
                f"{source}: {method.summary}.",
                f"`{values['classifier']}`",
                " + ".join(made_of) or f"its own: `{method.learner.__name__}`",
            )
        )
    return table(("method", "what it does", "answers with", "made of"), rows)


def parts(role: str) -> str:
    """What can stand in one place of a method, with the options that come with it."""
    from scrlearn.learners.methods import PARTS, _signature

    rows = [
        (
            f"`{name}`",
            summary(part),
            ", ".join(f"`{option}={default!r}`" for option, default in _signature(part).items()),
        )
        for name, part in PARTS[role].items()
    ]
    return table((role, "what it does", "its options"), rows)


def datasets(_: str) -> str:
    """Every data set with a name."""
    from scrlearn.data import DEFAULT_TASKS, SOURCES

    rows = []
    for source in SOURCES.values():
        where = source.where(Path("ROOT"))
        rows.append(
            (
                f"`{source.name}`",
                source.description,
                str(DEFAULT_TASKS[source.name]),
                "part of the package" if where is None else f"`{where}`",
                "not needed" if where is None else "yes" if source.fetch else "no",
            )
        )
    return table(("name", "what it is", "tasks", "where", "can be downloaded"), rows)


def search(arguments: str) -> str:
    """The best trials of a search that `scr tune --json` wrote down, by the first of the classifiers named after it.

    Figures are means over the search's seeds, in percent.
    """
    name, *classifiers = arguments.split()
    found = json.loads((RESULTS / "tuning" / f"{name}.json").read_text(encoding="utf-8"))
    best = sorted(found["trials"], key=lambda trial: -statistics.mean(trial["by_classifier"][classifiers[0]]))[:8]
    options = list(best[0]["values"])
    rows = [
        (
            *(f"{trial['values'][option]}" for option in options),
            *(f"{100 * statistics.mean(trial['by_classifier'][classifier]):.1f}" for classifier in classifiers),
        )
        for trial in best
    ]
    headings = (*(f"`{option}`" for option in options), *(f"{classifier}, %" for classifier in classifiers))
    return f"{len(found['trials'])} trials; the best by `{classifiers[0]}`:\n\n{table(headings, rows)}"


def searched(name: str) -> Any:
    """What a search wrote down."""
    return json.loads((RESULTS / "tuning" / f"{name}.json").read_text(encoding="utf-8"))


def effects(arguments: str) -> str:
    """What each value of a search's options is worth, as `scr tune --json` wrote it down: a column a search."""
    searches = [searched(name) for name in arguments.split()]
    sizes = [_sizes(found) for found in searches]
    rows = []
    for name in searches[0]["effects"]:
        worth = [{str(value): mean for value, mean in found["effects"][name]} for found in searches]
        for value, _ in searches[0]["effects"][name]:
            rows.append((f"`{name}`", f"`{value}`", *(f"{100 * means[str(value)]:.1f}" for means in worth)))
    return table(("option", "value", *(f"M = {size}, %" for size in sizes)), rows)


def means(arguments: str) -> str:
    """The mean of all trials that had the same values of some options, for all classifiers that know all classes.

    The argument: searches, then options, with a bar between them.
    """
    names, options = (part.split() for part in arguments.split("|"))
    classifiers = ("ncm", "softmax", "combined")
    rows: dict[tuple[str, ...], list[str]] = {}
    searches = [searched(name) for name in names]
    for found in searches:
        groups: dict[tuple[str, ...], list[Any]] = {}
        for trial in found["trials"]:
            groups.setdefault(tuple(f"`{trial['values'][option]}`" for option in options), []).append(trial)
        for values, trials in sorted(groups.items()):
            for classifier in classifiers:
                of_all = [statistics.mean(trial["by_classifier"][classifier]) for trial in trials]
                rows.setdefault(values, []).append(f"{100 * statistics.mean(of_all):.1f}")
    sizes = [f"M = {_sizes(found)}: {classifier}, %" for found in searches for classifier in classifiers]
    return table((*(f"`{option}`" for option in options), *sizes), ((*values, *row) for values, row in rows.items()))


def _sizes(found: Any) -> str:
    return " and ".join(f"{size:,}" for size in found["memory_sizes"])


# ---------------------------------------------------------------- runs


def published() -> Any:
    """The runs in results/runs."""
    from scrlearn.experiments.report.files import read_runs
    from scrlearn.experiments.report.runs import Runs

    return Runs(read_runs([RESULTS / "runs"]))


def beyond(order: str) -> str:
    """`scr+` beside SCR in the cells that were measured, as the report has it."""
    from scrlearn.experiments.report.beyond_paper import comparison
    from scrlearn.experiments.report.markdown import blocks

    return blocks(comparison(published(), order), "images/results")  # type: ignore[arg-type]


def answers(order: str) -> str:
    """What all classifiers of `scr+` say in the cells that were measured."""
    from scrlearn.experiments.beyond import variant
    from scrlearn.experiments.protocol import DATASETS
    from scrlearn.experiments.report.runs import figure_text, place_text

    runs, rows = published(), []
    classifiers = ("ncm", "softmax", "combined", "lda")
    for dataset, split in DATASETS.items():
        for size in split.memory:
            config = variant("scr+", dataset, size, order=order)
            if runs.values(config):
                figures = [figure_text(runs.accuracy(config, classifier)) for classifier in classifiers]
                rows.append((place_text(dataset, size), *figures))
    return table(("`scr+`", *classifiers), rows)


# ---------------------------------------------------------------- speed


def measured(name: str) -> Any:
    """What a benchmark wrote down."""
    return json.loads((RESULTS / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def gpu_runs(names: str) -> str:
    """Whole runs on a GPU, as `benchmarks/gpu_run.py --json` wrote them down."""
    rows, machines = [], set()
    for name in names.split():
        found = measured(name)
        machines.add(f"{found['device']}, torch {found['torch']}")
        for what, row in found["rows"].items():
            method, seeds = re.fullmatch(r"(\S+), (\d+) seeds", what).groups()  # type: ignore[union-attr]
            rows.append((f"`{method}`", f"{found['memory']:,}", int(seeds), row))
    lines = [
        (method, memory, str(seeds), f"{row['seconds']:.1f}", f"**{row['seconds_per_run']:.1f}**", _gibibytes(row))
        for method, memory, seeds, row in sorted(rows, key=lambda row: (row[0] != rows[0][0], row[0], row[2]))
    ]
    headings = ("method", "M", "seeds side by side", "the command, s", "a run, s", "GPU memory, GiB")
    return f"{', '.join(sorted(machines))}:\n\n{table(headings, lines)}"


def speed(name: str) -> str:
    """The same in a sentence: one method, alone and side by side."""
    found = measured(name)
    runs = {tuple(what.removesuffix(" seeds").split(", ")): row for what, row in found["rows"].items()}
    method = next(iter(runs))[0]
    alone, ten = (runs[method, seeds]["seconds_per_run"] for seeds in ("1", "10"))
    return (
        f"On one {found['device']} a whole run of `{method}` on CIFAR-100 (each of 50,000 images once, M = "
        f"{found['memory']:,}; loading, training and ten evaluations) takes **{alone:.1f} s**, and **{ten:.1f} s** for "
        "each of ten seeds side by side.\n"
    )


def gpu_steps(name: str) -> str:
    """Steps on a GPU, as `benchmarks/gpu_step.py --json` wrote them down."""
    found = measured(name)
    card, least = found["card"], found["least_work"]
    rows = []
    for what, seconds in found["seconds_per_step"].items():
        of_card: tuple[str, ...] = ("", "")
        if what.startswith("scr,"):
            of_card = tuple(
                f"{least[kind] / seconds / card[f'{kind}_per_second']:.0%}" for kind in ("bytes", "operations")
            )
        rows.append((what, f"{1000 * seconds:.2f}", *of_card))
    about = (
        f"{found['device']}, torch {found['torch']}: it copies {card['bytes_per_second'] / 1e12:.2f} TB/s and computes "
        f"{card['operations_per_second'] / 1e12:.0f} TFLOP/s in bfloat16. Most memory at any time: "
        f"{found['peak_memory'] / 2**30:.1f} GiB."
    )
    return f"{about}\n\n{table(('a step of', 'ms', 'of the bandwidth', 'of the arithmetic'), rows)}"


def engines(_: str) -> str:
    """The same runs as graphs and eagerly: average accuracy at the end, over the same seeds."""
    from scrlearn.evaluation import interval
    from scrlearn.experiments.exports import read_export

    def accuracies(file: str) -> dict[int, float]:
        runs = read_export(RESULTS / file)
        return {run.result.seed: run.result.average_accuracy for run in runs if not run.result.review}

    graph = accuracies("runs/cifar10/scr-1000.runs.json")
    eager = accuracies("engine/cifar10-scr-1000-eager.runs.json")
    seeds = sorted(graph.keys() & eager.keys())
    rows = [
        (how, interval([found[seed] for seed in seeds]).format(), str(len(seeds)))
        for how, found in (("CUDA graphs", graph), ("eagerly", eager))
    ]
    return table(("SCR, CIFAR-10, M = 1,000", "average accuracy, %", "seeds"), rows)


def _gibibytes(row: Mapping[str, float]) -> str:
    return f"{row['peak_memory'] / 2**30:.1f}"


def steps(name: str) -> str:
    """A step of every method, as `benchmarks/methods.py --json` wrote it down."""
    found = measured(name)
    rows = [
        (f"`{method}`", f"{row['milliseconds']:.0f}", f"{row['times_er']:.1f}")
        for method, row in sorted(found["methods"].items(), key=lambda item: item[1]["milliseconds"])
    ]
    machine = f"{found['machine']}, {found['threads']} threads, torch {found['torch']}"
    return f"{machine}:\n\n{table(('method', 'a step, ms', 'times ER'), rows)}"


def against_plain(name: str) -> str:
    """A step against plain PyTorch, as `benchmarks/cpu_step.py --json` wrote it down."""
    found = measured(name)
    rows = [
        (what, f"{1000 * seconds:.0f}", f"{found['times_as_fast'][what]:.2f}")
        for what, seconds in found["seconds"].items()
    ]
    machine = f"{found['machine']}, {found['threads']} threads, torch {found['torch']}"
    return f"{machine}:\n\n{table(('SCR on images of 32×32', 'a step, ms', 'times as fast'), rows)}"


# ---------------------------------------------------------------- the command line


def commands() -> dict[str, Any]:
    """Every command by its words: "run", "data list", …"""
    import typer

    from scrlearn.cli import app

    def walk(command: Any, words: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(words), command
        else:
            for name, part in inner.items():
                yield from walk(part, (*words, name))

    return dict(walk(typer.main.get_command(app), ()))


def command(words: str) -> str:
    """What a command takes, as `--help` says it."""
    rows = [_parameter(parameter) for parameter in commands()[words].params if parameter.name != "help"]
    return table(("option", "default", "what it is"), rows)


def other_commands(_: str) -> str:
    """What the commands take that have no section with examples of their own yet."""
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    sections = []
    for words, found in commands().items():
        if f"<!-- generated: command {words} -->" not in page:
            text = " ".join((found.help or "").split("\n\n")[0].split())
            sections.append(f"### scr {words}\n\n{text}\n\n{command(words)}")
    return "\n".join(sections) or "Every command has its section above.\n"


def _parameter(parameter: Any) -> tuple[str, str, str]:
    text, value = parameter.help or "", parameter.default
    if not parameter.opts[0].startswith("-"):
        name = parameter.name.upper() + ("…" if parameter.nargs == -1 else "")
        return f"`{name}`", "needed" if parameter.required else "none", text
    names = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)]
    if parameter.metavar:
        names[0] = f"`{parameter.opts[0]} {parameter.metavar}`"
    if parameter.envvar:
        text += f" Also by the environment variable `{parameter.envvar}`."
    said = HELP_DEFAULT.search(text)
    if parameter.required:
        default = "needed"
    elif said:
        default = said[1]
    elif isinstance(value, bool):
        default = "yes" if value else "no"
    else:
        default = "none" if value in (None, []) else f"`{value}`"
    return ", ".join(names), default, HELP_DEFAULT.sub("", text)


# ---------------------------------------------------------------- pages

TABLES: dict[str, Callable[[str], str]] = {
    "options": options,
    "methods": methods,
    "parts": parts,
    "datasets": datasets,
    "search": search,
    "effects": effects,
    "means": means,
    "beyond": beyond,
    "answers": answers,
    "gpu-runs": gpu_runs,
    "gpu-steps": gpu_steps,
    "speed": speed,
    "engines": engines,
    "steps": steps,
    "against-plain": against_plain,
    "command": command,
    "other-commands": other_commands,
}


def refreshed(text: str) -> str:
    """A page with its tables as they must be now."""

    def fill(found: re.Match[str]) -> str:
        kind, _, argument = found[2].partition(" ")
        return f"{found[1]}\n{TABLES[kind](argument)}\n{found[4]}"

    return BLOCK.sub(fill, text)


def main(arguments: list[str] | None = None) -> int:
    """Write the pages that are out of date, or name them."""
    parser = argparse.ArgumentParser(description="Generate the tables of the documentation from the code.")
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    check = parser.parse_args(arguments).check
    stale = 0
    readme = DOCS.parent / "README.md"
    for page in [*sorted(DOCS.rglob("*.md")), *([readme] if readme.is_file() else [])]:
        old = page.read_text(encoding="utf-8")
        if (new := refreshed(old)) != old:
            stale += 1
            if not check:
                page.write_text(new, encoding="utf-8")
            print(f"{page.name} {'is out of date' if check else 'is written anew'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
