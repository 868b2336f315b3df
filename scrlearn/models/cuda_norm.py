"""The sums that BatchNorm needs of a batch, by the kernels of batch_norm.cu."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from scrlearn.models import nvrtc

SOURCE = Path(__file__).with_name("batch_norm.cu")
THREADS, AT_ONCE = 256, 4  # as in the source
MOST_CHANNELS = 1024


def suits(x: Tensor) -> bool:
    """Whether the kernels can do it for these images."""
    channels = x.shape[1]
    return channels % 8 == 0 and channels <= MOST_CHANNELS and nvrtc.can_run(x) and trusted(channels, x.get_device())


def statistics(
    x: Tensor,
    counter: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
    segments: int = 1,
) -> Tensor:
    """Mean, inverse deviation, scale and shift of each segment, one after the other; moves the running statistics.

    `counter` holds a 0, and does again when this is over.
    """
    channels = x.shape[1]
    rows = x.numel() // channels // segments
    blocks = segments * _blocks(rows, channels, segments, x.get_device())
    partial, saved = floats(x, blocks * 2 * channels), floats(x, segments * 4 * channels)
    kernel = nvrtc.kernel(SOURCE, f"statistics<{channels}>", x.get_device())
    told = (weight, bias, mean, var, saved, rows, segments, momentum, eps)
    kernel(blocks, THREADS, 0, (x, partial, counter, *told))
    return saved


def settle(
    sums: Tensor,
    rows: int,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
    segments: int = 1,
) -> Tensor:
    """The same from sums that a convolution has made: parts × 2 × channels; `rows` are those of a segment."""
    channels = len(weight)
    saved = floats(sums, segments * 4 * channels)
    kernel = nvrtc.kernel(SOURCE, f"settle<{channels}>", sums.get_device())
    told = (weight, bias, mean, var, saved, rows, segments, momentum, eps)
    kernel(channels // 8, THREADS, 0, (sums, len(sums) // segments, *told))
    return saved


def backward_sums(
    dy: Tensor,
    y: Tensor,
    x: Tensor,
    counter: Tensor,
    saved: Tensor,
    shortcut: bool,
    relu: bool,
    segments: int = 1,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of weight and bias, and what the input's gradient needs of a segment: dx = scale · g + b · x + c.

    `also` is a second gradient that is added to dy. With a shortcut, its gradient g comes with them.
    """
    channels = x.shape[1]
    rows = x.numel() // channels // segments
    blocks = segments * _blocks(rows, channels, segments, x.get_device())
    partial, coefficients = floats(x, blocks * 2 * channels), floats(x, segments * 2 * channels)
    d_weight, d_bias = floats(x, channels), floats(x, channels)
    name = f"backward_sums<{channels}, {_word(shortcut)}, {_word(relu)}, {_word(also is not None)}>"
    kernel = nvrtc.kernel(SOURCE, name, x.get_device())
    gradient = torch.empty_like(x) if shortcut else None
    images = (dy, dy if also is None else also, y, x, x if gradient is None else gradient)
    kernel(blocks, THREADS, 0, (*images, partial, counter, saved, d_weight, d_bias, coefficients, rows, segments))
    return d_weight, d_bias, coefficients, gradient


@functools.cache
def trusted(channels: int, device: int) -> bool:
    """Whether the kernels can be had on this device and give what PyTorch gives; tried once."""
    return nvrtc.right(SOURCE, lambda: _error(channels, torch.device("cuda", device)))


@torch.no_grad()
def _error(channels: int, device: torch.device) -> float:
    """The largest relative error of the statistics and of the gradients that follow, on small images."""
    random = torch.Generator(device).manual_seed(0)
    x, dy = (
        torch.randn(5, channels, 9, 7, generator=random, device=device)
        .bfloat16()
        .contiguous(memory_format=torch.channels_last)
        for _ in range(2)
    )
    weight, bias, mean, var = (torch.rand(channels, generator=random, device=device) + 0.5 for _ in range(4))
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    saved = statistics(x, counter, weight, bias, mean.clone(), var.clone(), 0.1, 1e-5)
    parts = torch.stack([x.float().sum((0, 2, 3)), x.float().square().sum((0, 2, 3))])[None]
    settled = settle(parts, x.numel() // channels, weight, bias, mean.clone(), var.clone(), 0.1, 1e-5)
    d_weight, d_bias, _, gradient = backward_sums(dy, x, x, counter, saved, shortcut=True, relu=True)
    assert gradient is not None
    variance, average = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    inverse = (variance + 1e-5).rsqrt()
    right = torch.cat([average, inverse, weight * inverse, bias - average * weight * inverse])
    centred = (x.float() - average[:, None, None]) * inverse[:, None, None]
    through = dy.float().where(x > 0, 0.0)
    found = (saved, settled, d_weight, d_bias, gradient)
    expected = (right, right, (through * centred).sum((0, 2, 3)), through.sum((0, 2, 3)), through)
    return nvrtc.largest_error(zip(found, expected, strict=True))


def _blocks(rows: int, channels: int, segments: int, device: int) -> int:
    """For a segment: two for each processor altogether, or as few as have two turns each."""
    turn = THREADS // (channels // 8) * AT_ONCE
    return max(1, min(2 * nvrtc.processors(device) // segments, -(-rows // (2 * turn))))


def floats(like: Tensor, size: int) -> Tensor:
    """Room for so many numbers, where another tensor is."""
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _word(value: bool) -> str:
    return "true" if value else "false"
