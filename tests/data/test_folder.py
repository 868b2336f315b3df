from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from data_layouts import solid
from PIL import Image

from scrlearn.data import class_incremental, load
from scrlearn.data.folder import FolderImages, load_folder
from scrlearn.data.images import _by_threads, decode, read_ahead
from scrlearn.errors import DataError, InputError

MakeFolder = Callable[..., Path]


def test_classes_are_in_natural_order(make_folder: MakeFolder) -> None:
    root = make_folder({"class10": 2, "class2": 2, "Apple": 2, "banana": 2})
    (root / ".hidden").mkdir()
    (root / "notes.txt").write_text("no class")
    assert load(f"folder:{root}").class_names == ("Apple", "banana", "class2", "class10")


def test_split_is_80_20_per_class_and_fixed(make_folder: MakeFolder) -> None:
    root = make_folder({"a": 50, "b": 7, "c": 2})
    first, second = load(f"folder:{root}"), load(f"folder:{root}")
    assert torch.bincount(first.train.labels).tolist() == [40, 6, 1]
    assert torch.bincount(first.test.labels).tolist() == [10, 1, 1]
    red = [part.read(torch.arange(len(part)))[:, 0, 0, 0].tolist() for part in (first.train, first.test)]
    assert sorted(red[0] + red[1]) == sorted([*range(50), *range(7), *range(2)])
    assert red[1] == second.test.read(torch.arange(len(second.test)))[:, 0, 0, 0].tolist()
    assert red[1][:10] != list(range(10))  # chosen by hash, not by order


@pytest.mark.parametrize("second", ["val", "test"])
def test_train_and_second_folder_are_used(make_folder: MakeFolder, second: str) -> None:
    make_folder({"cat": 3, "dog": 4}, part="train")
    root = make_folder({"cat": 1, "dog": 2}, part=second)
    data = load(f"folder:{root}")
    assert data.class_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 3 + [1] * 4
    assert data.test.labels.tolist() == [0, 1, 1]


def test_test_folder_comes_before_val_unless_it_has_no_classes(make_folder: MakeFolder) -> None:
    make_folder({"cat": 3}, part="train")
    make_folder({"cat": 2}, part="val")
    root = make_folder({}, part="test")
    (root / "test").mkdir()
    assert len(load(f"folder:{root}").test) == 2
    make_folder({"cat": 1}, part="test")
    assert len(load(f"folder:{root}").test) == 1


def test_a_class_called_train_is_a_class(make_folder: MakeFolder) -> None:
    root = make_folder({"train": 5, "tram": 5})
    assert load(f"folder:{root}").class_names == ("train", "tram")


def test_images_in_deeper_folders_are_found(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 2})
    solid(root / "cat" / "2024" / "x.JPG", (9, 9, 9))
    (root / "cat" / "notes.txt").write_text("no image")
    data = load(f"folder:{root}")
    assert len(data.train) + len(data.test) == 3


def test_every_kind_of_image_becomes_rgb(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 200).save(tmp_path / "grey.png")
    Image.new("RGBA", (4, 4), (10, 20, 30, 128)).save(tmp_path / "alpha.png")
    Image.new("P", (4, 4), 0).save(tmp_path / "palette.gif")
    Image.new("CMYK", (4, 4), (0, 0, 0, 0)).save(tmp_path / "print.jpg")
    Image.fromarray(np.full((4, 4), 128 * 257, np.uint16)).save(tmp_path / "deep.png")
    values = {path.name: decode(path, (4, 4))[:, 0, 0].tolist() for path in tmp_path.iterdir()}
    assert values["grey.png"] == [200, 200, 200]
    assert values["alpha.png"] == [10, 20, 30]
    assert values["print.jpg"] == [255, 255, 255]
    assert values["deep.png"] == [128, 128, 128]
    assert len(values["palette.gif"]) == 3


def test_images_of_other_formats_are_told_and_left_out(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 2, "dog": 2})
    (root / "cat" / "0.png").rename(root / "cat" / "0.jfif")
    for name in ("cat/phone.HEIC", "dog/camera.NEF", "dog/.hidden.heic", "dog/notes.txt"):
        (root / name).write_bytes(b"other")
    with pytest.warns(UserWarning, match=r"cannot be read \(2, such as .*phone\.HEIC\); .* Convert them") as told:
        data = load_folder(root)
    assert len(told) == 1
    assert (len(data.train), len(data.test)) == (2, 2)
    (root / "cat" / "0.jfif").unlink()
    (root / "cat" / "1.png").unlink()
    with pytest.warns(UserWarning, match="left out"), pytest.raises(DataError, match="no training images for cat"):
        load_folder(root)


def test_float_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(DataError, match=r"float\.tif cannot be read .* pixels are floats"):
        decode(tmp_path / "float.tif", (4, 4))


def test_pixels_of_32_bits_are_refused_and_those_of_16_are_not(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 200, np.int32)).save(tmp_path / "long.tif")
    with pytest.raises(DataError, match=r"long\.tif cannot be read .* pixels have 32 bits"):
        decode(tmp_path / "long.tif", (4, 4))
    for name in ("short.tif", "short.png"):
        Image.fromarray(np.full((4, 4), 200 * 257, np.uint16)).save(tmp_path / name)
        assert (decode(tmp_path / name, (4, 4)) == 200).all()


def test_images_are_turned_as_their_tag_says(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 4), "black")
    image.paste((255, 255, 255), (0, 0, 4, 4))  # left half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise: the left side comes up
    image.save(tmp_path / "a.png", exif=exif)
    for name in ("b", "c"):
        solid(tmp_path / "set" / name / "1.png", (0, 0, 0), (4, 8))
        solid(tmp_path / "set" / name / "2.png", (0, 0, 0), (4, 8))
    (tmp_path / "a.png").rename(tmp_path / "set" / "b" / "3.png")
    assert load_folder(tmp_path / "set").image_shape == (3, 8, 4)
    pixels = decode(tmp_path / "set" / "b" / "3.png", (8, 4))
    assert (pixels[:, :4].min(), pixels[:, 4:].max()) == (255, 0)


def test_image_size_covers_and_takes_the_middle(tmp_path: Path) -> None:
    image = Image.new("RGB", (400, 100), "red")
    image.paste((0, 0, 255), (150, 0, 250, 100))
    image.save(tmp_path / "wide.png")
    pixels = decode(tmp_path / "wide.png", (20, 20))
    assert pixels.shape == (3, 20, 20)
    assert pixels[:, 10, 10].tolist() == [0, 0, 255]
    assert pixels[2].min() > 200  # the red ends are cut off
    image.save(tmp_path / "wide.jpg", quality=95)
    assert np.abs(decode(tmp_path / "wide.jpg", (20, 20)).astype(int) - pixels).max() < 40


def test_different_sizes_need_image_size(make_folder: MakeFolder) -> None:
    root = make_folder({"a": 3})
    solid(root / "b" / "1.png", (0, 0, 0), (12, 9))
    solid(root / "b" / "2.png", (0, 0, 0), (12, 9))
    with pytest.raises(DataError, match=r"2 different sizes: .* 8×8 and .* 12×9 .*image_size=84"):
        load(f"folder:{root}")
    assert load(f"folder:{root}", image_size=10).image_shape == (3, 10, 10)


def test_non_square_images_keep_their_shape(make_folder: MakeFolder) -> None:
    assert load(f"folder:{make_folder({'a': 2}, size=(12, 9))}").image_shape == (3, 9, 12)


def break_image(root: Path, kind: str) -> Path:
    path = root / "a" / "1.png"
    if kind == "truncated":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:-60])
    elif kind == "text":
        path.write_text("not an image")
    elif kind == "gone":
        path.unlink()
    return path


@pytest.mark.parametrize("kind", ["truncated", "text", "gone"])
@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_image_is_named_while_streaming(make_folder: MakeFolder, kind: str, workers: int) -> None:
    root = make_folder({"a": 30, "b": 30})
    data = load_folder(root, image_size=8, workers=workers)
    names = [str(data.train.files.path(index).relative_to(root)) for index in range(len(data.train))]  # type: ignore[attr-defined]
    assert "a/1.png" in names
    break_image(root, kind)
    stream = class_incremental(data, tasks=1)
    with pytest.raises(DataError, match=r"The image .*a/1\.png (cannot be read|was there)") as caught:
        list(stream.batches(0))
    assert "Traceback" not in str(caught.value)


def test_damaged_first_image_is_named_when_loading(make_folder: MakeFolder) -> None:
    root = make_folder({"a": 5})
    break_image(root, "text")
    with pytest.raises(DataError, match=r"a/1\.png cannot be read"):
        load(f"folder:{root}")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_prefetching_gives_the_same_as_reading(make_folder: MakeFolder, workers: int) -> None:
    data = load_folder(make_folder({"a": 30, "b": 30}), workers=workers)
    batches = [torch.tensor(part) for part in ([3, 1, 2], [40], [5, 5], list(range(20)))]
    ahead = list(data.train.prefetch(batches))  # type: ignore[attr-defined]
    assert all(torch.equal(images, data.train.read(batch)) for images, batch in zip(ahead, batches, strict=True))
    assert ahead[0][:, 1, 0, 0].tolist() == [100, 100, 100]


def test_streaming_draws_no_random_numbers_and_leaves_no_process(make_folder: MakeFolder) -> None:
    data = load_folder(make_folder({"a": 40}), workers=2)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches = class_incremental(data, tasks=1, batch_size=4).batches(0)
    next(batches)
    assert multiprocessing.active_children()
    batches.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()


def test_workers_are_processes_of_their_own() -> None:
    blocks = [torch.tensor([number]) for number in range(6)]
    seen = list(read_ahead(lambda block: (int(block), os.getpid()), blocks, 2))
    assert [number for number, _ in seen] == list(range(6))
    assert os.getpid() not in {process for _, process in seen}


@pytest.mark.skipif(sys.platform != "linux", reason="workers are processes on Linux only")
def test_workers_end_with_a_killed_parent() -> None:
    program = """
import os, signal, torch
from scrlearn.data.images import read_ahead
blocks = [torch.tensor([0])] * 100
results = read_ahead(lambda block: (os.getpid(), bytes(1_000_000)), blocks, 2)
print(*{next(results)[0] for _ in range(8)}, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # standard output ends only when the workers, which have inherited it, have ended: else this times out
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2  # both workers had sent something


def test_threads_do_the_same_work_lazily() -> None:
    started = []

    def work(block: torch.Tensor) -> int:
        started.append(int(block))
        if int(block) == 90:
            raise DataError("bad")
        return int(block)

    blocks = [torch.tensor([number]) for number in range(100)]
    results = _by_threads(work, blocks, 2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(started) < 50  # memory stays bounded: not everything is read at once
    with pytest.raises(DataError, match="bad"):
        list(results)


def test_odd_file_names(tmp_path: Path) -> None:
    names = ["a b.png", "ü.png", "quote'.png", os.fsdecode(b"latin\xe9.png")]
    for name in names:
        solid(tmp_path / "klass ß" / "1.png", (0, 0, 0))
        (tmp_path / "klass ß" / "1.png").rename(tmp_path / "klass ß" / name)
    data = load_folder(tmp_path)
    assert len(data.train) + len(data.test) == len(names)
    assert data.train.read(torch.arange(3)).shape == (3, 3, 8, 8)


def test_reading_with_threads_keeps_the_order(make_folder: MakeFolder) -> None:
    root = make_folder({"a": 60})
    images = FolderImages(root, [f"a/{number}.png" for number in range(60)], [0] * 60, (8, 8), workers=4)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert images.read(order)[:, 0, 0, 0].tolist() == order.tolist()


def test_wrong_folders(tmp_path: Path, make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(f"folder:{tmp_path / 'absent'}")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="not a folder"):
        load(f"folder:{tmp_path / 'file'}")
    with pytest.raises(InputError, match="names no folder"):
        load("folder:")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no subfolders"):
        load(f"folder:{tmp_path / 'empty'}")
    root = make_folder({"a": 3, "b": 1})
    with pytest.raises(DataError, match="no test images for b"):
        load(f"folder:{root}")
    (root / "c").mkdir()
    with pytest.raises(DataError, match="no training images for c"):
        load(f"folder:{root}")


def test_classes_of_both_parts_must_agree(make_folder: MakeFolder) -> None:
    make_folder({"cat": 2, "dog": 2}, part="train")
    root = make_folder({"cat": 2, "eel": 2}, part="val")
    with pytest.raises(DataError, match="lacks: eel"):
        load(f"folder:{root}")
