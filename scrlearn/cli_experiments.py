"""`scr reproduce`, `scr report` and `scr results`: the paper's experiments and their results, on the command line."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from scrlearn.cli import (
    Commands,
    DataRoot,
    Device,
    Engine,
    JsonFlag,
    Precision,
    QuietFlag,
    SideBySide,
    Tensorboard,
    _at_work,
    _console,
    _new_table,
    _print_json,
    _say,
    app,
)
from scrlearn.errors import InputError, suggest

# torch takes seconds to load, so what needs it is imported by the commands, and help and mistakes stay quick
if TYPE_CHECKING:
    from scrlearn.experiments import RunConfig
    from scrlearn.experiments.executors import Executor
    from scrlearn.experiments.reproduce import Sweep
    from scrlearn.experiments.store import Entry, Merged, Store

DEFAULT_STORE = Path("results.db")
StoreFile = Annotated[
    Path, typer.Option("--store", envvar="SCRLEARN_STORE", show_envvar=True, help="The result store, one file.")
]

# ----------------------------------------------------------------------------------------------------------- reproduce


@app.command()
def reproduce(
    target: Annotated[
        str,
        typer.Argument(
            help="paper, or a part of it: table1, figures, ablations; for scr+: beyond, beyond-ablations, beyond-wide."
        ),
    ],
    datasets: Annotated[
        list[str] | None, typer.Option("--datasets", help="Only these, by comma. (default: all of the paper)")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--methods", help="Only these, by comma. (default: all of the paper)")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option("--memory", help="Only these sizes, by comma. (default: all of the paper)")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds for each. (default: 10 for table1 and beyond, 5 for the others)")
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed: another share on another machine.")] = 0,
    order: Annotated[
        str, typer.Option(help="Class order: natural as in the paper, or shuffled by the seed.")
    ] = "natural",
    review: Annotated[
        bool | None,
        typer.Option(
            "--review/--no-review", help="SCR with review, or without. (default: table1 both, others without)"
        ),
    ] = None,
    store: StoreFile = DEFAULT_STORE,
    workers: Annotated[
        int, typer.Option(min=0, help="Local processes that share the runs. 0: in this one, side by side on a GPU.")
    ] = 0,
    parallel: SideBySide = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: local, auto, HOST:PORT or ray://HOST:PORT."),
    ] = None,
    ray_cpus: Annotated[int, typer.Option(min=1, help="CPUs of a task on Ray, and threads in it.")] = 1,
    ray_gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs of a task on Ray. (default: 1 where the cluster has any)")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Training images of each class, to try things out.")] = None,
    data_root: DataRoot = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch data sets that are not there.")] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
    tensorboard: Tensorboard = None,
    keep_folders: Annotated[
        bool, typer.Option("--keep-folders", help="Keep the last checkpoint of each run, beside the store.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and run nothing.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Run the paper's experiments, all of them or a part, and put every result into a store.

    What the store has already is skipped. A sweep that was stopped or killed goes on with the same command. A run that
    fails is told at the end, with exit code 1, and does not stop the others.
    """
    from scrlearn.experiments import beyond, protocol
    from scrlearn.experiments.store import Store

    targets = (protocol.PAPER, *protocol.TARGETS, *beyond.TARGETS)
    if target not in targets:
        raise InputError(f'There is no target "{target}".{suggest(target, targets)}')
    runs_for = beyond.runs_for if target in beyond.TARGETS else protocol.runs_for
    configs = runs_for(
        target,
        _listed(datasets),
        _listed(methods),
        _sizes(memory),
        seeds,
        first_seed=first_seed,
        order=_order(order),
        review=review,
        limit=limit,
        device=device,
        precision=precision,
        engine=engine,
    )
    if dry_run:
        _show_plan(configs, Store(store) if store.exists() else None, as_json)
        return
    executor = _executor(workers, parallel, data_root, download, ray, ray_cpus, ray_gpus)
    results = Store(store)
    report = _sweep(target, configs, results, executor, tensorboard, keep_folders, quiet)
    _show_sweep(report, configs, results, as_json, quiet)
    if report.failures:
        raise typer.Exit(1)


def _listed(given: list[str] | None) -> list[str] | None:
    """`--datasets a,b --datasets c` is a, b and c."""
    names = [name for text in given or [] for name in text.split(",") if name]
    return names or None


def _sizes(given: list[str] | None) -> list[int] | None:
    names = _listed(given)
    try:
        return None if names is None else [int(name) for name in names]
    except ValueError as error:
        raise typer.BadParameter(f"{names} are not all numbers, such as 1000,2000.", param_hint="--memory") from error


def _order(order: str) -> Any:
    if order not in ("natural", "shuffled"):
        raise typer.BadParameter(f'"{order}" is neither natural nor shuffled.', param_hint="--order")
    return order


def _executor(
    workers: int,
    parallel: int | None,
    data_root: Path | None,
    download: bool,
    ray: str | None,
    ray_cpus: int,
    ray_gpus: float | None,
) -> Executor:
    from scrlearn.experiments.executors import LocalDevice, Surroundings
    from scrlearn.experiments.processes import Processes
    from scrlearn.experiments.ray_executor import RayTasks

    surroundings = Surroundings(data_root, download)
    if ray is not None:
        if workers:
            raise typer.BadParameter("Runs are shared by --workers of this machine or by --ray, not by both.")
        return RayTasks(ray, surroundings, cpus=ray_cpus, gpus=ray_gpus, parallel=parallel)
    return Processes(workers, surroundings) if workers else LocalDevice(surroundings, parallel)


def _sweep(
    target: str,
    configs: list[RunConfig],
    store: Store,
    executor: Executor,
    tensorboard: Path | None,
    keep_folders: bool,
    quiet: bool,
) -> Sweep:
    from scrlearn.devices import keep_freed_memory
    from scrlearn.experiments.events import Events
    from scrlearn.experiments.reproduce import Watcher, is_done, sweep
    from scrlearn.experiments.sweep_progress import SweepBars

    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        if tensorboard is not None:
            watchers.append(stack.enter_context(Events(tensorboard)))
        if not quiet:
            there = sum(is_done(store, config) for config in configs)
            watchers.append(stack.enter_context(SweepBars(target, there, len(configs))))
        keep_freed_memory()
        return sweep(configs, store, executor, watchers, keep_folders=keep_folders)


def _show_sweep(report: Sweep, configs: list[RunConfig], store: Store, as_json: bool, quiet: bool) -> None:
    if as_json:
        failed = [{"run": failure.run, "error": failure.error} for failure in report.failures]
        numbers = {"wanted": report.wanted, "there": report.there, "finished": report.finished}
        _print_json({**numbers, "failed": failed, "store": str(store.path), "figures": _comparison(configs, store)})
    elif not quiet:
        _show_comparison(configs, store)
        typer.echo(
            f"{report.finished} runs made, {report.there} were there already, {len(report.failures)} failed; "
            f"{report.wanted} were asked for. All results are in {store.path}."
        )
    for error, runs in report.reasons().items():
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        _say(f"[red]failed:[/] {escape(runs[0])}{more}: {escape(error)}", markup=True)


def _comparison(configs: list[RunConfig], store: Store) -> list[dict[str, Any]]:
    from scrlearn.experiments.comparison import compare

    return [
        {
            "run": line.name,
            "classifier": line.classifier,
            "seeds": 0 if line.ours is None else line.ours.n,
            "wanted": line.wanted,
            "average_accuracy": None if line.ours is None else line.ours.mean,
            "half_width": None if line.ours is None or line.ours.n < 2 else line.ours.half_width,
            "paper": None if line.paper is None else line.paper.mean,
            "paper_half_width": None if line.paper is None else line.paper.half_width,
            "verdict": line.verdict or None,
        }
        for line in compare(configs, store)
    ]


def _show_comparison(configs: list[RunConfig], store: Store) -> None:
    from scrlearn.experiments.comparison import compare

    table = _new_table("run", "classifier")
    for heading in ("seeds", "average accuracy (%)", "paper (%)"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for line in compare(configs, store):
        seeds = f"{0 if line.ours is None else line.ours.n}/{line.wanted}"
        ours, theirs = ("" if value is None else value.format() for value in (line.ours, line.paper))
        table.add_row(escape(line.name), line.classifier, seeds, ours, theirs, line.verdict)
    _console().print(table)


def _show_plan(configs: list[RunConfig], store: Store | None, as_json: bool) -> None:
    from scrlearn.experiments.identity import describe, run_key
    from scrlearn.experiments.reproduce import is_done

    done = [store is not None and is_done(store, config) for config in configs]
    if as_json:
        runs = [
            {"key": run_key(config), "run": describe(config), "done": there, "config": config.to_dict()}
            for config, there in zip(configs, done, strict=True)
        ]
        _print_json({"wanted": len(configs), "there": sum(done), "runs": runs})
        return
    families: dict[str, list[bool]] = {}
    for config, there in zip(configs, done, strict=True):
        families.setdefault(describe(config, seed=False), []).append(there)
    table = _new_table("run")
    table.add_column("seeds done", justify="right")
    for name, members in families.items():
        table.add_row(escape(name), f"{sum(members)}/{len(members)}")
    _console().print(table)
    typer.echo(f"{len(configs)} runs: {sum(done)} done, {len(configs) - sum(done)} to do.")


# -------------------------------------------------------------------------------------------------------------- report


@app.command()
def report(
    store: Annotated[
        list[Path] | None,
        typer.Option(
            envvar="SCRLEARN_STORE",
            show_envvar=True,
            help="A result store, a JSON export or a folder of runs; may be given several times. (default: results.db)",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report.")] = Path("report"),
    notes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Explanations of figures outside the paper's interval, as TOML.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Table 1 and every figure of the paper from the store: a web page that stands alone, Markdown, PNG and SVG.

    Our means stand beside the paper's. What the store has not is said in its place, with the command that makes it.
    """
    from scrlearn.experiments.exports import is_store
    from scrlearn.experiments.report import build, load_notes, read_runs, write

    with _at_work("Reading runs and drawing figures", quiet):
        sources = store or [DEFAULT_STORE]
        entries = read_runs(sources)
        document = build(entries, [] if notes is None else load_notes(notes))
        if len(sources) == 1 and sources[0] != DEFAULT_STORE and is_store(sources[0]):
            document = document.with_store(shlex.quote(str(sources[0])))  # what is pasted goes on with this one
        written = write(document, out)
    if as_json:
        files = {"page": str(written.page), "markdown": str(written.markdown)}
        _print_json({"runs": len(entries), **files, "pictures": [str(path) for path in written.pictures]})
    elif not quiet:
        count = len(written.pictures) // 2  # each as PNG and SVG
        pictures = f"{count} picture{'' if count == 1 else 's'}"
        typer.echo(f"{len(entries)} runs, {pictures}. Open {written.page}, or read {written.markdown}.")


# ------------------------------------------------------------------------------------------------------------- results

results_app = typer.Typer(cls=Commands, help="The store of results: look, export, merge.", no_args_is_help=True)
app.add_typer(results_app, name="results")

Dataset = Annotated[str | None, typer.Option("--dataset", help="Only this data set.")]
Method = Annotated[str | None, typer.Option("--method", help="Only this method.")]
Memory = Annotated[int | None, typer.Option("--memory", help="Only this memory size.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Only this seed.")]


def _open(path: Path) -> Store:
    from scrlearn.experiments.store import Store

    return Store(path, create=False)


@results_app.command("list")
def results_list(
    store: StoreFile = DEFAULT_STORE,
    dataset: Dataset = None,
    method: Method = None,
    memory: Memory = None,
    seed: Seed = None,
    runs: Annotated[bool, typer.Option("--runs", help="Every run, with its key; not means over seeds.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """What there is: mean ± 95% interval over the seeds of each configuration, or every run."""
    from scrlearn.experiments.exports import rows

    entries = _open(store).query(dataset=dataset, method=method, memory_size=memory, seed=seed)
    if as_json:
        _print_json(list(rows(entries)))
    elif runs:
        _list_runs(entries)
    else:
        _list_means(entries)


def _list_runs(entries: list[Entry]) -> None:
    from scrlearn.experiments.identity import describe

    table = _new_table()
    table.add_column("key", no_wrap=True)  # whole on any terminal: `scr results show` is given it
    table.add_column("run", overflow="fold")
    table.add_column("accuracy (%)", justify="right", overflow="fold")
    for heading in ("device", "scrlearn", "date"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        figures = entry.result.by_classifier
        known = {name: figures[name]["average_accuracy"] for name in sorted(figures)}
        shown = [f"{name} {'–' if value is None else f'{100 * value:.1f}'}" for name, value in known.items()]
        version, device = entry.result.versions["scrlearn"], entry.result.machine["device"]
        table.add_row(entry.key[:8], escape(describe(entry.config)), ", ".join(shown), device, version, entry.date[:10])
    _console().print(table)
    typer.echo(f"{len(entries)} runs.")


def _list_means(entries: list[Entry]) -> None:
    from scrlearn.evaluation import interval
    from scrlearn.experiments.identity import describe, family_key

    families: dict[str, list[Entry]] = {}
    for entry in entries:
        families.setdefault(family_key(entry.config), []).append(entry)
    table = _new_table("run", "classifier")
    for heading in ("seeds", "average accuracy (%)", "forgetting (%)"):
        table.add_column(heading, justify="right")
    for members in families.values():
        for classifier in sorted({name for entry in members for name in entry.result.by_classifier}, reverse=True):
            measured = [entry.result.by_classifier.get(classifier) for entry in members]
            figures = [one for one in measured if one is not None]
            known = {
                name: [value[name] for value in figures if value[name] is not None]
                for name in ("average_accuracy", "forgetting")
            }
            shown = [interval(values).format() if values else "–" for values in known.values()]
            table.add_row(escape(describe(members[0].config, seed=False)), classifier, str(len(figures)), *shown)
    _console().print(table)
    typer.echo(f"{len(entries)} runs of {len(families)} configurations.")


@results_app.command("show")
def results_show(
    key: Annotated[str, typer.Argument(help="The beginning of a run's key (`scr results list --runs`).")],
    store: StoreFile = DEFAULT_STORE,
    as_json: JsonFlag = False,
) -> None:
    """Everything about one run."""
    from scrlearn.experiments.identity import describe

    entry = _open(store).find(key)
    result = entry.result
    if as_json:
        _print_json(
            {"key": entry.key, "date": entry.date, "artefacts": list(entry.artefacts), "result": result.to_dict()}
        )
        return
    console = _console()
    console.print(f"[bold]{escape(describe(entry.config))}[/]", highlight=False)
    for classifier, figures in sorted(result.by_classifier.items()):
        table = _new_table("after task", title=f"{classifier}: {_figures(figures)}")
        for task in range(1, len(result.tasks) + 1):
            table.add_column(f"on {task}", justify="right")
        for task, accuracies in enumerate(figures["accuracy_matrix"], 1):
            table.add_row(str(task), *("–" if value is None else f"{100 * value:.1f}" for value in accuracies))
        console.print(table)
    facts = {
        "key": entry.key,
        "date": entry.date,
        "machine": ", ".join(f"{name} {value}" for name, value in result.machine.items()),
        "versions": ", ".join(f"{name} {value}" for name, value in result.versions.items()),
        "seconds": ", ".join(f"{name} {value}" for name, value in result.seconds.items()),
        "options": ", ".join(f"{name}={value}" for name, value in result.method_options.items()),
        "artefacts": ", ".join(entry.artefacts) or "none",
    }
    for name, text in facts.items():
        console.print(f"{name}: {text}", highlight=False, markup=False)


def _figures(figures: dict[str, Any]) -> str:
    names = ("average_accuracy", "anytime_accuracy", "forgetting")
    parts = [f"{name.replace('_', ' ')} {100 * figures[name]:.1f}%" for name in names if figures[name] is not None]
    return ", ".join(parts)


@results_app.command("export")
def results_export(
    path: Annotated[
        Path, typer.Argument(help="FILE.csv, .parquet (tables), .json, .json.gz (everything), or a folder.")
    ],
    store: StoreFile = DEFAULT_STORE,
    dataset: Dataset = None,
    method: Method = None,
    memory: Memory = None,
    seed: Seed = None,
    quiet: QuietFlag = False,
) -> None:
    """Write runs to a file for other tools, or for another store."""
    from scrlearn.experiments.exports import export

    entries = _open(store).query(dataset=dataset, method=method, memory_size=memory, seed=seed)
    if not entries:
        raise InputError(f"There is no such run in {store}, so nothing to export.")
    with _at_work(f"Writing {len(entries)} runs", quiet):
        export(entries, path)
    if not quiet:
        typer.echo(f"{len(entries)} runs are in {path}.")


@results_app.command("merge")
def results_merge(
    others: Annotated[list[Path], typer.Argument(help="Other stores, or what `scr results export` wrote as JSON.")],
    store: StoreFile = DEFAULT_STORE,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Take in the runs of other stores; a run that is in several is there once."""
    from scrlearn.experiments.exports import add_path, is_store
    from scrlearn.experiments.store import Merged, Store

    _require(others)
    for other in filter(is_store, others):
        Store(other, create=False)  # all of them, before anything changes
    target, merged = Store(store), Merged()
    with _at_work("Taking runs in", quiet):
        for other in others:
            merged += target.merge(other) if is_store(other) else add_path(target, other)
    _say_merged(merged, store, as_json, quiet)


@results_app.command("add")
def results_add(
    paths: Annotated[list[Path], typer.Argument(help="Folders of runs, result.json files, JSON exports.")],
    store: StoreFile = DEFAULT_STORE,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Put in runs that were made elsewhere."""
    from scrlearn.experiments.exports import add_path
    from scrlearn.experiments.store import Merged, Store

    _require(paths)
    target, merged = Store(store), Merged()
    with _at_work("Taking runs in", quiet):
        for path in paths:
            merged += add_path(target, path)
    _say_merged(merged, store, as_json, quiet)


def _require(paths: list[Path]) -> None:
    """Say what is missing before anything changes."""
    for path in paths:
        if not path.exists():
            raise InputError(f'There is nothing at "{path}", so no runs to take in.')


def _say_merged(merged: Merged, store: Path, as_json: bool, quiet: bool) -> None:
    if as_json:
        conflicts = [vars(conflict) for conflict in merged.conflicts]
        _print_json({"new": merged.new, "same": merged.same, "conflicts": conflicts, "store": str(store)})
    elif not quiet:
        typer.echo(f"{store}: {merged}.")
        for conflict in merged.conflicts:
            _say(f"[yellow]other figures:[/] {escape(str(conflict))}", markup=True)


@results_app.command("remove")
def results_remove(
    keys: Annotated[list[str], typer.Argument(help="Beginnings of runs' keys (`scr results list --runs`).")],
    store: StoreFile = DEFAULT_STORE,
    quiet: QuietFlag = False,
) -> None:
    """Take runs out, so that `scr reproduce` makes them again."""
    target = _open(store)
    found = [target.full_key(key) for key in keys]
    removed = target.remove(found)
    if not quiet:
        typer.echo(f"{removed} run{'' if removed == 1 else 's'} removed from {store}.")
