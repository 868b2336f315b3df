"""The view in one kernel against the same view in many, from the same random numbers.

Needs Triton and a CUDA device; without one, TRITON_INTERPRET=1 runs the kernel in Triton's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from scrlearn.augment import COINS, SCR, TRIES, Augment, crop_flip

pytestmark = pytest.mark.device
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NOTHING: dict[str, Any] = {"scale": (1, 1), "flip": 0, "jitter": 0, "grey": 0}
on_cuda = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no CUDA graphs")


def view(augment: Augment, x: Tensor, drawn: Tensor) -> Tensor:
    pytest.importorskip("triton", reason="the kernel is written in Triton, which is not installed")
    from scrlearn.augment_fused import view

    return view(augment, x.to(DEVICE), drawn.to(DEVICE)).cpu()


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def images(n: int = 6, c: int = 3, h: int = 8, w: int = 8) -> Tensor:
    """Random images with pure black, white, grey and primary colours among their pixels."""
    x = torch.rand(n, c, h, w, generator=generator(7))
    x[0] = x[0].round()
    x[-1, :, 0] = x[-1, :1, 0]
    return x


def settled(augment: Augment, n: int, h: int, w: int) -> Tensor:
    """Random numbers whose boxes have sides that no last bit can round to another pixel."""
    drawn = augment.draw(20 * n + 200, generator(3))
    if augment.scale[0] < 1:
        area, shape = drawn[COINS:-4].double().split(TRIES + 1)
        (small, large), ratio = augment.scale, torch.tensor(augment.ratio).double().log() / 2
        side = ((small + area * (large - small)) * h * w).sqrt()
        shape = (ratio[0] + shape * (ratio[1] - ratio[0])).exp()
        sides = torch.cat((side / shape, side * shape))
        drawn = drawn[:, ((sides % 1 - 0.5).abs() > 1e-3).all(0)]
    assert drawn.shape[1] >= n
    return drawn[:, :n].contiguous()


def hold_to_the_many(augment: Augment, x: Tensor, atol: float = 1e-5) -> None:
    n, _, h, w = x.shape
    drawn = settled(augment, n, h, w)
    expected = augment.apply(x / 255 if x.dtype == torch.uint8 else x, augment.understood(drawn, h, w))
    found = view(augment, x, drawn)
    assert found.stride() == x.stride()
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jitter": 0, "grey": 0},
        {"scale": (1, 1), "flip": 0, "jitter": 1, "grey": 0},
        {"jitter": 1, "brightness": 1, "contrast": 1, "saturation": 1, "hue": 0.5},
        {"jitter": 1, "hue": 0},
        {"jitter": 1, "saturation": 0, "hue": 0.33},
        {"jitter": 1, "saturation": 0, "hue": 0},
        {"scale": (0.05, 0.3), "ratio": (0.3, 3.0), "grey": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_is_the_same_view(options: dict[str, Any], channels: int) -> None:
    hold_to_the_many(Augment(**options), images(12, channels))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("h", "w"), [(32, 32), (9, 17), (20, 12), (1, 1), (84, 84)])
def test_shapes_and_memory_formats(h: int, w: int, channels_last: bool) -> None:
    x = images(4, 3, h, w)
    # a place near pixel 84 is known to 8e-6 of a pixel
    hold_to_the_many(SCR, x.contiguous(memory_format=torch.channels_last) if channels_last else x, atol=3e-5)


def test_bytes_are_read_as_they_are() -> None:
    hold_to_the_many(SCR, (images(12) * 255).byte())


def test_where_no_box_fits_the_crop_is_centred() -> None:
    x = images(5, 3, 20, 48)
    augment = Augment(**NOTHING | {"scale": (0.99, 1)})
    drawn = augment.draw(5, generator())
    expected = torch.nn.functional.interpolate(x[..., 10:37], (20, 48), mode="bilinear")
    torch.testing.assert_close(view(augment, x, drawn), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(8, 8), (84, 84), (9, 17)])
def test_nothing_asked_nothing_done(size: tuple[int, int]) -> None:
    x = images(4, 3, *size)
    for flip in (0, 1):
        augment = Augment(**NOTHING | {"flip": flip})
        assert torch.equal(view(augment, x, augment.draw(4, generator())), x.flip(3) if flip else x)


def test_slices_and_empty_batches() -> None:
    x, drawn = images(6), settled(SCR, 3, 8, 8)
    assert torch.equal(view(SCR, x[::2], drawn), view(SCR, x[::2].contiguous(), drawn))
    assert view(SCR, x[:0], drawn[:, :0]).shape == (0, 3, 8, 8)


@on_cuda
@pytest.mark.parametrize("augment", [SCR, crop_flip, Augment(scale=(1, 1), hue=0.5)])
def test_the_same_bits_twice_and_in_a_graph(augment: Augment) -> None:
    x, g = images(110, 3, 32, 32).cuda(), generator(1, "cuda")
    first = augment(x, g)
    g.manual_seed(1)
    assert torch.equal(augment(x, g), first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(g)
    with torch.cuda.graph(graph):
        captured = augment(x, g)
    g.manual_seed(1)
    graph.replay()
    assert torch.equal(captured, first)
    graph.replay()
    assert not torch.equal(captured, first)


@on_cuda
def test_is_what_the_augmentation_uses_without_waiting() -> None:
    x = images(20, 3, 32, 32).cuda().requires_grad_()
    expected = view(SCR, x.detach(), SCR.draw(20, generator(4, "cuda")))
    g = generator(4, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = SCR(x, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), expected)
    assert not found.requires_grad


@on_cuda
@pytest.mark.parametrize(("augment", "channels"), [(Augment(form="torchvision"), 3), (SCR, 4)])
def test_other_views_go_the_long_way(augment: Augment, channels: int) -> None:
    x = images(8, channels).cuda()
    drawn = augment.draw(8, generator(4, "cuda"))
    assert torch.equal(augment(x, generator(4, "cuda")), augment.apply(x, augment.understood(drawn, 8, 8)))
