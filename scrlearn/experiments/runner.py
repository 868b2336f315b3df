"""The runner: one configuration becomes one result; it can be stopped at any moment and goes on exactly there."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import scrlearn
from scrlearn.checkpoint import load_checkpoint, save_checkpoint
from scrlearn.data import Dataset, Stream, load
from scrlearn.devices import nearest_precision, resolve_device, wake
from scrlearn.engine import START, GraphRunner, Position, most_side_by_side, why_not_graph
from scrlearn.engine import run as run_engine
from scrlearn.errors import CheckpointError, InputError
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.folders import CHECKPOINT, RESULT, SUMMARY, look_into, make_room, same_config
from scrlearn.experiments.identity import family_key, kind_key
from scrlearn.experiments.loop import ImagesAtHand, evaluate
from scrlearn.experiments.record import Moment, Record, Stopwatch, Watch
from scrlearn.experiments.result import Result, readable_json, summary_dict
from scrlearn.experiments.stopping import Interrupted, stop_requests
from scrlearn.files import atomic_write
from scrlearn.learners import Learner

CHECKPOINT_SECONDS = 30.0
SAVING_SHARE = 0.05  # a large memory on a slow disk must not turn a run into one long save
PROGRESS_SECONDS = 0.5


def run(
    config: RunConfig,
    *,
    out: str | os.PathLike[str] | None = None,
    data_root: str | Path | None = None,
    download: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Watch | None = None,
    dataset: Dataset | None = None,
    pictures: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Result:
    """Run one configuration.

    Parameters
    ----------
    config
        What to run.
    out
        Folder for ``result.json``, ``checkpoint.scr`` and the pictures; None: nothing is written.
    data_root, download
        See `scrlearn.data.load`.
    resume
        Go on from the checkpoint in `out`, exactly as if the run had never been stopped; start where there is none;
        give back the result where the run is complete.
    overwrite
        Replace a run that `out` holds. Without it and without `resume`, a folder that holds a run is refused.
    progress
        Called about twice a second, and after each task, with a `Moment`.
    dataset
        The data set, where it is loaded already; `config.dataset` is then its name only.
    pictures
        Draw accuracy over tasks, the confusion matrix and the memory into `out`.
    checkpoint_seconds
        Save at least so many seconds apart, and at the end; 0 saves after every batch.

    Raises
    ------
    Interrupted
        SIGINT (Ctrl-C) or SIGTERM came; the batch at hand was finished and the run saved. Only with `out`.

    Example
    -------
    >>> result = run(RunConfig(method="er", memory_size=50, limit=10))
    >>> result.classifier, len(result.accuracy_matrix), sorted(result.by_classifier)
    ('softmax', 5, ['ncm', 'softmax'])
    """
    return run_together(
        [config],
        outs=[out],
        data_root=data_root,
        download=download,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        dataset=dataset,
        pictures=pictures,
        checkpoint_seconds=checkpoint_seconds,
    )[0]


def run_together(
    configs: Sequence[RunConfig],
    *,
    outs: Sequence[str | os.PathLike[str] | None],
    data_root: str | Path | None = None,
    download: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Watch | None = None,
    dataset: Dataset | None = None,
    pictures: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[Result]:
    """Run several configurations of one data set side by side on one device; each gives what it would give alone.

    Parameters
    ----------
    configs
        What to run; seeds, memory sizes, methods and options may differ, the data set and the engine may not.
    outs
        A folder (or None) for each.
    data_root, download, resume, overwrite, progress, dataset, pictures, checkpoint_seconds
        See `run`.
    """
    if len({(c.dataset, c.image_size, c.engine) for c in configs}) != 1:
        raise InputError("Runs side by side must have one data set, one image size and one engine.")
    stopwatches = [Stopwatch() for _ in configs]
    folders = [None if out is None else Path(out) for out in outs]
    results = [
        None if folder is None else look_into(folder, config, resume, overwrite)
        for config, folder in zip(configs, folders, strict=True)
    ]
    first = configs[0]
    if None in results:
        wake(first.device)
        dataset = dataset or load(first.dataset, data_root, download=download, image_size=first.image_size)
    sessions: dict[int, Session] = {}
    held: dict[tuple[str, float], Dataset] = {}  # runs share their images
    for i, (config, folder) in enumerate(zip(configs, folders, strict=True)):
        if results[i] is None:
            assert dataset is not None
            kind = (config.split, config.holdout)
            if kind not in held:
                held[kind] = config.prepare(dataset)
            watch = None if progress is None else _numbered(progress, i)
            sessions[i] = Session(config, held[kind], folder, watch, checkpoint_seconds, stopwatches[i])
            sessions[i].open(resume)
    near = ImagesAtHand()
    for session in sessions.values():
        session.test_images = near
    _lead(list(sessions.values()), first.engine)
    for i, session in sessions.items():
        results[i] = session.close(pictures)
    return [result for result in results if result is not None]


def _numbered(progress: Watch, run: int) -> Watch:
    """Say of which of several runs each moment is."""
    return lambda moment: progress(dataclasses.replace(moment, run=run))


def _lead(sessions: list[Session], engine: str) -> None:
    """Lead all sessions to the end of their streams; where one is stopped, all are saved."""
    with stop_requests(active=any(session.folder is not None for session in sessions)) as stop_request:
        kinds = Counter(kind_key(session.config) for session in sessions)
        for session in sessions:
            session.begin(stop_request, len(sessions), kinds[kind_key(session.config)])
        try:
            run_engine(
                [session.learner for session in sessions],
                [session.stream for session in sessions],
                sessions,
                [session.position for session in sessions],
                engine=engine,
                say=lambda line: warnings.warn(line, stacklevel=2),
                kinds=[(family_key(session.config), session.learner.precision) for session in sessions],
            )
            for session in sessions:
                session.end()
        except Interrupted:
            for session in sessions:
                session.save_if_possible()
            raise


class Session:
    """A run under way: the learner, the stream, the place in it, and what was measured so far."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        folder: Path | None,
        progress: Watch | None,
        checkpoint_seconds: float,
        stopwatch: Stopwatch,
    ) -> None:
        self.config, self.folder, self.progress, self.stopwatch = config, folder, progress, stopwatch
        self.stream = config.make_stream(dataset)
        self.learner = config.make_learner(dataset.image_shape, len(self.stream.class_names))
        if self.learner.classifier not in self.learner.classifiers:  # say it now, not after the first task
            self.learner.scores_from_features(torch.empty(0), self.learner.classifier)
        self.position, self.record = START, Record()
        self._steps = sum(map(self.stream.steps, self.stream.tasks))
        self._stream_id = _fingerprint(self.stream)
        self._finishing: tuple[int, int] | None = None
        self.test_images = ImagesAtHand()
        self.stop_request: list[int] = []
        self.side_by_side, self.alike, self.among_others = 1, 1, False
        self.checkpoint_seconds, self._saved_at = checkpoint_seconds, time.monotonic()
        self._shown_at, self._shown = time.monotonic(), (0, 0.0)

    def open(self, resume: bool) -> None:
        """Make the folder ready, and go back to where a run in it was stopped if that is asked for."""
        if self.folder is not None:
            make_room(self.folder, keep_checkpoint=resume)
            if resume and (self.folder / CHECKPOINT).is_file():
                self.load(self.folder / CHECKPOINT)

    def begin(self, stop_request: list[int], side_by_side: int, alike: int) -> None:
        """Training starts: so many runs share the device, and so many of them are of this kind."""
        self.stop_request, self.side_by_side, self.alike = stop_request, side_by_side, alike
        self.among_others |= alike < side_by_side
        self.stopwatch.switch("training")
        self._shown_at, self._shown = time.monotonic(), (self._steps_done(), self.stopwatch.spent["training"])

    def end(self) -> None:
        """The stream is over."""
        if self.folder is not None and not self.learner.anytime:  # it has learned since the last task ended
            self._write_checkpoint()
        self.stopwatch.switch("setup")
        self._stop_if_asked()

    def close(self, pictures: bool) -> Result:
        """The result, written with its pictures where there is a folder."""
        result = self._result()
        if self.folder is not None:
            if pictures:
                from scrlearn.experiments.pictures import draw  # matplotlib takes a second to load

                draw(result, self.learner, self.folder)
            result.save(self.folder / RESULT)
        return result

    # what the engine calls

    def batch_learned(self, position: Position, loss: Tensor) -> None:
        """Show and save now and then; stop where that was asked for."""
        self.position = position
        self._pause(loss)

    def task_ended(self, task: int) -> None:
        """Measure, then save: a checkpoint between tasks always holds the measurement."""
        if self.learner.anytime:
            self._measure()
            self._measure_head(task)
        else:
            self.record.skip(self.stream, self.learner.classifiers)
        self.position = Position(task + 1, 0)
        if self.progress is not None:
            self._show(None, at_task_end=True)
        last = self.position.task == len(self.stream.tasks)
        if self.folder is not None and (last or self._due()):
            self._save()

    def finishing(self, step: int, steps: int) -> None:
        """The learner works on after the stream, and tells how far it is."""
        self._finishing = (step, steps)
        self._pause(None)

    def stream_ended(self) -> None:
        """Measure a learner that could not be asked before."""
        if not self.learner.anytime:
            self.record.drop_last()
            self._measure()

    def _measure(self) -> None:
        self._wait()
        with self.stopwatch.measure("evaluation"):
            self.record.add(self.stream, evaluate(self.learner, self.stream, self.test_images))
            if "ncm" in self.learner.classifiers:
                met = self.learner.met[: self.learner.num_classes]
                self.record.without_prototype = int((met & ~self.learner.prototypes().present).sum())

    def _measure_head(self, task: int) -> None:
        head = self.learner.network.head
        if head is not None:  # the means of its weights show the task-recency bias
            classes = [(c, t.index) for t in self.stream.tasks[: task + 1] for c in t.classes if c < head.capacity]
            new, old = [c for c, of in classes if of == task], [c for c, of in classes if of < task]
            self.record.add_head(head.weight.detach().float(), new, old)

    def _pause(self, loss: Tensor | None) -> None:
        now = time.monotonic()
        if self.progress is not None and now - self._shown_at >= PROGRESS_SECONDS:
            self._show(loss, at_task_end=False)
        if self.folder is not None and self._due():
            self._save()

    def _due(self) -> bool:
        return bool(self.stop_request) or time.monotonic() - self._saved_at >= self.checkpoint_seconds

    # showing, saving, going on

    def _steps_done(self) -> int:
        return sum(self.stream.steps(task) for task in self.stream.tasks[: self.position.task]) + self.position.step

    def _show(self, loss: Tensor | None, at_task_end: bool) -> None:
        assert self.progress is not None
        shown_loss = None if loss is None else float(loss)  # waits for the device
        self.stopwatch.switch("training")
        steps, spent = self._steps_done(), self.stopwatch.spent["training"]
        shown_step, shown_steps = self._finishing or (steps, self._steps)
        images = (steps - self._shown[0]) * self.config.batch_size
        seconds = spent - self._shown[1]
        self.progress(
            Moment(
                seed=self.config.seed,
                task=min(self.position.task + (not at_task_end), len(self.stream.tasks)),
                tasks=len(self.stream.tasks),
                step=shown_step,
                steps=shown_steps,
                loss=shown_loss,
                images_per_second=images / seconds if images and seconds else None,
                accuracy=self.record.so_far(self.learner.classifier),
                at_task_end=at_task_end,
            )
        )
        self._shown_at, self._shown = time.monotonic(), (steps, spent)

    def save_if_possible(self) -> None:
        """Save because a neighbour was stopped."""
        if self.folder is not None:
            self._write_checkpoint()

    def _save(self) -> None:
        """Save, and stop where that was asked for."""
        self._write_checkpoint()
        self._stop_if_asked()

    def _write_checkpoint(self) -> None:
        assert self.folder is not None
        path = self.folder / CHECKPOINT
        self._wait()
        begin = time.monotonic()
        with self.stopwatch.measure("saving"):
            save_checkpoint(path, self.learner.state_dict(), self._about())
        took = time.monotonic() - begin
        # the next one is due so much later that saving stays a small share of the time
        self._saved_at = begin + took + (took * self.side_by_side / SAVING_SHARE if self.checkpoint_seconds else 0.0)

    def _wait(self) -> None:
        """Let the device finish what this run has asked for, so that its time is counted where it belongs."""
        if self.learner.device.type == "cuda":
            torch.cuda.current_stream(self.learner.device).synchronize()
            if isinstance(self.learner.runner, GraphRunner):
                self.learner.runner.stream.synchronize()

    def _stop_if_asked(self) -> None:
        if self.stop_request and self.folder is not None:
            raise Interrupted(self.folder / CHECKPOINT, self._steps_done(), self._steps, self.stop_request[0])

    def _about(self) -> dict[str, Any]:
        dataset = self.stream.dataset
        return {
            "kind": "run",
            "config": self.config.to_dict(),
            "made_with": self.config.all_options(len(self.stream.class_names)),
            "position": [self.position.task, self.position.step],
            "record": dataclasses.asdict(self.record),
            "seconds": self.stopwatch.seconds(),
            "among_others": self.among_others,
            "stream": self._stream_id,
            "machine": self._machine(),
            "versions": versions(),
            "image_shape": list(dataset.image_shape),
            "class_names": list(self.stream.class_names),
        }

    def load(self, path: Path) -> None:
        """Stand where the checkpoint was written; nothing changes if it does not belong to this run."""
        state, about = load_checkpoint(path)
        self._check_belongs(path, about)
        self.learner.load_state_dict(state)
        self.position, self.record = Position(*about["position"]), Record(**about["record"])
        for kind, spent in about["seconds"].items():
            if kind in self.stopwatch.spent:
                self.stopwatch.spent[kind] += spent
        self.among_others = about.get("among_others", False)

    def _check_belongs(self, path: Path, about: dict[str, Any]) -> None:
        if about.get("kind") != "run":
            raise CheckpointError(f'"{path}" is not the checkpoint of a run; choose another folder.')
        same_config(self.config, _config_of(about), about["machine"], path)
        if about["stream"] != self._stream_id:
            raise CheckpointError(
                f'The data set "{self.config.dataset}" is not the one that the run in {path.parent} began with (other '
                "images or classes). Bring it back, or start afresh with --overwrite."
            )
        there, here = about["machine"], self._machine()
        for name in ("device", "precision"):
            if there[name] != here[name]:
                raise CheckpointError(
                    f"The run in {path.parent} began with {name} {there[name]}, and here it is {here[name]}; the "
                    f"result would not be that of one run. Ask for --{name} {there[name]}, or start afresh with "
                    "--overwrite."
                )
        self._warn_of_changes(path, about["versions"], there)

    def _warn_of_changes(self, path: Path, versions_there: dict[str, str], there: dict[str, Any]) -> None:
        """Say what may change the bits without making it another run."""
        here = self._machine()
        changed = [f"another version of {name}" for name, now in versions().items() if versions_there.get(name) != now]
        if there["name"] != here["name"]:
            changed.append(f"another processor ({there['name']}, here {here['name']})")
        if there["threads"] != here["threads"] and here["device"] == "cpu":  # sums are split between the threads
            changed.append(f"another number of threads ({there['threads']}, here {here['threads']})")
        if changed:
            warnings.warn(
                f"The run in {path.parent} began with {', '.join(changed)}; its figures may differ from those of a run "
                "that was not stopped.",
                stacklevel=2,
            )

    # the result

    def _machine(self) -> dict[str, Any]:
        device = self.learner.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        threads = torch.get_num_threads()
        return {"device": device.type, "name": name, "precision": self.learner.precision, "threads": threads}

    def _result(self) -> Result:
        learner, stream, figures = self.learner, self.stream, self.record.figures()
        first = figures[learner.classifier]
        options = self.config.all_options(len(stream.class_names))
        return Result(
            method=self.config.method,
            classifier=learner.classifier,
            dataset=self.config.dataset,
            memory_size=options.get("memory_size") or 0,
            seed=self.config.seed,
            review=bool(getattr(learner, "review", False)),
            memory_use=_memory_use(learner),
            average_accuracy=first["average_accuracy"],
            anytime_accuracy=first["anytime_accuracy"],
            forgetting=first["forgetting"],
            backward_transfer=first["backward_transfer"],
            forward_transfer=first["forward_transfer"],
            accuracy_matrix=first["accuracy_matrix"],
            by_classifier=figures,
            class_names=list(stream.class_names),
            tasks=[list(task.classes) for task in stream.tasks],
            images=sum(min(len(task.train), stream.steps(task) * stream.batch_size) for task in stream.tasks),
            steps=self._steps,
            config=self.config.to_dict(),
            method_options=options,
            machine=self._machine(),
            versions=versions(),
            # what was spent beside runs of other kinds before a stop is in its time too
            seconds={
                **self.stopwatch.seconds(),
                "side_by_side": self.side_by_side,
                "alike": min(self.alike, self.side_by_side - 1) if self.among_others else self.alike,
            },
        )


def versions() -> dict[str, str]:
    """Of this package and of those that compute."""
    return {
        "scrlearn": scrlearn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _memory_use(learner: Learner) -> str:
    if not learner.memory.capacity:
        return "none"
    return "replayed" if learner.trains_on_memory else "prototypes only"


def _fingerprint(stream: Stream) -> str:
    """Which images come in which order, without reading one."""
    hasher = hashlib.sha256(repr((stream.class_names, stream.dataset.image_shape, stream.batch_size)).encode())
    for tensor in (stream.train_labels, stream.test_labels, *(task.train for task in stream.tasks)):
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()


def load_learner(path: str | os.PathLike[str], device: str | torch.device = "auto") -> tuple[Learner, list[str]]:
    """The learner in a run's checkpoint, as it stood, and the names of its classes.

    Parameters
    ----------
    path
        The ``checkpoint.scr`` of a run.
    device
        Where it shall answer; "auto": the device that the run had where this machine has it, else the CPU. It computes
        in the precision of the run where the device has that, else in float32.
    """
    state, about = load_checkpoint(path)
    if about.get("kind") != "run":
        raise CheckpointError(f'"{path}" is not the checkpoint of a run.')
    place = _place(about["machine"]["device"], device)
    precision = nearest_precision(about["machine"]["precision"], place)
    config = _config_of(about).replace(device=str(place), precision=precision)
    channels, height, width = about["image_shape"]
    learner = config.make_learner((channels, height, width), len(about["class_names"]))
    learner.load_state_dict(state)
    return learner, list(about["class_names"])


def _config_of(about: dict[str, Any]) -> RunConfig:
    """The configuration in a checkpoint."""
    return RunConfig.from_dict(about["config"]).as_made(about.get("made_with", {}))


def _place(before: str, wanted: str | torch.device) -> torch.device:
    """The device that was asked for; where that is left open, the one there was before, or the CPU."""
    if str(wanted) != "auto":
        return resolve_device(wanted)
    try:
        return resolve_device(before)
    except InputError:
        return torch.device("cpu")


def run_seeds(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    out: str | os.PathLike[str] | None = None,
    data_root: str | Path | None = None,
    download: bool = False,
    dataset: Dataset | None = None,
    pictures: bool = True,
    parallel: int | None = None,
    **how: Any,
) -> list[Result]:
    """Run one configuration with several seeds; each gives what it would give alone.

    Parameters
    ----------
    config
        What to run; its own seed does not count.
    seeds
        The seeds.
    out
        Seed k is written to the folder ``seed-k`` in it, and the means with their intervals to ``summary.json``.
    parallel
        How many run side by side on a CUDA device; None: as many as it has room for.
    data_root, download, dataset, pictures, how
        See `run`.

    Example
    -------
    >>> from scrlearn.experiments import summary
    >>> results = run_seeds(RunConfig(method="fine-tune", memory_size=100, limit=10), [0, 1])
    >>> summary(results)["softmax"]["average_accuracy"].n
    2
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError(f"The seeds are {list(seeds)}; expected one or more, each once.")
    folder = None if out is None else Path(out)
    places = {seed: None if folder is None else folder / f"seed-{seed}" for seed in seeds}
    for seed, place in places.items():  # before the first one runs
        if place is not None:
            look_into(place, config.replace(seed=seed), how.get("resume", False), how.get("overwrite", False))
    wake(config.device)
    dataset = dataset or load(config.dataset, data_root, download=download, image_size=config.image_size)
    runs = [(config.replace(seed=seed), place) for seed, place in places.items()]
    results = _in_groups(runs, _side_by_side(config, dataset, parallel), dataset=dataset, pictures=pictures, **how)
    if folder is not None:
        _write_summary(results, folder, pictures)
    return results


def run_all(
    configs: Sequence[RunConfig], dataset: Dataset, *, parallel: int | None = None, progress: Watch | None = None
) -> list[Result]:
    """Run several configurations on a data set that is loaded already, on a CUDA device side by side.

    Nothing is written. What may differ between them is told at `run_together`; `parallel` at `run_seeds`.
    """
    size = _side_by_side(configs[0], dataset, parallel)
    return _in_groups([(config, None) for config in configs], size, dataset=dataset, pictures=False, progress=progress)


def _side_by_side(config: RunConfig, dataset: Dataset, wanted: int | None) -> int:
    """How many runs share the device at a time."""
    if wanted is not None and wanted < 1:
        raise InputError(f"parallel is {wanted}; it must be 1 or more.")
    if config.engine == "eager" or resolve_device(config.device).type != "cuda":
        return 1
    learner = config.make_learner(dataset.image_shape, dataset.num_classes)
    return 1 if why_not_graph(learner) else most_side_by_side(learner, wanted)


def _in_groups(runs: list[tuple[RunConfig, Path | None]], size: int, **how: Any) -> list[Result]:
    """Run groups of this size; a group that the device has no room for is halved."""
    results: list[Result] = []
    while len(results) < len(runs):
        group = runs[len(results) : len(results) + size]
        try:
            results += run_together([config for config, _ in group], outs=[place for _, place in group], **how)
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise
            size = max(1, size // 2)
            warnings.warn(f"The device has not enough memory; going on with {size} side by side.", stacklevel=3)
            torch.cuda.empty_cache()
            how = {**how, "overwrite": not how.get("resume", False)}
    return results


def _write_summary(results: Sequence[Result], folder: Path, pictures: bool) -> None:
    atomic_write(folder / SUMMARY, (readable_json(summary_dict(results)) + "\n").encode())
    if pictures:
        from scrlearn.experiments.pictures import draw_seeds  # matplotlib takes a second to load

        draw_seeds(results, folder)
