"""Images from outside: told by their content, measured before they are decoded, and brought to the model's shape."""

from __future__ import annotations

import io
import struct

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.images import Shape, to_tensor
from scrlearn.service.problems import Problem

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
_GREY = ("1", "L", "LA", "La")


def decode_images(files: list[bytes], shape: Shape, max_pixels: int) -> Tensor:
    """The contents of image files as uint8 N×C×H×W; the first that cannot be used is a `Problem`."""
    return torch.cat([decode_image(data, number, shape, max_pixels) for number, data in enumerate(files)])


def decode_image(data: bytes, number: int, shape: Shape, max_pixels: int) -> Tensor:
    """One image file as uint8 1×C×H×W.

    Parameters
    ----------
    data
        The file: PNG, JPEG, WebP or BMP.
    number
        Its place in the request, to name it by.
    shape
        Channels, height and width to bring it to: scaled until it covers them, the middle taken.
    max_pixels
        A larger image is refused by what its header says, before any memory is taken for it.

    Examples
    --------
    >>> file = io.BytesIO()
    >>> Image.new("L", (40, 20)).save(file, "PNG")
    >>> decode_image(file.getvalue(), 0, (3, 8, 8), 10**6).shape
    torch.Size([1, 3, 8, 8])
    >>> decode_image(b"GIF89a", 0, (3, 8, 8), 10**6)
    Traceback (most recent call last):
    ...
    scrlearn.service.problems.Problem: Image 0 is no PNG, JPEG, WebP or BMP file.
    """
    if not data:
        raise _bad(number, "is empty")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        _check_webp(data, number, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            _check(file, number, max_pixels)
            side = 2 * max(shape[1:])
            file.draft("RGB", (side, side))  # a large JPEG is decoded small, yet at least twice as large as wanted
            file.load()
            colours = file.mode not in _GREY and not file.mode.startswith("I")
            image = file.convert("L") if shape[0] == 1 and colours else file
            return to_tensor([image], expected=shape, size=shape[1:])
    except Problem:
        raise
    except Image.DecompressionBombError:
        raise _too_large(number, max_pixels) from None
    except UnidentifiedImageError:
        raise _bad(number, "is no PNG, JPEG, WebP or BMP file") from None
    except InputError as error:
        raise _bad(number, f"cannot be used: {error}") from None
    except Exception as error:  # damaged bytes can make a decoder fail in any way
        raise _bad(number, f"is damaged or cut short ({type(error).__name__})") from None


def _check(image: Image.Image, number: int, max_pixels: int) -> None:
    """What the header says."""
    width, height = image.size
    if width * height > max_pixels:
        raise _too_large(number, max_pixels, width, height)
    # some cameras put a second picture behind a JPEG; that is no animation
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
        raise _bad(number, "is animated; send a single picture")


def _check_webp(data: bytes, number: int, max_pixels: int) -> None:
    """Pillow's WebP reader takes memory for the whole canvas when it opens a file, so look at the header first."""
    kind, head = data[12:16], data[20:30]
    if len(head) < 10:
        raise _bad(number, "is damaged or cut short")
    if kind == b"VP8X":
        if head[0] & 2:
            raise _bad(number, "is animated; send a single picture")
        width, height = (1 + int.from_bytes(head[i : i + 3], "little") for i in (4, 7))
    elif kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (size & 0x3FFF for size in struct.unpack("<HH", head[6:10]))
    else:
        raise _bad(number, "is damaged or cut short")
    if width * height > max_pixels:
        raise _too_large(number, max_pixels, width, height)


def _bad(number: int, what: str) -> Problem:
    return Problem("bad-image", f"Image {number} {what}.", image=number)


def _too_large(number: int, max_pixels: int, *size: int) -> Problem:
    given = f" has {size[0]}×{size[1]} pixels" if size else " has too many pixels"
    return Problem("too-large", f"Image {number}{given}; at most {max_pixels:,} are allowed.", image=number)
