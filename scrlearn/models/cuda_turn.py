"""Weights turned against orthogonalised directions by the kernels of turn.cu: `orthogonal.Matrices` on CUDA."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scrlearn.models import nvrtc

SOURCE = Path(__file__).with_name("turn.cu")
MOST, SIDE, THREADS, CLUSTER = 64, 32, 256, 8  # as in the source
Pointers = ctypes.c_void_p * MOST
Integers = ctypes.c_int * MOST


class Rule(NamedTuple):
    r"""How a step is made: D = `own` · gradient + `past` · velocity, and its orthogonal matrix O.

    .. math:: W \leftarrow \mathrm{keep} \; W - \mathrm{step} \cdot \ell \; O
    """

    own: float
    past: float
    keep: float
    polynomial: tuple[float, float, float]
    rounds: int


class Turned(ctypes.Structure):
    """The matrices of one launch, as the kernels take them."""

    _fields_ = (
        ("weight", Pointers),
        ("gradient", Pointers),
        ("velocity", Pointers),
        ("rows", Integers),
        ("columns", Integers),
        ("place", Integers),
        ("squares", Integers),
        ("tiles", Integers),
        ("step", ctypes.c_float * MOST),
        ("count", ctypes.c_int),
    )


class Polynomial(ctypes.Structure):
    """a X + b X³ + c X⁵."""

    _fields_ = (("a", ctypes.c_float), ("b", ctypes.c_float), ("c", ctypes.c_float))


def suits(weights: Sequence[Tensor]) -> bool:
    """Whether the kernels can turn these weights."""
    return (
        bool(weights)
        and torch.version.cuda is not None
        and all(w.is_cuda and w.dtype == torch.float32 and w.numel() and w.is_contiguous() for w in weights)
        and torch.cuda.get_device_capability(weights[0].device) >= (9, 0)  # where blocks can wait for each other
        and trusted(weights[0].get_device())
    )


def turn(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    steps: Sequence[float],
    lengths: Tensor,
    rule: Rule,
) -> None:
    """One step of all weights, in place.

    Parameters
    ----------
    weights, gradients, velocities
        Matrices whose rows lie one behind the other in memory.
    steps
        A number for each.
    lengths
        ℓ, a float32 number on the device for each.
    rule
        What all have in common.
    """
    for begin in range(0, len(weights), MOST):
        part = slice(begin, begin + MOST)
        held = [gradient.contiguous() for gradient in gradients[part]]  # copies live until the kernels are launched
        older = velocities[part] if velocities is not None else None
        table = Turned(count=len(held))
        squares = tiles = place = 0
        for i, (weight, gradient, step) in enumerate(zip(weights[part], held, steps[part], strict=True)):
            rows, columns = weight.shape
            assert weight.is_contiguous() and (older is None or older[i].is_contiguous())  # noqa: PT018
            table.weight[i], table.gradient[i] = weight.data_ptr(), gradient.data_ptr()
            table.velocity[i] = None if older is None else older[i].data_ptr()
            table.rows[i], table.columns[i], table.step[i] = rows, columns, step
            table.place[i], table.squares[i], table.tiles[i] = place, squares, tiles
            high, wide = -(-rows // SIDE), -(-columns // SIDE)
            place, squares, tiles = place + rows * rows, squares + high * (high + 1) // 2, tiles + high * wide
        launch = functools.partial(_launch, weights[0].get_device())
        one = _iterated(launch, table, held[0].new_empty(5, place), squares, rule)
        launch("turn", tiles, table, float(rule.own), float(rule.past), one, lengths[part], float(rule.keep))


def _launch(device: int, name: str, blocks: int, *arguments: nvrtc.Argument) -> None:
    nvrtc.kernel(SOURCE, name, device)(blocks, THREADS, 0, arguments)


def _iterated(launch: Callable[..., None], table: Turned, room: Tensor, blocks: int, rule: Rule) -> Tensor:
    """What directions are multiplied by from the left, for all matrices, one square behind the other."""
    square, rest, once, one, after = room.unbind()
    launch("squares", blocks, table, float(rule.own), float(rule.past), square)
    given = (square, rest, once, one, after, Polynomial(*rule.polynomial), rule.rounds)
    launch("iterate", CLUSTER * table.count, table, *given)
    return after if rule.rounds % 2 else one


@functools.cache
def trusted(device: int) -> bool:
    """Whether the kernels can be had on this device and do what PyTorch does; tried once."""
    return nvrtc.right(SOURCE, lambda: _error(torch.device("cuda", device)))


@torch.no_grad()
def _error(device: torch.device) -> float:
    """The largest relative error of a step of three weights."""
    random = torch.Generator(device).manual_seed(0)
    shapes = (24, 216), (170, 33), (7, 70)  # less than a tile, more tiles than blocks, and odd
    w, g, v = ([torch.randn(s, generator=random, device=device) for s in shapes] for _ in range(3))
    steps, lengths = (0.1, 0.2, 0.3), torch.tensor([2.0, 1.0, 3.0], device=device)
    rule = Rule(own=1.5, past=0.5, keep=0.9, polynomial=(3.4445, -4.775, 2.0315), rounds=5)
    before = [weight.clone() for weight in w]
    turn(w, g, v, steps, lengths, rule)
    pairs = []
    for i, found in enumerate(w):
        x = (rule.own * g[i] + rule.past * v[i]).double()
        x /= x.norm()
        for _ in range(rule.rounds):
            square = x @ x.T
            a, b, c = rule.polynomial
            x = a * x + b * square @ x + c * square @ square @ x
        pairs.append((found - rule.keep * before[i], -steps[i] * float(lengths[i]) * x))  # the step alone
    return nvrtc.largest_error(pairs)
