"""The two convolutions of stride 2 that a block begins with, at once, by the kernels of strided.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scrlearn.models import nvrtc
from scrlearn.models.cuda_conv import Tiles, room

SOURCE = Path(__file__).with_name("strided.cu")
MOST_INNER, MOST_OUTER = 40, 80  # channels in and out: more would not fit in registers
WARPS, TASK = 8, 32  # as in the source: of a block; pixels that a warp works on
MOST_PIXELS = 512  # of images together
TRIAL = (5, 17, 20)  # images that the kernels are tried on, height and width


class Plan(NamedTuple):
    """Tiles, and the blocks that go over them, with their threads and bytes of shared memory."""

    tiles: Tiles
    blocks: int
    threads: int
    shared: int


class Cost(NamedTuple):
    """What a kernel needs: bytes that a block and a tile take, cycles of a tile, and whether one buffer can do."""

    threads: int
    fixed: int
    tile: int
    moved: int  # bytes that come and go
    waiting: int  # for the tensor cores, of which a processor has four, and for what is on its way
    working: int  # of shared memory, which all blocks of a processor use
    two_buffers: bool = False


@functools.lru_cache(maxsize=256)
def plan(
    kind: str,
    shape: tuple[int, ...],
    outer: int,
    segment: int,
    processors: int,
    room: tuple[int, int],
    most: int | None = None,
) -> Plan | None:
    """The quickest way, by an estimate, with at most so many blocks; None if not even a row fits.

    `kind` is the kernel, `shape` that of the images that come in. No tile holds images of two segments, of so many
    images each. The room is what a block can have of shared memory, and what a processor has.

    >>> plan("downsample", (220, 24, 84, 84), 40, 220, processors=132, room=(232_448, 233_472)).tiles
    Tiles(rows=3, together=1, number=3080)
    """
    found = []
    for tiles in _cuts(shape, segment):
        cost = COSTS[kind](shape, outer, tiles)
        for buffers in (1, 2):  # one is enough if each block has a single tile
            shared = cost.fixed + buffers * cost.tile
            fit = min(_blocks(shape[1], outer), room[1] // (shared + 1024))
            blocks = min(tiles.number, fit * processors, most or tiles.number)
            if fit and shared <= room[0] and (buffers == 2 or (blocks == tiles.number and not cost.two_buffers)):
                at_once = min(fit, -(-tiles.number // processors))
                cycles = max(cost.waiting + cost.working, at_once * cost.working, at_once * cost.moved // 18)
                turns = -(-tiles.number // (at_once * processors))
                cycles += 700 // at_once  # between two tiles one block waits
                found.append((turns * cycles + at_once * cost.tile // 18, Plan(tiles, blocks, cost.threads, shared)))
                break
    return min(found)[1] if found else None


def _cuts(shape: tuple[int, ...], segment: int) -> Iterator[Tiles]:
    images, _, height, width = shape
    down, right = -(-height // 2), -(-width // 2)
    for rows in sorted({-(-down // strips) for strips in range(1, down + 1)}):
        for together in range(1, max(1, MOST_PIXELS // (down * right) if rows == down else 1) + 1):
            if segment % together == 0 or together < segment == images:
                yield Tiles(rows, together, -(-images // together) * -(-down // rows))


def pitch(channels: int) -> int:
    """Bytes from pixel to pixel in shared memory."""
    return (channels // 8 | 1) * 16


def _blocks(inner: int, outer: int) -> int:
    """That a processor has registers for."""
    return 2 if inner + outer <= 64 else 1


def _line(chunks: int) -> int:
    """Bytes of a line of weights."""
    return (chunks + 1) // 2 * 32 + 16


def _input(shape: tuple[int, ...], tiles: Tiles) -> int:
    """Bytes of a tile of the images that come in."""
    return tiles.together * (2 * tiles.rows + 1) * (2 * -(-shape[3] // 2) + 1) * pitch(shape[1])


def _pixels(shape: tuple[int, ...], tiles: Tiles) -> int:
    """Of a tile of a result."""
    return tiles.together * tiles.rows * -(-shape[3] // 2)


def _forward(shape: tuple[int, ...], outer: int, tiles: Tiles) -> Cost:
    each, parts, tile, pixels = shape[1] // 8, outer // 8, _input(shape, tiles), _pixels(shape, tiles)
    tasks, steps = -(-pixels // TASK), (9 * each + 1) // 2 + (each + 1) // 2
    fixed = outer * (_line(9 * each) + _line(each)) + 32 * WARPS * outer + WARPS * 16 * pitch(outer)
    waiting = -(-tasks // 4) * steps * 13 * parts + -(-tasks // WARPS) * (20 * steps + 100 * parts) + 800
    working = tasks * (steps * (8 + 2 * parts) + 30 * parts)
    return Cost(WARPS * 32, fixed, tile, tile + 4 * pixels * outer, waiting, working)


def _back(shape: tuple[int, ...], outer: int, tiles: Tiles) -> Cost:
    each, parts, pixels = outer // 8, shape[1] // 8, _pixels(shape, tiles)
    tasks = -(-pixels // TASK)
    fixed = shape[1] * _line(10 * each) + WARPS * 16 * (4 * shape[1] + 16)
    tile = 2 * tiles.together * (tiles.rows + 1) * (-(-shape[3] // 2) + 1) * pitch(outer)
    waiting = -(-tasks // 2) * 3 * each * 13 * parts + -(-2 * tasks // WARPS) * (60 * each + 100 * parts) + 800
    working = tasks * (5 * each * (8 + 2 * parts) + 60 * parts)
    return Cost(WARPS * 32, fixed, tile, tile + 8 * pixels * shape[1], waiting, working)


def _weights(shape: tuple[int, ...], outer: int, tiles: Tiles) -> Cost:
    each, parts, sharing = shape[1] // 8, outer // 8, 3 if _blocks(shape[1], outer) == 2 else 7
    groups = -(-_pixels(shape, tiles) // 16)
    tile = _input(shape, tiles) + 2 * 16 * groups * pitch(outer)
    rows = -(-(9 * each + 1) // 2 // sharing)
    waiting, working = groups * (7 * rows * parts + 100) + 500, groups * sharing * (4 * rows + 2 * parts)
    return Cost(sharing * 32 + 32, 4 * 16 * groups, tile, tile, waiting, working, True)


COSTS = {"downsample": _forward, "downsample_back": _back, "downsample_weights": _weights}


def takes(outer: int, inner: int, strides: tuple[int, ...]) -> bool:
    """Whether the kernels are for convolutions with these channels and strides; then they want float32 weights."""
    return set(strides) == {2} and inner % 8 == outer % 8 == 0 and inner <= MOST_INNER and outer <= MOST_OUTER


def suits(x: Tensor, weight: Tensor, small: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the kernels can do a 3×3 and a 1×1 convolution of these images, with these weights and strides."""
    outer, inner = weight.shape[:2]
    trial = (TRIAL[0], inner, *TRIAL[1:])
    return (
        takes(outer, inner, strides)
        and weight.shape[2:] == (3, 3)
        and small.shape == (outer, inner, 1, 1)
        and weight.dtype == small.dtype == torch.float32
        and nvrtc.can_run(x)
        and all(_plan(kind, tuple(x.shape), outer, 1, x.get_device()) for kind in COSTS)
        and all(_plan(kind, trial, outer, 1, x.get_device(), most=1) for kind in COSTS)
        and trusted(inner, outer, x.get_device())
    )


@functools.cache
def trusted(inner: int, outer: int, device: int) -> bool:
    """Whether the kernels can be had on this device and give what PyTorch gives; tried once."""
    return nvrtc.right(SOURCE, lambda: _error(inner, outer, device))


@torch.no_grad()
def _error(inner: int, outer: int, device: int) -> float:
    """The largest relative error of two small convolutions and their gradients; a block has several tiles."""
    images, height, width = TRIAL
    of_results = (images, outer, -(-height // 2), -(-width // 2))
    shapes = [(images, inner, height, width), of_results, of_results, (outer, inner, 3, 3), (outer, inner, 1, 1)]
    x, dy, dy1, weight, small = nvrtc.examples(device, *shapes)
    x, dy, dy1 = x.bfloat16(), dy.bfloat16(), dy1.bfloat16()
    y, y1, dx = torch.empty_like(dy), torch.empty_like(dy), torch.empty_like(x)
    sums = downsample(x, weight, small, (y, y1), segments=1, most=1)
    input_gradient((dy, dy1), weight, small, dx, most=1)
    dw, dw1 = apart(weight_gradients(x, (dy, dy1), weight, most=1).sum(0), weight)
    found, expected = [y, y1, dw, dw1], []
    gradient = torch.zeros_like(x, dtype=torch.float32)
    for w, given, padding in ((weight, dy, 1), (small, dy1, 0)):
        expected.append(torch.nn.functional.conv2d(x.float(), w, stride=2, padding=padding))
        of_x, of_w, _ = torch.ops.aten.convolution_backward(
            given.float(), x.float(), w, None, (2, 2), (padding,) * 2, (1, 1), False, (0, 0), 1, (True, True, False)
        )
        gradient += of_x
        expected.append(of_w)
    assert sums is not None
    found += [dx, sums.sum(1)]
    powers = [torch.stack([out.float().sum((0, 2, 3)), out.float().square().sum((0, 2, 3))]) for out in (y, y1)]
    expected = [expected[i] for i in (0, 2, 1, 3)] + [gradient, torch.stack(powers)]
    return nvrtc.largest_error(zip(found, expected, strict=True))


def downsample(
    x: Tensor, weight: Tensor, small: Tensor, results: tuple[Tensor, Tensor], segments: int, most: int | None = None
) -> Tensor | None:
    """Fill both results, and give the sums of their parts (2 × parts × 2 × channels) if some segments want them.

    What the parts are is told at `cuda_conv.convolve`. At most so many blocks do the work.
    """
    outer, inner = weight.shape[:2]
    planned = _plan("downsample", tuple(x.shape), outer, max(1, segments), x.get_device(), most)
    assert planned is not None
    sums = None
    if segments:
        parts = planned.tiles.number if segments > 1 else planned.blocks
        sums = torch.empty((2, parts, 2, outer), dtype=torch.float32, device=x.device)
    name = f"downsample<{inner}, {outer}, {'true' if segments else 'false'}>"
    written = (*results, results[0] if sums is None else sums)
    _launch(name, planned, x, (x, weight, small, *written, int(segments > 1)))
    return sums


def input_gradient(
    gradients: tuple[Tensor, Tensor], weight: Tensor, small: Tensor, dx: Tensor, most: int | None = None
) -> None:
    """Fill the gradient of the images, from those of both results."""
    outer, inner = weight.shape[:2]
    planned = _plan("downsample_back", tuple(dx.shape), outer, 1, dx.get_device(), most)
    assert planned is not None
    _launch(f"downsample_back<{inner}, {outer}>", planned, dx, (*gradients, weight, small, dx))


def weight_gradients(x: Tensor, gradients: tuple[Tensor, Tensor], weight: Tensor, most: int | None = None) -> Tensor:
    """Partial sums: blocks × the gradients of both weights, one behind the other (`apart` takes them apart)."""
    outer, inner = weight.shape[:2]
    planned = _plan("downsample_weights", tuple(x.shape), outer, 1, x.get_device(), most)
    assert planned is not None
    partial = torch.empty((planned.blocks, 10 * outer * inner), dtype=torch.float32, device=x.device)
    _launch(f"downsample_weights<{inner}, {outer}>", planned, x, (x, *gradients, partial))
    return partial


def apart(total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both weights, channels last."""
    outer, inner = weight.shape[:2]
    of_large, of_small = total.split([9 * outer * inner, outer * inner])
    return of_large.view(outer, 3, 3, inner).permute(0, 3, 1, 2), of_small.view(outer, 1, 1, inner).permute(0, 3, 1, 2)


def _launch(name: str, planned: Plan, images: Tensor, arguments: tuple[Tensor | int, ...]) -> None:
    count, _, height, width = images.shape
    kernel = nvrtc.kernel(SOURCE, name, images.get_device())
    kernel(planned.blocks, planned.threads, planned.shared, (*arguments, count, height, width, *planned.tiles))


def _plan(
    kind: str, shape: tuple[int, ...], outer: int, segments: int, device: int, most: int | None = None
) -> Plan | None:
    if kind == "downsample":
        return plan(kind, shape, outer, shape[0] // segments, nvrtc.processors(device), room(device), most)
    return plan(kind, shape, outer, shape[0], nvrtc.processors(device), room(device), most)
