"""`scr …`: the command line. Thin: each command calls a function that Python users can call too.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (128 + the signal's number). Results go to standard output,
everything else to standard error.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from typer.core import TyperGroup

import scrlearn
from scrlearn.errors import ScrlearnError
from scrlearn.service.commands import named_values, serve

# torch takes seconds to load, so what needs it is imported by the commands, and help and mistakes stay quick
if TYPE_CHECKING:
    from scrlearn.experiments import Result, RunConfig

DEBUG = "SCRLEARN_DEBUG"


class Commands(TyperGroup):
    """Commands whose errors are one clear line; with SCRLEARN_DEBUG=1 they are tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error becomes a line and an exit code."""
        warnings.showwarning = _show_warning
        try:
            return super().invoke(ctx)
        except (ScrlearnError, OSError, KeyboardInterrupt) as error:
            if os.environ.get(DEBUG) or isinstance(error, BrokenPipeError):
                raise
            raise typer.Exit(_explain(error)) from error


def _explain(error: BaseException) -> int:
    """Say what happened in a line; the exit code."""
    number = getattr(error, "signal_number", 2)
    if isinstance(error, KeyboardInterrupt):
        _say(str(error) or "Interrupted.")
        if getattr(error, "checkpoint", None) is not None:
            _say(f"Go on with: {_command_to_go_on()}")
        return 128 + int(number)
    if isinstance(error, OSError) and error.filename is not None:
        _say(f"[red]error:[/] {escape(str(error.filename))}: {escape(error.strerror or str(error))}", markup=True)
        return 1
    _say(f"[red]error:[/] {escape(str(error))}", markup=True)
    return 1


def _command_to_go_on() -> str:
    kept = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    return shlex.join([*_program(), *kept, "--resume"])


def _program() -> list[str]:
    """The words that this command was called by: a script of somebody's own knows methods that `scr` does not."""
    return ["scr"] if Path(sys.argv[0]).stem in ("scr", "__main__") else ["python", sys.argv[0]]


def _at_work(text: str, quiet: bool) -> AbstractContextManager[object]:
    """Shows on a terminal that something goes on that takes a while."""
    return nullcontext() if quiet else Console(stderr=True).status(text)


def _say(text: str, markup: bool = False) -> None:
    """A line on standard error."""
    Console(stderr=True).print(text, markup=markup, highlight=False, soft_wrap=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _say(f"[yellow]warning:[/] {escape(str(message))}", markup=True)


def _console() -> Console:
    """Standard output; a pipe or file has no width of its own, and shall not be cut to 80 columns."""
    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=140) if free else Console()


def _new_table(*columns: str, title: str | None = None) -> Table:
    return Table(*columns, title=title, box=box.SIMPLE_HEAD, title_justify="left")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


app = typer.Typer(
    name="scr",
    cls=Commands,
    help="Learn image classes from a stream, one small batch at a time.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(
    cls=Commands, help="Data sets: which there are, whether they are complete.", no_args_is_help=True
)
app.add_typer(data_app, name="data")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no table.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(envvar="SCRLEARN_DATA", show_envvar=True, help="Folder that data sets lie in.", show_default=False),
]

# options that several commands share
DatasetName = Annotated[str, typer.Option(help="A name of `scr data list`, or folder:PATH.")]
MethodName = Annotated[str, typer.Option(help="A name of `scr methods`.")]
Tasks = Annotated[int | None, typer.Option(min=1, help="Tasks. (default: the field's for the data set)")]
ClassOrder = Annotated[str, typer.Option(help="Class order: natural, or shuffled by the seed.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images in a stream batch.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Training images of each class, at most.")]
DropLast = Annotated[bool, typer.Option(help="Leave out a task's last batch if it is not complete.")]
Split = Annotated[str, typer.Option(help="Training and test images: given, or shuffled anew, once for all seeds.")]
ClassesAhead = Annotated[
    bool, typer.Option("--classes-ahead", help="The softmax head trains all classes from the start.")
]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Bring images to this height and width.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")]
Precision = Annotated[str, typer.Option(help="auto, bf16, tf32, fp32.")]
Engine = Annotated[str, typer.Option(help="How a step runs: auto, eager, graph.")]
SideBySide = Annotated[
    int | None, typer.Option(min=1, help="Runs side by side on a GPU. (default: as many as it has room for)")
]
Tensorboard = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard event files there.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scr {scrlearn.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Learn image classes from a stream, one small batch at a time."""


# ---------------------------------------------------------------------------------------------------------------- run


@app.command()
def run(
    dataset: DatasetName = "digits",
    method: MethodName = "scr",
    memory: Annotated[int | None, typer.Option(min=0, help="Images kept. (default: the method's)")] = None,
    memory_batch: Annotated[
        int | None, typer.Option(min=1, help="Images replayed with each stream batch. (default: the method's)")
    ] = None,
    classifier: Annotated[
        str | None, typer.Option(help="softmax, ncm, combined, lda: whose figures come first. (default: the method's)")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; several go to OUT/seed-K.")] = 1,
    tasks: Tasks = None,
    order: ClassOrder = "natural",
    batch_size: BatchSize = 10,
    blurry: Annotated[float, typer.Option(help="Share of each class that comes in other tasks.")] = 0.0,
    imbalance: Annotated[float, typer.Option(help="Most frequent class against the least frequent one.")] = 1.0,
    limit: Limit = None,
    drop_last: DropLast = True,
    holdout: Annotated[
        float, typer.Option(help="Test on this share of the training images, held out, instead of the test images.")
    ] = 0.0,
    first_tasks: Annotated[int | None, typer.Option(min=1, help="End after this many tasks. (default: all)")] = None,
    split: Split = "given",
    review: Annotated[
        bool | None, typer.Option("--review/--no-review", help="Review the memory after each task.")
    ] = None,
    classes_ahead: ClassesAhead = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", metavar="NAME=VALUE", help="Any option of the method (`scr methods NAME`)."),
    ] = None,
    image_size: ImageSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Seeds side by side on a GPU. (default: as many as it has room for)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for result, checkpoint and pictures. (default: none)")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT, or start it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in OUT.")] = False,
    pictures: Annotated[bool, typer.Option(help="Draw pictures into OUT.")] = True,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Save this often. 0: after each batch.")] = 30.0,
    tensorboard: Tensorboard = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Run a method on a data set as a stream, and say how well it did.

    With --out, the run can be stopped at any moment (Ctrl-C, kill, power) and goes on with --resume, exactly as if it
    had never been stopped. A folder that holds a run already is refused without --resume or --overwrite.
    """
    if out is None and (resume or overwrite):
        raise typer.BadParameter("needs --out DIR", param_hint="--resume / --overwrite")
    if resume and overwrite:
        raise typer.BadParameter("go on with a run, or replace it?", param_hint="--resume / --overwrite")
    options = named_values(option or [])
    for name, value in (("memory_batch", memory_batch), ("review", review)):
        if value is not None and name in options:
            raise typer.BadParameter(f"{name} was given twice.", param_hint="--option")
        if value is not None:
            options[name] = value
    from scrlearn.devices import keep_freed_memory
    from scrlearn.experiments import RunConfig

    config = RunConfig(
        dataset=dataset,
        method=method,
        memory_size=memory,
        seed=seed,
        tasks=tasks,
        order=order,  # type: ignore[arg-type]  # checked where the stream is made
        batch_size=batch_size,
        blurry=blurry,
        imbalance=imbalance,
        limit=limit,
        drop_last=drop_last,
        classifier=classifier,
        options=options,
        image_size=image_size,
        precision=precision,
        device=device,
        classes_ahead=classes_ahead,
        engine=engine,
        holdout=holdout,
        split=split,
        first_tasks=first_tasks,
    )
    how = {
        "data_root": data_root,
        "download": download,
        "resume": resume,
        "overwrite": overwrite,
        "pictures": pictures,
        "checkpoint_seconds": checkpoint_seconds,
    }
    if not quiet:
        _say_what_is_kept(out, resume, range(seed, seed + seeds))
    keep_freed_memory()
    results = _run(config, seeds, parallel, out, quiet, how, tensorboard)
    _report(results, several=seeds > 1, as_json=as_json, quiet=quiet, out=out)


def _say_what_is_kept(out: Path | None, resume: bool, seeds: range) -> None:
    from scrlearn.experiments.folders import CHECKPOINT, RESULT

    if out is None:
        _say("Nothing is written without --out DIR.")
    elif resume:
        folders = [out / f"seed-{seed}" for seed in seeds] if len(seeds) > 1 else [out]
        if all((folder / RESULT).exists() for folder in folders):
            _say(f"The run in {out} is complete.")
        elif not any((folder / name).exists() for folder in folders for name in (RESULT, CHECKPOINT)):
            _say(f"There is no checkpoint in {out} yet: starting.")


def _run(
    config: RunConfig,
    seeds: int,
    parallel: int | None,
    out: Path | None,
    quiet: bool,
    how: dict[str, Any],
    tensorboard: Path | None,
) -> list[Result]:
    from scrlearn import experiments
    from scrlearn.experiments.events import watch_with_events
    from scrlearn.experiments.progress import Bars
    from scrlearn.experiments.record import Watch

    numbers = list(range(config.seed, config.seed + seeds))

    def work(progress: Watch | None) -> list[Result]:
        if seeds > 1:
            return experiments.run_seeds(config, numbers, out=out, progress=progress, parallel=parallel, **how)
        return [experiments.run(config, out=out, progress=progress, **how)]

    if quiet:
        return watch_with_events(work, config, None, tensorboard)
    with Bars(f"{config.method} on {config.dataset}", numbers) as bars:
        return watch_with_events(work, config, bars, tensorboard)


def _report(results: list[Result], several: bool, as_json: bool, quiet: bool, out: Path | None) -> None:
    from scrlearn.experiments.result import summary_dict

    if as_json:
        runs = [result.to_dict() for result in results]
        _print_json({"summary": summary_dict(results), "results": runs} if several else runs[0])
    elif not quiet:
        _console().print(_table(results))
        if results[0].memory_use == "prototypes only":
            typer.echo("Its memory is stored for the ncm classifier only, and is never trained on.")
        if out is not None:
            typer.echo(f"Written to {out}.")


def _table(results: list[Result]) -> Table:
    """Mean ± 95% interval of the main figures, a row for each classifier."""
    from scrlearn.experiments import summary

    first = results[0]
    seeds = f"seed {first.seed}" if len(results) == 1 else f"{len(results)} seeds, mean ± 95% interval"
    memory = f"memory {first.memory_size:,}{', with review' if first.review else ''}"
    table = _new_table(title=f"{first.method} on {first.dataset}, {memory}: {seeds}")
    table.add_column("classifier")
    for name in ("average accuracy", "anytime accuracy", "forgetting"):
        table.add_column(f"{name} (%)", justify="right")
    figures = summary(results)
    for classifier in sorted(figures, key=lambda name: name != first.classifier):
        values = [figures[classifier][name] for name in ("average_accuracy", "anytime_accuracy", "forgetting")]
        shown = [value.format() if len(results) > 1 else f"{100 * value.mean:.1f}" for value in values]
        table.add_row(classifier, *shown)
    return table


# ------------------------------------------------------------------------------------------------------------ methods


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show all options of this one.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The methods, where they come from, and their options."""
    from scrlearn.learners import METHODS, find_method

    if name is not None:
        _show_method(find_method(name), as_json)
        return
    if as_json:
        _print_json([_method_dict(method) for method in METHODS.values()])
        return
    table = _new_table()
    for column in ("method", "classifier", "replayed / kept"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it does, and where it comes from", ratio=1)
    for method in METHODS.values():
        parameters = method.parameters()
        roles = [str(parameters.get(role, "none")) for role in ("retrieve", "update") if "update" in parameters]
        source = f"{escape(method.summary)} [dim]({escape(method.reference)}, {method.year})[/]"
        table.add_row(method.name, str(parameters.get("classifier")), " / ".join(roles) or "its own", source)
    _console().print(table)


def _method_dict(method: Any) -> dict[str, Any]:
    about = {name: getattr(method, name) for name in ("name", "title", "reference", "year", "summary")}
    # a part that is an object and not a name is shown by its name in Python
    return about | {"options": json.loads(json.dumps(method.parameters(), default=repr))}


def _show_method(method: Any, as_json: bool) -> None:
    about = _method_dict(method)
    if as_json:
        _print_json(about)
        return
    console = _console()
    console.print(f"[bold]{method.name}[/]: {method.title} ({method.reference}, {method.year})", highlight=False)
    console.print(method.summary, highlight=False)
    table = _new_table("option", "default")
    for option, value in about["options"].items():
        table.add_row(option, json.dumps(value, ensure_ascii=False))
    console.print(table)


# --------------------------------------------------------------------------------------------------------------- data


@data_app.command("list")
def data_list(data_root: DataRoot = None, as_json: JsonFlag = False) -> None:
    """The data sets with a name, and whether they are there."""
    from scrlearn.data import available

    found = available(data_root)
    if as_json:
        _print_json(
            [
                {
                    "name": item.name,
                    "description": item.description,
                    "where": None if item.where is None else str(item.where),
                    "present": item.present,
                    "downloadable": item.downloadable,
                }
                for item in found
            ]
        )
        return
    table = _new_table("data set", "what it is", "there")
    table.add_column("where", overflow="fold")
    for item in found:
        there = "yes" if item.present else "no (can be downloaded)" if item.downloadable else "no"
        table.add_row(
            item.name, item.description, there, "part of the package" if item.where is None else str(item.where)
        )
    table.add_row("folder:PATH", "any folder of class folders", "", "")
    _console().print(table)


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="The data set.")],
    data_root: DataRoot = None,
    image_size: ImageSize = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Read a whole data set and say whether it is complete. Exit code 1 where it is not."""
    from scrlearn.data import check

    report = check(name, data_root, image_size=image_size, progress=not quiet)
    if as_json:
        where = None if report.where is None else str(report.where)
        _print_json({**vars(report), "where": where, "ok": report.ok})
    elif not quiet and report.ok:
        low, high = report.train_per_class
        per_class = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        means, deviations = (
            ", ".join(f"{value:.4f}" for value in values)
            for values in (report.channel_means, report.channel_deviations)
        )
        typer.echo(
            f"{report.name}: {report.classes} classes, {report.train:,} training images ({per_class} a class) and "
            f"{report.test:,} test images; channel means {means}, deviations {deviations}. Nothing is wrong."
        )
    elif not as_json:
        for problem in report.problems:
            _say(problem)
    if not report.ok:
        raise typer.Exit(1)


@data_app.command("download")
def data_download(
    name: Annotated[str, typer.Argument(help="The data set.")], data_root: DataRoot = None, quiet: QuietFlag = False
) -> None:
    """Fetch a data set from its official place, and check it."""
    from scrlearn.data import download

    where = download(name, data_root, progress=not quiet)
    if not quiet:
        typer.echo(f"{name} is part of the package." if where is None else f"{name} is in {where}.")


# ------------------------------------------------------------------------------------------------------------- answers


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="What OnlineClassifier.save wrote, or a run's checkpoint.scr.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    device: Annotated[
        str, typer.Option(help="auto (that of the model, where it is there), cpu, cuda, cuda:1.")
    ] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Say which class each image is, with its probability: a line for each file (label, probability, file).

    A file that is no image is told, and the others are answered; the exit code is then 1.
    """
    from scrlearn.experiments.prediction import predict_files

    unreadable: list[ScrlearnError] = []
    predictions = predict_files(model, images, device=device, unreadable=unreadable.append)
    if as_json:
        _print_json([{"file": str(p.file), "label": p.label, "probability": p.probability} for p in predictions])
    else:
        for p in predictions:
            typer.echo(f"{p.label}\t{p.probability:.3f}\t{p.file}")
    for error in unreadable:
        _explain(error)
    if unreadable:
        raise typer.Exit(1)


@app.command()
def export(
    model: Annotated[
        Path, typer.Argument(help="What OnlineClassifier.save wrote, a run's checkpoint.scr, or a service's state.")
    ],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX.")] = False,
    torchscript: Annotated[bool, typer.Option("--torchscript", help="Write TorchScript.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write. (default: MODEL with the ending .onnx or .pt)"),
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a taught model as one file that predicts on a phone or in another runtime, checked against the model.

    Says on how many images their answers were compared, and the largest difference. Models with an encoder of your own
    are exported from Python: scrlearn.export.export.
    """
    if onnx == torchscript:
        raise typer.BadParameter("say which one", param_hint="--onnx / --torchscript")
    from scrlearn.export import SUFFIXES, export, report

    format = "onnx" if onnx else "torchscript"
    exported = export(model, out or model.with_suffix(SUFFIXES[format]), format)
    if as_json:
        _print_json({**vars(exported), "path": str(exported.path)})
    elif not quiet:
        typer.echo(report(exported))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the picture and the report.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each method.")] = 3,
    quiet: QuietFlag = False,
) -> None:
    """SCR beside ER and fine-tuning on Split Digits: a table, a picture and a report in less than a minute."""
    from scrlearn.experiments import demo as demonstration

    console = Console(stderr=True)
    runs = seeds * len(demonstration.METHODS)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task(f"{runs} runs on digits", total=runs)

        def show(result: Result) -> None:
            progress.advance(bar)
            if not quiet:
                accuracy = f"{100 * (result.average_accuracy or 0):.1f}%"
                console.print(f"{result.method}, seed {result.seed}: accuracy {accuracy}", highlight=False)

        report = demonstration.run_demo(out, seeds=seeds, processes=demonstration.processes_here(), watch=show)
    if not quiet:
        _console().print(demonstration.table(report))
        typer.echo(report.verdict)
        typer.echo(f"The picture is {out / demonstration.PICTURE}, the report {out / demonstration.REPORT}.")


app.command()(serve)

import scrlearn.cli_experiments  # noqa: E402  # adds its commands to `app`
import scrlearn.cli_tune  # noqa: E402  # adds `scr tune`


def main() -> None:
    """The command `scr`."""
    try:
        app(prog_name="scr")
    except KeyboardInterrupt:  # while still loading
        sys.exit(130)


if __name__ == "__main__":
    main()
