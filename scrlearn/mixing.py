"""Pieces of one image in another: CutMix, on the batch's own device. Graph-safe, as `scrlearn.augment` is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 5  # random ones for an image: the other image, how large the piece is, its place (down, across), a coin


class Mixed(NamedTuple):
    """Images with a piece of another one in them.

    Parameters
    ----------
    images
        N×C×H×W, laid out as the images that were given.
    other
        N: the number of the image that the piece is from.
    share
        N: how much of the image it covers, from 0 to 1.
    """

    images: Tensor
    other: Tensor
    share: Tensor


def cut_mix(x: Tensor, generator: torch.Generator, probability: Tensor) -> Mixed:
    """Paste a piece of another image of the batch into some, at the place where it was.

    The other image, how much of an image the piece would cover (from nothing to all), and its middle are drawn
    uniformly; what hangs over the edge is cut off.

    Parameters
    ----------
    x
        float32 images N×C×H×W.
    generator
        Where random numbers come from, on the images' device.
    probability
        N: how likely a piece is pasted into each image.

    References
    ----------
    Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", ICCV 2019.

    Examples
    --------
    >>> x = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8)
    >>> images, other, share = cut_mix(x, torch.Generator().manual_seed(0), torch.tensor([0.0, 1.0, 1.0, 0.5]))
    >>> torch.allclose(images.mean((1, 2, 3)), (1 - share) * torch.arange(4.0) + share * other)
    True
    """
    drawn = torch.rand((NUMBERS, len(x)), generator=generator, device=x.device)
    with torch.no_grad():
        if x.is_cuda and (fused := _fused()) is not None:
            return fused(x, drawn, probability)
        return pasted(x, drawn, probability)


def pasted(x: Tensor, drawn: Tensor, probability: Tensor) -> Mixed:
    """What these random numbers (`NUMBERS` rows, a column an image) mean; without drawing any."""
    n, _, h, w = x.shape
    other = (drawn[0] * n).long().clamp_(max=n - 1)
    half = (drawn[1] * (drawn[4] < probability)).sqrt_() / 2
    (top, bottom), (left, right) = _ends(drawn[2], half, h), _ends(drawn[3], half, w)
    row, column = (torch.arange(length, device=x.device, dtype=drawn.dtype) for length in (h, w))
    down = (row >= top[:, None]) & (row < bottom[:, None])
    across = (column >= left[:, None]) & (column < right[:, None])
    piece = down[:, None, :, None] & across[:, None, None, :]
    share = (bottom - top) * (right - left) / (h * w)
    images = torch.empty_like(x).copy_(torch.where(piece, x.index_select(0, other), x))
    return Mixed(images, other, share)


def _ends(middle: Tensor, half: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """First pixel of a piece on a line, and the one behind its last."""
    return (
        ((middle - half) * length + 0.5).floor_().clamp_(0, length),
        ((middle + half) * length + 0.5).floor_().clamp_(0, length),
    )


@functools.cache
def _fused() -> Callable[[Tensor, Tensor, Tensor], Mixed] | None:
    """The same as one kernel for CUDA; None without Triton."""
    try:
        from scrlearn.mixing_fused import pasted as fused
    except ImportError:
        return None
    return fused
