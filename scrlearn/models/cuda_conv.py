"""3×3 convolutions of few channels by the kernels of convolution.cu; a step spends most of its time in them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scrlearn.models import nvrtc

SOURCE = Path(__file__).with_name("convolution.cu")
MOST_CHANNELS = 48  # more would not fit in registers
PATCH = (4, 16)  # rows and columns that a warp works on
GRADIENT_PIXELS = 256  # of a tile, where the weights' gradient is made
GRADIENT_TILE = 50 * 1024  # bytes of it at most


class Tiles(NamedTuple):
    """How a batch is cut into tiles: some rows of an image, or some whole images together."""

    rows: int
    together: int
    number: int


class Plan(NamedTuple):
    """Tiles, and the blocks that go over them, with the bytes of shared memory each of them needs."""

    tiles: Tiles
    blocks: int
    warps: int
    shared: int


def cut(images: int, height: int, width: int, channels: int) -> Tiles | None:
    """The largest tiles for the weights' gradient; None if not even one row fits.

    >>> cut(220, 32, 32, 24)
    Tiles(rows=8, together=1, number=880)
    """
    lines = GRADIENT_TILE // bordered(-1, 1, width, channels)  # that fit in memory, borders and all
    rows = min(height, GRADIENT_PIXELS // width, lines - 2)
    if rows < 1:
        return None
    rows = -(-height // -(-height // rows))
    together = min(images, GRADIENT_PIXELS // (height * width), lines // (rows + 2)) if rows == height else 1
    return Tiles(rows, together, -(-images // together) * -(-height // rows))


@functools.lru_cache(maxsize=256)
def plan(
    shape: tuple[int, ...], outer: int, segment: int, processors: int, room: tuple[int, int], most: int | None = None
) -> Plan | None:
    """The quickest way to convolve images, by an estimate, with at most so many blocks; None if they do not fit.

    No tile holds images of two segments, of so many images each. The room is what a block can have of shared memory,
    and what a processor has.

    >>> plan((220, 24, 32, 32), 24, 220, processors=132, room=(232_448, 233_472))
    Plan(tiles=Tiles(rows=16, together=1, number=440), blocks=264, warps=8, shared=80640)
    """
    images, _, height, width = shape
    found = []
    for rows in {-(-height // strips) for strips in range(1, height + 1)} | set(range(4, height, 4)):
        for together in range(1, max(1, 8 * PATCH[1] // width if rows == height else 1) + 1):
            if segment % together == 0 or together < segment == images:
                tiles = Tiles(rows, together, -(-images // together) * -(-height // rows))
                found += _planned(tiles, shape, outer, processors, room, most or tiles.number)
    return min(found)[1] if found else None


def _planned(
    tiles: Tiles, shape: tuple[int, ...], outer: int, processors: int, room: tuple[int, int], most: int
) -> list[tuple[int, Plan]]:
    """The estimated cycles, and the plan with these tiles, if it can be done."""
    _, inner, _, width = shape
    down, right = -(-tiles.rows // PATCH[0]), -(-tiles.together * width // PATCH[1])
    most_warps = 8 if outer <= 24 else 6 if outer <= 40 else 4  # as in the kernel's __launch_bounds__
    steps = (3 * inner // 8 + 1) // 2
    rounds = -(-down * right // most_warps)
    warps = -(-down * right // rounds)
    tile = bordered(tiles.rows, tiles.together, width, inner)
    below = bordered(PATCH[0] * down - tiles.rows - 2, 1, width, inner)  # a patch may reach that far
    shared = 3 * outer * (steps * 16 + 8) * 2 + warps * 48 * outer + tile + below
    for another in (0, tile):  # a second buffer, unless each block has a single tile
        shared += another
        fit = min(2 * most_warps // warps, room[1] // (shared + 1024))
        blocks = min(tiles.number, fit * processors, most)
        if fit and shared <= room[0] and (another or blocks == tiles.number):
            each = -(-tiles.number // processors)
            busy = warps * min(fit, each)
            idle = max(1.0, 0.5 + most_warps / busy)  # with few warps, one waits for what another could have used
            patch = (20 * steps + 30) * outer // 8  # the products, and the way out
            fetching, working = tile / 32, rounds * warps * patch * idle + 300
            begin = 7 * inner * outer / warps + min(fit, each) * fetching  # weights and first tiles
            cycles = begin + each * max(fetching, working)
            return [(round(cycles), Plan(tiles, blocks, warps, shared))]
    return []


def bordered(rows: int, together: int, width: int, channels: int) -> int:
    """Bytes of a tile with its border of one pixel."""
    return together * (rows + 2) * (width + 2) * channels * 2


def suits(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether the kernels can do this convolution here."""
    outer, inner, side = weight.shape[:3]
    images, _, height, width = x.shape
    return (
        side == 3
        and stride == 1
        and inner % 8 == outer % 8 == 0
        and max(inner, outer) <= MOST_CHANNELS
        and nvrtc.can_run(x)
        and (tiles := cut(images, height, width, max(inner, outer))) is not None
        and _for_gradient(tiles, width, inner, outer) <= room(x.get_device())[0]
        and all(_plan((images, a, height, width), b, 1, x.get_device()) for a, b in ((inner, outer), (outer, inner)))
        and trusted(inner, outer, x.get_device())
    )


@functools.cache
def trusted(inner: int, outer: int, device: int) -> bool:
    """Whether the kernels can be had on this device and give what PyTorch gives; tried once."""
    return nvrtc.right(SOURCE, lambda: _error(inner, outer, device))


@torch.no_grad()
def _error(inner: int, outer: int, device: int) -> float:
    """The largest relative error of a small convolution and its gradients; a block has several tiles."""
    shapes = [(5, inner, 9, 10), (5, outer, 9, 10), (outer, inner, 3, 3)]
    x, dy, weight = nvrtc.examples(device, *shapes)
    x, dy = x.bfloat16(), dy.bfloat16()
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    sums = convolve(x, weight, y, backward=False, segments=1, most=1)
    convolve(dy, weight, dx, backward=True, segments=0, most=1)
    dw = weight_gradient(x, dy, weight, most=1).sum(0).view(outer, 3, 3, inner).permute(0, 3, 1, 2)
    expected = torch.nn.functional.conv2d(x.float(), weight, padding=1)
    gradients = torch.ops.aten.convolution_backward(
        dy.float(), x.float(), weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False)
    )
    assert sums is not None
    of_y = torch.stack([power.sum((0, 2, 3)) for power in (y.float(), y.float().square())])
    pairs = zip((y, dx, dw, sums.sum(0)), (expected, *gradients[:2], of_y), strict=True)
    return nvrtc.largest_error(pairs)


def apart(size: int, tile: int, segments: int) -> bool:
    """Whether sums over tiles are wanted, and are sums over parts of the segments: no tile lies in two of them.

    >>> apart(20, 4, segments=1), apart(20, 4, segments=2), apart(20, 4, segments=0)
    (True, False, False)
    """
    return segments == 1 or (segments > 1 and size // segments % tile == 0)


def convolve(
    x: Tensor, weight: Tensor, y: Tensor, backward: bool, segments: int, most: int | None = None
) -> Tensor | None:
    """Fill y, and give the sums of its parts if they are wanted for some segments of the batch.

    Each segment has the sums of as many parts, one after the other: of its tiles, or, where it is alone, of the blocks
    that did the work. There are at most so many blocks.
    """
    outer, inner = weight.shape[:2]
    if backward:
        outer, inner = inner, outer
    images, _, height, width = x.shape
    planned = _plan(tuple(x.shape), outer, max(1, segments), x.get_device(), most)
    assert planned is not None
    tiles, blocks, warps, shared = planned
    parts = tiles.number if segments > 1 else blocks
    sums = torch.empty((parts, 2, outer), dtype=torch.float32, device=x.device) if segments else None
    kernel = nvrtc.kernel(
        SOURCE, f"convolve<{inner}, {outer}, {_word(backward)}, {_word(segments > 0)}>", x.get_device()
    )
    arguments = (x, weight, y, y if sums is None else sums, int(segments > 1), images, height, width, *tiles)
    kernel(blocks, warps * 32, shared, arguments)
    return sums


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, most: int | None = None) -> Tensor:
    """Partial sums of the weights' gradient: blocks × the weights, channels last."""
    outer, inner = weight.shape[:2]
    images, _, height, width = x.shape
    tiles = cut(images, height, width, max(inner, outer))
    assert tiles is not None
    shared = _for_gradient(tiles, width, inner, outer)
    most_fit = 4 if max(inner, outer) <= 24 else 2  # as in the kernel's __launch_bounds__
    fit = min(most_fit, room(x.get_device())[1] // (shared + 1024))
    blocks = min(most or fit * nvrtc.processors(x.get_device()), tiles.number)
    partial = torch.empty((blocks, weight.numel()), dtype=torch.float32, device=x.device)
    kernel = nvrtc.kernel(SOURCE, f"weight_gradient<{inner}, {outer}>", x.get_device())
    kernel(blocks, 128, shared, (x, dy, partial, images, height, width, *tiles))
    return partial


def _for_gradient(tiles: Tiles, width: int, inner: int, outer: int) -> int:
    """Bytes of shared memory that a block needs for the weights' gradient."""
    pixels = -(-tiles.together * tiles.rows * width // 16) * 16
    return 2 * (bordered(tiles.rows, tiles.together, width, inner) + pixels * outer * 2) + pixels * 4


def _plan(shape: tuple[int, ...], outer: int, segments: int, device: int, most: int | None = None) -> Plan | None:
    return plan(shape, outer, shape[0] // segments, nvrtc.processors(device), room(device), most)


@functools.cache
def room(device: int) -> tuple[int, int]:
    """Bytes of shared memory that a block can have, and that a processor has."""
    of = torch.cuda.get_device_properties(device)
    of_a_block = getattr(of, "shared_memory_per_block_optin", of.shared_memory_per_block)  # its stub does not know it
    return of_a_block, of.shared_memory_per_multiprocessor


def _word(value: bool) -> str:
    return "true" if value else "false"
