"""The CUDA kernels of BatchNorm and convolution against PyTorch in float64: values, gradients, statistics, bits."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the kernels need Triton")

from scrlearn.learners import make_learner
from scrlearn.learners.replay import Replay
from scrlearn.models import Network, ReducedResNet18, cuda_conv, cuda_strided, resnet
from scrlearn.models.fused import MANY_CHANNELS, MORE_ROWS, WHOLE_ROWS, batch_norm, by_running_statistics
from scrlearn.models.fused_conv import convolve, downsample, widened
from scrlearn.models.resnet import MOST_CHANNELS, BasicBlock, averaged

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
NEAR_ZERO = 1e-2  # ReLU's gradient jumps at 0, where the kernel and the reference may stand on different sides

# batch, channels, height, width: one kernel for all rows or partial sums; odd sizes; the border between the two ways
IMAGES = [
    (2, 160, 4, 4),
    (3, 20, 5, 7),
    (1, 1, 2, 1),
    (7, 33, 9, 11),
    (1, 8, WHOLE_ROWS, 1),
    (1, 8, WHOLE_ROWS + 1, 1),
    (20, 24, 32, 32),
    (11, 5, 16, 17),
    (6, 130, 21, 21),
    (1, MANY_CHANNELS, MORE_ROWS, 1),
    (1, MANY_CHANNELS, MORE_ROWS + 1, 1),
]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.to(DEVICE, memory_format=torch.channels_last) if len(shape) == 4 else values.to(DEVICE)


def close(found, exact, error):
    """Every value is as near as its own rounding allows, and as the rounding of what it was summed from."""
    exact = exact.to(found.device)
    scale = exact.abs().max().clamp(min=0.1).item()
    torch.testing.assert_close(found.double(), exact, rtol=error, atol=error * scale)


# ---------------------------------------------------------------- BatchNorm


class Norm:
    """One layer with all it reads and writes; segments of the batch have other means."""

    def __init__(self, shape, dtype, residual, relu, segments=1):
        channels = shape[1]
        self.relu, self.segments = relu, segments
        away = torch.arange(segments, device=DEVICE).repeat_interleave(shape[0] // segments)
        self.x = random(*shape, dtype=dtype) + 0.5 + away[:, None, None, None].to(dtype)
        self.residual = random(*shape, seed=1, dtype=dtype) if residual else None
        self.weight, self.bias = random(channels, seed=2) + 1, random(channels, seed=3)
        self.mean, self.var = random(channels, seed=4), random(channels, seed=5).abs() + 0.5
        self.first = (self.mean.clone(), self.var.clone())
        self.counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.dy, self.also = (random(*shape, seed=seed, dtype=dtype) for seed in (6, 7))
        for dy in (self.dy, self.also):
            dy[self.before_relu().abs() < NEAR_ZERO] = 0

    @property
    def leaves(self):
        return [t for t in (self.x, self.weight, self.bias, self.residual) if t is not None]

    def before_relu(self):
        out = self.exact(self.x.double(), None, None, self.weight.double(), self.bias.double())
        return out if self.residual is None else out + self.residual.double()

    def exact(self, x, *told):
        """One call of PyTorch for each segment."""
        return torch.cat([F.batch_norm(part, *told, True, 0.1, 1e-5) for part in x.chunk(self.segments)])

    def run(self, sums=None, read=None):
        """Output, gradients by input, weight, bias and residual, and the new running statistics.

        `read`: the result is given twice, and these of the two are read.
        """
        self.mean.copy_(self.first[0]), self.var.copy_(self.first[1])
        x, weight, bias, *residual = (t.detach().requires_grad_() for t in self.leaves)
        residual = residual[0] if residual else None
        told = (weight, bias, self.mean, self.var, self.counter, self.relu)
        y = batch_norm(x, residual, *told, sums=sums, segments=self.segments, twice=read is not None)
        leaves = [x, weight, bias] + ([] if residual is None else [residual])
        results, gradients = (y, (self.dy, self.also)) if read else ([y], [self.dy])
        assert torch.equal(results[0], results[-1])
        wanted = read or [0]
        gradients = torch.autograd.grad([results[i] for i in wanted], leaves, [gradients[i] for i in wanted])
        return [results[0].detach(), *gradients, self.mean.clone(), self.var.clone()]

    def expected(self, read=(0,)):
        """The same by PyTorch in float64."""
        leaves = [t.detach().double().requires_grad_() for t in self.leaves]
        x, weight, bias, *residual = leaves
        mean, var = (t.double() for t in self.first)
        y = self.exact(x, mean, var, weight, bias)
        y = y + residual[0] if residual else y
        y = y.relu() if self.relu else y
        dy = sum((self.dy, self.also)[i].double() for i in read)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy), mean, var]


NAMES = ["output", "input", "weight", "bias", "residual"]


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_forward_gradients_and_running_statistics(shape, dtype, residual, relu):
    layer = Norm(shape, dtype, residual, relu)
    found = layer.run()
    assert found[0].dtype == found[1].dtype == dtype
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    check(layer, found, layer.expected())


def check(layer, found, expected):
    rounding = 1e-4 if found[0].dtype == torch.float32 else 2**-7
    for name, a, b in zip(NAMES[: len(found) - 2], found[:-2], expected[:-2], strict=True):
        close(a, b, 1e-4 if name in ("weight", "bias") else rounding)
    for a, b in zip(found[-2:], expected[-2:], strict=True):
        close(a, b, 1e-5)
    assert layer.counter.item() == 0  # ready for the next time


# for two segments and for three: one kernel for all rows, on the border, and partial sums, of one block or many
SEGMENTED = [
    (6, 160, 4, 4),
    (6, 33, 5, 7),
    (6, 8, WHOLE_ROWS // 2, 1),
    (6, 24, 40, 40),
    (24, 24, 32, 32),
    (6, 130, 41, 41),
]


@pytest.mark.parametrize("shape", SEGMENTED)
@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("residual", "relu"), [(False, False), (False, True), (True, True)])
def test_batch_norm_of_segments_is_that_of_batches_one_after_the_other(shape, segments, dtype, residual, relu):
    layer = Norm(shape, dtype, residual, relu, segments)
    check(layer, layer.run(), layer.expected())


@pytest.mark.parametrize("shape", [(6, 160, 4, 4), (24, 24, 32, 32), (6, 33, 30, 31)])
@pytest.mark.parametrize("read", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_adds_up_the_gradients_of_two_readers(shape, read, segments, dtype, residual, relu):
    layer = Norm(shape, dtype, residual, relu, segments)
    check(layer, layer.run(read=read), layer.expected(read))


@pytest.mark.parametrize("shape", [(20, 24, 32, 32), (20, 160, 4, 4)])
def test_segments_move_the_running_statistics_as_batches_do(shape):
    layer = Norm(shape, torch.bfloat16, residual=True, relu=True, segments=2)
    x, residual, *rest = layer.x, layer.residual, layer.weight, layer.bias
    running, other = ([layer.mean.clone(), layer.var.clone()] for _ in range(2))
    y = batch_norm(x, residual, *rest, *running, layer.counter, True, segments=2)
    for part, added, own in zip(x.chunk(2), residual.chunk(2), y.chunk(2), strict=True):
        alone = batch_norm(part, added, *rest, *other, layer.counter, True)
        close(own, alone.double(), 2**-7)
    for a, b in zip(running, other, strict=True):
        close(a, b.double(), 1e-6)


@pytest.mark.parametrize("shape", IMAGES)
def test_batch_norm_gives_the_same_bits_every_time(shape):
    layer = Norm(shape, torch.bfloat16, residual=True, relu=True)
    first = layer.run()
    for _ in range(3):
        for a, b in zip(first, layer.run(), strict=True):
            assert torch.equal(a, b)


def test_batch_norm_of_images_in_another_memory_layout():
    layer = Norm((4, 12, 6, 5), torch.float32, residual=True, relu=True)
    first = layer.run()
    layer.x, layer.residual, layer.dy = (t.contiguous() for t in (layer.x, layer.residual, layer.dy))
    assert not layer.x.is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(first, layer.run(), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- convolution

# channels in, channels out, kernel, stride, (batch, height, width)
CONVOLUTIONS = [
    (3, 24, 3, 1, (20, 32, 32)),
    (8, 24, 3, 1, (20, 32, 32)),
    (24, 24, 3, 1, (20, 32, 32)),
    (24, 40, 3, 2, (20, 32, 32)),
    (24, 40, 1, 2, (20, 32, 32)),
    (40, 40, 3, 1, (8, 16, 16)),
    (1, 20, 3, 1, (3, 8, 8)),
    (MOST_CHANNELS, MOST_CHANNELS, 3, 1, (2, 4, 4)),
    (5, 7, 3, 1, (3, 9, 11)),
    (5, 7, 3, 2, (3, 9, 11)),
    (5, 7, 1, 2, (3, 9, 11)),
    (5, 7, 1, 1, (3, 7, 5)),
    (20, 20, 3, 1, (1, 1, 1)),
    (20, 40, 3, 2, (1, 2, 3)),
    (17, 33, 3, 2, (5, 21, 13)),
]


def convolution(channels_in, channels, size, stride, images, dtype=torch.bfloat16):
    """Output and gradients by input and weight, and the same by PyTorch in float64 from the same rounded numbers."""
    count, height, width = images
    x = random(count, channels_in, height, width, dtype=dtype).requires_grad_()
    weight = random(channels, channels_in, size, size, seed=1).requires_grad_()
    y, _ = convolve(x, weight, stride)
    dy = random(*y.shape, seed=2, dtype=torch.bfloat16)
    found = [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight)]
    out = F.conv2d(*exact, stride=stride, padding=size // 2)
    return found, [out.detach(), *torch.autograd.grad(out, exact, dy.double())]


@pytest.mark.parametrize("channels", [1, 3, 8, 20])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bytes_given", [True, False])
def test_images_are_widened_with_zeros(channels, layout, bytes_given):
    pixels = torch.randint(0, 256, (5, channels, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = pixels.to(DEVICE).contiguous(memory_format=layout)
    floats = pixels.float() / 255.0
    wide = -(-channels // 8) * 8
    for given in (pixels, pixels.flip(-1)) if bytes_given else (floats, floats.flip(-1), floats.transpose(2, 3)):
        found = widened(given, wide)
        expected = given.float() / 255.0 if given.dtype == torch.uint8 else given
        assert found.dtype == torch.bfloat16
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found, F.pad(expected.bfloat16(), (0, 0, 0, 0, 0, wide - channels)))


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_convolution_forward_and_gradients(layer):
    found, expected = convolution(*layer)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for a, b, error in zip(found, expected, (2**-7, 2**-7, 1e-4), strict=True):
        assert a.shape == b.shape
        close(a, b, error)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 20, 5, 7), (20, 24, 32, 32), (1, 160, 4, 4)])
def test_batch_norm_by_running_statistics(shape, residual, relu):
    layer = Norm(shape, torch.bfloat16, residual, relu)
    found = by_running_statistics(layer.x, layer.residual, layer.weight, layer.bias, layer.mean, layer.var, relu)
    statistics = (t.double() for t in (layer.mean, layer.var, layer.weight, layer.bias))
    expected = F.batch_norm(layer.x.double(), *statistics)
    expected = expected if layer.residual is None else expected + layer.residual.double()
    close(found, expected.relu() if relu else expected, 2**-7)
    assert torch.equal(layer.mean, layer.first[0])


@pytest.mark.parametrize(("inner", "outer"), [(24, 24), (40, 40), (24, 40), (8, 24), (8, 48)])
def test_the_cuda_kernels_are_in_use(inner, outer):
    x, weight = random(4, inner, 32, 32, dtype=torch.bfloat16), random(outer, inner, 3, 3)
    assert cuda_conv.suits(x, weight, stride=1)
    assert not cuda_conv.suits(x, weight, stride=2)
    assert not cuda_conv.suits(x.float(), weight, stride=1)


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_convolution_answers_what_it_trains(layer):
    channels_in, channels, size, stride, (count, height, width) = layer
    x = random(count, channels_in, height, width, dtype=torch.bfloat16)
    weight = random(channels, channels_in, size, size, seed=1)
    y, sums = convolve(x, weight, stride, training=False)
    assert sums is None
    assert torch.equal(y, convolve(x, weight, stride)[0])


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_convolution_hands_over_the_sums_of_its_result(layer):
    channels_in, channels, size, stride, (count, height, width) = layer
    x = random(count, channels_in, height, width, dtype=torch.bfloat16)
    y, sums = convolve(x, random(channels, channels_in, size, size, seed=1), stride)
    assert sums.shape[1:] == (2, channels)
    y = y.double()
    close(sums.double().sum(0), torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))]), 1e-5)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_sums_of_segments(layer, segments):
    """Where the sums are there, those of a segment follow each other; and they are there for the shapes of a step."""
    channels_in, channels, size, stride, (count, height, width) = layer
    x = random(2 * count, channels_in, height, width, dtype=torch.bfloat16)
    y, sums = convolve(x, random(channels, channels_in, size, size, seed=1), stride, segments=segments)
    assert sums is not None or segments == 2
    if count == 20:
        assert sums is not None
    if sums is not None:
        for part, own in zip(y.double().chunk(segments), sums.double().chunk(segments), strict=True):
            close(own.sum(0), torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]), 1e-5)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20, 24, 32, 32), (8, 33, 30, 31), (4, 20, 5, 7)])
def test_batch_norm_from_sums(shape, relu, segments, dtype):
    layer = Norm(shape, dtype, residual=True, relu=relu, segments=segments)
    own = layer.run()
    x = layer.x.float()
    parts = x.split(2)
    sums = torch.stack([torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]) for part in parts])
    for a, b in zip(layer.run(sums), own, strict=True):
        close(a, b.double(), 2**-7)
    assert layer.counter.item() == 0


def test_convolution_of_float32_images():
    found, expected = convolution(3, 24, 3, 1, (4, 32, 32), torch.float32)
    close(found[0], expected[0], 2**-7)
    close(found[2], expected[2], 2**-7)  # the kernel rounds the images itself


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_convolution_gives_the_same_bits_every_time(layer):
    first = convolution(*layer)[0]
    for a, b in zip(first, convolution(*layer)[0], strict=True):
        assert torch.equal(a, b)


def test_convolution_takes_weights_in_any_memory_layout():
    x = random(3, 6, 8, 8, dtype=torch.bfloat16)
    weight = random(9, 6, 3, 3, seed=1)
    plain = weight.contiguous()
    assert plain.stride() != weight.stride()
    results = []
    for w in (weight.detach().requires_grad_(), plain.detach().requires_grad_()):
        y, _ = convolve(x, w)
        results.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), w)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- two convolutions of stride 2

# channels in, channels out, (batch, height, width)
DOWNSAMPLINGS = [
    (24, 40, (20, 84, 84)),
    (40, 80, (20, 42, 42)),
    (24, 40, (220, 32, 32)),
    (40, 80, (220, 16, 16)),
    (8, 16, (3, 9, 11)),
    (16, 8, (1, 1, 1)),
    (8, 80, (5, 21, 13)),
    (40, 8, (2, 2, 3)),
]


def downsampling(channels_in, channels, images):
    """Images, both weights, and gradients of both results."""
    count, height, width = images
    x = random(count, channels_in, height, width, dtype=torch.bfloat16)
    weights = [random(channels, channels_in, side, side, seed=side) for side in (3, 1)]
    size = (-(-height // 2), -(-width // 2))
    return x, weights, [random(count, channels, *size, seed=seed, dtype=torch.bfloat16) for seed in (4, 5)]


def downsampled(x, weights, gradients, read=(0, 1)):
    """Both results, and the gradients of images and weights when some of the results are read."""
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    results = [y for y, _ in downsample(*leaves)]
    found = torch.autograd.grad([results[i] for i in read], leaves, [gradients[i] for i in read])
    return [*(y.detach() for y in results), *found]


@pytest.mark.parametrize("layer", DOWNSAMPLINGS)
def test_two_convolutions_of_stride_2_and_their_gradients(layer):
    x, weights, gradients = downsampling(*layer)
    assert cuda_strided.suits(x, *weights, (2, 2))
    found = downsampled(x, weights, gradients)
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 2
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (x, *weights)]
    results = [F.conv2d(exact[0], w, stride=2, padding=len(w[0, 0]) // 2) for w in exact[1:]]
    expected = [*results, *torch.autograd.grad(results, exact, [dy.double() for dy in gradients])]
    for a, b, error in zip(found, expected, [2**-7] * 3 + [1e-4] * 2, strict=True):
        assert a.shape == b.shape
        close(a, b.detach(), error)
    for a, b in zip(found, downsampled(x, weights, gradients), strict=True):
        assert torch.equal(a, b)  # the same bits every time


@pytest.mark.parametrize("only", [0, 1])
def test_one_of_two_convolutions_of_stride_2_may_be_left_unread(only):
    x, weights, gradients = downsampling(24, 40, (4, 16, 16))
    found = downsampled(x, weights, gradients, read=(only,))[2:]
    gradients[1 - only].zero_()
    for a, b in zip(found, downsampled(x, weights, gradients)[2:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("layer", DOWNSAMPLINGS)
def test_two_convolutions_of_stride_2_hand_over_sums_and_answer_what_they_train(layer, segments):
    channels_in, channels, (count, *size) = layer
    x, weights, _ = downsampling(channels_in, channels, (2 * count, *size))
    trained = downsample(x, *weights, segments=segments)
    answers = downsample(x, *weights, training=False)
    for (y, sums), (answer, no_sums) in zip(trained, answers, strict=True):
        assert no_sums is None
        assert torch.equal(y, answer)
        for part, own in zip(y.double().chunk(segments), sums.double().chunk(segments), strict=True):
            close(own.sum(0), torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]), 1e-5)


def test_what_two_convolutions_of_stride_2_at_once_cannot_take():
    x, (weight, small), _ = downsampling(24, 40, (4, 16, 16))
    assert cuda_strided.suits(x, weight, small, (2, 2, 2, 2))
    assert not cuda_strided.suits(x, weight, small, (1, 1))
    assert not cuda_strided.suits(x, weight, small, (2, 2, 1, 1))
    assert not cuda_strided.suits(x, small, weight, (2, 2))
    assert not cuda_strided.suits(x.float(), weight, small, (2, 2))
    assert not cuda_strided.suits(*(random(160, 80, side, side) for side in (16, 3, 1)), (2, 2))


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("channels", "size"), [((24, 40), 32), ((40, 80), 21)])
def test_a_block_is_the_same_with_its_first_convolutions_at_once(channels, size, training, segments, monkeypatch):
    x = random(8, channels[0], size, size, dtype=torch.bfloat16)
    found = []
    for at_once in (True, False):
        torch.manual_seed(0)
        block = BasicBlock(*channels, 2).to(DEVICE).train(training)
        if not at_once:
            monkeypatch.setattr(resnet, "_fused_downsampling", lambda: None)
        leaf = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(training):
            y, _ = block(leaf, leaf, segments)
            assert (block._convolved_at_once(leaf, segments) is not None) == at_once
        found.append([y.detach(), *(torch.autograd.grad(y.float().sin().sum(), leaf) if training else [])])
        found[-1] += [b.clone() for name, b in block.named_buffers() if "running" in name]
    for a, b in zip(*found, strict=True):
        assert (a.double() - b.double()).norm() <= 0.05 * b.double().norm()


# ---------------------------------------------------------------- average pooling


@pytest.mark.parametrize("size", [(11, 11), (4, 4), (8, 10)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_and_their_gradient_are_torchs_own(size, dtype):
    x = random(20, 160, *size, dtype=dtype).requires_grad_()
    y, expected = averaged(x, (4, 4), training=True), F.avg_pool2d(x, (4, 4))
    assert torch.equal(y, expected)
    dy = random(len(y), y[0].numel(), seed=1, dtype=dtype).view(y.shape)
    ours, theirs = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    assert torch.equal(ours, theirs)
    assert ours.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- graphs


def captured(function):
    """What a function gives when it is recorded as a CUDA graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize("shape", [(3, 20, 5, 7), (20, 24, 32, 32)])
def test_batch_norm_in_a_graph_gives_the_same_bits(shape):
    layer = Norm(shape, torch.bfloat16, residual=True, relu=True)
    eager = layer.run()
    for a, b in zip(eager, captured(layer.run), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_in_a_graph_gives_the_same_bits(stride):
    x = random(6, 24, 16, 16, dtype=torch.bfloat16)
    weight = random(40, 24, 3, 3, seed=1)

    def run():
        a, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y, _ = convolve(a, w, stride)
        return [y.detach(), *torch.autograd.grad(y, (a, w), torch.ones_like(y))]

    eager = run()
    for a, b in zip(eager, captured(run), strict=True):
        assert torch.equal(a, b)


def test_two_convolutions_of_stride_2_in_a_graph_give_the_same_bits():
    given = downsampling(24, 40, (6, 32, 32))
    eager = downsampled(*given)
    for a, b in zip(eager, captured(lambda: downsampled(*given)), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- the whole encoder


def trained_once(encoder, x, device, bf16):
    """Features of a batch and the gradient of a loss on them, in training mode."""
    network = Network(encoder.to(device), bf16=bf16).train()
    features = network.features(x.to(device))
    direction = torch.linspace(-1, 1, features.shape[1], device=features.device, dtype=features.dtype)
    loss = (F.normalize(features, dim=1) * direction).sum(1).square().mean()
    gradients = torch.autograd.grad(loss, list(encoder.parameters()))
    return features.detach().double().cpu(), [g.double().cpu() for g in gradients]


@pytest.mark.parametrize(("bf16", "error"), [(False, 1e-3), (True, 0.1)])
@pytest.mark.parametrize("shape", [(110, 3, 32, 32), (7, 1, 28, 28), (1, 3, 84, 84)])
def test_the_encoder_with_all_kernels_against_float64(shape, bf16, error):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    encoder = ReducedResNet18(shape[1])
    exact = ReducedResNet18(shape[1]).double()
    exact.load_state_dict(encoder.state_dict())
    encoder.pad_channels(8)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        features, gradients = trained_once(encoder, x, DEVICE, bf16)
    exact.train()
    expected = exact(x.double())
    direction = torch.linspace(-1, 1, expected.shape[1], dtype=torch.float64)
    loss = (F.normalize(expected, dim=1) * direction).sum(1).square().mean()
    expected_gradients = torch.autograd.grad(loss, list(exact.parameters()))
    assert (features - expected).norm() < error * expected.norm()
    inside = [g[tuple(map(slice, e.shape))] for g, e in zip(gradients, expected_gradients, strict=True)]
    ours, theirs = (torch.cat([g.flatten() for g in side]) for side in (inside, expected_gradients))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 1 - 2 * error
    for (name, own), (_, other) in zip(encoder.named_buffers(), exact.named_buffers(), strict=True):
        if "running" in name:
            own = own[: len(other)].double().cpu()
            assert (own - other).norm() < error * other.norm(), name
    for gradient, own in zip(gradients, expected_gradients, strict=True):
        gradient[tuple(map(slice, own.shape))] = 0
        assert not gradient.any()  # added channels never move


@pytest.mark.parametrize(("bf16", "error"), [(False, 1e-3), (True, 0.03)])
@pytest.mark.parametrize("shape", [(50, 3, 32, 32), (7, 1, 28, 28)])
def test_the_encoder_answers_as_in_float64(shape, bf16, error):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    encoder = ReducedResNet18(shape[1])
    encoder.train()(x)  # moves the running statistics
    exact = ReducedResNet18(shape[1]).double().eval()
    exact.load_state_dict(encoder.state_dict())
    encoder.pad_channels(8)
    network = Network(encoder.to(DEVICE), bf16=bf16).eval()
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found, expected = network.features(x.to(DEVICE)).double().cpu(), exact(x.double())
    assert (found - expected).norm() < error * expected.norm()


@pytest.mark.parametrize(
    ("images", "size", "bf16"),
    [(10, 32, False), (10, 32, True), (3, 84, False), (3, 84, True), (2, 8, False), (1, 8, False)],
)
def test_the_encoder_takes_segments_as_batches_one_after_the_other(images, size, bf16):
    x = torch.rand(2 * images, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for at_once in (True, False):
        torch.manual_seed(0)
        encoder = ReducedResNet18()
        encoder.pad_channels(8)
        network = Network(encoder.to(DEVICE), bf16=bf16).train()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            parts = [network.features(x, segments=2)] if at_once else map(network.features, x.chunk(2))
            features = torch.cat(list(parts))
            loss = F.normalize(features, dim=1)[:, ::3].sum(1).square().sum()
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(encoder.parameters()))])
        found.append([features.detach(), gradient, *(b for n, b in encoder.named_buffers() if "running" in n)])
    for name, a, b in zip(["features", "gradient", *["buffer"] * 99], *found, strict=False):
        assert (a - b).norm() <= (0.1 if bf16 else 1e-3) * b.norm(), name


def taught(monkeypatch, at_once):
    """A learner of ER after a batch without memory and one with, and its weights in between."""
    if not at_once:
        monkeypatch.setattr(Replay, "_shares_pass", lambda self, x: False)
    learner = make_learner("er", image_shape=(3, 32, 32), memory_size=40, device=DEVICE, seed=1)
    numbers = torch.Generator().manual_seed(2)
    for _ in range(2):
        before = torch.cat([w.detach().flatten() for w in learner.weights])
        x = torch.randint(0, 256, (10, 3, 32, 32), generator=numbers, dtype=torch.uint8)
        loss = learner.learn(x, torch.randint(0, 3, (10,), generator=numbers))
    return learner, loss.item(), torch.cat([w.detach().flatten() for w in learner.weights]) - before


def test_a_step_in_one_pass_is_that_in_two(monkeypatch):
    merged, loss, step = taught(monkeypatch, at_once=True)
    assert merged._shares_pass(torch.empty(10, 3, 32, 32, device=DEVICE))
    plain, expected_loss, expected = taught(monkeypatch, at_once=False)
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    assert (step - expected).norm() < 0.1 * expected.norm()
    assert torch.equal(merged.generator.get_state(), plain.generator.get_state())
    assert torch.equal(merged.memory.images[:20], plain.memory.images[:20])
    for (name, a), (_, b) in zip(merged.network.named_buffers(), plain.network.named_buffers(), strict=True):
        if "running" in name:
            assert (a - b).norm() < 0.01 * b.norm(), name
