"""The batched augmentation against a plain one: loops over images and pixels, with the same parameters."""

from __future__ import annotations

import colorsys
import copy
import functools
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scrlearn.augment import SCR, Augment, Parameters, as_augment, crop_flip
from scrlearn.errors import InputError

NOTHING: dict[str, Any] = {"scale": (1, 1), "flip": 0, "jitter": 0, "grey": 0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 6, c: int = 3, h: int = 8, w: int = 8, seed: int = 7) -> Tensor:
    """Random images with pure black, white, grey and primary colours among their pixels."""
    x = torch.rand(n, c, h, w, generator=generator(seed))
    if n and c == 3:
        x[0] = x[0].round()
        x[-1, :, 0] = x[-1, :1, 0]
    return x


# --- the reference -------------------------------------------------------------------------------------------------


def reference(augment: Augment, x: Tensor, parameters: Parameters) -> Tensor:
    return torch.stack([reference_one(augment, x[i], parameters, i) for i in range(len(x))])


def reference_one(augment: Augment, image: Tensor, parameters: Parameters, i: int) -> Tensor:
    (top, left), (height, width) = (v[:, i].int().tolist() for v in (parameters.corner, parameters.size))
    crop = image[None, :, top : top + height, left : left + width]
    view = F.interpolate(crop, size=image.shape[1:], mode="bilinear", align_corners=False)[0]
    if parameters.flip[i]:
        view = torch.from_numpy(view.numpy()[:, :, ::-1].copy())
    pixels = view.double().numpy()
    if augment.jitter:
        pixels = reference_jitter(augment, pixels, parameters.colour[:, i].tolist())
    if parameters.grey[i] and len(pixels) == 3:
        pixels = np.broadcast_to(reference_luma(pixels), pixels.shape)
    return torch.from_numpy(np.ascontiguousarray(pixels)).float()


def reference_luma(pixels: np.ndarray) -> np.ndarray:
    return np.tensordot([0.299, 0.587, 0.114], pixels, 1)[None]


def reference_jitter(augment: Augment, p: np.ndarray, colour: list[float]) -> np.ndarray:
    strengths = (augment.brightness, augment.contrast, augment.saturation)
    brightness, contrast, saturation = (1 + share * most for share, most in zip(colour, strengths, strict=False))
    turn = colour[3] * augment.hue
    if augment.form == "kornia":
        p = np.clip(p + brightness - 1, 0, 1)
        p = np.clip(p * contrast, 0, 1)
        return reference_hsv(p, saturation, turn) if len(p) == 3 else p
    p = np.clip(p * brightness, 0, 1)
    p = np.clip(contrast * p + (1 - contrast) * (reference_luma(p) if len(p) == 3 else p).mean(), 0, 1)
    if len(p) != 3:
        return p
    p = np.clip(saturation * p + (1 - saturation) * reference_luma(p), 0, 1)
    return reference_hsv(p, 1.0, turn)


def reference_hsv(p: np.ndarray, saturation: float, turn: float) -> np.ndarray:
    out = np.empty_like(p)
    for row, column in np.ndindex(p.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*p[:, row, column])
        out[:, row, column] = colorsys.hsv_to_rgb((h + turn) % 1, min(1.0, s * saturation), v)
    return out


def reference_crop(rng: random.Random, augment: Augment, h: int, w: int) -> tuple[int, int, int, int]:
    """Top, left, height, width: ten tries, then the centre."""
    for _ in range(10):
        area = h * w * rng.uniform(*augment.scale)
        ratio = math.exp(rng.uniform(*map(math.log, augment.ratio)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= w and 0 < height <= h:
            return rng.randint(0, h - height), rng.randint(0, w - width), height, width
    ratio = min(max(w / h, augment.ratio[0]), augment.ratio[1])
    height, width = (h, round(h * ratio)) if ratio < w / h else (round(w / ratio), w)
    return (h - height) // 2, (w - width) // 2, height, width


# --- the pictures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["kornia", "torchvision"])
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
def test_matches_the_reference(form: Any, options: dict[str, Any]) -> None:
    augment = Augment(form=form, **options)
    x = images(16)
    parameters = augment.parameters(16, 8, 8, generator(3))
    torch.testing.assert_close(augment.apply(x, parameters), reference(augment, x, parameters), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("c", "h", "w"), [(1, 8, 8), (1, 28, 28), (3, 84, 84), (3, 9, 17), (3, 20, 12), (4, 8, 8), (3, 1, 1)]
)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("form", ["kornia", "torchvision"])
def test_shapes_and_memory_formats(c: int, h: int, w: int, channels_last: bool, form: Any) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = images(3, c, h, w).contiguous(memory_format=memory_format)
    before = x.clone()
    augment = Augment(form=form)
    view = augment(x, generator())
    assert (view.shape, view.dtype, view.stride()) == (x.shape, x.dtype, x.stride())
    assert view.is_contiguous(memory_format=memory_format)
    assert torch.equal(x, before)
    parameters = augment.parameters(3, h, w, generator())
    # a place near pixel 84 is known to 8e-6 of a pixel
    torch.testing.assert_close(view, reference(augment, x, parameters), atol=3e-5, rtol=0)


def test_a_slice_of_a_batch_is_a_batch() -> None:
    x = images(6)
    parameters = SCR.parameters(3, 8, 8, generator())
    torch.testing.assert_close(SCR.apply(x[::2], parameters), SCR.apply(x[::2].clone(), parameters))


@pytest.mark.parametrize("form", ["kornia", "torchvision"])
@pytest.mark.parametrize("size", [(8, 8), (32, 32), (84, 84), (9, 17)])
def test_nothing_asked_nothing_done(form: Any, size: tuple[int, int]) -> None:
    x = images(4, 3, *size)
    view = Augment(form=form, **NOTHING)(x, generator())
    assert torch.equal(view, x)
    assert view.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("size", [(8, 8), (84, 84), (9, 17)])
def test_flip_alone_only_mirrors(size: tuple[int, int]) -> None:
    x = images(4, 3, *size)
    assert torch.equal(Augment(**NOTHING | {"flip": 1})(x, generator()), x.flip(3))


def test_the_whole_image_as_a_crop_is_the_image() -> None:
    x = images(5, 3, 84, 84)
    whole = SCR.parameters(5, 84, 84, generator())._replace(corner=torch.zeros(2, 5), size=torch.full((2, 5), 84.0))
    assert torch.equal(crop_flip.apply(x, whole._replace(flip=torch.zeros(5, dtype=torch.bool))), x)


@pytest.mark.parametrize("strength", [{}, {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0}])
def test_jitter_of_no_strength_changes_nothing(strength: dict[str, float]) -> None:
    x = images(6)
    augment = Augment(**NOTHING | {"jitter": 1} | strength)
    still = augment.parameters(6, 8, 8, generator())
    if not strength:
        still = still._replace(colour=torch.zeros(4, 6))
    torch.testing.assert_close(augment.apply(x, still), x, atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["kornia", "torchvision"])
def test_grey_images_stay_grey(form: Any) -> None:
    x = images(20)[:, :1].expand(-1, 3, -1, -1).contiguous()
    view = Augment(form=form, scale=(1, 1), hue=0.5, saturation=1)(x, generator())
    assert torch.equal(view[:, :1].expand_as(view), view)
    assert torch.equal(Augment(**NOTHING | {"grey": 1})(x, generator()), x)


def test_grey_takes_all_colour_from_the_images_it_falls_on() -> None:
    x, augment = images(40), Augment(**NOTHING | {"grey": 0.5})
    grey = augment.parameters(40, 8, 8, generator()).grey
    view = augment(x, generator())
    assert torch.equal(view.amax(1) == view.amin(1), grey[:, None, None].expand(-1, 8, 8) | (x.amax(1) == x.amin(1)))
    assert torch.equal(view[~grey], x[~grey])


def test_turning_the_hue_by_a_third_moves_red_to_green() -> None:
    red = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    augment = Augment(**NOTHING | {"jitter": 1, "hue": 1 / 3})
    turned = Parameters(*(v.clone() for v in augment.parameters(1, 4, 4, generator())))
    turned.colour[:] = torch.tensor([0, 0, 0, 1.0])[:, None]
    torch.testing.assert_close(augment.apply(red, turned)[0, :, 0, 0], torch.tensor([0, 1.0, 0]))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    low=st.floats(0.01, 1),
    form=st.sampled_from(["kornia", "torchvision"]),
    strength=st.floats(0, 1),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_views_stay_between_0_and_1(seed: int, low: float, form: Any, strength: float, size: tuple[int, int]) -> None:
    augment = Augment(
        scale=(low, 1), form=form, brightness=strength, contrast=strength, saturation=strength, hue=strength / 2
    )
    x = images(8, 3, *size, seed=seed)
    view = augment(x, generator(seed))
    assert bool(((view >= 0) & (view <= 1)).all())


@pytest.mark.parametrize("augment", [SCR, Augment(form="torchvision"), crop_flip])
def test_an_image_does_not_feel_its_neighbours(augment: Augment) -> None:
    x = images(10, h=32, w=32)
    parameters = augment.parameters(10, 32, 32, generator())
    together = augment.apply(x, parameters)
    for some in (slice(3, 4), slice(2, 9)):
        alone = augment.apply(x[some], Parameters(*(v[..., some] for v in parameters)))
        torch.testing.assert_close(alone, together[some], atol=1e-6, rtol=0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_large_batch_in_parts_is_the_whole_batch(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(11).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    whole = SCR(x, generator())
    monkeypatch.setattr("scrlearn.augment.PART", 3 * x[0].numel())
    in_parts = SCR(x, generator())
    torch.testing.assert_close(in_parts, whole, atol=1e-6, rtol=0)
    assert in_parts.stride() == x.stride()


def test_same_state_same_bits_and_the_next_call_another_view() -> None:
    x, g = images(6), generator(5)
    state = g.get_state()
    first, second = SCR(x, g), SCR(x, g)
    g.set_state(state)
    assert torch.equal(SCR(x, g), first)
    assert not torch.equal(first, second)
    assert not torch.equal(SCR(x, generator(6)), first)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    SCR(images(), generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_batch_gives_an_empty_batch() -> None:
    assert SCR(torch.empty(0, 3, 8, 8), generator()).shape == (0, 3, 8, 8)


def test_autocast_and_gradients_stay_outside() -> None:
    x = images(6).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        view = SCR(x, generator())
    assert not view.requires_grad
    assert torch.equal(view, SCR(x.detach(), generator()))


# --- the parameters ------------------------------------------------------------------------------------------------

MANY = 20_000


CROPS = [
    (SCR, 32, 32),
    (SCR, 84, 84),
    (SCR, 20, 48),
    (Augment(scale=(0.5, 1)), 20, 48),
    (Augment(scale=(0.4, 1)), 64, 20),
    (Augment(ratio=(0.4, 0.8)), 32, 32),
]


def hold_crops_to_the_loop(augment: Augment, h: int, w: int, g: torch.Generator) -> None:
    parameters = augment.parameters(MANY, h, w, g)
    top, left, height, width = torch.cat((parameters.corner, parameters.size)).double().cpu().numpy()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= h).all()
    assert (left + width <= w).all()
    rng = random.Random(2)
    loop = np.array([reference_crop(rng, augment, h, w) for _ in range(MANY)], dtype=float).T
    for ours, theirs in zip((top, left, height, width), loop, strict=True):
        assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > 1e-3
    assert stats.ks_2samp(height * width, loop[2] * loop[3], method="asymp").pvalue > 1e-3
    assert stats.ks_2samp(width / height, loop[3] / loop[2], method="asymp").pvalue > 1e-3


@pytest.mark.parametrize(("augment", "h", "w"), CROPS)
def test_crops_are_distributed_as_those_of_the_loop(augment: Augment, h: int, w: int) -> None:
    hold_crops_to_the_loop(augment, h, w, generator(1))


@pytest.mark.device
@pytest.mark.parametrize(("augment", "h", "w"), CROPS)
def test_crops_drawn_on_the_device_too(augment: Augment, h: int, w: int) -> None:
    hold_crops_to_the_loop(augment, h, w, torch.Generator("cuda").manual_seed(1))


def test_where_no_box_fits_the_crop_is_centred() -> None:
    # every box of the whole area and an allowed ratio is higher than the image
    parameters = Augment(scale=(0.99, 1)).parameters(50, 20, 48, generator())
    assert torch.equal(parameters.size, torch.tensor([[20.0], [27.0]]).expand(2, 50))
    assert torch.equal(parameters.corner, torch.tensor([[0.0], [10.0]]).expand(2, 50))


def test_tiny_boxes_are_never_empty() -> None:
    parameters = Augment(scale=(1e-4, 0.05)).parameters(MANY, 6, 6, generator())
    assert parameters.size.min() == 1


def test_every_place_is_as_likely() -> None:
    corner = Augment(scale=(0.25, 0.25), ratio=(1, 1)).parameters(MANY, 32, 32, generator()).corner
    for axis in corner:
        assert stats.chisquare(torch.bincount(axis.long(), minlength=17).numpy()).pvalue > 1e-3


def test_coins_and_colours() -> None:
    parameters = SCR.parameters(MANY, 32, 32, generator(4))
    jittered = (parameters.colour != 0).all(0)
    assert torch.equal(jittered, (parameters.colour != 0).any(0))
    for coin, p in ((parameters.flip, 0.5), (jittered, 0.8), (parameters.grey, 0.2)):
        assert abs(coin.float().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / MANY)
    for share in parameters.colour[:, jittered]:
        assert stats.kstest(share.numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-3
    drawn = torch.cat((parameters.colour, parameters.size, torch.stack((parameters.flip, jittered, parameters.grey))))
    correlation = torch.corrcoef(drawn).fill_diagonal_(0)
    correlation[4, 5] = correlation[5, 4] = 0  # height and width share their area
    assert correlation.abs().max() < 4.5 / math.sqrt(MANY)


@pytest.mark.parametrize("p", [0, 1])
def test_certain_coins(p: int) -> None:
    parameters = Augment(flip=p, jitter=p, grey=p).parameters(1000, 8, 8, generator())
    for coin in (parameters.flip, parameters.grey, (parameters.colour != 0).any(0)):
        assert bool((coin == bool(p)).all())


# --- graph safety --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [SCR, Augment(form="torchvision", hue=0.5), crop_flip])
@pytest.mark.parametrize("size", [(8, 8), (20, 48)])
def test_no_value_is_read_back(augment: Augment, size: tuple[int, int]) -> None:
    # tensors without values: reading one, or a shape that depends on one, raises
    g = generator()
    with FakeTensorMode():
        assert augment(torch.empty(4, 3, *size), g).shape == (4, 3, *size)


@pytest.mark.parametrize("augment", [SCR, Augment(form="torchvision"), crop_flip])
def test_apply_is_traced_whole(augment: Augment) -> None:
    torch.compiler.reset()
    x, parameters = images(), augment.parameters(6, 8, 8, generator())
    traced = torch.compile(augment.apply, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(x, parameters), augment.apply(x, parameters))


@pytest.mark.device
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("augment", [SCR, Augment(form="torchvision"), crop_flip])
def test_captured_as_a_cuda_graph(augment: Augment, channels_last: bool) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = images(110, 3, 32, 32).cuda().contiguous(memory_format=memory_format)
    g = torch.Generator("cuda").manual_seed(0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        augment(x, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(g)
    with torch.cuda.graph(graph):
        captured = augment(x, g)
    g.manual_seed(3)
    views = []
    for _ in range(3):
        graph.replay()
        views.append(captured.clone())
    assert not torch.equal(views[0], views[1])
    g.manual_seed(3)
    for view in views:
        assert torch.equal(augment(x, g), view)


@pytest.mark.device
@pytest.mark.parametrize("size", [(32, 32), (20, 48)])
def test_never_waits_for_the_device_and_agrees_with_the_cpu(size: tuple[int, int]) -> None:
    x = images(20, 3, *size)
    on_device, g = x.cuda(), torch.Generator("cuda").manual_seed(0)
    SCR(on_device, g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        parameters = SCR.parameters(20, *size, g)
        view = SCR.apply(on_device, parameters)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert view.device == on_device.device
    there = Parameters(*(v.cpu() for v in parameters))
    torch.testing.assert_close(view.cpu(), SCR.apply(x, there), atol=1e-5, rtol=0)


# --- what people give it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.5, 0.2)}, r"scale is \(0.5, 0.2\).*smaller first"),
        ({"scale": (0.2, 1.5)}, "above 0 to 1"),
        ({"scale": (0, 1)}, "above 0"),
        ({"scale": 0.2}, "pair of numbers"),
        ({"ratio": ("a", "b")}, "pair of numbers"),
        ({"ratio": (-1, 1)}, "ratio is"),
        ({"flip": 1.5}, "flip is 1.5; it must be a number between 0 and 1"),
        ({"hue": 0.6}, "hue is 0.6; it must be a number between 0 and 0.5"),
        ({"jitter": float("nan")}, "jitter is nan"),
        ({"grey": "often"}, "grey is 'often'; it must be a number"),
        ({"form": "korna"}, 'Did you mean "kornia"'),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Augment(**options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"float32.*given uint8 of shape \(2, 3, 8, 8\)"),
        (torch.zeros(3, 8, 8), r"N×C×H×W.*float32 of shape \(3, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8, device="meta"), "images are on meta and the generator on cpu"),
    ],
)
def test_impossible_images(x: Tensor, message: str) -> None:
    g = generator()
    before = g.get_state()
    with pytest.raises(InputError, match=message):
        SCR(x, g)
    assert torch.equal(g.get_state(), before)


def test_is_a_value() -> None:
    assert Augment() == SCR == pickle.loads(pickle.dumps(SCR)) == copy.deepcopy(SCR)
    assert Augment(scale=[0.2, 1]) == SCR  # type: ignore[arg-type]
    assert hash(Augment()) == hash(SCR)
    assert crop_flip != SCR
    with pytest.raises(AttributeError):
        SCR.flip = 0.1  # type: ignore[misc]


class Blend(nn.Module):
    def forward(self, x: Tensor, share: float = 0.5) -> Tensor:
        return x * share


class Anything(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        (only,) = inputs
        return 1 - only


def noise(x: Tensor, *, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator)


def noise_too(x: Tensor, source: torch.Generator, /) -> Tensor:
    return torch.rand(x.shape, generator=source)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda x: x / 2, lambda x: x / 2),
        (lambda x, p=0.5: x * p, lambda x: x / 2),
        (Blend(), lambda x: x / 2),
        (nn.Sequential(Blend(), Blend()), lambda x: x / 4),
        (Anything(), lambda x: 1 - x),
        (torch.square, torch.square),
        (functools.partial(torch.clamp, max=0.5), lambda x: x.clamp(max=0.5)),
        (noise, lambda x: torch.rand(x.shape, generator=generator(9))),
        (noise_too, lambda x: torch.rand(x.shape, generator=generator(9))),
        (lambda x, g: SCR(x, g), lambda x: SCR(x, generator(9))),
        (lambda x, generator=None: x if generator is None else SCR(x, generator), lambda x: SCR(x, generator(9))),
        (SCR, lambda x: SCR(x, generator(9))),
        (None, lambda x: x),
    ],
)
def test_any_callable_is_an_augmentation(given: Any, expected: Any) -> None:
    x = images()
    assert torch.equal(as_augment(given)(x, generator(9)), expected(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("blur", "'blur' is no augmentation"),
        (Augment, "is no augmentation; give a callable"),
        (lambda: None, r"takes \(\)"),
        (lambda x, y, z: x, r"takes \(x, y, z\).*functools.partial"),
        (lambda x, *, strength: x, "strength"),
        (lambda x, y, *, generator: x, "generator"),
    ],
)
def test_what_is_no_augmentation(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_augment(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda x: x[:, :1], "changed the batch's shape"),
        (lambda x: x.double(), "changed the batch's dtype from torch.float32 to torch.float64"),
        (lambda x: x.numpy(), "returned a ndarray, not a tensor"),
    ],
)
def test_a_view_must_look_like_its_images(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_augment(given)(images(), generator())
