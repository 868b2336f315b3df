"""The folder of a run: what lies in it, and whether a run may be made there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from scrlearn.errors import CheckpointError, InputError
from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.result import Result

RESULT, CHECKPOINT, SUMMARY = "result.json", "checkpoint.scr", "summary.json"
PICTURES = ("accuracy.png", "confusion.png", "memory.png")
LEFT_BEHIND_SECONDS = 60.0


def look_into(folder: Path, config: RunConfig, resume: bool, overwrite: bool) -> Result | None:
    """Whether a run may be made here; the result where one is complete and was asked to go on."""
    if resume and overwrite:
        raise InputError("A run can go on (resume) or be replaced (overwrite), not both.")
    if folder.exists() and not folder.is_dir():
        raise InputError(f'"{folder}" is a file; results go to a folder.')
    if overwrite:
        return None
    if (folder / RESULT).exists():
        if resume:
            result = Result.load(folder / RESULT)
            same_config(config, result.run_config(), result.machine, folder / RESULT)
            return result
        raise InputError(_taken(folder, "a finished run"))
    if (folder / CHECKPOINT).exists() and not resume:
        raise InputError(_taken(folder, "a run that was stopped"))
    return None


def _taken(folder: Path, what: str) -> str:
    go_on = "see its result" if what == "a finished run" else "go on with it"
    return (
        f'"{folder}" holds {what}. To {go_on}, ask for --resume; to replace it, --overwrite; to keep it, choose '
        "another folder."
    )


def same_config(config: RunConfig, saved: RunConfig, machine: dict[str, Any], path: Path) -> None:
    """Refuse to go on with a run that has another configuration; "auto" stands for what the run was made with."""
    one, other = (_settled(either, machine) for either in (config, saved))
    differences = one.differences(other)
    if differences:
        raise CheckpointError(
            f"The run in {path.parent} has another configuration: {'; '.join(differences)}. Go on with the same "
            "settings, choose another folder, or start afresh with --overwrite."
        )


def _settled(config: RunConfig, machine: dict[str, Any]) -> RunConfig:
    open_ones = [name for name in ("device", "precision") if getattr(config, name) == "auto" and name in machine]
    return config.replace(**{name: machine[name] for name in open_ones})


def make_room(folder: Path, keep_checkpoint: bool) -> None:
    """Create the folder, or clear it of what a run leaves; nothing else in it is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    if not keep_checkpoint:
        # the result goes first: without it the folder never looks complete
        for name in (RESULT, CHECKPOINT, *PICTURES):
            (folder / name).unlink(missing_ok=True)
    for name in (RESULT, CHECKPOINT, *PICTURES):
        for temporary in folder.glob(f".{name}.*.tmp"):  # of a run that was killed while it saved
            if time.time() - temporary.stat().st_mtime > LEFT_BEHIND_SECONDS:
                temporary.unlink(missing_ok=True)
