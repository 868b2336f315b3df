"""CUDA source compiled as it is needed, by the compiler library that comes with PyTorch; no toolkit is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scrlearn.files import atomic_write

_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that every kernel may use
Argument = Tensor | int | float | ctypes.Structure
log = logging.getLogger("scrlearn.kernels")


class CompilerError(RuntimeError):
    """The source could not be compiled or loaded here."""


class Kernel:
    """One function of a source file, ready to be launched.

    Parameters
    ----------
    source
        The file.
    name
        The function; one with template arguments is written with them: ``"convolve<24, 24>"``.
    device
        The number of the CUDA device.
    """

    def __init__(self, source: Path, name: str, device: int) -> None:
        self.driver = _library("libcuda.so.1")
        self.name, self.device, self.shared = name, device, _WITHOUT_ASKING
        self.function = ctypes.c_void_p()
        self.module = ctypes.c_void_p()
        code, mangled = _compiled(source, name, torch.cuda.get_device_capability(device))
        with torch.cuda.device(device):
            self._enter()
            self._check(self.driver.cuModuleLoadData(ctypes.byref(self.module), code))
            self._check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), self.module, mangled))

    def __call__(self, blocks: int, threads: int, shared: int, arguments: Sequence[Argument]) -> None:
        """Launch it on the current stream: tensors are passed as addresses, numbers in 32 bits, structures as such."""
        values = [as_c(value) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        with torch.cuda.device(self.device):
            self._enter()
            if shared > self.shared:
                self._check(self.driver.cuFuncSetAttribute(self.function, _SHARED_MEMORY, shared))
                self.shared = shared
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            self._check(
                self.driver.cuLaunchKernel(self.function, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, None)
            )

    def _enter(self) -> None:
        """PyTorch's context, also in a thread that has not used it: gradients are computed in one of their own."""
        context = ctypes.c_void_p()
        self._check(self.driver.cuCtxGetCurrent(ctypes.byref(context)))
        if not context.value:
            self._check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device))
            self._check(self.driver.cuCtxSetCurrent(context))

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise CompilerError(f"{self.name}: {(text.value or b'unknown error').decode()} (CUDA error {status})")


def as_c(value: Argument) -> Any:
    """A kernel's argument."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure):
        return value
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


@functools.cache
def kernel(source: Path, name: str, device: int) -> Kernel:
    """A kernel, made at its first use."""
    return Kernel(source, name, device)


def examples(device: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Random images and weights with channels last to try kernels on, the same every time."""
    random = torch.Generator(f"cuda:{device}").manual_seed(0)
    return tuple(
        torch.randn(shape, generator=random, device=random.device).contiguous(memory_format=torch.channels_last)
        for shape in shapes
    )


def largest_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error of what was found against what is right; not a number if any is none."""
    errors = [(found.double() - exact.double()).norm() / exact.double().norm() for found, exact in pairs]
    return float(torch.stack(errors).max())


def right(source: Path, trial: Callable[[], float]) -> bool:
    """Whether kernels can be had here and are right: their relative error in a small trial. If not, it says so."""
    try:
        error = trial()
    except CompilerError as problem:
        reason = str(problem)
    else:
        if error < 0.008:  # rounding to bfloat16 makes 0.002
            return True
        reason = f"they are off by {error:.0%}"
    warnings.warn(
        f"The kernels of {source.name} are not used, slower ones take their place: {reason.rstrip('.')}.", stacklevel=3
    )
    return False


def can_run(x: Tensor) -> bool:
    """Whether these images and their device are of the kind that the kernels are written for."""
    cuda = x.is_cuda and torch.version.cuda is not None
    return cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)


@functools.cache
def processors(device: int) -> int:
    """How many blocks the device can work on at once, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _compiled(source: Path, name: str, capability: tuple[int, int]) -> tuple[bytes, bytes]:
    """Machine code, and the function's name in it; kept on disk, since making it takes a moment."""
    text = _whole(source).encode()
    architecture = f"sm_{capability[0]}{capability[1]}"
    told = repr((text, name, architecture, torch.version.cuda)).encode()
    kept = cache_folder() / f"{source.stem}-{hashlib.sha256(told).hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError, ValueError):
        mangled, code = kept.read_bytes().split(b"\n", 1)
        if code.startswith(b"\x7fELF"):
            return code, mangled
    _say_that_it_takes_time()
    code, mangled = _compile(text, source.name, name, architecture)
    with contextlib.suppress(OSError):  # no place to keep it: then it is made again the next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, mangled + b"\n" + code)
    return code, mangled


@functools.cache
def _say_that_it_takes_time() -> None:
    """Once in a process: nothing moves until they are there."""
    log.info("Preparing kernels for this GPU. That takes a while, once on a machine.")


def _whole(source: Path) -> str:
    """The source with the files beside it that it includes: all that the machine code depends on."""
    text = source.read_text(encoding="utf-8")
    return re.sub(r'^#include "(.+)"$', lambda line: _whole(source.with_name(line[1])), text, flags=re.MULTILINE)


def cache_folder() -> Path:
    """Where compiled kernels are kept, as the desktop's conventions have it."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "scrlearn" / "kernels"


def _compile(text: bytes, file: str, name: str, architecture: str) -> tuple[bytes, bytes]:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    options = (f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, file.encode(), 0, None, None)
    if status:
        raise CompilerError(f"NVRTC could not take {file} (error {status}).")
    try:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise CompilerError(f"{name} of {file} does not compile:\n{log.decode(errors='replace')}")
        mangled = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(mangled))
        return _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), mangled.value or b""
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The compiler that PyTorch has brought along."""
    version = (torch.version.cuda or "12").split(".")[0]
    root = Path(torch.__file__).parent
    places = [f"libnvrtc.so.{version}"]
    for folder in (root / "lib", *sorted((root.parent / "nvidia").glob("*/lib"))):
        places += map(str, sorted(folder.glob(f"libnvrtc.so.{version}*")))
    return _library(*places, "libnvrtc.so")


@functools.cache
def _library(*names: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompilerError(f"There is no {names[0]} on this machine.")
