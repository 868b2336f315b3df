"""3×3 convolutions of few channels by the kernels of convolution.cu; a step spends most of its time in them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scrlearn.models import nvrtc

SOURCE = Path(__file__).with_name("convolution.cu")
PIXELS_OF_A_WARP = 64
MOST_SHARED = 100 * 1024  # bytes, so that two blocks find room
MOST_CHANNELS = 48  # more would not fit in registers


class Tiles(NamedTuple):
    """How a batch is cut into tiles: some rows of an image, or some whole images together."""

    rows: int
    together: int
    number: int
    warps: int


def cut(images: int, height: int, width: int, channels: int, wanted: int, most_warps: int = 8) -> Tiles | None:
    """The largest tiles of which there are as many as wanted, or the smallest; None if not even one row fits.

    >>> cut(220, 32, 32, 24, wanted=132)
    Tiles(rows=16, together=1, number=440, warps=8)
    """
    found = None
    lines = MOST_SHARED // 2 // bordered(-1, 1, width, channels)  # that fit in memory, borders and all
    for warps in (8, 4):
        rows = min(height, warps * PIXELS_OF_A_WARP // width, lines - 2)
        if warps > most_warps or rows < 1:
            continue
        strips = -(-height // rows)
        rows = -(-height // strips)
        together = 1
        if strips == 1:
            together = min(images, warps * PIXELS_OF_A_WARP // (height * width), lines // (rows + 2))
        found = Tiles(rows, together, -(-images // together) * strips, warps)
        if found.number >= wanted:
            break
    return found


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
        and cut(images, height, width, max(inner, outer), wanted=1, most_warps=4) is not None
        and trusted(inner, outer, x.get_device())
    )


@functools.cache
def trusted(inner: int, outer: int, device: int) -> bool:
    """Whether the kernels can be had on this device and give what PyTorch gives; tried once."""
    return nvrtc.right(SOURCE, lambda: _error(inner, outer, device))


@torch.no_grad()
def _error(inner: int, outer: int, device: int) -> float:
    """The largest relative error of a small convolution and its gradients."""
    random = torch.Generator(f"cuda:{device}").manual_seed(0)
    shapes = [(3, inner, 9, 10), (3, outer, 9, 10), (outer, inner, 3, 3)]
    x, dy, weight = (
        torch.randn(shape, generator=random, device=random.device).contiguous(memory_format=torch.channels_last)
        for shape in shapes
    )
    x, dy = x.bfloat16(), dy.bfloat16()
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    convolve(x, weight, y, backward=False, segments=1)
    convolve(dy, weight, dx, backward=True, segments=0)
    dw = weight_gradient(x, dy, weight).sum(0).view(outer, 3, 3, inner).permute(0, 3, 1, 2)
    expected = torch.nn.functional.conv2d(x.float(), weight, padding=1)
    gradients = torch.ops.aten.convolution_backward(
        dy.float(), x.float(), weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False)
    )
    pairs = zip((y, dx, dw), (expected, *gradients[:2]), strict=True)
    return max(float((found.float() - right).norm() / right.norm()) for found, right in pairs)


def apart(size: int, tile: int, segments: int) -> bool:
    """Whether sums over tiles are wanted, and are sums over parts of the segments: no tile lies in two of them.

    >>> apart(20, 4, segments=1), apart(20, 4, segments=2), apart(20, 4, segments=0)
    (True, False, False)
    """
    return segments == 1 or (segments > 1 and size // segments % tile == 0)


def convolve(x: Tensor, weight: Tensor, y: Tensor, backward: bool, segments: int) -> Tensor | None:
    """Fill y, and give the sums of its tiles if they are wanted for some segments of the batch (see `apart`)."""
    outer, inner = weight.shape[:2]
    if backward:
        outer, inner = inner, outer
    images, _, height, width = x.shape
    tiles = cut(images, height, width, max(inner, outer), nvrtc.processors(x.get_device()))
    assert tiles is not None
    has_sums = apart(images, tiles.together, segments)
    sums = torch.empty((tiles.number, 2, outer), dtype=torch.float32, device=x.device) if has_sums else None
    kernel = nvrtc.kernel(SOURCE, f"convolve<{inner}, {outer}, {_word(backward)}, {_word(has_sums)}>", x.get_device())
    length = (9 * inner // 8 + 1) // 2 * 16 + 8
    shared = outer * length * 2 + bordered(tiles.rows, tiles.together, width, inner)
    arguments = (x, weight, y, y if sums is None else sums, images, height, width, tiles.rows, tiles.together)
    kernel(tiles.number, tiles.warps * 32, shared, arguments)
    return sums


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Partial sums of the weights' gradient: blocks × the weights, channels last."""
    outer, inner = weight.shape[:2]
    images, _, height, width = x.shape
    blocks = 2 * nvrtc.processors(x.get_device())
    tiles = cut(images, height, width, max(inner, outer), blocks, most_warps=4)
    assert tiles is not None
    blocks = min(blocks, tiles.number)
    partial = torch.empty((blocks, weight.numel()), dtype=torch.float32, device=x.device)
    pixels = -(-tiles.together * tiles.rows * width // 16) * 16
    shared = 2 * (bordered(tiles.rows, tiles.together, width, inner) + pixels * outer * 2)
    kernel = nvrtc.kernel(SOURCE, f"weight_gradient<{inner}, {outer}>", x.get_device())
    arguments = (x, dy, partial, images, height, width, tiles.rows, tiles.together, tiles.number)
    kernel(blocks, 128, shared, arguments)
    return partial


def _word(value: bool) -> str:
    return "true" if value else "false"
