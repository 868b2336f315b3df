"""Images that no network has learned by heart: halves of two stored ones, to see which classes are said too readily."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TIMES, MOST = 2, 2048  # blends for each stored image, and in all


class Blends(NamedTuple):
    """Blended images (uint8), and how much each is of each class: a half of both, or all of one."""

    images: Tensor
    shares: Tensor


def blends(images: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> Blends:
    """The means of pairs of images, pixel by pixel; every image is in as many of them as any other, as far as it goes.

    Parameters
    ----------
    images, y
        What is stored (uint8), and its classes. One image alone is blended with itself.
    num_classes
        Columns of the shares.
    generator
        Says who is blended with whom; on the CPU.

    Examples
    --------
    >>> images = torch.tensor([0, 100, 200], dtype=torch.uint8)[:, None, None, None]
    >>> found = blends(images, torch.tensor([0, 1, 1]), 2, torch.Generator().manual_seed(0))
    >>> sorted(zip(found.images.flatten().tolist(), found.shares.tolist()))[:2]
    [(50, [0.5, 0.5]), (50, [0.5, 0.5])]
    """
    rounds = [torch.randperm(len(y), generator=generator) for _ in range(TIMES)]
    one = torch.cat(rounds)[:MOST].to(images.device)
    other = torch.cat([order.roll(1) for order in rounds])[:MOST].to(images.device)
    mean = (images[one].short() + images[other].short()) // 2
    shares = (F.one_hot(y[one], num_classes) + F.one_hot(y[other], num_classes)) / 2
    return Blends(mean.to(torch.uint8), shares)
