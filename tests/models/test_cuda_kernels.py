"""The CUDA kernels, run on the CPU by an emulator of what they need of a GPU, against PyTorch in float64."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scrlearn.models import cuda_conv, cuda_norm, nvrtc

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator is compiled with g++, which is not here")

# channels in, channels out, images, height, width
LAYERS = [
    (24, 24, 2, 8, 8),
    (24, 24, 1, 18, 32),
    (24, 40, 3, 7, 9),
    (40, 24, 1, 5, 21),
    (40, 40, 1, 16, 16),
    (8, 16, 5, 4, 4),
    (16, 8, 1, 1, 1),
    (8, 16, 1, 3, 100),
    (24, 24, 1, 9, 84),
]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    library = tmp_path_factory.mktemp("emulator") / "emulator.so"
    sources = [f'-DCONVOLUTION="{cuda_conv.SOURCE}"', f'-DBATCH_NORM="{cuda_norm.SOURCE}"', str(HERE / "emulator.cpp")]
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", *sources, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "barrier" in done.stderr and "No such file" in done.stderr:
        pytest.skip("this g++ has no std::barrier")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def emulated(emulator, monkeypatch):
    """The emulator in the place of a GPU."""

    def kernel(source, name, device):
        function, *arguments = re.findall(r"\w+", name)
        flags = [int(word) if word.isdigit() else int(word == "true") for word in arguments]

        def launch(blocks, threads, shared, arguments):
            values = map(nvrtc.as_c, arguments)
            assert getattr(emulator, f"run_{function}")(*flags, blocks, threads, shared, *values) == 0

        return launch

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "processors", lambda device: 2)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).contiguous(
        memory_format=torch.channels_last
    )


def near(found, exact, error):
    assert found.isfinite().all()
    assert (found.double() - exact).norm() < error * exact.norm() + 1e-6


@pytest.mark.parametrize("layer", LAYERS)
def test_forward_with_sums_and_both_gradients(layer):
    channels_in, channels, images, height, width = layer
    x = random(images, channels_in, height, width).bfloat16()
    dy = random(images, channels, height, width, seed=1).bfloat16()
    weight = random(channels, channels_in, 3, 3, seed=2).bfloat16().float()

    y = torch.full_like(dy, torch.nan)
    sums = cuda_conv.convolve(x, weight, y, backward=False, segments=1)
    dx = torch.full_like(x, torch.nan)
    assert cuda_conv.convolve(dy, weight, dx, backward=True, segments=0) is None
    partial = cuda_conv.weight_gradient(x, dy, weight)

    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = F.conv2d(*exact, padding=1)
    expected_dx, expected_dw = torch.autograd.grad(expected, exact, dy.double())
    near(y, expected.detach(), 2**-8)
    near(dx, expected_dx, 2**-8)
    dw = partial.double().sum(0).view(channels, 3, 3, channels_in).permute(0, 3, 1, 2)
    near(dw, expected_dw, 1e-5)
    written = y.double()
    near(sums.double().sum(0), torch.stack([written.sum((0, 2, 3)), written.square().sum((0, 2, 3))]), 1e-5)


@pytest.mark.parametrize(
    ("images", "size", "segments"), [(6, (18, 32), 3), (8, (8, 8), 2), (6, (8, 8), 2), (4, (9, 7), 4)]
)
def test_sums_belong_to_segments_or_are_not_there(images, size, segments):
    x, weight = random(images, 24, *size).bfloat16(), random(24, 24, 3, 3, seed=1)
    y = torch.empty_like(x)
    sums = cuda_conv.convolve(x, weight, y, backward=False, segments=segments)
    tiles = cuda_conv.cut(images, *size, 24, wanted=2)
    if images // segments % tiles.together:
        assert sums is None
        return
    for part, own in zip(y.double().chunk(segments), sums.double().chunk(segments), strict=True):
        near(own.sum(0), torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]), 1e-5)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the trial of the kernels run where they are emulated."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch, "device", lambda *names: "cpu")
    for cached in (cuda_conv.trusted, cuda_norm.trusted):
        cached.cache_clear()
    yield
    for cached in (cuda_conv.trusted, cuda_norm.trusted):
        cached.cache_clear()


@pytest.mark.usefixtures("on_the_cpu")
class TestTrial:
    def test_kernels_that_are_right_are_trusted(self):
        assert cuda_conv.trusted(24, 40, 0)
        assert cuda_norm.trusted(24, 0)

    def test_kernels_that_are_wrong_are_not_used(self, monkeypatch):
        own, own_settle = cuda_conv.convolve, cuda_norm.settle

        def wrong(x, weight, y, backward, segments):
            sums = own(x, weight, y, backward, segments)
            y[0, :, 0, 0] += 3
            return sums

        monkeypatch.setattr(cuda_conv, "convolve", wrong)
        monkeypatch.setattr(cuda_norm, "settle", lambda *given: own_settle(*given) * 1.01)
        with pytest.warns(UserWarning, match=r"convolution.cu are not used.* off by"):
            assert not cuda_conv.trusted(24, 40, 0)
        with pytest.warns(UserWarning, match=r"batch_norm.cu are not used.* off by 1%"):
            assert not cuda_norm.trusted(24, 0)

    def test_kernels_that_do_not_compile_are_not_used(self, monkeypatch):
        def kernel(source, name, device):
            raise nvrtc.CompilerError("There is no libnvrtc.so.12 on this machine.")

        monkeypatch.setattr(nvrtc, "kernel", kernel)
        with pytest.warns(UserWarning, match=r"Triton's take their place: There is no libnvrtc"):
            assert not cuda_conv.trusted(24, 40, 0)


# ---------------------------------------------------------------- BatchNorm

# images, channels, height, width
BATCHES = [(7, 24, 9, 11), (40, 24, 8, 8), (3, 80, 5, 5), (30, 160, 4, 4), (1, 8, 1, 2), (2, 8, 64, 64)]


def batch(shape, seed):
    x = random(*shape, seed=seed).bfloat16() + 0.5
    values = [torch.rand(shape[1], generator=torch.Generator().manual_seed(seed + i)) + 0.5 for i in range(4)]
    return x, values, torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("shape", BATCHES)
def test_statistics_of_a_batch(shape):
    x, (weight, bias, mean, var), counter = batch(shape, 0)
    expected = F.batch_norm(x.double(), (m := mean.double()), (v := var.double()), weight.double(), bias.double(), True)
    means, variances = mean.clone(), var.clone()
    saved = cuda_norm.statistics(x, counter, weight, bias, means, variances, 0.1, 1e-5).view(4, -1, 1, 1)
    near(x.double() * saved[2] + saved[3], expected, 1e-5)
    near((x.double() - saved[0]) * saved[1] * weight[:, None, None] + bias[:, None, None], expected, 1e-5)
    near(means, m, 1e-5)
    near(variances, v, 1e-5)
    assert counter.item() == 0


@pytest.mark.parametrize("shape", BATCHES)
def test_statistics_from_sums(shape):
    x, (weight, bias, mean, var), counter = batch(shape, 1)
    parts = [part.float() for part in x.flatten(2).split(3, dim=2)]
    sums = torch.stack([torch.stack([p.sum((0, 2)), p.square().sum((0, 2))]) for p in parts])
    means, variances = mean.clone(), var.clone()
    saved = cuda_norm.settle(sums, x.numel() // shape[1], weight, bias, means, variances, 0.1, 1e-5)
    near(saved, cuda_norm.statistics(x, counter, weight, bias, mean, var, 0.1, 1e-5).double(), 1e-4)
    near(means, mean.double(), 1e-5)
    near(variances, var.double(), 1e-4)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("shape", BATCHES)
def test_sums_of_the_gradient(shape, shortcut, relu):
    x, (weight, bias, mean, var), counter = batch(shape, 2)
    residual = random(*shape, seed=3).bfloat16() if shortcut else torch.zeros_like(x)
    dy = random(*shape, seed=4).bfloat16()
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    before = F.batch_norm(leaves[0], None, None, *leaves[1:], True) + residual.double()
    dy[before.abs() < 0.02] = 0  # where rounding decides on which side of 0 a value lies
    y = (before.relu() if relu else before).detach()
    expected = torch.autograd.grad(before.relu() if relu else before, leaves, dy.double())
    saved = cuda_norm.statistics(x, counter, weight, bias, mean, var, 0.1, 1e-5)
    d_weight, d_bias, coefficients = cuda_norm.backward_sums(dy, y.bfloat16(), x, counter, saved, shortcut, relu)
    near(d_weight, expected[1], 1e-4)
    near(d_bias, expected[2], 1e-4)
    b, c = coefficients.double().view(2, -1, 1, 1)
    gradient = torch.where(y > 0, dy.double(), 0) if relu else dy.double()
    if x.numel() > 100:  # of two values the gradient is all rounding
        near(saved.double().view(4, -1, 1, 1)[2] * gradient + b * x.double() + c, expected[0], 1e-3)
    assert counter.item() == 0


def segmented(images, segments, seed):
    """A batch whose segments have other means."""
    x, values, counter = batch((images * segments, 24, 9, 11), seed)
    return x + torch.arange(segments).repeat_interleave(images)[:, None, None, None].bfloat16(), values, counter


@pytest.mark.parametrize("images", [1, 7, 40])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments_are_batches_one_after_the_other(images, segments):
    x, (weight, bias, mean, var), counter = segmented(images, segments, 5)
    told, parts = (weight, bias), x.chunk(segments)
    running = [(mean.clone(), var.clone()) for _ in range(3)]
    one_by_one = [cuda_norm.statistics(part, counter, *told, *running[0], 0.1, 1e-5) for part in parts]
    saved = cuda_norm.statistics(x, counter, *told, *running[1], 0.1, 1e-5, segments)
    near(saved, torch.cat(one_by_one).double(), 1e-6)
    sums = torch.stack([torch.stack([p.sum((0, 2)), p.square().sum((0, 2))]) for p in x.float().flatten(2).split(1)])
    settled = cuda_norm.settle(sums, images * 99, *told, *running[2], 0.1, 1e-5, segments)
    near(settled, saved.double(), 1e-4)
    for own in zip(*running, strict=True):
        near(own[1], own[0].double(), 1e-6)
        near(own[2], own[0].double(), 1e-4)
    assert counter.item() == 0


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_two_gradients_of_segments_are_added_up(segments, shortcut, relu):
    x, (weight, bias, mean, var), counter = segmented(7, segments, 6)
    dy, also, y = (random(*x.shape, seed=7 + i).bfloat16() for i in range(3))
    saved = cuda_norm.statistics(x, counter, weight, bias, mean, var, 0.1, 1e-5, segments)
    both = dy.float() + also.float()
    found = cuda_norm.backward_sums(dy, y, x, counter, saved, shortcut, relu, segments, also)
    totals, slopes = 0.0, 0.0
    of_all = zip(*(t.chunk(segments) for t in (both, y, x, saved, found[2])), strict=True)
    for gradient, output, values, own, coefficients in of_all:
        average, inverse, scale, shift = own.double().view(4, -1, 1, 1)
        before = output.double() if shortcut else values.double() * scale + shift
        gradient = gradient.double().where(before > 0, 0.0) if relu else gradient.double()
        total, slope = (g.sum((0, 2, 3)) for g in (gradient, gradient * (values.double() - average) * inverse))
        totals, slopes = totals + total, slopes + slope
        rows = values.numel() // 24
        b = -(scale * inverse).flatten() * slope / rows
        c = -scale.flatten() * total / rows - b * average.flatten()
        near(coefficients, torch.cat([b, c]), 1e-4)
    near(found[0], slopes, 1e-4)
    near(found[1], totals, 1e-4)
    assert counter.item() == 0


# ---------------------------------------------------------------- tiles


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
