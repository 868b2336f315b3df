"""A whole view of a batch (crop, flip, resize, colours, grey) in one kernel, on CUDA (Triton).

`scrlearn.augment` says what a view is; this is the same, all steps for one pixel at a time. Every program finds its
image's crop again from the random numbers, which costs less than writing it down and reading it back.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrlearn.augment import COINS, TRIES, centred_box

if TYPE_CHECKING:
    from scrlearn.augment import Augment

PIXELS = 512


@triton.jit
def _crop(
    drawn, image, images, height, width,
    area_low, area_span, shape_low, shape_span, centred_height, centred_width, tries: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Corner and size of the image's crop: the first of the boxes that fits, or else the centred one."""
    number = tl.arange(0, rows)
    among = number < tries
    # the boxes' areas and shapes follow each other, one more of each than is used
    area = tl.load(drawn + number * images + image, mask=among, other=0.0)
    shape = tl.load(drawn + (tries + 1 + number) * images + image, mask=among, other=0.0)
    side = tl.sqrt_rn(area * area_span + area_low)
    shape = tl.exp(shape * shape_span + shape_low)
    heights = tl.floor(tl.div_rn(side, shape) + 0.5)
    widths = tl.floor(side * shape + 0.5)
    fits = among & (heights <= height) & (widths <= width) & (heights >= 1) & (widths >= 1)
    first = tl.min(tl.where(fits, number, tries), 0)
    none = first == tries
    crop_height = tl.where(none, centred_height, tl.sum(tl.where(number == first, heights, 0.0), 0))
    crop_width = tl.where(none, centred_width, tl.sum(tl.where(number == first, widths, 0.0), 0))
    return crop_height, crop_width, none


@triton.jit
def _corner(coin, places, centred):
    return tl.floor(tl.where(centred, places * 0.5 - 0.5, coin * places))


@triton.jit
def _place(pixel, corner, size, step, length: tl.constexpr):
    """Where a pixel of the view lies on a line of the image: the pixel before, the one after, and that one's share."""
    last = corner + size - 1
    place = (corner + last) * 0.5 + (pixel.to(tl.float32) - (length - 1) * 0.5) * step
    place = tl.minimum(tl.maximum(place, corner), last)
    before = tl.floor(place)
    return before.to(tl.int32), tl.minimum(before + 1, last).to(tl.int32), place - before


@triton.jit
def _sample(x, above, below, down, before, after, right, stride_h, stride_w, inside):
    """One channel, bilinearly between four pixels."""
    a = tl.load(x + above * stride_h + before * stride_w, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + above * stride_h + after * stride_w, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(x + below * stride_h + before * stride_w, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(x + below * stride_h + after * stride_w, mask=inside, other=0.0).to(tl.float32)
    upper = a * (1 - right) + b * right
    lower = c * (1 - right) + d * right
    value = upper * (1 - down) + lower * down
    if x.dtype.element_ty == tl.uint8:
        value = tl.div_rn(value, 255.0)
    return value


@triton.jit
def _clamp(value):
    return tl.minimum(tl.maximum(value, 0.0), 1.0)


@triton.jit
def _brighten(value, brightness, contrast):
    value = _clamp(value + brightness)
    return _clamp(value + value * contrast)


@triton.jit
def _channel(high, chroma, hue):
    """A channel that is full within one sixth of its own hue and empty from two sixths on."""
    empty = tl.abs(tl.abs(hue) - 3) - 2
    return high + chroma * tl.minimum(tl.maximum(empty, -1.0), 0.0)


@triton.jit
def _turn_hue(red, green, blue, saturation, turn, wrap: tl.constexpr):
    """Turn the hue of HSV by so many sixths, and multiply its saturation by 1 + so much."""
    high = tl.maximum(red, tl.maximum(green, blue))
    low = tl.minimum(red, tl.minimum(green, blue))
    chroma = high - low
    hue = tl.abs(tl.div_rn(green + blue - red + high - 2 * low, tl.maximum(chroma, 1e-12)))
    hue = tl.where(green < blue, -hue, hue) + turn
    if wrap:
        hue -= 6 * tl.floor(tl.div_rn(hue, 6.0) + 0.5)
    chroma = tl.minimum(chroma + chroma * saturation, high)
    return _channel(high, chroma, hue), _channel(high, chroma, hue - 2), _channel(high, chroma, hue + 2)


@triton.jit
def _luma(red, green, blue):
    value = green + (red - green) * (0.299 / 0.886)
    return value + (blue - value) * 0.114


@triton.jit
def _view(
    x, y, drawn, images, x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w,
    area_low, area_span, shape_low, shape_span, centred_height, centred_width, flip, jitter, grey,
    brightness, contrast, saturation, hue,
    height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, coins: tl.constexpr, tries: tl.constexpr,
    rows: tl.constexpr, crops: tl.constexpr, jitters: tl.constexpr, turns: tl.constexpr, wrap: tl.constexpr,
    pixels: tl.constexpr,
):  # fmt: skip
    """Some pixels of the view of one image; `drawn` holds a row for each random number, a column for each image."""
    image = tl.program_id(0)
    size_h, size_w, none = height * 1.0, width * 1.0, False
    colours = drawn + coins * images + image
    if crops:
        size_h, size_w, none = _crop(
            drawn + coins * images, image, images, height, width,
            area_low, area_span, shape_low, shape_span, centred_height, centred_width, tries, rows,
        )  # fmt: skip
        colours += 2 * (tries + 1) * images
    top = _corner(tl.load(drawn + image), height + 1 - size_h, none)
    left = _corner(tl.load(drawn + images + image), width + 1 - size_w, none)
    step = tl.div_rn(size_w, width * 1.0)
    step = tl.where(tl.load(drawn + 2 * images + image) < flip, -step, step)

    pixel = tl.program_id(1) * pixels + tl.arange(0, pixels)
    inside = pixel < height * width
    row, column = pixel // width, pixel % width
    above, below, down = _place(row, top, size_h, tl.div_rn(size_h, height * 1.0), height)
    before, after, right = _place(column, left, size_w, step, width)
    x += image.to(tl.int64) * x_n
    y += image.to(tl.int64) * y_n + row * y_h + column * y_w
    on = tl.where(tl.load(drawn + 3 * images + image) < jitter, 1.0, 0.0)
    bright = (2 * tl.load(colours) - 1) * on * brightness
    strong = (2 * tl.load(colours + images) - 1) * on * contrast
    red = _sample(x, above, below, down, before, after, right, x_h, x_w, inside)
    red = _brighten(red, bright, strong) if jitters else _clamp(red)
    if channels == 3:
        green = _sample(x + x_c, above, below, down, before, after, right, x_h, x_w, inside)
        blue = _sample(x + 2 * x_c, above, below, down, before, after, right, x_h, x_w, inside)
        green = _brighten(green, bright, strong) if jitters else _clamp(green)
        blue = _brighten(blue, bright, strong) if jitters else _clamp(blue)
        if turns:
            saturated = (2 * tl.load(colours + 2 * images) - 1) * on * saturation
            turn = (2 * tl.load(colours + 3 * images) - 1) * on * hue * 6
            red, green, blue = _turn_hue(red, green, blue, saturated, turn, wrap)
        luma = _luma(red, green, blue)
        colourless = tl.load(drawn + 4 * images + image) < grey
        red = tl.where(colourless, luma, red)
        tl.store(y + y_c, tl.where(colourless, luma, green), mask=inside)
        tl.store(y + 2 * y_c, tl.where(colourless, luma, blue), mask=inside)
    tl.store(y, red, mask=inside)


def view(augment: Augment, x: Tensor, drawn: Tensor) -> Tensor:
    """The views of images with 1 or 3 channels that these random numbers (`Augment.draw`) mean.

    Images may be uint8 too; the views are float32 from 0 to 1, laid out as the images are.
    """
    n, channels, height, width = x.shape
    y = torch.empty_like(x, dtype=torch.float32)
    if not y.numel():
        return y
    (small, large), (narrow, wide) = augment.scale, augment.ratio
    low, high = math.log(narrow) / 2, math.log(wide) / 2
    with torch.cuda.device_of(x):
        _view[(n, triton.cdiv(height * width, PIXELS))](
            x, y, drawn, n, *x.stride(), *y.stride(),
            small * height * width, (large - small) * height * width, low, high - low,
            *map(float, (*centred_box(height, width, narrow, wide), augment.flip, augment.jitter, augment.grey,
                         augment.brightness, augment.contrast, augment.saturation, augment.hue)),
            height=height, width=width, channels=channels, coins=COINS, tries=TRIES,
            rows=triton.next_power_of_2(TRIES), crops=small < 1, jitters=augment.jitter > 0,
            turns=augment.jitter > 0 and (augment.saturation > 0 or augment.hue > 0), wrap=augment.hue > 1 / 3,
            pixels=PIXELS,
        )  # fmt: skip
    return y
