"""Pieces pasted into images: against plain loops, the statistics of what is drawn, and the same as one kernel."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scrlearn.mixing import NUMBERS, cut_mix, pasted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, c: int = 3, h: int = 8, w: int = 8) -> Tensor:
    return torch.rand(n, c, h, w, generator=generator(7))


def by_loops(x: Tensor, drawn: Tensor, probability: Tensor) -> tuple[Tensor, list[int], list[float]]:
    n, _, h, w = x.shape
    y, others, shares = x.clone(), [], []
    for i in range(n):
        other, area, down, across, coin = drawn[:, i].tolist()
        other = int(other * n)
        half = math.sqrt(area) / 2 if coin < probability[i] else 0.0

        def ends(middle: float, length: int, half: float = half) -> range:
            first, behind = (math.floor((middle + side * half) * length + 0.5) for side in (-1, 1))
            return range(max(first, 0), min(behind, length))

        piece = [(row, column) for row in ends(down, h) for column in ends(across, w)]
        for row, column in piece:
            y[i, :, row, column] = x[other, :, row, column]
        others.append(other)
        shares.append(len(piece) / (h * w))
    return y, others, shares


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 6), h=st.integers(1, 7), w=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_pieces_are_those_of_plain_loops(n, h, w, seed):
    x, p = images(n, 2, h, w), torch.tensor([0.0, 0.4, 1.0]).repeat(2)[:n]
    drawn = torch.rand((NUMBERS, n), generator=generator(seed), dtype=torch.float64)
    found, (y, others, shares) = pasted(x, drawn, p), by_loops(x, drawn, p)
    assert torch.equal(found.images, y)
    assert found.other.tolist() == others
    assert found.share.tolist() == pytest.approx(shares)


def test_what_is_drawn_is_uniform():
    n = 20_000
    mixed = cut_mix(torch.zeros(n, 1, 32, 32), generator(1), torch.ones(n))
    counts = torch.bincount(mixed.other // (n // 10), minlength=10).double()
    assert float(((counts - n / 10) ** 2 / (n / 10)).sum()) < 27.9  # χ² with 9 degrees of freedom, p = 0.001
    # a side of length s has its middle anywhere: s - s²/4 of it lies inside, on average
    side = torch.linspace(0, 1, 100_001, dtype=torch.float64).sqrt()
    expected = float(((side * (1 - side / 4)) ** 2).mean())
    assert float(mixed.share.mean()) == pytest.approx(expected, abs=0.01)


def test_so_many_have_a_piece_in_them():
    probability = torch.tensor([0.0, 0.3]).repeat(20_000)
    share = cut_mix(torch.zeros(40_000, 1, 32, 32), generator(2), probability).share.view(-1, 2)
    assert not share[:, 0].any()
    assert float((share[:, 1] > 0).float().mean()) == pytest.approx(0.3, abs=0.015)


def test_the_same_seed_gives_the_same_pieces_and_the_images_stay():
    x = images(9).contiguous(memory_format=torch.channels_last)
    before = x.clone()
    one, two, three = (cut_mix(x, generator(seed), torch.ones(9)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one.images, three.images)
    assert torch.equal(x, before)
    assert one.images.stride() == x.stride()


@pytest.mark.device
@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(6, 3, 32, 32), (5, 1, 7, 40), (1, 3, 8, 8), (0, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
def test_one_kernel_does_the_same(shape, probability, layout):
    pytest.importorskip("triton", reason="the kernel is written in Triton, which is not installed")
    from scrlearn.mixing_fused import pasted as fused

    x = images(*shape).contiguous(memory_format=layout)
    drawn = torch.rand((NUMBERS, 50 + len(x)), generator=generator(5))
    half = drawn[1].double().sqrt() / 2
    ends = [
        (drawn[row] + side * half) * length for row, length in ((2, x.shape[2]), (3, x.shape[3])) for side in (1, -1)
    ]
    sure = torch.stack([(end % 1 - 0.5).abs() > 1e-3 for end in ends]).all(0)  # no last bit moves it to another pixel
    drawn = drawn[:, sure][:, : len(x)].contiguous()
    each = torch.full((len(x),), probability)
    found, expected = fused(x.to(DEVICE), drawn.to(DEVICE), each.to(DEVICE)), pasted(x, drawn, each)
    assert torch.equal(found.images.cpu(), expected.images)
    assert found.images.stride() == x.stride()
    assert torch.equal(found.other.cpu(), expected.other)
    torch.testing.assert_close(found.share.cpu(), expected.share)
