"""What people have as images — NumPy arrays, tensors, PIL images — turned into uint8 tensors N×C×H×W."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from scrlearn.errors import InputError

Images: TypeAlias = Any
"""uint8 NumPy N×H×W×C or N×H×W, uint8 torch N×C×H×W or N×H×W, or a list of image files, PIL images or arrays."""

Shape: TypeAlias = tuple[int, int, int]
Array: TypeAlias = np.ndarray[Any, Any]

ACCEPTED = "uint8 NumPy N×H×W×C or N×H×W, uint8 torch N×C×H×W, or a list of PIL images or paths"
_GREY = ("1", "L", "LA", "La")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def to_tensor(
    images: Images, *, expected: Shape | None = None, size: tuple[int, int] | None = None, count: int | None = None
) -> Tensor:
    """Any form of images as a uint8 tensor N×C×H×W. Arrays and tensors are not copied where that can be avoided.

    Parameters
    ----------
    images
        uint8 NumPy N×H×W×C or N×H×W, uint8 torch N×C×H×W or N×H×W, or a list of single images: PIL images, paths of
        image files (opened one after the other), uint8 NumPy H×W×C or H×W, uint8 torch C×H×W. Pictures are turned
        upright as their EXIF says; grey ones stay grey (one channel) where all are, everything else becomes RGB.
    expected
        Channels, height, width that the images must have.
    size
        Height and width to bring the images to: scaled bilinearly until they cover it, the middle taken.
    count
        How many images there should be; it only helps to tell three grey images from one in colour.

    Raises
    ------
    InputError
        For anything else, saying what was given and how to convert it.

    Examples
    --------
    >>> to_tensor(np.zeros((5, 32, 32, 3), dtype=np.uint8)).shape
    torch.Size([5, 3, 32, 32])
    >>> to_tensor([Image.new("L", (40, 20))], size=(28, 28)).shape
    torch.Size([1, 1, 28, 28])
    >>> to_tensor(np.zeros((5, 8, 8)))
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: The images are float64, from 0 to 0; pixels must be uint8, from 0 to 255. If they \
go from 0 to 1, convert them with (images * 255).round().astype(np.uint8).
    """
    if hasattr(images, "__array__") and not isinstance(images, Tensor | Image.Image):
        images = np.asarray(images)
    if isinstance(images, Tensor | np.ndarray) and tuple(images.shape[:1]) == (0,):
        raise InputError("There are no images in this batch; give at least one.")
    if isinstance(images, Tensor):
        x = _from_torch(images, expected, count)
    elif isinstance(images, np.ndarray) and images.dtype != object:
        x = _from_numpy(images, expected, count)
    else:
        x = _from_list(_as_list(images), expected, size)
    if min(x.shape) == 0:
        raise InputError(f"Images of {_show(x.shape[1:])} (channels×height×width) have no pixels.")
    if size is not None and tuple(x.shape[2:]) != size:
        x = _resize(x, size)
    if expected is not None and tuple(x.shape[1:]) != expected:
        raise InputError(_differs(x, expected, resized=size is not None))
    return x


# -------------------------------------------------------------------- arrays and tensors


def _from_numpy(images: Array, expected: Shape | None, count: int | None) -> Tensor:
    _check_pixels(images)
    shape = images.shape
    if images.ndim == 2:
        _refuse_rows(shape, expected, count, "height, width), in colour images.reshape(-1, height, width, channels")
        raise InputError(f"One image ({_show(shape)}) was given where a batch is expected: give images[None].")
    if images.ndim == 3:
        if shape[2] in (1, 3, 4) and expected != (1, *shape[1:]):
            raise InputError(
                f"An array of shape {_show(shape)} looks like one H×W×C image: give images[None]. "
                "If these are grey images N×H×W, give images[..., None]."
            )
        return _view(images)[:, None]
    if images.ndim != 4:
        raise InputError(f"An array of shape {_show(shape)} is no batch of images; expected N×H×W×C or N×H×W.")
    _, height, width, channels = shape
    as_expected = expected == (channels, height, width)
    if channels > 4 and channels >= min(height, width) > 0 and not as_expected:
        raise InputError(
            f"An array of shape {_show(shape)} would be images of {channels} channels. NumPy images are N×H×W×C; "
            "if these are N×C×H×W, give images.transpose(0, 2, 3, 1) or torch.from_numpy(images)."
        )
    return _view(images).permute(0, 3, 1, 2)


def _refuse_rows(shape: tuple[int, ...], expected: Shape | None, count: int | None, sides: str) -> None:
    """Images as rows of pixels, such as scikit-learn's `digits.data`: only a person knows their sides."""
    if count == shape[0] > 1 or (expected is not None and shape[1] == math.prod(expected)):
        raise InputError(
            f"An array of shape {_show(shape)} looks like images as rows of {shape[1]} pixels: give "
            f"images.reshape(-1, {sides})."
        )


def _from_torch(images: Tensor, expected: Shape | None, count: int | None) -> Tensor:
    _check_pixels(images)
    shape = tuple(images.shape)
    if images.ndim == 2:
        _refuse_rows(shape, expected, count, "channels, height, width")
        raise InputError(f"One image ({_show(shape)}) was given where a batch is expected: give images[None].")
    if images.ndim == 3:
        channels = None if expected is None else expected[0]
        # three grey images or one in colour: what was learned before, or the number of labels, tells
        if shape[0] in (3, 4) and channels != 1 and (channels is not None or count != shape[0]):
            raise InputError(
                f"A tensor of shape {_show(shape)} looks like one C×H×W image: give images[None]. "
                "If these are grey images N×H×W, give images[:, None]."
            )
        return images.detach()[:, None]
    if images.ndim != 4:
        raise InputError(f"A tensor of shape {_show(shape)} is no batch of images; expected N×C×H×W or N×H×W.")
    if shape[1] > 4 and shape[3] <= 4 and expected != shape[1:]:
        raise InputError(
            f"A tensor of shape {_show(shape)} would be images of {shape[1]} channels. Torch images are N×C×H×W; "
            "if these are N×H×W×C, give images.permute(0, 3, 1, 2) or images.numpy()."
        )
    return images.detach()


def _view(images: Array) -> Tensor:
    """The same pixels as a tensor; copied only where torch cannot look at them in place."""
    if any(stride < 0 for stride in images.strides):
        images = np.ascontiguousarray(images)
    with warnings.catch_warnings():
        # a read-only array (a memory map, say) is fine: pixels are only ever read
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(images)


def _check_pixels(images: Array | Tensor) -> None:
    """Only uint8 says without doubt how bright a pixel is; for everything else, say how to convert."""
    torch_given = isinstance(images, Tensor)
    name = str(images.dtype).removeprefix("torch.")
    if name == "uint8":
        return
    to_uint8 = ".to(torch.uint8)" if torch_given else ".astype(np.uint8)"
    values = images.detach().cpu() if isinstance(images, Tensor) else images
    if name == "bool":
        raise InputError(f"The images are bool; pixels must be uint8. Convert them with images{to_uint8} * 255.")
    try:
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    except (TypeError, ValueError, RuntimeError, IndexError):
        raise InputError(f"An array of {name} is no batch of images; expected {ACCEPTED}.") from None
    if np.isnan(low) or np.isnan(high):
        raise InputError(f"Some pixels are NaN ({name}); pixels must be uint8, from 0 to 255. Remove or replace them.")
    text = f"The images are {name}, from {low:g} to {high:g}; pixels must be uint8, from 0 to 255."
    floating = name.startswith(("float", "bfloat"))
    if floating and low >= 0 and high <= 1:
        raise InputError(f"{text} If they go from 0 to 1, convert them with (images * 255).round(){to_uint8}.")
    if low >= 0 and high <= 255:
        raise InputError(f"{text} If they go from 0 to 255, convert them with images{'.round()' * floating}{to_uint8}.")
    raise InputError(f"{text} Bring them to this range first; normalising belongs into the encoder.")


# -------------------------------------------------------------------- lists of single images


def _as_list(images: Images) -> list[Any]:
    if isinstance(images, Image.Image):
        raise InputError("One PIL image was given where a batch is expected: give [image].")
    if isinstance(images, str | bytes | PathLike):
        raise InputError(f"{str(images)!r} is no batch of images; give a list: [path].")
    if not isinstance(images, Iterable) or isinstance(images, dict | set | frozenset):
        raise InputError(f"A {type(images).__name__} is no batch of images; expected {ACCEPTED}.")
    return list(images)


def _from_list(images: list[Any], expected: Shape | None, size: tuple[int, int] | None) -> Tensor:
    if not images:
        raise InputError("There are no images in this batch; give at least one.")
    for number, image in enumerate(images):
        if not isinstance(image, Image.Image | np.ndarray | Tensor | str | PathLike):
            raise InputError(f"images[{number}] is a {type(image).__name__}; expected {ACCEPTED}.")
    channels = _channels(images, expected)
    parts = [_single(image, number, channels, size) for number, image in enumerate(images)]
    for number, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise InputError(
                f"images[{number}] is {_show(part.shape)} (channels×height×width), but images[0] is "
                f"{_show(parts[0].shape)}. Bring all to one size, or let image_size=(height, width) do it."
            )
    return torch.stack(parts)


def _channels(images: list[Any], expected: Shape | None) -> int:
    """Channels that PIL images get: those learned before, else 1 where every image is grey."""
    modes = {n: _mode(image, n) for n, image in enumerate(images) if not isinstance(image, np.ndarray | Tensor)}
    grey = {number: mode in _GREY or mode.startswith("I") for number, mode in modes.items()}
    if expected is None:
        return 1 if all(grey.values()) else 3
    if expected[0] not in _MODES and modes:
        raise InputError(f"Earlier images had {expected[0]} channels, which PIL images cannot have; give arrays.")
    if expected[0] == 1 and not all(grey.values()):
        number = next(number for number, is_grey in grey.items() if not is_grey)
        raise InputError(
            f"images[{number}] has colours (mode {modes[number]}), but earlier images were grey: convert it with "
            'image.convert("L").'
        )
    return expected[0]


def _single(image: Any, number: int, channels: int, size: tuple[int, int] | None) -> Tensor:
    """One image of a list as C×H×W."""
    if isinstance(image, str | PathLike):
        with _opened(image, number) as file:
            return torch.from_numpy(_picture(file, number, channels, size))
    if isinstance(image, Image.Image):
        return torch.from_numpy(_picture(image, number, channels, size))
    if image.ndim not in (2, 3):
        raise InputError(f"images[{number}] has shape {_show(image.shape)}; expected one image in each place.")
    try:
        if isinstance(image, Tensor):
            x = _from_torch(image[None] if image.ndim == 3 else image[None, None], None, None).cpu()
        else:
            x = _from_numpy(image[None] if image.ndim == 3 else image[None, ..., None], None, None)
    except InputError as error:
        raise InputError(f"images[{number}]: {error}") from None
    return (_resize(x, size) if size is not None and min(x.shape) > 0 else x)[0]


def _mode(image: Any, number: int) -> str:
    if isinstance(image, Image.Image):
        return image.mode
    with _opened(image, number) as file:
        return file.mode


@contextlib.contextmanager
def _opened(path: str | PathLike[str], number: int) -> Iterator[Image.Image]:
    """An image file, closed again at once: there may be more of them than a process can have open."""
    try:
        file = Image.open(path)
    except (OSError, ValueError, Image.DecompressionBombError) as error:  # ValueError: no possible name of a file
        raise InputError(f"images[{number}] cannot be read ({error}); replace it or leave it out.") from error
    with file:
        yield file


def has_32_bits(image: Image.Image) -> bool:
    """Whether a picture has whole numbers of 32 bits, whose range nobody knows. 16 bits may be mode I as well."""
    bits = getattr(image, "tag_v2", {}).get(258, (32,))
    return image.mode == "I" and image.format == "TIFF" and max(bits) > 16


def _picture(image: Image.Image, number: int, channels: int, size: tuple[int, int] | None) -> Array:
    """A PIL image as uint8 C×H×W: upright, in this number of channels, of this size."""
    try:
        if has_32_bits(image):
            raise InputError(f'images[{number}] has 32 bits (mode I); bring it to 0 to 255, then image.convert("L").')
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16-bit grey: Pillow would cut every value above 255
            values = np.asarray(upright).astype(np.float64) / 257
            upright = Image.fromarray(np.rint(values.clip(0, 255)).astype(np.uint8))
        if upright.mode == "F":
            raise InputError(
                f'images[{number}] holds floats (mode F); bring them to 0 to 255, then image.convert("L").'
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a palette with transparency: its colours are kept
            upright = upright.convert(_MODES[channels])
    except InputError:
        raise
    except Exception as error:  # damaged bytes can make the decoder fail in any way
        raise InputError(f"images[{number}] cannot be read ({error}); replace it or leave it out.") from error
    if size is not None and min(upright.size) > 0:
        upright = _fit(upright, size)
    pixels = np.array(upright)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


# -------------------------------------------------------------------- sizes


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Each image scaled with PIL, so that arrays and PIL images of the same picture give the same pixels."""
    channels = x.shape[1]
    planes = x.cpu().numpy()
    out = np.empty((len(planes), channels, *size), dtype=np.uint8)
    for row, image in enumerate(planes):
        if channels in (3, 4):
            whole = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
            out[row] = np.asarray(_fit(whole, size)).transpose(2, 0, 1)
        else:
            for channel, plane in enumerate(image):
                out[row, channel] = np.asarray(_fit(Image.fromarray(np.ascontiguousarray(plane)), size))
    return torch.from_numpy(out).to(x.device)


def _fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    height, width = size
    if image.size == (width, height):
        return image
    return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


def _differs(x: Tensor, expected: Shape, resized: bool) -> str:
    text = f"These images are {_show(x.shape[1:])} (channels×height×width), but earlier ones were {_show(expected)}."
    if x.shape[1] != expected[0]:
        grey = " Grey N×H×W becomes three channels with np.repeat(images[..., None], 3, axis=-1)."
        return f"{text} The number of channels must stay the same.{grey if (x.shape[1], expected[0]) == (1, 3) else ''}"
    if resized:
        return f"{text} Set image_size back to {expected[1:]}."
    return f"{text} Bring them to that size, or set_params(image_size={expected[1:]}) to have it done."


def _show(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))
