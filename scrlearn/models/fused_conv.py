"""3×3 and 1×1 convolutions of few channels, forward and backward, on CUDA (Triton).

The libraries' kernels are built for 64 channels and more; with 24 or 40 they leave most of a tile empty, and some fall
back to conversions. Here a tile holds all channels, images are read through the cache once for all nine taps, weights
are taken in float32 and their gradient comes out in float32. Sums are made in a fixed order.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 132
MOST_CHANNELS = 64


@triton.jit
def _convolve(
    x, w, y, rows_total, w_in, w_out, w_tap,
    height: tl.constexpr, width: tl.constexpr, from_height: tl.constexpr, from_width: tl.constexpr,
    inner: tl.constexpr, outer: tl.constexpr, taps: tl.constexpr, stride: tl.constexpr, backward: tl.constexpr,
    tile: tl.constexpr, block_in: tl.constexpr, block_out: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Pixels × channels of the result, one small product a tap. Backward: where a pixel's value went, not came from."""
    k = tl.arange(0, block_in)
    n = tl.arange(0, block_out)
    weight_mask = (k < inner)[:, None] & (n < outer)[None, :]
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    column = rows % width
    row = (rows // width) % height
    image = rows // (width * height)
    total = tl.zeros((tile, block_out), tl.float32)
    for tap in tl.range(0, taps, num_stages=stages):
        down = tap // 3 - 1 if taps == 9 else tap
        right = tap % 3 - 1 if taps == 9 else tap
        if backward:
            from_row, from_column = row - down, column - right
            inside = (rows < rows_total) & (from_row >= 0) & (from_column >= 0)
            if stride > 1:
                inside = inside & (from_row % stride == 0) & (from_column % stride == 0)
                from_row, from_column = from_row // stride, from_column // stride
        else:
            from_row, from_column = row * stride + down, column * stride + right
            inside = (rows < rows_total) & (from_row >= 0) & (from_column >= 0)
        inside = inside & (from_row < from_height) & (from_column < from_width)
        place = x + ((image * from_height + from_row) * from_width + from_column)[:, None] * inner + k[None, :]
        pixels = tl.load(place, mask=inside[:, None] & (k < inner)[None, :], other=0.0).to(tl.bfloat16)
        weights = tl.load(w + k[:, None] * w_in + n[None, :] * w_out + tap * w_tap, mask=weight_mask, other=0.0)
        total = tl.dot(pixels, weights.to(tl.bfloat16), total)
    mask = (rows < rows_total)[:, None] & (n < outer)[None, :]
    tl.store(y + rows[:, None] * outer + n[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient(
    x, dy, partial, rows_total, programs,
    height: tl.constexpr, width: tl.constexpr, from_height: tl.constexpr, from_width: tl.constexpr,
    inner: tl.constexpr, outer: tl.constexpr, taps: tl.constexpr, stride: tl.constexpr,
    tile: tl.constexpr, block_in: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """Partial sums of one row of taps (three of the nine) over a share of the pixels."""
    k = tl.arange(0, block_in)
    n = tl.arange(0, block_out)
    channel = (k < inner)[None, :]
    down = tl.program_id(1) - 1 if taps == 9 else 0
    left = tl.zeros((block_out, block_in), tl.float32)
    middle = tl.zeros((block_out, block_in), tl.float32)
    right = tl.zeros((block_out, block_in), tl.float32)
    for first in range(tl.program_id(0) * tile, rows_total, programs * tile):
        rows = first + tl.arange(0, tile)
        column = (rows % width) * stride
        row = ((rows // width) % height) * stride + down
        image = rows // (width * height)
        given = (rows < rows_total)[:, None] & (n < outer)[None, :]
        gradient = tl.load(dy + rows[:, None] * outer + n[None, :], mask=given, other=0.0)
        gradient = tl.trans(gradient.to(tl.bfloat16))
        inside = (rows < rows_total) & (row >= 0) & (row < from_height)
        place = x + ((image * from_height + row) * from_width + column)[:, None] * inner + k[None, :]
        pixels = tl.load(place, mask=inside[:, None] & channel, other=0.0)
        middle = tl.dot(gradient, pixels.to(tl.bfloat16), middle)
        if taps == 9:
            pixels = tl.load(place - inner, mask=(inside & (column > 0))[:, None] & channel, other=0.0)
            left = tl.dot(gradient, pixels.to(tl.bfloat16), left)
            pixels = tl.load(place + inner, mask=(inside & (column < from_width - 1))[:, None] & channel, other=0.0)
            right = tl.dot(gradient, pixels.to(tl.bfloat16), right)
    mask = (n < outer)[:, None] & (k < inner)[None, :]
    # the layout of a channels-last weight: output channel, tap, input channel
    base = partial + tl.program_id(0) * (outer * taps * inner) + tl.program_id(1) * 3 * inner
    place = base + n[:, None] * (taps * inner) + k[None, :]
    if taps == 9:
        tl.store(place, left, mask=mask)
        tl.store(place + inner, middle, mask=mask)
        tl.store(place + 2 * inner, right, mask=mask)
    else:
        tl.store(place, middle, mask=mask)


@triton.jit
def _add_up(partial, out, size, programs, rows: tl.constexpr, block: tl.constexpr):
    """The sum over all programs' partial sums, in order."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((rows, block), tl.float32)
    for first in range(0, programs, rows):
        program = first + tl.arange(0, rows)
        mask = (program < programs)[:, None] & (columns < size)[None, :]
        total += tl.load(partial + program[:, None] * size + columns[None, :], mask=mask, other=0.0)
    tl.store(out + columns, tl.sum(total, 0), mask=columns < size)


def _blocks(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def _run(x: Tensor, weight: Tensor, size: tuple[int, int], stride: int, backward: bool) -> Tensor:
    outer, inner = weight.shape[:2]
    strides = (weight.stride(1), weight.stride(0), weight.stride(3))
    if backward:
        outer, inner = inner, outer
        strides = (strides[1], strides[0], strides[2])
    shape = (len(x), outer, *size)
    y = torch.empty(shape, dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last)
    rows = y.numel() // outer
    tile = 128 if rows >= 128 * PROGRAMS else 64
    _convolve[(triton.cdiv(rows, tile),)](
        x, weight, y, rows, *strides, height=size[0], width=size[1], from_height=x.shape[2], from_width=x.shape[3],
        inner=inner, outer=outer, taps=weight.shape[2] * weight.shape[3], stride=stride, backward=backward,
        tile=tile, block_in=_blocks(inner), block_out=_blocks(outer), stages=1, num_warps=4 if outer <= 32 else 8,
    )  # fmt: skip
    return y


def _sum_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    outer, inner = weight.shape[:2]
    taps = weight.shape[2] * weight.shape[3]
    rows = dy.numel() // outer
    tile = 128 if max(inner, outer) <= 32 else 64
    programs = min(triton.cdiv(rows, tile), PROGRAMS)
    partial = torch.empty((programs, weight.numel()), dtype=torch.float32, device=x.device)
    _weight_gradient[(programs, 3 if taps == 9 else 1)](
        x, dy, partial, rows, programs, height=dy.shape[2], width=dy.shape[3], from_height=x.shape[2],
        from_width=x.shape[3], inner=inner, outer=outer, taps=taps, stride=stride,
        tile=tile, block_in=_blocks(inner), block_out=_blocks(outer), num_warps=4, num_stages=1,
    )  # fmt: skip
    total = torch.empty_like(weight, memory_format=torch.channels_last)
    _add_up[(triton.cdiv(weight.numel(), 32),)](partial, total, weight.numel(), programs, rows=128, block=32)
    return total


class _Convolution(torch.autograd.Function):
    """Autograd around the kernels."""

    @staticmethod
    def forward(ctx, x, weight, stride):
        """The convolution."""
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        size = (-(-x.shape[2] // stride), -(-x.shape[3] // stride))
        return _run(x, weight, size, stride, backward=False)

    @staticmethod
    def backward(ctx, dy):
        """Gradients of input and weight."""
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _run(dy, weight, tuple(x.shape[2:]), ctx.stride, backward=True)
        return dx, _sum_weight_gradient(x, dy, weight, ctx.stride), None


def convolve(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """3×3 (padding 1) or 1×1 convolution of channels-last images; float32 weights, bfloat16 out."""
    x = x.contiguous(memory_format=torch.channels_last)
    return _Convolution.apply(x, weight, stride)
