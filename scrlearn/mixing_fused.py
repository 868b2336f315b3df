"""Pieces of images pasted into others in one kernel, on CUDA (Triton). `scrlearn.mixing` says what is done."""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrlearn.mixing import Mixed

PIXELS = 512


@triton.jit
def _end(place, length: tl.constexpr):
    return tl.minimum(tl.maximum(tl.floor(place * length + 0.5), 0.0), length * 1.0)


@triton.jit
def _paste(
    x, y, drawn, others, shares, images, probability, x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, pixels: tl.constexpr,
):  # fmt: skip
    """Some pixels of one image; `drawn` holds a row for each random number, a column for each image."""
    image = tl.program_id(0)
    drawn += image
    other = tl.minimum((tl.load(drawn) * images).to(tl.int32), images - 1)
    area = tl.where(tl.load(drawn + 4 * images) < tl.load(probability + image), tl.load(drawn + images), 0.0)
    half = tl.sqrt_rn(area) / 2
    down, across = tl.load(drawn + 2 * images), tl.load(drawn + 3 * images)
    top, bottom = _end(down - half, height), _end(down + half, height)
    left, right = _end(across - half, width), _end(across + half, width)
    if tl.program_id(1) == 0:
        tl.store(others + image, other.to(tl.int64))
        tl.store(shares + image, tl.div_rn((bottom - top) * (right - left), height * width * 1.0))
    pixel = tl.program_id(1) * pixels + tl.arange(0, pixels)
    inside = pixel < height * width
    row, column = pixel // width, pixel % width
    piece = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    source = tl.where(piece, other, image).to(tl.int64) * x_n + row * x_h + column * x_w
    target = image.to(tl.int64) * y_n + row * y_h + column * y_w
    for channel in range(channels):
        value = tl.load(x + source + channel * x_c, mask=inside)
        tl.store(y + target + channel * y_c, value, mask=inside)


def pasted(x: Tensor, drawn: Tensor, probability: Tensor) -> Mixed:
    """What `scrlearn.mixing.pasted` gives."""
    n, channels, height, width = x.shape
    y = torch.empty_like(x)
    others, shares = torch.empty(n, dtype=torch.int64, device=x.device), torch.empty_like(drawn[0])
    if x.numel():
        with torch.cuda.device_of(x):
            _paste[(n, triton.cdiv(height * width, PIXELS))](
                x, y, drawn, others, shares, n, probability.contiguous(), *x.stride(), *y.stride(),
                channels=channels, height=height, width=width, pixels=PIXELS,
            )  # fmt: skip
    return Mixed(y, others, shares)
