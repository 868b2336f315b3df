"""Where and in which precision a learner computes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import torch

from scrlearn.errors import InputError, suggest

PRECISIONS = ("auto", "fp32", "tf32", "bf16")
TINY = 16
# what glibc's mallopt calls its settings, and values that no step reaches, in bytes
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MOST_KEPT, LARGEST_KEPT = 2**31 - 1, 2**30


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of this name; "auto" is the first CUDA device, or the CPU where there is none."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise InputError(f'"{device}" is no device. Use "auto", "cpu", "cuda" or "cuda:1".') from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f'Device "{device}" was asked for, but torch sees no CUDA device. Use device="cpu" or "auto".')
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f'Device "{device}" was asked for, but torch sees {torch.cuda.device_count()} of them, counted from 0. Use '
            '"cuda:0" or "auto".'
        )
    if resolved.type not in ("cpu", "cuda"):
        _check_other(resolved)
    return resolved


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wake(device: str | torch.device) -> None:
    """Begin to set a CUDA device up, beside whatever comes next: it takes a second, which reading data can fill."""
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        threading.Thread(target=torch.zeros, args=(1,), kwargs={"device": resolved}, daemon=True).start()


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next step, where the C library can; says whether it can.

    By default glibc hands large blocks back to the system at once, and every step fetches them again, page by page:
    6 to 10 % of a step's time on a CPU. The process never shrinks then. So this is for processes that are our own, such
    as `scr run`, and not for importing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(TRIM_THRESHOLD, MOST_KEPT))


def _check_other(device: torch.device) -> None:
    """A learner needs random numbers on its device, so a device without them is none."""
    try:
        torch.Generator(device=device)
    except RuntimeError as error:
        raise InputError(
            f'Device "{device}" was asked for, but it cannot be used here. Use "cpu" or "auto".'
        ) from error


def resolve_precision(precision: str, device: torch.device, image_shape: tuple[int, int, int]) -> str:
    """ "auto" is bfloat16 for the encoder where the hardware has it, float32 elsewhere.

    It is float32 for tiny images too: there the last maps are single pixels, BatchNorm sees a handful of values, and
    bfloat16 adds much noise to the gradient for little time saved.
    """
    if precision not in PRECISIONS:
        raise InputError(f'There is no precision "{precision}".{suggest(precision, PRECISIONS)}')
    if precision != "auto":
        return precision
    if min(image_shape[1:]) < TINY:
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if device.type == "cpu" and _cpu_has_bf16() else "fp32"


def nearest_precision(precision: str, device: torch.device) -> str:
    """The precision itself where the device computes in it, else "fp32", which has all its digits and more.

    >>> nearest_precision("tf32", torch.device("cpu"))
    'fp32'
    """
    if precision == "bf16":
        return resolve_precision("auto", device, (1, TINY, TINY))
    return precision if device.type == "cuda" else "fp32"


def _cpu_has_bf16() -> bool:
    # torch offers these under private names only; without them the answer is the safe one
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in names)


@contextlib.contextmanager
def numerics(precision: str) -> Iterator[None]:
    """Deterministic kernels, and TF32 only where it was asked for."""
    tf32 = precision != "fp32"
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
        yield
