"""Checkpoints: one safetensors file with JSON in its header. Nothing in it is ever executed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from scrlearn.errors import CheckpointError
from scrlearn.files import atomic_write

FORMAT = 1
_HEADER = "scrlearn"


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write a learner's state (nested dicts of tensors and numbers) and JSON about it, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    values = _split(state, "", tensors)
    header = json.dumps({"format": FORMAT, "meta": meta, "values": values})
    atomic_write(path, save(tensors, metadata={_HEADER: header}))


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (state, meta) back."""
    header, tensors = _read(Path(path), with_tensors=True)
    try:
        return _join(header["values"], tensors), header["meta"]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f'"{path}" is damaged: its header names what is not in it ({error}).') from error


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Only what the checkpoint says about itself; its tensors are not read."""
    meta: dict[str, Any] = _read(Path(path), with_tensors=False)[0]["meta"]
    return meta


def _read(path: Path, with_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header, and the tensors if they are wanted."""
    if not path.is_file():
        raise CheckpointError(f'There is no checkpoint at "{path}".')
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            _check(header, path)  # before the tensors: a newer version may have others
            tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, RecursionError, OSError) as error:
        raise CheckpointError(f'"{path}" is no checkpoint, or a part of it is missing: {error}.') from error
    return header, tensors


def _check(header: Any, path: Path) -> None:
    if not isinstance(header, dict) or type(header.get("format")) is not int:
        raise CheckpointError(f'"{path}" was not written by scrlearn.')
    if header["format"] > FORMAT:
        raise CheckpointError(
            f'"{path}" has format {header["format"]}; this version of scrlearn reads up to {FORMAT}. '
            "Install a newer version."
        )
    if not isinstance(header.get("meta"), dict) or not isinstance(header.get("values"), dict):
        raise CheckpointError(f'"{path}" is damaged: its header is not complete.')


def _split(state: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put tensors into one flat dict and leave the rest, with the tensors' names, as JSON."""
    values: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if name in tensors:  # {"a.b": …} beside {"a": {"b": …}}
                name = f"{name}#{len(tensors)}"
            # a clone: safetensors refuses tensors that share memory
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            values[key] = {"tensor": name}
        elif isinstance(value, dict):
            values[key] = {"dict": _split(value, f"{name}.", tensors)}
        else:
            values[key] = {"value": value}
    return values


def _join(values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, entry in values.items():
        if "tensor" in entry:
            state[key] = tensors[entry["tensor"]]
        elif "dict" in entry:
            state[key] = _join(entry["dict"], tensors)
        else:
            state[key] = entry["value"]
    return state


def digest(state: dict[str, Any]) -> str:
    """A fingerprint of a state: equal exactly when every tensor and number is bit for bit equal."""
    tensors: dict[str, Tensor] = {}
    values = _split(state, "", tensors)
    hasher = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
