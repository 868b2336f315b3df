"""Views of a batch: random crop, flip, colour jitter and grey, drawn for each image, on the batch's own device.

Everything here is graph-safe: shapes are fixed, nothing is read back from the device and no Python branch looks at a
tensor's values, so the same code runs eagerly on a CPU and inside a CUDA graph. Numbers that differ between images
come from the caller's generator; numbers that do not are Python scalars, so a captured graph holds no hidden constants.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from scrlearn.errors import InputError, suggest

View = Callable[[Tensor, torch.Generator], Tensor]
Form = Literal["kornia", "torchvision"]

COINS, TRIES = 5, 10
# on a CPU, pixel values worked on at once: with all that is made of them they stay in its cache
PART = 2**18


class Parameters(NamedTuple):
    """What was drawn for a batch of N images: `Augment.parameters` draws it, `Augment.apply` follows it.

    Parameters
    ----------
    corner
        2×N: top and left of each crop, in whole pixels.
    size
        2×N: its height and width, in whole pixels.
    flip
        N: is the image mirrored left to right?
    colour
        4×N: how far brightness, contrast, saturation and hue move, from −1 to 1 of their strength; 0 where the image
        is not jittered.
    grey
        N: does the image lose its colours?
    """

    corner: Tensor
    size: Tensor
    flip: Tensor
    colour: Tensor
    grey: Tensor


@dataclass(frozen=True, kw_only=True)
class Augment:
    """One random view of each image of a batch; the defaults are those of Supervised Contrastive Replay.

    In this order: random resized crop, horizontal flip, colour jitter, grey. Every image has its own parameters. Views
    carry no gradient back to the images. Saturation, hue and grey need three channels and are left out for images with
    another number of channels. On CUDA, with Triton, a view with the form "kornia" of images with one or three channels
    is one kernel.

    Parameters
    ----------
    scale
        Smallest and largest area of the crop, as a share of the image. ``(1, 1)`` keeps the whole image.
    ratio
        Smallest and largest width / height of the crop, drawn log-uniformly. Ten boxes are drawn for each image at
        once and the first that fits is taken; where none fits, the largest centred box with an allowed ratio. The crop
        is brought back to the image's size bilinearly, as `torch.nn.functional.interpolate` does it with
        ``align_corners=False``.
    flip
        Probability of mirroring an image left to right.
    jitter
        Probability of a colour jitter: brightness, contrast, saturation, hue, always in this order (the libraries named
        under `form` shuffle it from batch to batch, which a fixed graph cannot), clamped to [0, 1] after each.
    brightness, contrast, saturation
        Strength: the factor is drawn from 1 − strength to 1 + strength; from 0 to 1.
    hue
        Strength: the largest turn of the hue in either direction, as a share of the full circle; from 0 to 0.5.
    grey
        Probability of replacing an image by its luma.
    form
        "kornia": as in the code released with the paper: brightness adds (factor − 1), contrast multiplies, saturation
        multiplies that of HSV. "torchvision": brightness multiplies, contrast moves away from the image's mean luma,
        saturation away from the pixel's luma.

    References
    ----------
    Mai et al., "Supervised Contrastive Replay", CVPR-W 2021; Chen et al., "A Simple Framework for Contrastive Learning
    of Visual Representations", ICML 2020.

    Examples
    --------
    >>> images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> view = Augment()(images, torch.Generator().manual_seed(1))
    >>> view.shape, bool((view >= 0).all() and (view <= 1).all())
    (torch.Size([8, 3, 32, 32]), True)
    >>> nothing = Augment(scale=(1, 1), flip=0, jitter=0, grey=0)
    >>> torch.equal(nothing(images, torch.Generator()), images)
    True
    """

    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey: float = 0.2
    form: Form = "kornia"

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise InputError(f'There is no form "{self.form}" of colour jitter.{suggest(self.form, get_args(Form))}')
        for name, top in (("scale", 1.0), ("ratio", math.inf)):
            object.__setattr__(self, name, _range(name, getattr(self, name), top))
        for name in ("flip", "jitter", "grey", "brightness", "contrast", "saturation", "hue"):
            value, top = getattr(self, name), 0.5 if name == "hue" else 1.0
            if not isinstance(value, Real) or not 0 <= float(value) <= top:
                raise InputError(f"{name} is {value!r}; it must be a number between 0 and {top:g}.")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A view of each image (float32, N×C×H×W, from 0 to 1): same shape, device and memory format."""
        if x.ndim != 4 or x.dtype != torch.float32:
            given = f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
            raise InputError(f"Augment takes float32 images N×C×H×W from 0 to 1, but was given {given}.")
        if generator.device.type != x.device.type:
            raise InputError(
                f"The images are on {x.device} and the generator on {generator.device}; "
                f'make it with torch.Generator(device="{x.device}").'
            )
        n, c, h, w = x.shape
        drawn = self.draw(n, generator, x.device)
        if x.is_cuda and self.form == "kornia" and c in (1, 3) and (fused := _fused_view()) is not None:
            return fused(self, x, drawn)
        return self.apply(x, self.understood(drawn, h, w))

    def parameters(
        self, n: int, h: int, w: int, generator: torch.Generator, device: torch.device | str | None = None
    ) -> Parameters:
        """Draw the parameters of n views of h×w images, on the generator's device unless another is named."""
        return self.understood(self.draw(n, generator, device), h, w)

    def draw(self, n: int, generator: torch.Generator, device: torch.device | str | None = None) -> Tensor:
        """The random numbers behind n views, uniform from 0 to 1, a column an image.

        The rows: the crop's place (down, across), flip, jitter, grey; areas and shapes of the boxes, unless the whole
        image is kept; four colours.
        """
        boxes = 2 * (TRIES + 1) if self.scale[0] < 1 else 0
        device = generator.device if device is None else device
        return torch.rand((COINS + boxes + 4, n), generator=generator, device=device)

    def understood(self, drawn: Tensor, h: int, w: int) -> Parameters:
        """What these random numbers mean for h×w images."""
        corner, size = self._crop(drawn[COINS:-4], h, w, drawn[:2])
        colour, jitter = 2 * drawn[-4:] - 1, drawn[3] < self.jitter
        return Parameters(corner, size, drawn[2] < self.flip, colour.mul_(jitter), drawn[4] < self.grey)

    def apply(self, x: Tensor, parameters: Parameters) -> Tensor:
        """The views that these parameters describe; without random numbers, and traceable by `torch.compile`."""
        # in bfloat16 a view would lose bits that its 8-bit pixels have
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            parts = math.ceil(x.numel() / PART) if x.device.type == "cpu" else 1
            if parts <= 1:
                y = self._view(x, parameters)
                return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)
            view, size = torch.empty_like(x), math.ceil(len(x) / parts)
            for part in (slice(start, start + size) for start in range(0, len(x), size)):
                view[part] = self._view(x[part], Parameters(*(drawn[..., part] for drawn in parameters)))
            return view

    def _view(self, x: Tensor, parameters: Parameters) -> Tensor:
        moved = self.scale[0] < 1 or self.flip > 0
        y = _resample(x, parameters) if moved else x.clone(memory_format=torch.contiguous_format)
        # from here on in place: on a CPU fresh memory costs more than the arithmetic
        y = self._jitter(y, parameters.colour[:, :, None, None, None]) if self.jitter else y.clamp_(0, 1)
        if self.grey and y.shape[1] == 3:
            # exact at the weights 0 and 1, and on a CPU several times faster than where
            y = y.lerp_(_luma(y), parameters.grey[:, None, None, None].to(y.dtype))
        return y

    def _crop(self, boxes: Tensor, h: int, w: int, place: Tensor) -> tuple[Tensor, Tensor]:
        """Corner and size of each crop: the first of ten random boxes that fits, or else the centred one."""
        if self.scale[0] == 1:
            size = torch.empty_like(place)
            size[0], size[1] = h, w
            return torch.zeros_like(size), size
        (smallest, largest), (narrow, wide) = self.scale, self.ratio
        area, shape = boxes.split(TRIES + 1)
        side = (area * ((largest - smallest) * h * w)).add_(smallest * h * w).sqrt_()
        shape = (shape * (math.log(wide / narrow) / 2)).add_(math.log(narrow) / 2).exp_()
        size = torch.stack((side / shape, side * shape)).round_()
        # the centred box stands last, where it is taken only if no other fits
        size[0, TRIES], size[1, TRIES] = centred = centred_box(h, w, narrow, wide)
        fits = (size[0] <= h) & (size[1] <= w)
        if math.sqrt(smallest * h * w * min(narrow, 1 / wide)) < 1:
            fits &= (size >= 1).all(0)
        # the index that max gives is the first of equals
        first = fits.max(0, keepdim=True).indices
        size = size.gather(1, first.expand(2, 1, -1)).squeeze(1)
        places = h + 1 - size if h == w else torch.stack((h + 1 - size[0], w + 1 - size[1]))
        corner = (place * places).floor_()
        if centred != (h, w):
            corner = torch.where(first == TRIES, (places / 2 - 0.5).floor_(), corner)
        return corner, size

    def _jitter(self, y: Tensor, colour: Tensor) -> Tensor:
        """Brightness, contrast, saturation and hue moved by these shares (4×N×1×1×1) of their strengths."""
        brightness, contrast, saturation, hue = colour
        coloured = y.shape[1] == 3
        if self.form == "kornia":
            y = y.add_(brightness, alpha=self.brightness).clamp_(0, 1)
            y = y.addcmul_(y, contrast, value=self.contrast).clamp_(0, 1)
            if coloured and (self.saturation or self.hue):
                y = _turn_hue(y, hue, self.hue, saturation, self.saturation)
            return y
        y = y.addcmul_(y, brightness, value=self.brightness).clamp_(0, 1)
        mean = (_luma(y) if coloured else y).mean((1, 2, 3), keepdim=True)
        y = y.addcmul_(y - mean, contrast, value=self.contrast).clamp_(0, 1)
        if coloured and self.saturation:
            y = y.addcmul_(y - _luma(y), saturation, value=self.saturation).clamp_(0, 1)
        if coloured and self.hue:
            y = _turn_hue(y, hue, self.hue)
        return y


def _resample(x: Tensor, parameters: Parameters) -> Tensor:
    """Crop, mirror and resize bilinearly: one matrix for the rows and one for the columns of each image.

    The matrices need no gather and mirror for free; on a CPU this takes half the time of `grid_sample` at 32×32, and
    unlike it leaves an uncropped image exactly as it was.
    """
    n, c, h, w = x.shape
    corner, size = parameters.corner, parameters.size
    step = size / h if h == w else torch.stack((size[0] / h, size[1] / w))
    step[1].addcmul_(step[1], parameters.flip, value=-2)
    if h == w:
        rows, columns = _weights(corner, size, step, h)
    else:
        rows, columns = _weights(corner[0], size[0], step[0], h), _weights(corner[1], size[1], step[1], w)
    if x.is_contiguous():
        y = torch.bmm(x.view(n, c * h, w), columns.mT).view(n, c, h, w)
        y = torch.bmm(rows, y.transpose(1, 2).reshape(n, h, c * w)).view(n, h, c, w)
    else:
        # rows first: their product takes images whose channels come last as they lie
        y = torch.bmm(rows, x.permute(0, 2, 3, 1).reshape(n, h, w * c)).view(n, h, w, c)
        y = torch.bmm(y.transpose(2, 3).reshape(n, h * c, w), columns.mT).view(n, h, c, w)
    return y.transpose(1, 2).contiguous()


def _weights(corner: Tensor, size: Tensor, step: Tensor, length: int) -> Tensor:
    """…×length×length: how much of each pixel of a line goes into each pixel of the view's line."""
    pixel = torch.arange(length, device=corner.device, dtype=corner.dtype)
    last = corner + size - 1
    # where each pixel of the view lies in the image, counted from the middle of the crop; never outside the crop
    place = torch.addcmul(torch.lerp(corner, last, 0.5)[..., None], pixel - (length - 1) / 2, step[..., None])
    place = place.clamp_(corner[..., None], last[..., None])
    return (1 - (place[..., None] - pixel).abs_()).clamp_(min=0)


def _luma(x: Tensor) -> Tensor:
    """0.299 red + 0.587 green + 0.114 blue (N×1×H×W), written so that a grey pixel keeps its value exactly."""
    red, green, blue = x.split(1, dim=1)
    return torch.lerp(torch.lerp(green, red, 0.299 / 0.886), blue, 0.114)


def _turn_hue(x: Tensor, turn: Tensor, most: float, saturation: Tensor | None = None, strength: float = 0.0) -> Tensor:
    """Turn the hue of HSV by `turn · most` circles, and multiply its saturation by 1 + `saturation · strength`.

    Value is the largest channel and chroma = saturation · value, so neither needs HSV itself. The hue, in sixths of the
    circle, is ±(high + green + blue − red − 2 low) / chroma with the sign of green − blue, whatever the sector.
    """
    red, green, blue = x.split(1, dim=1)
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = high - low
    hue = (green + blue).sub_(red).add_(high).sub_(low, alpha=2).div_(chroma.clamp(min=1e-12))
    hue = torch.copysign(hue, green - blue).add_(turn, alpha=6 * most)
    if most > 1 / 3:
        # the distances below are right up to 7 sixths
        hue = hue.sub_(hue.div(6).round_(), alpha=6)
    if saturation is not None:
        chroma = torch.minimum(chroma.addcmul_(chroma, saturation, value=strength), high)
    # a channel is full within one sixth of its own hue (red 0, green 2, blue −2) and empty from two sixths on
    empty = torch.cat((hue, hue - 2, hue + 2), dim=1).abs_().sub_(3).abs_().sub_(2).clamp_(-1, 0)
    return torch.addcmul(high, chroma, empty, out=empty)


@functools.cache
def _fused_view() -> Callable[[Augment, Tensor, Tensor], Tensor] | None:
    try:
        from scrlearn.augment_fused import view
    except ImportError:  # no Triton: the same in many kernels
        return None
    return view


def centred_box(h: int, w: int, narrow: float, wide: float) -> tuple[int, int]:
    """Height and width of the largest box in an h×w image whose ratio is allowed."""
    if w / h < narrow:
        return max(1, round(w / narrow)), w
    if w / h > wide:
        return h, max(1, round(h * wide))
    return h, w


def _range(name: str, value: Any, top: float) -> tuple[float, float]:
    """The two ends of a range, checked."""
    try:
        low, high = map(float, value)
    except (TypeError, ValueError):
        raise InputError(f"{name} is {value!r}; it must be a pair of numbers, the smaller first.") from None
    if not 0 < low <= high <= top:
        limit = f" to {top:g}" if top < math.inf else ""
        raise InputError(f"{name} is {value!r}; it must be a pair of numbers above 0{limit}, the smaller first.")
    return low, high


SCR = Augment()
"""The second view of Supervised Contrastive Replay, as released with the paper."""

crop_flip = Augment(jitter=0.0, grey=0.0)
"""Random resized crop and flip, colours untouched."""


def identity(x: Tensor, generator: torch.Generator) -> Tensor:
    """The images themselves."""
    return x


@dataclass(frozen=True)
class _Adapted:
    """A user's callable as a view; its answer is checked, because a wrong one would surface far from here."""

    call: Callable[..., Any]
    generator: Literal["named", "second", "none"]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if self.generator == "named":
            view = self.call(x, generator=generator)
        else:
            view = self.call(x, generator) if self.generator == "second" else self.call(x)
        if not isinstance(view, Tensor):
            raise InputError(f"The augmentation {self.call!r} returned a {type(view).__name__}, not a tensor.")
        for what in ("shape", "dtype", "device"):
            given, wanted = getattr(view, what), getattr(x, what)
            if given != wanted:
                raise InputError(
                    f"The augmentation {self.call!r} changed the batch's {what} from {wanted} to {given}; "
                    "a view must look like the images it was made from."
                )
        return view


def as_augment(augment: Callable[..., Any] | None) -> View:
    """Any augmentation as a view ``f(x, generator)``.

    Parameters
    ----------
    augment
        `None` for no augmentation; or a callable ``f(x)`` or ``f(x, generator)`` (a function, an `nn.Module`, an
        `Augment`) that takes a float32 batch N×C×H×W from 0 to 1 and returns one like it. The generator is passed to
        a parameter of that name, or to a second parameter without a default. A callable that draws its random numbers
        elsewhere cannot be repeated from the learner's seed, and one that is not graph-safe can only run eagerly.

    Examples
    --------
    >>> mirror = as_augment(lambda x: x.flip(3))
    >>> mirror(torch.tensor([[[[0.0, 1.0]]]]), torch.Generator())
    tensor([[[[1., 0.]]]])
    """
    if augment is None:
        return identity
    if isinstance(augment, Augment):
        return augment
    if isinstance(augment, type) or not callable(augment):
        raise InputError(f"{augment!r} is no augmentation; give a callable f(x) or f(x, generator), or None.")
    return _Adapted(augment, _generator_of(augment))


def _generator_of(augment: Callable[..., Any]) -> Literal["named", "second", "none"]:
    """How a callable takes its generator, read from its signature."""
    try:
        # a module's own call takes anything; what it needs is written at its forward
        signature = inspect.signature(augment.forward if isinstance(augment, nn.Module) else augment)
    except (TypeError, ValueError):
        return "none"
    taken = list(signature.parameters.values())
    named = any(p.name == "generator" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in taken)
    needed = [p for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p for p in needed if not (named and p.name == "generator")]
    takes_images = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in taken)
    by_name = any(p.kind == p.KEYWORD_ONLY for p in needed)
    if not takes_images or by_name or len(needed) > (1 if named else 2):
        raise InputError(
            f"The augmentation {augment!r} takes {signature}; give a callable f(x) or f(x, generator), "
            "its other parameters bound with functools.partial."
        )
    if named:
        return "named"
    return "second" if len(needed) == 2 else "none"
