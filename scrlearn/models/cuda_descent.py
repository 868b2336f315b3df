"""Gradient descent with all that belongs to it (momentum, decay, averaged weights) by the kernel of descent.cu."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scrlearn.models import nvrtc

SOURCE = Path(__file__).with_name("descent.cu")
MOST, THREADS, CHUNK = 80, 256, 2048  # as in the source
Pointers = ctypes.c_void_p * MOST
Integers = ctypes.c_int * MOST


class Moved(NamedTuple):
    """A tensor that a step moves, with what belongs to it: gradient, velocity, running average, weight decay.

    Without a gradient only the average moves.
    """

    weight: Tensor
    gradient: Tensor | None = None
    velocity: Tensor | None = None
    average: Tensor | None = None
    decay: float = 0.0


class Tensors(ctypes.Structure):
    """The tensors of one launch, as the kernel takes them."""

    _fields_ = (
        ("weight", Pointers),
        ("gradient", Pointers),
        ("velocity", Pointers),
        ("average", Pointers),
        ("size", Integers),
        ("first", Integers),
        ("decay", ctypes.c_float * MOST),
        ("count", ctypes.c_int),
    )


def suits(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel can move these weights, and their averages."""
    return (
        bool(weights)
        and torch.version.cuda is not None
        and all(w.is_cuda and w.dtype == torch.float32 and _in_one_piece(w) for w in weights)
        and trusted(weights[0].get_device())
    )


def descend(
    moved: Sequence[Moved], updates: Tensor, rate: float, momentum: float, scale: float, averaging: float
) -> None:
    r"""Move all weights and their averages by one step, in place.

    .. math:: v \leftarrow \mu v + s \, (g + \lambda \theta), \qquad \theta \leftarrow \theta - \eta v, \qquad
        \bar\theta \leftarrow \bar\theta + (1 - \min(d, \tfrac{1 + t}{10 + t})) \, (\theta - \bar\theta)

    Parameters
    ----------
    moved
        The tensors; all of a weight have its shape.
    updates
        t, a float32 number on the device.
    rate, momentum, scale, averaging
        η, μ, s, d.
    """
    for begin in range(0, len(moved), MOST):
        held = list(_alike(moved[begin : begin + MOST]))  # copies live until the kernel is launched
        table = Tensors(count=len(held))
        blocks = 0
        for i, one in enumerate(held):
            for name in ("weight", "gradient", "velocity", "average"):
                tensor = getattr(one, name)
                getattr(table, name)[i] = None if tensor is None else tensor.data_ptr()
            table.size[i], table.first[i], table.decay[i] = one.weight.numel(), blocks, one.decay
            blocks += -(-one.weight.numel() // CHUNK)
        kernel = nvrtc.kernel(SOURCE, "descend", moved[0].weight.get_device())
        kernel(blocks, THREADS, 0, (table, updates, rate, momentum, scale, averaging))


def _alike(moved: Sequence[Moved]) -> Iterator[Moved]:
    """The same, with gradients in the order of their weights; tensors without values are left out."""
    for one in moved:
        gradient = one.gradient
        if gradient is not None and not _same_order(one.weight, gradient):
            gradient = torch.empty_like(one.weight).copy_(gradient)
        assert all(t is None or _same_order(one.weight, t) for t in (one.velocity, one.average))
        if one.weight.numel():
            yield one._replace(gradient=gradient)


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether the values of two tensors of one shape lie in the same order; sides of length 1 have no say."""
    strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (a, b)]
    return strides[0] == strides[1] and _in_one_piece(b)


def _in_one_piece(tensor: Tensor) -> bool:
    """Whether there are no gaps between the values, and the first one can be read with its neighbours."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.numel() == 0 or span == tensor.numel()) and tensor.data_ptr() % 16 == 0


@functools.cache
def trusted(device: int) -> bool:
    """Whether the kernel can be had on this device and does what PyTorch does; tried once."""
    return nvrtc.right(SOURCE, lambda: _error(torch.device("cuda", device)))


@torch.no_grad()
def _error(device: torch.device) -> float:
    """The largest relative error of a step on two weights and a statistic."""
    random = torch.Generator(device).manual_seed(0)
    w, g, v, a = ([torch.randn(n, generator=random, device=device) for n in (4099, 7)] for _ in range(4))
    mean, averaged = (torch.randn(24, generator=random, device=device) for _ in range(2))
    updates = torch.full((), 5.0, device=device)
    moved = [Moved(w[i], g[i], v[i], a[i], decay) for i, decay in enumerate((0.1, 0.0))]
    share = 1 - 6 / 15
    expected = []
    for one in moved:
        assert one.gradient is not None and one.velocity is not None and one.average is not None  # noqa: PT018
        velocity = 0.9 * one.velocity + 0.5 * (one.gradient + one.decay * one.weight)
        weight = one.weight - 0.2 * velocity
        expected += [velocity, weight, one.average + share * (weight - one.average)]
    expected.append(averaged + share * (mean - averaged))
    descend([*moved, Moved(mean, average=averaged)], updates, 0.2, 0.9, 0.5, 0.99)
    found = [t for one in moved for t in (one.velocity, one.weight, one.average)] + [averaged]
    return nvrtc.largest_error((a, b) for a, b in zip(found, expected, strict=True) if a is not None)
