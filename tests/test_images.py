from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scrlearn.errors import InputError
from scrlearn.images import to_tensor


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


COLOUR = pixels(4, 9, 7, 3)
GREY = pixels(4, 9, 7)


class TestForms:
    """Every form of the same pictures gives the same tensor."""

    WANTED = torch.from_numpy(COLOUR).permute(0, 3, 1, 2)
    WANTED_GREY = torch.from_numpy(GREY)[:, None]

    @pytest.mark.parametrize(
        "images",
        [
            COLOUR,
            np.flip(COLOUR[:, ::-1].copy(), 1),
            np.asfortranarray(COLOUR),
            torch.from_numpy(COLOUR.transpose(0, 3, 1, 2)),
            [Image.fromarray(image) for image in COLOUR],
            tuple(Image.fromarray(image) for image in COLOUR),
            (Image.fromarray(image) for image in COLOUR),
            list(COLOUR),
            [torch.from_numpy(image.transpose(2, 0, 1)) for image in COLOUR],
        ],
        ids=["numpy", "flipped", "fortran", "torch", "pil", "tuple", "generator", "arrays", "tensors"],
    )
    def test_colour(self, images):
        x = to_tensor(images)
        assert x.dtype == torch.uint8
        assert torch.equal(x, self.WANTED)

    @pytest.mark.parametrize(
        "images",
        [
            GREY,
            GREY[..., None],
            torch.from_numpy(GREY),
            torch.from_numpy(GREY)[:, None],
            [Image.fromarray(image) for image in GREY],
            list(GREY),
        ],
        ids=["numpy", "numpy with channel", "torch", "torch with channel", "pil", "arrays"],
    )
    def test_grey(self, images):
        assert torch.equal(to_tensor(images, count=4), self.WANTED_GREY)

    def test_objects_in_an_array_are_a_list(self):
        array = np.empty(4, dtype=object)
        array[:] = [Image.fromarray(image) for image in COLOUR]
        assert torch.equal(to_tensor(array), self.WANTED)

    def test_whatever_says_it_is_an_array(self):
        class Wrapped:
            def __array__(self, dtype=None, copy=None):
                return COLOUR

        assert torch.equal(to_tensor(Wrapped()), self.WANTED)

    def test_read_only_memory_is_looked_at_in_place_without_a_warning(self):
        images = COLOUR.copy()
        images.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = to_tensor(images)
        assert x.data_ptr() == images.ctypes.data

    def test_more_than_four_channels_are_fine_where_they_stand_last(self):
        assert to_tensor(pixels(2, 16, 16, 12)).shape == (2, 12, 16, 16)

    def test_an_unlikely_shape_is_fine_where_it_is_expected(self):
        assert to_tensor(torch.zeros(2, 12, 16, 4, dtype=torch.uint8), expected=(12, 16, 4)).shape == (2, 12, 16, 4)
        assert to_tensor(pixels(2, 4, 4, 12), expected=(12, 4, 4)).shape == (2, 12, 4, 4)

    @pytest.mark.parametrize(
        ("images", "count", "expected"),
        [(GREY[:3], 3, None), (GREY[:3], None, (1, 9, 7)), (GREY[:1], None, None), (GREY, None, (1, 9, 7))],
    )
    def test_a_few_grey_tensors_are_told_from_one_in_colour(self, images, count, expected):
        assert to_tensor(torch.from_numpy(images), count=count, expected=expected).shape == (len(images), 1, 9, 7)


class TestPictures:
    def test_grey_stays_grey_only_where_all_are(self):
        grey, colour = Image.fromarray(GREY[0]), Image.fromarray(COLOUR[0])
        assert to_tensor([grey, grey]).shape[1] == 1
        mixed = to_tensor([grey, colour])
        assert torch.equal(mixed[0], torch.from_numpy(GREY[0]).expand(3, 9, 7))

    def test_grey_becomes_colour_for_a_classifier_of_colour_images(self):
        assert to_tensor([Image.fromarray(GREY[0])], expected=(3, 9, 7)).shape == (1, 3, 9, 7)

    @pytest.mark.parametrize(
        ("mode", "channels"), [("1", 1), ("LA", 1), ("P", 3), ("RGBA", 3), ("CMYK", 3), ("HSV", 3)]
    )
    def test_modes(self, mode, channels):
        assert to_tensor([Image.new(mode, (7, 9))]).shape == (1, channels, 9, 7)

    def test_sixteen_bits_keep_their_brightness(self):
        image = Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16))
        assert to_tensor([image]).flatten().tolist() == [0, 1, 255]

    def test_32_bits_are_refused(self):
        file = io.BytesIO()
        Image.fromarray(np.array([[0, 128, 255]], dtype=np.int32)).save(file, format="TIFF")
        with pytest.raises(InputError, match=r"images\[0\] has 32 bits"):
            to_tensor([Image.open(file)])

    def test_pictures_are_turned_upright(self):
        image = Image.fromarray(COLOUR[0])
        image.getexif()[0x0112] = 6  # to be turned by a quarter
        assert torch.equal(to_tensor([image])[0], to_tensor([image.transpose(Image.Transpose.ROTATE_270)])[0])

    def test_files_are_opened_one_after_the_other(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(COLOUR[0]).save(tmp_path / "a.png", exif=exif)
        paths = [tmp_path / "a.png", str(tmp_path / "a.png")] * 40
        resource = pytest.importorskip("resource")  # not on Windows
        opened = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, opened[1]))
        try:
            x = to_tensor(paths)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, opened)
        assert torch.equal(x, to_tensor([Image.open(paths[0])]).expand(80, -1, -1, -1))

    def test_grey_files_stay_grey_only_where_all_are(self, tmp_path):
        Image.fromarray(GREY[0]).save(tmp_path / "grey.png")
        Image.fromarray(COLOUR[0]).save(tmp_path / "colour.png")
        assert to_tensor([tmp_path / "grey.png"]).shape[1] == 1
        assert to_tensor([tmp_path / "grey.png", Image.fromarray(COLOUR[0])]).shape[1] == 3
        with pytest.raises(InputError, match=r"images\[0\] has colours"):
            to_tensor([tmp_path / "colour.png"], expected=(1, 9, 7))

    def test_a_truncated_file_is_named(self):
        file = io.BytesIO()
        Image.fromarray(pixels(64, 64, 3)).save(file, format="JPEG")
        broken = Image.open(io.BytesIO(file.getvalue()[:700]))
        with pytest.raises(InputError, match=r"images\[1\] cannot be read"):
            to_tensor([Image.new("RGB", (64, 64)), broken])


class TestSize:
    def test_all_forms_are_resized_alike(self):
        wanted = to_tensor([Image.fromarray(image) for image in COLOUR], size=(5, 5))
        assert wanted.shape == (4, 3, 5, 5)
        assert torch.equal(to_tensor(COLOUR, size=(5, 5)), wanted)
        assert torch.equal(to_tensor(list(COLOUR), size=(5, 5)), wanted)

    def test_many_channels(self):
        assert torch.equal(
            to_tensor(pixels(2, 16, 16, 6), size=(8, 8))[:, 2:3], to_tensor(pixels(2, 16, 16, 6)[..., 2:3], size=(8, 8))
        )

    def test_the_middle_of_a_long_picture_is_taken(self):
        picture = np.zeros((1, 8, 24), dtype=np.uint8)
        picture[:, :, 8:16] = 200
        assert (to_tensor(picture, size=(8, 8)) == 200).all()

    def test_pictures_of_different_sizes(self):
        assert to_tensor([Image.new("RGB", (30, 20)), Image.new("RGB", (8, 9))], size=(16, 12)).shape == (2, 3, 16, 12)

    def test_the_right_size_is_left_alone(self):
        assert torch.equal(to_tensor(COLOUR, size=(9, 7)), to_tensor(COLOUR))


BAD = [
    (COLOUR.astype(float) / 255, {}, r"float64, from 0 to 1; .* \(images \* 255\)\.round\(\)\.astype\(np\.uint8\)"),
    (torch.from_numpy(COLOUR) / 255, {}, r"float32, .* \(images \* 255\)\.round\(\)\.to\(torch\.uint8\)"),
    (COLOUR.astype(np.float32), {}, r"from 0 to 255, convert them with images\.round\(\)\.astype"),
    (COLOUR.astype(int), {}, r"int64, .* convert them with images\.astype"),
    (COLOUR.astype(float) - 300, {}, "Bring them to this range first"),
    (np.where(COLOUR > 250, np.nan, COLOUR / 255), {}, "Some pixels are NaN"),
    (torch.full((2, 3, 4, 4), torch.nan), {}, "Some pixels are NaN"),
    (COLOUR > 127, {}, r"The images are bool; .* images\.astype\(np\.uint8\) \* 255"),
    (np.array(["a", "b"]), {}, "no batch of images"),
    (COLOUR[0], {}, r"one H×W×C image: give images\[None\]"),
    (GREY[0], {}, r"One image .* give images\[None\]"),
    (GREY.reshape(4, 63), {"count": 4}, r"rows of 63 pixels: give images\.reshape\(-1, height, width\)"),
    (GREY.reshape(4, 63), {"expected": (1, 9, 7)}, r"rows of 63 pixels"),
    (torch.from_numpy(GREY.reshape(4, 63)), {"count": 4}, r"give images\.reshape\(-1, channels, height, width\)"),
    (GREY[0][..., None], {}, r"one H×W×C image: give images\[None\]"),
    (torch.from_numpy(GREY[0]), {}, r"One image .* give images\[None\]"),
    (torch.from_numpy(GREY[:3]), {}, r"looks like one C×H×W image: give images\[None\]"),
    (torch.from_numpy(GREY[:3]), {"expected": (3, 9, 7), "count": 3}, r"looks like one C×H×W image"),
    (COLOUR.transpose(0, 3, 1, 2), {}, r"images\.transpose\(0, 2, 3, 1\)"),
    (torch.from_numpy(COLOUR), {}, r"images\.permute\(0, 3, 1, 2\)"),
    (COLOUR[None], {}, "1×4×9×7×3 is no batch"),
    (torch.from_numpy(COLOUR)[None], {}, "1×4×9×7×3 is no batch"),
    (np.array(3, dtype=np.uint8), {}, "no batch"),
    (COLOUR[:0], {}, "no images in this batch"),
    (np.array([]), {}, "no images in this batch"),
    (torch.empty(0), {}, "no images in this batch"),
    ([], {}, "no images in this batch"),
    (pixels(2, 0, 7, 3), {}, "have no pixels"),
    (Image.new("RGB", (4, 4)), {}, r"give \[image\]"),
    ("cat.png", {}, "no batch of images; give a list"),
    (Path("cat.png"), {}, "no batch of images; give a list"),
    (["no-cat.png"], {}, r"images\[0\] cannot be read .*no-cat"),
    ([b"cat.png"], {}, r"images\[0\] is a bytes"),
    ([[1, 2], [3, 4]], {}, r"images\[0\] is a list"),
    (None, {}, "A NoneType is no batch"),
    ({"image": 1}, {}, "A dict is no batch"),
    ([COLOUR[0], COLOUR[1] / 255], {}, r"images\[1\]: The images are float64"),
    ([COLOUR], {}, r"images\[0\] has shape 4×9×7×3; expected one image in each place"),
    ([COLOUR[0], COLOUR[1][:5]], {}, r"images\[1\] is 3×5×7 .* images\[0\] is 3×9×7"),
    ([Image.new("F", (3, 3))], {}, "holds floats"),
    ([Image.new("RGB", (7, 9))], {"expected": (1, 9, 7)}, r"images\[0\] has colours .* image\.convert\(\"L\"\)"),
    ([Image.new("L", (7, 9))], {"expected": (6, 9, 7)}, "6 channels, which PIL images cannot have"),
    (COLOUR, {"expected": (3, 9, 9)}, r"3×9×7 .* earlier ones were 3×9×9\. .*image_size=\(9, 9\)"),
    (GREY, {"expected": (3, 9, 7)}, r"channels must stay the same\. Grey"),
    (COLOUR, {"expected": (3, 9, 9), "size": (5, 5)}, r"Set image_size back to \(9, 9\)"),
]


@pytest.mark.parametrize(("images", "options", "message"), BAD)
def test_bad_images_are_explained(images, options, message):
    with pytest.raises(InputError, match=message):
        to_tensor(images, **options)


def test_the_advice_works():
    floats = COLOUR / 255
    assert torch.equal(to_tensor((floats * 255).round().astype(np.uint8)), to_tensor(COLOUR))
    planes = COLOUR.transpose(0, 3, 1, 2)
    assert torch.equal(to_tensor(planes.transpose(0, 2, 3, 1)), to_tensor(COLOUR))
    assert to_tensor(np.repeat(GREY[..., None], 3, axis=-1), expected=(3, 9, 7)).shape == (4, 3, 9, 7)
    assert to_tensor(COLOUR[0][None]).shape == (1, 3, 9, 7)
