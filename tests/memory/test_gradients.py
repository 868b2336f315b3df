"""Gradients of groups of images at once, against a backward pass for each group."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scrlearn.memory import gradients as module
from scrlearn.memory.gradients import Run, gradients_by_vmap, gram, group_gradients
from scrlearn.models import ReducedResNet18
from scrlearn.randomness import seeded

RUNS = [Run(3, 1), Run(2, 4), Run(1, 2)]
ROWS = sum(groups * size for groups, size in RUNS)


@pytest.fixture(params=["a group at a time", "products"])
def way(request, monkeypatch):
    """Both ways through a convolution, on any device."""
    if request.param == "products":
        own = module._Convolution
        monkeypatch.setattr(own, "by_weight", lambda self, g, runs: self._at_once(self.x.to(g.dtype), g, runs))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 5, (3, 1), stride=(2, 1), padding=(0, 2), bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(5, 4, 3, dilation=2, padding="same"),
        nn.BatchNorm2d(4, eps=0.1),
        nn.Conv2d(4, 7, 2, stride=3, padding=1, padding_mode="circular"),
        nn.Conv2d(7, 4, 1, padding="valid"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


class Tokens(nn.Module):
    """Linear layers along an axis, one of them twice, and one that is called as a function."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(24, 4, bias=False)
        self.own = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        x = self.first(torch.tanh(self.first(x)))
        x = x + F.linear(input=x, weight=self.own)
        return self.last(x.mean(2).flatten(1))


class Scaled(nn.Module):
    """BatchNorm with a weight and no bias, a bias that stays, and a weight that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.norm.bias = None
        self.layer = nn.Linear(3, 4)
        self.layer.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        self.unused(x.new_zeros(len(x), 2))
        return self.layer(self.norm(x).square().mean((2, 3)))


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = ReducedResNet18(3, width=4), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def prepared(build):
    with seeded(1, "test"):
        network = build()
        for part in network.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)
                part.weight.data.normal_(1, 0.3)
    return network.eval(), [p for p in network.parameters() if p.requires_grad]


def batch(rows=ROWS):
    random = torch.Generator().manual_seed(2)
    return torch.rand(rows, 3, 8, 8, generator=random), torch.randint(0, 4, (rows,), generator=random)


def shares(runs=RUNS, device="cpu"):
    return torch.cat([torch.full((groups * size,), 1 / size, device=device) for groups, size in runs])


def found_at_once(network, weights, x, y):
    share = shares(device=x.device)
    return group_gradients(
        lambda: (F.cross_entropy(network(x).float(), y, reduction="none") * share).sum(), weights, RUNS
    )


def found_one_by_one(network, weights, x, y):
    start, runs = 0, []
    for groups, size in RUNS:
        rows = []
        for _ in range(groups):
            loss = F.cross_entropy(network(x[start : start + size]), y[start : start + size])
            rows.append(torch.autograd.grad(loss, weights, materialize_grads=True))
            start += size
        runs.append([torch.stack(parts) for parts in zip(*rows, strict=True)])
    return runs


NETWORKS = [convolutions, Tokens, Scaled, Resnet]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("build", NETWORKS)
@pytest.mark.usefixtures("way")
def test_equal_a_backward_pass_for_each_group(build, channels_last):
    network, weights = prepared(build)
    x, y = batch()
    if channels_last:
        x, network = x.contiguous(memory_format=torch.channels_last), network.to(memory_format=torch.channels_last)
    found = found_at_once(network, weights, x, y)
    for run, expected in zip(found, found_one_by_one(network, weights, x, y), strict=True):
        for gradient, wanted in zip(run, expected, strict=True):
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item() + 1e-9)
    assert all(weight.grad is None for weight in weights)


@pytest.mark.usefixtures("way")
def test_bfloat16_gradients_point_the_same_way():
    network, weights = prepared(Resnet)
    x, y = batch()
    exact = found_at_once(network, weights, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = found_at_once(network, weights, x, y)
    for run, other in zip(exact, rounded, strict=True):
        assert all(g.dtype == torch.float32 for g in other)
        flat, near = (torch.cat([g.flatten(1) for g in gradients], dim=1) for gradients in (run, other))
        assert F.cosine_similarity(flat, near).min() > 0.99


@pytest.mark.parametrize("build", [convolutions, Tokens, Resnet])
def test_vmap_gives_the_same(build):
    class Loss(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x, y):
            return F.cross_entropy(self.network(x), y)

    network, weights = prepared(build)
    for layer in network.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    x, y = batch()
    rows = gradients_by_vmap(Loss(network), weights, x[3:11].unflatten(0, (2, 4)), y[3:11].unflatten(0, (2, 4)))
    for gradient, wanted in zip(rows, found_at_once(network, weights, x, y)[1], strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item() + 1e-9)


@pytest.mark.usefixtures("way")
def test_gram_holds_all_inner_products():
    network, weights = prepared(convolutions)
    found = found_at_once(network, weights, *batch())
    rows = torch.cat([torch.cat([g.flatten(1) for g in run], dim=1) for run in found]).double()
    torch.testing.assert_close(gram(found).double(), rows @ rows.T, rtol=1e-4, atol=1e-6 * rows.square().sum().item())


def test_gram_takes_weights_of_any_shape():
    shapes = [(), (3,), (2, 3), (1, 4, 5), (2, 3, 3, 2), (2, 2, 2, 2, 2)]
    random = torch.Generator().manual_seed(0)
    runs = [[torch.randn(groups, *shape, generator=random) for shape in shapes] for groups in (3, 2)]
    for some in (slice(0, 1), slice(1, 4), slice(4, 6), slice(None)):
        chosen = [run[some] for run in runs]
        rows = torch.cat([torch.cat([g.reshape(len(g), -1) for g in run], dim=1) for run in chosen])
        torch.testing.assert_close(gram(chosen), rows @ rows.T, rtol=1e-4, atol=1e-5)


class Standardised(nn.Conv2d):
    """A convolution by a weight that is made from its own."""

    def forward(self, x):
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


class Own(torch.autograd.Function):
    """A product that no one can look into."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x


class Hidden(nn.Linear):
    def forward(self, x):
        return Own.apply(x, self.weight)


class Tied(nn.Linear):
    """Uses its weight there and back."""

    def forward(self, x):
        return super().forward(x) @ self.weight


class Joined(nn.Linear):
    def forward(self, x):
        return F.linear(x, torch.cat([self.weight, self.weight]))


class Overwriting(nn.Linear):
    """Changes what it has read, which goes unnoticed where autograd kept a copy in another precision."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        x.mul_(2)
        return y


class Halved(nn.Linear):
    """Sees half of the batch."""

    def forward(self, x):
        first, second = x.chunk(2)
        return torch.cat([super().forward(first), second[:, : self.out_features]])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(3, 6, 3, groups=3)],
        [nn.Conv2d(3, 4, 2, padding="same")],
        [nn.ConvTranspose2d(3, 4, 3)],
        [nn.Flatten(2), nn.Conv1d(3, 4, 3)],
        [nn.GroupNorm(1, 3)],
        [nn.LayerNorm([3, 8, 8])],
        [nn.BatchNorm2d(3, track_running_stats=False)],
        [nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.Conv2d(3, 4, 3)],
        [Standardised(3, 4, 3)],
        [nn.Flatten(), Hidden(192, 4)],
        [nn.Flatten(), Tied(192, 4)],
        [nn.Flatten(), Joined(192, 4)],
        [nn.Flatten(), nn.Identity(), nn.Linear(192, 5), Overwriting(5, 4)],
        [nn.Flatten(), Halved(192, 4)],
        [nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))],
    ],
    ids=lambda layers: " ".join(type(layer).__name__ for layer in layers),
)
def test_other_uses_of_weights_are_noticed(layers):
    network = nn.Sequential(*layers, nn.Flatten()).eval()
    x, y = batch(14)
    share = torch.ones(14)
    loss = lambda: (F.cross_entropy(network(x)[:, :4].float(), y, reduction="none") * share).sum()  # noqa: E731
    assert group_gradients(loss, list(network.parameters()), [Run(14, 1)]) is None


@pytest.mark.device
@pytest.mark.parametrize("build", NETWORKS)
def test_equal_on_the_device(build):
    network, weights = prepared(build)
    network.double()  # no ReLU may fall on the other side by rounding
    x, y = batch()
    expected = found_one_by_one(network, weights, x.double(), y)
    network.cuda()
    found = found_at_once(network, [p for p in network.parameters() if p.requires_grad], x.double().cuda(), y.cuda())
    for run, other in zip(found, expected, strict=True):
        for gradient, wanted in zip(run, other, strict=True):
            gradient, wanted = gradient.cpu().double(), wanted.double()
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item() + 1e-9)


@pytest.mark.device
def test_bfloat16_on_the_device_in_a_graph():
    network, weights = prepared(Resnet)
    exact = gram(found_at_once(network, weights, *batch()))
    network.cuda().to(memory_format=torch.channels_last)
    weights = [p for p in network.parameters() if p.requires_grad]
    x, y = (t.cuda() for t in batch())
    x = x.contiguous(memory_format=torch.channels_last)

    def products():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            found = found_at_once(network, weights, x, y)
        return gram(found)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = products()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products()
    for _ in range(2):
        graph.replay()
        assert torch.equal(captured, eager)
    norms, near = exact.diagonal().sqrt(), captured.cpu().diagonal().sqrt()
    torch.testing.assert_close(
        captured.cpu() / (near[:, None] * near), exact / (norms[:, None] * norms), atol=0.05, rtol=0
    )
