"""The reduced ResNet18 against a plain functional form of the protocol's description, and its padding with zeros."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from scrlearn.checkpoint import digest, load_checkpoint, save_checkpoint
from scrlearn.models import Network, ReducedResNet18
from scrlearn.models.resnet import BasicBlock, BatchNorm, _Averaged, averaged

STAGES = ((20, 1), (40, 2), (80, 2), (160, 2))


def encoder(channels=3, seed=0, **options):
    torch.manual_seed(seed)
    return ReducedResNet18(channels, **options)


def by_the_protocol(state, x, training):
    """3×3 stem, no max-pool, 2-2-2-2 basic blocks of 20, 40, 80, 160 channels, 4×4 average pool, flatten."""

    def norm(name, x):
        mean, var = state[f"{name}.running_mean"].clone(), state[f"{name}.running_var"].clone()
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"], training, 0.1, 1e-5)

    x = F.relu(norm("bn1", F.conv2d(x, state["conv1.weight"], padding=1)))
    number, channels_in = 0, 20
    for channels, first_stride in STAGES:
        for stride in (first_stride, 1):
            name = f"blocks.{number}"
            out = F.relu(norm(f"{name}.bn1", F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1)))
            out = norm(f"{name}.bn2", F.conv2d(out, state[f"{name}.conv2.weight"], padding=1))
            if stride != 1 or channels_in != channels:
                x = norm(f"{name}.shortcut.1", F.conv2d(x, state[f"{name}.shortcut.0.weight"], stride=stride))
            x, channels_in, number = F.relu(out + x), channels, number + 1
    return F.avg_pool2d(x, 4).flatten(1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [28, 32, 84])
def test_computes_what_the_protocol_says(training, size):
    model = encoder().double().train(training)
    x = torch.rand(2, 3, size, size, dtype=torch.float64)
    expected = by_the_protocol(copy.deepcopy(model.state_dict()), x, training)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("size", "features"),
    [((32, 32), 160), ((84, 84), 640), ((28, 28), 160), ((8, 8), 160), ((1, 1), 160), ((32, 84), 320), ((33, 64), 320)],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_features_of_every_size(size, features, channels):
    assert encoder(channels).eval()(torch.zeros(2, channels, *size)).shape == (2, features)


@pytest.mark.parametrize(("size", "maps"), [(32, [32, 32, 16, 8, 4]), (84, [84, 84, 42, 21, 11]), (8, [8, 8, 4, 2, 1])])
def test_sizes_and_channels_of_the_maps(size, maps):
    model, seen = encoder().eval(), []
    for module in (model.bn1, *model.blocks):
        module.register_forward_hook(lambda module, given, out: seen.append(tuple(out[0].shape[1:])))
    model(torch.zeros(1, 3, size, size))
    expected = [(20, maps[0], maps[0])]
    for (channels, _), side in zip(STAGES, maps[1:], strict=True):
        expected += [(channels, side, side)] * 2
    assert seen == expected


def test_convolutions_one_by_one():
    found = [
        (c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding, c.bias)
        for c in encoder().modules()
        if isinstance(c, nn.Conv2d)
    ]
    expected = [(3, 20, (3, 3), (1, 1), (1, 1), None)]
    before = 20
    for channels, stride in STAGES:
        expected += [(before, channels, (3, 3), (stride, stride), (1, 1), None)]
        expected += [(channels, channels, (3, 3), (1, 1), (1, 1), None)]
        if channels != before:
            expected += [(before, channels, (1, 1), (stride, stride), (0, 0), None)]
        expected += [(channels, channels, (3, 3), (1, 1), (1, 1), None)] * 2
        before = channels
    assert found == expected


@pytest.mark.parametrize("channels", [1, 3])
def test_number_of_parameters(channels):
    count, before = 9 * channels * 20 + 2 * 20, 20
    for width, _ in STAGES:
        count += 9 * before * width + 3 * 9 * width * width + 4 * 2 * width
        if width != before:
            count += before * width + 2 * width
        before = width
    assert sum(p.numel() for p in encoder(channels).parameters()) == count
    assert count == {3: 1_093_140, 1: 1_092_780}[channels]


def test_two_blocks_a_stage_and_no_max_pool():
    modules = list(encoder().modules())
    assert sum(isinstance(m, BasicBlock) for m in modules) == 8
    assert not any("pool" in type(m).__name__.lower() for m in modules)


@pytest.mark.parametrize("size", [(4, 4), (11, 11), (8, 5), (9, 7)])
@pytest.mark.parametrize("pool", [(4, 4), (3, 2), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_averages_and_their_gradient_are_torchs_own(size, pool, dtype, layout):
    x = torch.randn(3, 8, *size).to(dtype).contiguous(memory_format=layout).requires_grad_()
    y, expected = _Averaged.apply(x, pool), F.avg_pool2d(x, pool)
    assert torch.equal(y, expected)
    dy = torch.randn(y.shape).to(dtype)
    ours, theirs = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    torch.testing.assert_close(ours, theirs)
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    if pool == (4, 4):
        assert torch.equal(ours, theirs)


def test_averages_on_a_cpu_are_left_to_torch():
    x = torch.randn(2, 8, 9, 9).requires_grad_()
    assert "AvgPool2D" in type(averaged(x, (4, 4), training=True).grad_fn).__name__


def test_gradients_of_many_images_by_vmap_do_not_meet_averages_of_our_own(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.randn(3, 2, 8, 9, 9)
    assert "Averaged" in type(averaged(x[0].requires_grad_(), (4, 4), training=True).grad_fn).__name__
    found = vmap(grad(lambda x: averaged(x, (4, 4), training=False).sum()))(x)
    torch.testing.assert_close(found[..., :8, :8], torch.full((3, 2, 8, 8, 8), 1 / 16))


# ---------------------------------------------------------------- BatchNorm


@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (1, 4, 3, 1), (3, 4, 1, 1)])
def test_batch_norm_is_torchs_own(shape):
    ours, theirs = BatchNorm(4).double(), nn.BatchNorm2d(4).double()
    with torch.no_grad():
        for module in (ours, theirs):
            module.weight.copy_(torch.tensor([1.0, 0.5, -1.0, 2.0]))
            module.bias.copy_(torch.tensor([0.1, 0.0, -0.2, 0.3]))
    for training in (True, True, False):
        x = torch.rand(shape, dtype=torch.float64).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        a, b = ours.train(training)(x), theirs.train(training)(twin)
        a.square().sum().backward(), b.square().sum().backward()
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_adds_the_shortcut_then_cuts_below_zero(residual, relu):
    x, shortcut = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    expected = nn.BatchNorm2d(2)(x) + (shortcut if residual else 0)
    expected = expected.clamp(min=0) if relu else expected
    torch.testing.assert_close(BatchNorm(2)(x, shortcut if residual else None, relu), expected)


@pytest.mark.parametrize(("images", "size"), [(4, 16), (3, 8), (2, 8), (1, 8)])  # the last map of 8×8 pixels is 1×1
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments_are_batches_one_after_the_other(images, size, segments):
    x = torch.rand(segments * images, 3, size, size, dtype=torch.float64)
    direction = torch.randn(160, dtype=torch.float64)
    torch.manual_seed(0)
    ours = ReducedResNet18().double()
    theirs = copy.deepcopy(ours)
    found, expected = ours(x, segments), torch.cat([theirs(part) for part in x.chunk(segments)])
    torch.testing.assert_close(found, expected)
    for out in (found, expected):
        (out @ direction).square().sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6 * b.grad.abs().max().item(), msg=name)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(ours.eval()(x, segments), ours(x))  # by the running statistics there are no segments


@pytest.mark.parametrize("training", [False, True])
def test_a_result_for_two_readers_is_the_same_twice(training):
    norm, x = BatchNorm(3).train(training), torch.randn(2, 3, 4, 4)
    first, second = norm(x, relu=True, twice=True)
    assert first is second
    assert isinstance(norm(x), torch.Tensor)


def test_a_single_value_per_channel_joins_the_running_statistics_first():
    norm = BatchNorm(3).double()
    norm(torch.randn(5, 3, 2, 2, dtype=torch.float64))
    mean, var, x = norm.running_mean.clone(), norm.running_var.clone(), torch.randn(1, 3, 1, 1, dtype=torch.float64)
    away = x.flatten() - mean
    mean, var = mean + 0.1 * away, 0.9 * (var + 0.1 * away**2)
    torch.testing.assert_close(norm(x).flatten(), (x.flatten() - mean) / (var + 1e-5).sqrt())
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, var)
    before = norm.eval().running_mean.clone()
    norm(x)
    assert torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (1, 3, 1, 2)])
def test_two_values_per_channel_join_the_running_statistics_first(shape):
    norm = BatchNorm(3).double()
    norm(torch.randn(5, 3, 2, 2, dtype=torch.float64))
    mean, var, x = norm.running_mean.clone(), norm.running_var.clone(), torch.randn(shape, dtype=torch.float64)
    first, second = x.movedim(1, 0).reshape(3, 2).T
    # the variance of a mixture: nine parts of before, one of these two
    both = (first + second) / 2
    mean, var = 0.9 * mean + 0.1 * both, 0.9 * var + 0.1 * (first - second) ** 2 / 4 + 0.09 * (both - mean) ** 2
    found = norm(x).movedim(1, 0).reshape(3, 2).T
    torch.testing.assert_close(found, (torch.stack([first, second]) - mean) / (var + 1e-5).sqrt())
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, var)


def test_two_values_next_to_each_other_have_a_bounded_gradient():
    norm, x = BatchNorm(1), torch.tensor([[[[0.5]]], [[[0.5 + 1e-6]]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x)[0].sum(), x)
    assert gradient.abs().max().item() < 2


def test_a_single_value_of_any_size_has_a_bounded_output_and_gradient():
    for size in (1e3, 1e6, 1e9):
        norm, x = BatchNorm(1), torch.full((1, 1, 1, 1), size, requires_grad=True)
        out = norm(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert out.abs().item() < 3.01  # 0.9 / sqrt(0.9 · 0.1)
        assert gradient.abs().item() < 1 / size


def test_single_values_by_and_by_give_the_statistics_of_their_stream():
    norm, random = BatchNorm(1), torch.Generator().manual_seed(0)
    means, variances = [], []
    for _ in range(2000):
        norm(4 + 2 * torch.randn(1, 1, 1, 1, generator=random))
        means.append(norm.running_mean.item()), variances.append(norm.running_var.item())
    assert sum(means[100:]) / 1900 == pytest.approx(4, abs=0.15)
    assert sum(variances[100:]) / 1900 == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("size", [1, 8])
def test_a_single_image_can_be_trained_on(size):
    model = encoder(1).train()
    before = [p.detach().clone() for p in model.parameters()]
    features = model(torch.rand(1, 1, size, size))
    features.square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad.isfinite().all()
            p -= 0.1 * p.grad
    assert any((p != old).any() for p, old in zip(model.parameters(), before, strict=True))


def test_the_saved_state_has_no_count_of_batches_and_loads_without_metadata():
    state = dict(encoder(seed=1).state_dict())
    assert not any("num_batches" in name or "counter" in name for name in state)
    model = encoder(seed=2)
    model.load_state_dict(state)
    assert digest(model.state_dict()) == digest(state)


# ---------------------------------------------------------------- padding


def padded(multiple, seed=0, channels=3):
    model = encoder(channels, seed).double()
    with torch.no_grad():  # so that a wrong place in the middle would be seen
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.weight.uniform_(0.5, 1.5), module.bias.uniform_(-0.5, 0.5)
                module.running_mean.uniform_(-1, 1), module.running_var.uniform_(0.5, 2)
    plain = copy.deepcopy(model)
    model.pad_channels(multiple)
    return plain, model


@pytest.mark.parametrize("multiple", [1, 8, 16, 32])
@pytest.mark.parametrize("training", [True, False])
def test_padded_channels_change_no_output_and_no_gradient(multiple, training):
    plain, wide = padded(multiple)
    assert wide.conv1.weight.shape == (-(-20 // multiple) * multiple, -(-3 // multiple) * multiple, 3, 3)
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    outputs = [model.train(training)(x) for model in (plain, wide)]
    torch.testing.assert_close(*outputs)
    for out in outputs:
        (out * torch.linspace(-1, 1, 160, dtype=torch.float64)).sum().backward()
    for narrow, broad in zip(plain.parameters(), wide.parameters(), strict=True):
        inside = tuple(map(slice, narrow.shape))
        torch.testing.assert_close(broad.grad[inside], narrow.grad)
        outside = broad.grad.clone()
        outside[inside] = 0
        assert not outside.any()
    for narrow, broad in zip(plain.buffers(), wide.buffers(), strict=True):
        torch.testing.assert_close(broad[tuple(map(slice, narrow.shape))], narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_added_channels_stay_exactly_zero_under_training(dtype):
    plain, wide = (model.to(dtype).train() for model in padded(16))
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.rand(4, 3, 16, 16, generator=random).to(dtype)
        direction = torch.randn(4, 160, generator=random).to(dtype)
        for model in (plain, wide):
            model.zero_grad()
            (F.normalize(model(x), dim=1) * direction).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    own = dict(plain.named_parameters()) | dict(plain.named_buffers())
    added = 0
    for name, tensor in (*wide.named_parameters(), *wide.named_buffers()):
        rest = tensor.detach().clone()
        rest[tuple(map(slice, own[name].shape))] = 0
        assert not rest.any(), name
        added += tensor.numel() - own[name].numel()
    assert added > 0
    if dtype == torch.float64:
        for name, tensor in wide.state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name])


def test_saved_states_have_the_layers_own_sizes_and_load_both_ways(tmp_path):
    plain, wide = padded(8)
    assert digest(dict(wide.state_dict())) == digest(dict(plain.state_dict()))
    save_checkpoint(tmp_path / "wide.scr", {"encoder": wide.state_dict()}, {})
    state, _ = load_checkpoint(tmp_path / "wide.scr")
    for target in (encoder(seed=5).double(), padded(8, seed=6)[1], padded(16, seed=7)[1]):
        target.load_state_dict(state["encoder"])
        assert digest(dict(target.state_dict())) == digest(dict(plain.state_dict()))
        x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(target.eval()(x), plain.eval()(x))


def test_a_network_around_a_padded_encoder_and_a_copy_of_it_save_the_same(tmp_path):
    plain, wide = padded(8)
    expected = digest(dict(Network(plain).state_dict()))
    network = Network(wide)
    assert digest(dict(network.state_dict())) == expected
    twin = copy.deepcopy(network)
    assert digest(dict(twin.state_dict())) == expected
    twin.load_state_dict(Network(padded(8, seed=3)[0]).state_dict())
    assert digest(dict(twin.state_dict())) == digest(dict(Network(padded(8, seed=3)[0]).state_dict()))
    assert digest(dict(network.state_dict())) == expected


@pytest.mark.parametrize("pad", [None, 8])
def test_a_state_of_another_encoder_is_refused(pad):
    model = encoder(3)
    if pad:
        model.pad_channels(pad)
    with pytest.raises(RuntimeError, match=r"conv1\.weight"):
        model.load_state_dict(encoder(1).state_dict())
