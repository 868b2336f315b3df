"""The CUDA kernels, run on the CPU by an emulator of what they need of a GPU, against PyTorch in float64."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scrlearn.learners import make_learner
from scrlearn.models import cuda_conv, cuda_descent, cuda_norm, cuda_strided, cuda_turn, nvrtc
from scrlearn.models.orthogonal import Matrices

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator is compiled with g++, which is not here")

ROOM = (227 * 1024, 228 * 1024)  # shared memory of an H100

SIZES = [(1, 1), (4, 4), (8, 8), (16, 16), (28, 28), (32, 32), (42, 42), (84, 84), (5, 256), (300, 200)]

# channels in, channels out, images, height, width, blocks
LAYERS = [
    (24, 24, 2, 8, 8, 132),
    (24, 24, 1, 18, 32, 2),
    (24, 40, 3, 7, 9, 2),
    (40, 24, 1, 5, 21, 1),
    (40, 24, 1, 21, 21, 2),
    (40, 40, 1, 16, 16, 3),
    (8, 16, 5, 4, 4, 132),
    (8, 16, 60, 2, 2, 1),
    (8, 16, 150, 1, 1, 1),
    (16, 8, 1, 1, 1, 132),
    (8, 16, 1, 3, 100, 1),
    (24, 24, 1, 9, 84, 2),
    (8, 16, 1, 84, 84, 5),
    (24, 24, 3, 9, 10, 2),
    (8, 24, 2, 9, 32, 3),
]


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """Compiled once for all processes that share the tests."""
    fcntl = pytest.importorskip("fcntl")
    own = tmp_path_factory.getbasetemp()
    library = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator.so"
    sources = [f'-DCONVOLUTION="{cuda_conv.SOURCE}"', f'-DBATCH_NORM="{cuda_norm.SOURCE}"']
    sources += [f'-DDESCENT="{cuda_descent.SOURCE}"', f'-DTURN="{cuda_turn.SOURCE}"']
    sources += [f'-DSTRIDED="{cuda_strided.SOURCE}"', str(HERE / "emulator.cpp")]
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", *sources, "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "ucontext" in done.stderr and "No such file" in done.stderr:
                pytest.skip("this system has no ucontext")
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
    monkeypatch.setattr(nvrtc, "processors", lambda device: 132)
    monkeypatch.setattr(cuda_conv, "room", lambda device: ROOM)
    monkeypatch.setattr(cuda_strided, "room", lambda device: ROOM)
    monkeypatch.setattr(cuda_turn, "CLUSTER", 1)  # blocks run one after the other and cannot wait for each other


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).contiguous(
        memory_format=torch.channels_last
    )


def near(found, exact, error):
    assert found.isfinite().all()
    assert (found.double() - exact).norm() < error * exact.norm() + 1e-6


@pytest.mark.parametrize("layer", LAYERS)
def test_forward_with_sums_and_both_gradients(layer):
    channels_in, channels, images, height, width, blocks = layer
    x = random(images, channels_in, height, width).bfloat16()
    dy = random(images, channels, height, width, seed=1).bfloat16()
    weight = random(channels, channels_in, 3, 3, seed=2).bfloat16().float()

    y = torch.full_like(dy, torch.nan)
    sums = cuda_conv.convolve(x, weight, y, backward=False, segments=1, most=blocks)
    dx = torch.full_like(x, torch.nan)
    assert cuda_conv.convolve(dy, weight, dx, backward=True, segments=0, most=blocks) is None
    partial = cuda_conv.weight_gradient(x, dy, weight, most=blocks)

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
    ("images", "size", "segments"), [(6, (18, 20), 3), (8, (8, 8), 2), (6, (8, 8), 2), (4, (9, 7), 4), (30, (2, 2), 3)]
)
@pytest.mark.parametrize("blocks", [1, 2, 132])
def test_sums_belong_to_segments(images, size, segments, blocks):
    x, weight = random(images, 8, *size).bfloat16(), random(16, 8, 3, 3, seed=1)
    y = torch.empty_like(x[:, :1].expand(-1, 16, -1, -1), memory_format=torch.channels_last)
    sums = cuda_conv.convolve(x, weight, y, backward=False, segments=segments, most=blocks)
    assert sums is not None
    for part, own in zip(y.double().chunk(segments), sums.double().chunk(segments), strict=True):
        near(own.sum(0), torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]), 1e-5)


@pytest.mark.parametrize("size", [(9, 10), (4, 4), (7, 40)])
def test_results_do_not_depend_on_the_number_of_blocks(size, monkeypatch):
    monkeypatch.setattr(nvrtc, "processors", lambda device: 1)  # tiles are as large as can be
    x, weight = random(20, 8, *size).bfloat16(), random(16, 8, 3, 3, seed=1)
    found = []
    for blocks in (1, 3):
        y = torch.empty_like(x[:, :1].expand(-1, 16, -1, -1), memory_format=torch.channels_last)
        found.append((y, cuda_conv.convolve(x, weight, y, backward=False, segments=5, most=blocks)))
    near(found[0][0], F.conv2d(x.double(), weight.bfloat16().double(), padding=1), 2**-8)
    assert torch.equal(found[0][0], found[1][0])
    assert len(found[0][1]) > 3  # tiles
    assert torch.equal(found[0][1], found[1][1])


# ---------------------------------------------------------------- two convolutions of stride 2


# channels in, channels out, images, height, width, blocks
STRIDED_LAYERS = [
    (24, 40, 1, 12, 14, 132),
    (24, 40, 1, 7, 84, 1),
    (40, 80, 1, 7, 9, 1),
    (40, 80, 2, 4, 4, 1),
    (8, 16, 1, 1, 1, 132),
    (8, 16, 18, 3, 4, 1),
    (16, 8, 5, 5, 2, 2),
    (8, 16, 20, 1, 7, 3),
    (8, 16, 1, 40, 33, 4),
    (24, 40, 2, 21, 84, 2),
    (24, 40, 2, 84, 84, 3),
    (40, 80, 2, 42, 42, 1),
    (40, 80, 5, 21, 21, 1),
    (40, 80, 1, 13, 9, 1),
    (24, 40, 3, 32, 32, 2),
    (40, 80, 9, 16, 16, 132),
]


def strided(channels_in, channels, images, height, width):
    """Images, gradients of both results, and both weights."""
    size = (-(-height // 2), -(-width // 2))
    x = random(images, channels_in, height, width).bfloat16()
    gradients = tuple(random(images, channels, *size, seed=seed).bfloat16() for seed in (1, 2))
    weight, small = (random(channels, channels_in, side, side, seed=3).bfloat16().float() for side in (3, 1))
    return x, gradients, weight, small


@pytest.mark.parametrize("layer", STRIDED_LAYERS)
def test_two_convolutions_of_stride_2_with_sums_and_all_gradients(layer):
    *shapes, blocks = layer
    x, gradients, weight, small = strided(*shapes)
    results = tuple(torch.full_like(dy, torch.nan) for dy in gradients)
    sums = cuda_strided.downsample(x, weight, small, results, segments=1, most=blocks)
    dx = torch.full_like(x, torch.nan)
    cuda_strided.input_gradient(gradients, weight, small, dx, most=blocks)
    partial = cuda_strided.weight_gradients(x, gradients, weight, most=blocks)
    found = cuda_strided.apart(partial.double().sum(0), weight)

    exact = [t.double().requires_grad_() for t in (x, weight, small)]
    expected = [F.conv2d(exact[0], w, stride=2, padding=w.shape[2] // 2) for w in exact[1:]]
    expected_dx, *expected_dw = torch.autograd.grad(expected, exact, [dy.double() for dy in gradients])
    near(dx, expected_dx, 2**-8)
    for y, exact_y, of_y, dw, exact_dw in zip(results, expected, sums, found, expected_dw, strict=True):
        near(y, exact_y.detach(), 2**-8)
        near(dw, exact_dw, 1e-5)
        written = y.double()
        near(of_y.double().sum(0), torch.stack([written.sum((0, 2, 3)), written.square().sum((0, 2, 3))]), 1e-5)
    assert sums.shape == (2, sums.shape[1], 2, weight.shape[0])
    answers = tuple(torch.full_like(dy, torch.nan) for dy in gradients)
    assert cuda_strided.downsample(x, weight, small, answers, segments=0, most=blocks) is None
    assert all(map(torch.equal, answers, results))


@pytest.mark.parametrize(("images", "size", "segments"), [(6, (9, 10), 3), (8, (8, 7), 2), (30, (3, 4), 3)])
@pytest.mark.parametrize("blocks", [1, 132])
def test_sums_of_both_results_belong_to_segments(images, size, segments, blocks):
    x, gradients, weight, small = strided(8, 16, images, *size)
    results = tuple(map(torch.empty_like, gradients))
    sums = cuda_strided.downsample(x, weight, small, results, segments=segments, most=blocks)
    for y, of_y in zip(results, sums, strict=True):
        for part, own in zip(y.double().chunk(segments), of_y.double().chunk(segments), strict=True):
            near(own.sum(0), torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]), 1e-5)


@pytest.mark.parametrize("inner", [8, 24, 40])
@pytest.mark.parametrize("outer", [8, 40, 80])
@pytest.mark.parametrize("images", [1, 10, 220])
def test_strided_tiles_hold_every_pixel_and_fit_in_memory(images, inner, outer):
    for kind, cost in cuda_strided.COSTS.items():
        for height, width in SIZES:
            shape, down = (images, inner, height, width), -(-height // 2)
            for most in (None, 2):
                planned = cuda_strided.plan(kind, shape, outer, images, 132, ROOM, most)
                if planned is None:  # not even a row, and the next one on its way
                    need = cost(shape, outer, cuda_conv.Tiles(1, 1, images * down))
                    assert need.fixed + 2 * need.tile > ROOM[0]
                    continue
                tiles, blocks, _, shared = planned
                need = cost(shape, outer, tiles)
                assert 1 <= blocks <= min(tiles.number, most or 2 * 132)
                buffers = 1 if blocks == tiles.number and not need.two_buffers else 2
                assert shared == need.fixed + buffers * need.tile <= ROOM[0]
                assert -(-blocks // 132) * (shared + 1024) <= ROOM[1]
                holds(tiles, images, down)
    assert cuda_strided.plan("downsample", (1, 24, 1, 10_000), 24, 1, 132, ROOM) is None
    for kind in cuda_strided.COSTS:
        for processors in (16, 132):
            planned = cuda_strided.plan(kind, (5, inner, *cuda_strided.TRIAL[1:]), outer, 5, processors, ROOM, 1)
            assert planned.tiles.number > 2  # of a block, in the trial


def test_strided_tiles_of_a_segment_hold_its_images_only():
    for segments in (1, 2, 11, 20, 220):
        tiles = cuda_strided.plan("downsample", (220, 24, 4, 4), 40, 220 // segments, 4, ROOM).tiles
        assert segments == 1 or 220 // segments % tiles.together == 0


def test_strided_kernels_take_no_weights_in_bfloat16(monkeypatch):
    monkeypatch.setattr(nvrtc, "can_run", lambda x: True)
    monkeypatch.setattr(cuda_strided, "trusted", lambda *which: True)
    x, _, weight, small = strided(40, 80, 2, 9, 9)
    assert cuda_strided.suits(x, weight, small, (2, 2))
    assert not cuda_strided.suits(x, weight.bfloat16(), small.bfloat16(), (2, 2))


@pytest.mark.parametrize("room", [(99 * 1024, 100 * 1024), (163 * 1024, 164 * 1024)])
def test_what_is_taken_fits_into_less_shared_memory_and_so_does_the_trial(room, monkeypatch):
    def kernel(source, name, device):
        def launch(blocks, threads, shared, arguments):
            assert blocks >= 1
            assert shared <= room[0]

        return launch

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "can_run", lambda x: True)
    tried = []
    for module in (cuda_conv, cuda_strided):
        monkeypatch.setattr(module, "room", lambda device: room)
        monkeypatch.setattr(module, "trusted", lambda *which, module=module: tried.append(module) or True)
    for inner, outer, size in [(24, 24, 2), (40, 40, 4), (48, 48, 16), (24, 24, 32), (24, 40, 32), (40, 80, 16)]:
        x, _, weight, small = strided(inner, outer, 20, size, size)
        if cuda_conv.suits(x, weight, 1):
            cuda_conv.weight_gradient(x, x.new_empty(20, outer, size, size), weight)
        if cuda_strided.suits(x, weight, small, (2, 2)):
            trial = (cuda_strided.TRIAL[0], inner, *cuda_strided.TRIAL[1:])
            assert all(cuda_strided.plan(kind, trial, outer, 5, 132, room, 1) for kind in cuda_strided.COSTS)
    assert set(tried) == {cuda_conv, cuda_strided}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the trial of the kernels run where they are emulated."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch, "device", lambda *names: "cpu")
    tried = [module.trusted for module in (cuda_conv, cuda_strided, cuda_norm, cuda_descent, cuda_turn)]
    for cached in tried:
        cached.cache_clear()
    yield
    for cached in tried:
        cached.cache_clear()


@pytest.mark.usefixtures("on_the_cpu")
class TestTrial:
    def test_kernels_that_are_right_are_trusted(self):
        assert cuda_conv.trusted(24, 40, 0)
        assert cuda_strided.trusted(8, 16, 0)
        assert cuda_norm.trusted(24, 0)
        assert cuda_descent.trusted(0)
        assert cuda_turn.trusted(0)

    def test_kernels_that_are_wrong_are_not_used(self, monkeypatch):
        own, own_settle, own_descend = cuda_conv.convolve, cuda_norm.settle, cuda_descent.descend

        def wrong(x, weight, y, backward, segments, most):
            sums = own(x, weight, y, backward, segments, most)
            y[0, :, 0, 0] += 3
            return sums

        monkeypatch.setattr(cuda_conv, "convolve", wrong)
        monkeypatch.setattr(cuda_norm, "settle", lambda *given: own_settle(*given) * 1.01)
        monkeypatch.setattr(
            cuda_descent, "descend", lambda moved, updates, *rule: own_descend(moved, updates + 1, *rule)
        )
        own_turn = cuda_turn.turn

        def nothing(weights, *given):
            weights[-1].fill_(torch.nan)

        monkeypatch.setattr(cuda_turn, "turn", nothing)
        with pytest.warns(UserWarning, match=r"turn.cu are not used.* off by nan"):
            assert not cuda_turn.trusted(0)
        cuda_turn.trusted.cache_clear()

        def one_round_less(*given):
            own_turn(*given[:-1], given[-1]._replace(rounds=4))

        monkeypatch.setattr(cuda_turn, "turn", one_round_less)
        with pytest.warns(UserWarning, match=r"descent.cu are not used.* off by"):
            assert not cuda_descent.trusted(0)
        with pytest.warns(UserWarning, match=r"turn.cu are not used.* off by"):
            assert not cuda_turn.trusted(0)
        with pytest.warns(UserWarning, match=r"convolution.cu are not used.* off by"):
            assert not cuda_conv.trusted(24, 40, 0)
        own_gradient = cuda_strided.input_gradient

        def wrong_gradient(gradients, weight, small, dx, most):
            own_gradient(gradients[::-1], weight, small, dx, most)

        monkeypatch.setattr(cuda_strided, "input_gradient", wrong_gradient)
        with pytest.warns(UserWarning, match=r"strided.cu are not used.* off by"):
            assert not cuda_strided.trusted(8, 16, 0)
        with pytest.warns(UserWarning, match=r"batch_norm.cu are not used.* off by 1%"):
            assert not cuda_norm.trusted(24, 0)

    def test_kernels_that_do_not_compile_are_not_used(self, monkeypatch):
        def kernel(source, name, device):
            raise nvrtc.CompilerError("There is no libnvrtc.so.12 on this machine.")

        monkeypatch.setattr(nvrtc, "kernel", kernel)
        with pytest.warns(UserWarning, match=r"slower ones take their place: There is no libnvrtc"):
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
    told = (dy, y.bfloat16(), x, counter, saved, shortcut, relu)
    d_weight, d_bias, coefficients, of_shortcut = cuda_norm.backward_sums(*told)
    near(d_weight, expected[1], 1e-4)
    near(d_bias, expected[2], 1e-4)
    b, c = coefficients.double().view(2, -1, 1, 1)
    gradient = torch.where(y > 0, dy.double(), 0) if relu else dy.double()
    if x.numel() > 100:  # of two values the gradient is all rounding
        near(saved.double().view(4, -1, 1, 1)[2] * gradient + b * x.double() + c, expected[0], 1e-3)
    assert (of_shortcut is not None) == shortcut
    if of_shortcut is not None:
        assert torch.equal(of_shortcut.double(), gradient)
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
    *found, of_shortcut = cuda_norm.backward_sums(dy, y, x, counter, saved, shortcut, relu, segments, also)
    if of_shortcut is not None:  # what it says is what flows: the sum as bfloat16 has it
        both = both.bfloat16().float()
        assert torch.equal(of_shortcut.float(), both.where(y > 0, 0) if relu else both)
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


@pytest.mark.parametrize("channels", [8, 24, 40, 48])
@pytest.mark.parametrize("images", [1, 10, 220])
def test_tiles_hold_every_pixel_and_fit_in_memory(images, channels):
    for height, width in SIZES:
        small = cuda_conv.cut(images, height, width, channels)
        if small is None:  # not even three lines of the image fit
            assert 3 * (width + 2) * channels * 2 > cuda_conv.GRADIENT_TILE
            continue
        for most in (None, 2):
            planned = cuda_conv.plan((images, channels, height, width), channels, images, 132, ROOM, most)
            tiles, blocks, warps, shared = planned
            assert 1 <= blocks <= min(tiles.number, most or 16 * 132)
            buffers = 1 if blocks == tiles.number else 2
            weights = 3 * channels * (3 * channels // 16 * 16 + 8) * 2
            pixels = cuda_conv.bordered(tiles.rows, tiles.together, width, channels)
            assert weights + buffers * pixels < shared <= ROOM[0]
            assert -(-blocks // 132) * (shared + 1024) <= ROOM[1]
            assert 1 <= warps <= 8
            holds(tiles, images, height)
        holds(small, images, height)
        assert small.rows * small.together * width <= cuda_conv.GRADIENT_PIXELS
        assert cuda_conv.bordered(small.rows, small.together, width, channels) <= cuda_conv.GRADIENT_TILE
    assert cuda_conv.cut(1, 1, 10_000, 24) is None
    assert cuda_conv.plan((1, 24, 1, 10_000), 24, 1, 132, ROOM) is None


def holds(tiles, images, height):
    assert tiles.together == 1 or tiles.rows == height
    assert tiles.number == -(-images // tiles.together) * -(-height // tiles.rows)


@pytest.mark.parametrize("inner", [8, 24, 40, 48])
@pytest.mark.parametrize("outer", [8, 24, 40, 48])
def test_a_block_has_several_tiles_in_the_trial(inner, outer):
    for processors in (16, 132):
        planned = cuda_conv.plan((5, inner, 9, 10), outer, 5, processors, ROOM, 1)
        assert planned.tiles.number > 2
    assert cuda_conv.cut(5, 9, 10, max(inner, outer)).number > 2


def test_tiles_of_a_segment_hold_its_images_only():
    for segments in (1, 2, 11, 20, 220):
        tiles = cuda_conv.plan((220, 24, 4, 4), 24, 220 // segments, 4, ROOM).tiles
        assert segments == 1 or 220 // segments % tiles.together == 0


# ---------------------------------------------------------------- descent


def weights_of_many_shapes(layout=torch.contiguous_format):
    shapes = [(24, 8, 3, 3), (5,), (40, 24, 1, 1), (3, 7), (2049,), (), (16, 130)]
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    return [t.contiguous(memory_format=layout) if t.ndim == 4 else t for t in made]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("averaging", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("most", [3, 80])
def test_descent_is_that_of_torch(layout, momentum, averaging, most, monkeypatch):
    """Against torch's own optimiser and the formula of the average, over several steps."""
    monkeypatch.setattr(cuda_descent, "MOST", most)  # several launches
    weights = weights_of_many_shapes(layout)
    twins = [torch.nn.Parameter(w.clone(memory_format=torch.preserve_format).double()) for w in weights]
    groups = [{"params": twins[:4], "weight_decay": 0.1}, {"params": twins[4:]}]
    optimiser = torch.optim.SGD(groups, lr=0.2, momentum=momentum)
    velocity = [torch.zeros_like(w) for w in weights]
    average = [torch.full_like(w, 0.5) for w in weights]
    expected = [a.double() for a in average]
    statistic, its_average = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0])
    updates = torch.zeros(())
    for step in range(3):
        updates += 1
        gradient = [
            torch.randn(w.shape, generator=torch.Generator().manual_seed(50 * step + i)) for i, w in enumerate(weights)
        ]
        moved = [
            cuda_descent.Moved(w, g, v if momentum else None, a if averaging else None, 0.1 if i < 4 else 0.0)
            for i, (w, g, v, a) in enumerate(zip(weights, gradient, velocity, average, strict=True))
        ]
        if averaging:
            moved.append(cuda_descent.Moved(statistic, average=its_average))
        cuda_descent.descend(moved, updates, 0.2, momentum, 1.0, averaging)
        for twin, g in zip(twins, gradient, strict=True):
            twin.grad = g.double()
        optimiser.step()
        share = 1 - min(averaging, (1 + step + 1) / (10 + step + 1))
        expected = [a + share * (w.detach() - a) for a, w in zip(expected, twins, strict=True)]
    for w, twin in zip(weights, twins, strict=True):
        torch.testing.assert_close(w.double(), twin.detach(), atol=1e-6, rtol=1e-5)
    assert statistic.tolist() == [3.0, 5.0]
    if averaging:
        for a, exact in zip(average, expected, strict=True):
            torch.testing.assert_close(a.double(), exact, atol=1e-6, rtol=1e-5)
        assert (its_average > 1).all()
    else:
        assert all((a == 0.5).all() for a in average)


def test_a_shortened_gradient_joins_the_velocity():
    w, g, v = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -4.0]), torch.tensor([1.0, 1.0])
    cuda_descent.descend([cuda_descent.Moved(w, g, v, decay=0.5)], torch.zeros(()), 0.1, 0.5, 0.1, 0.0)
    torch.testing.assert_close(v, torch.tensor([0.5 + 0.1 * 4.5, 0.5 - 0.1 * 3.0]))
    torch.testing.assert_close(w, torch.tensor([1.0 - 0.095, 2.0 - 0.02]))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0, "weight_decay": 0.01}, {"averaging": 0.0}], ids=str)
def test_a_learner_learns_the_same_by_the_kernel(options, monkeypatch):
    learners = []
    encoder = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    for at_once in (False, True):
        monkeypatch.setattr(cuda_descent, "suits", lambda weights, at_once=at_once: at_once)
        options = {"encoder": encoder, "memory_size": 100, "memory_batch": 10, "review": True, **options}
        learner = make_learner("scr+", image_shape=(1, 6, 6), device="cpu", precision="fp32", **options)
        random = torch.Generator().manual_seed(0)
        for _ in range(11):  # a memory of 100 is what a review needs
            x = torch.randint(0, 256, (10, 1, 6, 6), dtype=torch.uint8, generator=random)
            learner.learn(x, torch.arange(10))
        learner.end_task()
        learners.append(learner)
    one, other = (learner.state_dict() for learner in learners)
    assert one["updates"] == other["updates"] == (0 if learners[0].average is None else 11)
    for part in ("network", "average", "velocity"):
        for name, value in one.get(part, {}).items():
            torch.testing.assert_close(other[part][name], value, atol=1e-4, rtol=1e-3)


def test_what_the_kernel_cannot_take_is_known():
    whole = torch.zeros(8, 6)
    assert cuda_descent._in_one_piece(whole)
    assert cuda_descent._in_one_piece(whole.t())
    assert not cuda_descent._in_one_piece(whole[:, :3])
    assert not cuda_descent._in_one_piece(whole.flatten()[1:])  # not at a multiple of 16 bytes
    assert not cuda_descent._same_order(whole, whole.t().contiguous().t())
    assert cuda_descent._same_order(
        torch.zeros(5, 3, 1, 1), torch.zeros(5, 3, 1, 1).contiguous(memory_format=torch.channels_last)
    )


# ---------------------------------------------------------------- turn


def layers_of_many_shapes(layout=torch.contiguous_format):
    torch.manual_seed(0)
    shapes = [(3, 8, 3), (8, 40, 3), (40, 40, 1), (5, 33, 2)]
    convolutions = [torch.nn.Conv2d(*shape).to(memory_format=layout) for shape in shapes]
    return torch.nn.ModuleList([*convolutions, torch.nn.Linear(9, 70), torch.nn.Linear(30, 1)])


def drawn_like(weight, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty_like(weight.detach()).copy_(torch.randn(weight.shape, generator=generator))


def turned(monkeypatch, by_kernels, layers, *given):
    monkeypatch.setattr(cuda_turn, "suits", lambda weights: by_kernels)
    Matrices(layers).turn(*given)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("most", [2, 64])
def test_kernels_turn_as_torch_does(layout, momentum, most, monkeypatch):
    monkeypatch.setattr(cuda_turn, "MOST", most)  # several launches
    sides = []
    for by_kernels in (False, True):
        layers = layers_of_many_shapes(layout)
        weights = Matrices(layers).weights
        gradients, velocities = ([drawn_like(w, seed + i) for i, w in enumerate(weights)] for seed in (0, 100))
        if momentum is None:
            turned(monkeypatch, by_kernels, layers, [g.contiguous() for g in gradients], 0.05)
        else:
            turned(monkeypatch, by_kernels, layers, gradients, 0.05, velocities, momentum, 0.5)
            sides.append(velocities)
        sides.append([w.detach() for w in weights])
    half = len(sides) // 2
    untouched = Matrices(layers_of_many_shapes(layout)).weights
    for plain, by_kernels in zip(sides[:half], sides[half:], strict=True):
        for a, b in zip(plain, by_kernels, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    for before, after in zip(untouched, sides[-1], strict=True):
        assert float((before.detach() - after).norm()) > 0.03 * float(before.detach().norm())


def test_kernels_turn_matrices_of_many_rows(monkeypatch):
    """More than are held at once."""
    moved = []
    for by_kernels in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(30, 170)
        turned(monkeypatch, by_kernels, layer, [torch.randn(170, 30)], 0.05)
        moved.append(layer.weight.detach())
    torch.testing.assert_close(moved[1], moved[0], atol=2e-5, rtol=1e-4)


def test_without_a_gradient_kernels_only_shorten(monkeypatch):
    layers = layers_of_many_shapes()
    found = Matrices(layers)
    before = [w.detach().clone() for w in found.weights]
    turned(monkeypatch, True, layers, [torch.zeros_like(w) for w in found.weights], 0.6)
    for weight, old in zip(found.weights, before, strict=True):
        torch.testing.assert_close(weight.detach(), 0.8 * old)


def test_a_learner_turns_the_same_by_kernels(monkeypatch):
    learners = []
    encoder = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    for by_kernels in (False, True):
        monkeypatch.setattr(cuda_turn, "suits", lambda weights, told=by_kernels: told)
        monkeypatch.setattr(cuda_descent, "suits", lambda weights, told=by_kernels: told)
        options = {"encoder": encoder, "memory_size": 100, "memory_batch": 10, "review": True, "orthogonal": 0.02}
        learner = make_learner("scr+", image_shape=(1, 6, 6), device="cpu", precision="fp32", **options)
        random = torch.Generator().manual_seed(0)
        for _ in range(11):
            x = torch.randint(0, 256, (10, 1, 6, 6), dtype=torch.uint8, generator=random)
            learner.learn(x, torch.arange(10))
        learner.end_task()
        learners.append(learner)
    one, other = (learner.state_dict() for learner in learners)
    assert one["updates"] == other["updates"] == 11
    for part in ("network", "average", "velocity"):
        for name, value in one[part].items():
            torch.testing.assert_close(other[part][name], value, atol=1e-3, rtol=1e-2)
