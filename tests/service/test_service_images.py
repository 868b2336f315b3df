"""Images from outside: formats by content, sizes by header, nothing that can hurt."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from service_tools import file_of, pixels

from scrlearn.images import to_tensor
from scrlearn.service.images_in import decode_image, decode_images
from scrlearn.service.problems import Problem

COLOUR = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def refused(data: bytes, most: int = 10**6, shape=(3, 8, 8)) -> Problem:
    with pytest.raises(Problem) as caught:
        decode_image(data, 4, shape, most)
    assert caught.value.extra["image"] == 4
    return caught.value


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_formats_give_the_pixels(kind: str, options: dict, channels: int) -> None:
    image = Image.fromarray(COLOUR).convert("L" if channels == 1 else "RGB")
    if kind == "WEBP":
        image = image.convert("RGB")
    data = file_of(np.asarray(image), kind, **options)
    expected = to_tensor([image.convert("L") if channels == 1 else image], size=(8, 8))
    assert torch.equal(decode_image(data, 0, (channels, 8, 8), 10**6), expected)


def test_a_name_is_nothing_and_grey_becomes_colour() -> None:
    x = decode_image(file_of(pixels("cat")), 0, (3, 8, 8), 10**6)
    assert x.shape == (1, 3, 8, 8)
    assert torch.equal(x[0, 0], torch.from_numpy(pixels("cat")))
    assert torch.equal(x[0, 0], x[0, 2])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_of_png(mode: str, channels: int) -> None:
    image = Image.fromarray(COLOUR)
    image = Image.new("I;16", (32, 24), 65535) if mode == "I;16" else image.convert(mode)
    file = io.BytesIO()
    image.save(file, "PNG")
    x = decode_image(file.getvalue(), 0, (channels, 8, 8), 10**6)
    assert x.shape == (1, channels, 8, 8)
    if mode == "I;16":
        assert int(x.min()) == 255


def test_a_photograph_is_turned_upright() -> None:
    image = Image.fromarray(np.concatenate([np.zeros((40, 20), np.uint8), np.full((40, 20), 255, np.uint8)], axis=1))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right by a quarter: what was left comes up
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif, quality=95)
    x = decode_image(file.getvalue(), 0, (1, 8, 8), 10**6)[0, 0].float()
    assert x[:3].mean() < 60 < 200 < x[5:].mean()


def test_a_large_photograph_is_taken() -> None:
    smooth = np.linspace(0, 255, 2000 * 1500).reshape(1500, 2000).astype(np.uint8)
    x = decode_image(file_of(smooth, "JPEG"), 0, (3, 16, 16), 4 * 10**6)
    assert x.shape == (1, 3, 16, 16)
    assert float(x[0, :, 0].float().mean()) < 30 < 220 < float(x[0, :, -1].float().mean())


def test_a_picture_behind_a_picture_is_no_animation() -> None:
    """Telephones write a JPEG with a second picture behind it (MPO)."""
    file = io.BytesIO()
    second = Image.fromarray(COLOUR[::-1].copy())
    Image.fromarray(COLOUR).save(file, "MPO", save_all=True, append_images=[second])
    assert decode_image(file.getvalue(), 0, (3, 8, 8), 10**6).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PPM", "ICO", "PDF"])
def test_other_formats_are_refused(kind: str) -> None:
    assert "PNG, JPEG, WebP or BMP" in refused(file_of(COLOUR, kind)).detail


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_are_refused(kind: str) -> None:
    file = io.BytesIO()
    frames = [Image.fromarray(np.roll(COLOUR, n, axis=0)) for n in range(3)]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    assert "animated" in refused(file.getvalue()).detail


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_truncated_files_are_refused_at_every_length(kind: str) -> None:
    data = file_of(COLOUR, kind)
    for length in [*range(0, min(len(data), 64)), *range(64, len(data) - 16, 37)]:
        problem = refused(data[:length])
        assert problem.status == 422


def test_noise_never_does_more_than_be_refused() -> None:
    rng = np.random.default_rng(1)
    heads = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"RIFF\x00\x01\x00\x00WEBPVP8 ", b"BM", b""]
    files = [file_of(COLOUR, kind) for kind in ("PNG", "JPEG", "WEBP", "BMP")]
    for n in range(400):
        noise = rng.integers(0, 256, 200, dtype=np.uint8).tobytes()
        data = bytearray(files[n % 4])
        for place in rng.integers(0, len(data), 8):
            data[place] = rng.integers(256)
        for content in (heads[n % 5] + noise, bytes(data)):
            with contextlib.suppress(Problem):
                assert decode_image(content, 0, (3, 8, 8), 10**6).shape == (1, 3, 8, 8)


def png_of_size(width: int, height: int) -> bytes:
    """The head of a PNG that says how large it is, and almost no content."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def webp_of_size(kind: bytes, size: int) -> bytes:
    if kind == b"VP8X":
        head = bytes(4) + (size - 1).to_bytes(3, "little") * 2
    elif kind == b"VP8L":
        head = b"\x2f" + ((size - 1) | (size - 1) << 14).to_bytes(4, "little") + bytes(5)
    else:
        head = b"\x10\x00\x00\x9d\x01\x2a" + struct.pack("<HH", size, size)
    body = b"WEBP" + kind + len(head).to_bytes(4, "little") + head + bytes(20)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "data",
    [png_of_size(1001, 1000), png_of_size(60_000, 60_000), png_of_size(2**31 - 1, 2**31 - 1)]
    + [webp_of_size(kind, 16_383) for kind in (b"VP8X", b"VP8L", b"VP8 ")],
    ids=["png", "large", "huge", "webp", "webp-lossless", "webp-lossy"],
)
def test_bombs_are_refused_by_their_heads(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    problem = refused(data, most=10**6)
    assert problem.status == 413
    assert "1,000,000" in problem.detail


def test_sizes_in_webp_heads_are_read_right() -> None:
    image = Image.fromarray(np.zeros((70, 50, 3), np.uint8))
    for options in ({"lossless": True}, {"quality": 50}, {"icc_profile": b"x" * 20}):
        file = io.BytesIO()
        image.save(file, "WEBP", **options)
        assert "50×70" in refused(file.getvalue(), most=3499).detail
        decode_image(file.getvalue(), 0, (3, 8, 8), 3500)


def test_the_first_bad_image_is_named() -> None:
    with pytest.raises(Problem, match="Image 1 is empty"):
        decode_images([file_of(COLOUR), b"", b""], (3, 8, 8), 10**6)
