"""The CUDA convolutions, run on the CPU by an emulator of what they need of a GPU, against PyTorch in float64."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scrlearn.models import cuda_conv

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator is compiled with g++, which is not here")

# channels in, channels out, images, height, width
LAYERS = [
    (24, 24, 2, 8, 8),
    (24, 24, 1, 32, 32),
    (24, 40, 3, 7, 9),
    (40, 24, 1, 5, 21),
    (40, 40, 2, 16, 16),
    (8, 16, 5, 4, 4),
    (16, 8, 1, 1, 1),
    (8, 16, 1, 3, 100),
    (24, 24, 1, 9, 84),
]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    library = tmp_path_factory.mktemp("emulator") / "emulator.so"
    where = f'-DCONVOLUTION="{cuda_conv.SOURCE}"'
    command = [
        COMPILER,
        "-std=c++20",
        "-O1",
        "-pthread",
        "-shared",
        "-fPIC",
        where,
        str(HERE / "emulator.cpp"),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "barrier" in done.stderr and "No such file" in done.stderr:
        pytest.skip("this g++ has no std::barrier")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture
def kernels(emulator, monkeypatch):
    """The launchers of `cuda_conv` with the emulator in the place of a GPU."""

    def compiled(name, device):
        function, *arguments = re.findall(r"\w+", name)
        flags = [int(word) if word.isdigit() else int(word == "true") for word in arguments]

        def launch(blocks, threads, shared, arguments):
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            values = [
                ctypes.c_void_p(v) if isinstance(a, torch.Tensor) else v for a, v in zip(arguments, values, strict=True)
            ]
            assert getattr(emulator, f"run_{function}")(*flags, blocks, threads, shared, *values) == 0

        return launch

    monkeypatch.setattr(cuda_conv, "compiled", compiled)
    monkeypatch.setattr(cuda_conv, "_processors", lambda device: 2)
    return cuda_conv


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).contiguous(
        memory_format=torch.channels_last
    )


def near(found, exact, error):
    assert found.isfinite().all()
    assert (found.double() - exact).norm() < error * exact.norm() + 1e-6


@pytest.mark.parametrize("layer", LAYERS)
def test_forward_with_sums_and_both_gradients(kernels, layer):
    channels_in, channels, images, height, width = layer
    x = random(images, channels_in, height, width).bfloat16()
    dy = random(images, channels, height, width, seed=1).bfloat16()
    weight = random(channels, channels_in, 3, 3, seed=2).bfloat16().float()

    y = torch.full_like(dy, torch.nan)
    sums = kernels.convolve(x, weight, y, backward=False, has_sums=True)
    dx = torch.full_like(x, torch.nan)
    assert kernels.convolve(dy, weight, dx, backward=True, has_sums=False) is None
    partial = kernels.weight_gradient(x, dy, weight)

    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = F.conv2d(*exact, padding=1)
    expected_dx, expected_dw = torch.autograd.grad(expected, exact, dy.double())
    near(y, expected.detach(), 2**-8)
    near(dx, expected_dx, 2**-8)
    dw = partial.double().sum(0).view(channels, 3, 3, channels_in).permute(0, 3, 1, 2)
    near(dw, expected_dw, 1e-5)
    written = y.double()
    near(sums.double().sum(0), torch.stack([written.sum((0, 2, 3)), written.square().sum((0, 2, 3))]), 1e-5)


@pytest.fixture
def on_the_cpu(kernels, monkeypatch):
    """Let the trial of the kernels run where they are emulated."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    kernels.trusted.cache_clear()
    yield kernels
    kernels.trusted.cache_clear()


def test_kernels_that_are_right_are_trusted(on_the_cpu):
    assert on_the_cpu.trusted(24, 40, 0)
    assert on_the_cpu._error(24, 40, 0) < 2**-7


def test_kernels_that_are_wrong_are_not_used(on_the_cpu, monkeypatch):
    own = on_the_cpu.convolve

    def wrong(x, weight, y, backward, has_sums):
        sums = own(x, weight, y, backward, has_sums)
        y[0, :, 0, 0] += 3
        return sums

    monkeypatch.setattr(on_the_cpu, "convolve", wrong)
    with pytest.warns(UserWarning, match="off by"):
        assert not on_the_cpu.trusted(24, 40, 0)


def test_kernels_that_do_not_compile_are_not_used(on_the_cpu, monkeypatch):
    def compiled(name, device):
        raise cuda_conv.CompilerError("There is no libnvrtc.so.12 on this machine.")

    monkeypatch.setattr(on_the_cpu, "compiled", compiled)
    with pytest.warns(UserWarning, match=r"Triton's take their place: There is no libnvrtc"):
        assert not on_the_cpu.trusted(24, 40, 0)


def test_tiles_hold_every_pixel_and_fit_in_memory():
    for images in (1, 10, 220):
        for height, width in [(1, 1), (4, 4), (8, 8), (16, 16), (28, 28), (32, 32), (84, 84), (5, 256), (300, 200)]:
            for channels in (8, 24, 40, 48):
                tiles = cuda_conv.cut(images, height, width, channels, wanted=132)
                if tiles is None:  # not even three lines of the image fit
                    assert 3 * (width + 2) * channels * 2 > cuda_conv.MOST_SHARED // 2
                    continue
                assert tiles.rows * tiles.together * width <= 64 * tiles.warps
                assert tiles.together == 1 or tiles.rows == height
                assert tiles.number == -(-images // tiles.together) * -(-height // tiles.rows)
                assert cuda_conv.bordered(tiles.rows, tiles.together, width, channels) <= cuda_conv.MOST_SHARED // 2
    assert cuda_conv.cut(1, 1, 10_000, 24, wanted=1) is None
