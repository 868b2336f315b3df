"""Orthogonalised directions against the iteration in plain steps, and against singular values."""

import math

import pytest
import torch
from torch import nn

from scrlearn.models import ReducedResNet18, cuda_turn
from scrlearn.models.orthogonal import POLYNOMIAL, ROUNDS, Matrices, as_matrix, polynomials


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def iterated(x):
    """Five rounds on the matrix itself, in float64."""
    a, b, c = POLYNOMIAL
    x = x.double() / x.double().norm()
    for _ in range(ROUNDS):
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x


def orthogonalised(x):
    """A matrix, or the weights of a convolution, with singular values near 1."""
    matrix = as_matrix(x, x)
    found = polynomials([matrix])[0] @ matrix
    return found.view(x.shape) if x.is_contiguous() else found.view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (20, 3, 3, 3), (40, 20, 1, 1), (5, 5, 3, 3), (1, 7)], ids=str)
def test_it_is_what_the_iteration_gives(shape, scale):
    x = scale * drawn(*shape)
    forms = [x] if x.ndim == 2 else [x, x.contiguous(memory_format=torch.channels_last)]
    for form in forms:  # the order of columns makes no difference
        expected = iterated(x.flatten(1))
        torch.testing.assert_close(orthogonalised(form).flatten(1).double(), expected, atol=2e-4, rtol=0)


def test_matrices_of_one_height_are_computed_beside_each_other():
    given = [drawn(6, width, seed=width) for width in (3, 6, 50)]
    for x, found in zip(given, polynomials(given), strict=True):
        torch.testing.assert_close((found @ x).double(), iterated(x), atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [(160, 1440), (80, 40), (32, 32)])
def test_singular_values_come_near_1_and_directions_stay(shape):
    x = drawn(*shape)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    found = left.T @ orthogonalised(x) @ right.T
    told = values / values.norm() > 0.01  # five rounds bring these up
    assert 0.6 < float(found.diagonal()[told].min()) <= float(found.diagonal().max()) < 1.25
    assert float((found - found.diagonal().diag()).abs().max()) < 1e-3


def test_few_directions_stay_few():
    x = drawn(30, 2) @ drawn(2, 50, seed=1)
    values = torch.linalg.svdvals(orthogonalised(x))
    assert float(values[1]) > 0.6
    assert float(values[2]) < 1e-4


def test_zeros_stay_zeros():
    x = torch.zeros(24, 32)
    x[:20, :27] = drawn(20, 27)
    wide = orthogonalised(x)
    torch.testing.assert_close(wide[:20, :27], orthogonalised(x[:20, :27].contiguous()), atol=1e-4, rtol=0)
    assert not wide[20:].any()
    assert not wide[:, 27:].any()
    assert not orthogonalised(torch.zeros(24, 8)).any()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_step_is_the_formula(form):
    layer = nn.Conv2d(3, 5, 3).to(memory_format=form)
    before, direction, rate = layer.weight.detach().clone(), drawn(5, 3, 3, 3), 0.02
    Matrices(layer).turn([direction], rate)
    moved = math.sqrt(1 - rate**2) * before - rate * before.norm() / math.sqrt(5) * orthogonalised(direction)
    torch.testing.assert_close(layer.weight.detach(), moved, atol=1e-5, rtol=1e-4)


def test_a_step_takes_no_numbers_from_the_host(monkeypatch):
    """A copy from the host cannot be recorded as a part of a CUDA graph."""
    layer = nn.Linear(6, 4)
    found, gradient = Matrices(layer), drawn(4, 6)
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
        monkeypatch.setattr(owner, name, lambda *given, **named: pytest.fail("made of numbers of the host"))
    before = layer.weight.detach().clone()
    found.turn([gradient], 0.02, [torch.zeros(4, 6)], 0.9)
    assert not torch.equal(layer.weight.detach(), before)


def test_lengths_stay_about_what_they_were():
    layer = nn.Linear(40, 30)
    length, found = float(layer.weight.detach().norm()), Matrices(layer)
    for seed in range(400):
        found.turn([drawn(30, 40, seed=seed)], 0.05)
    assert float(layer.weight.detach().norm()) == pytest.approx(length, rel=0.2)


def test_an_angle_is_about_the_rate():
    layer = nn.Linear(300, 40)
    before = layer.weight.detach().clone()
    Matrices(layer).turn([drawn(40, 300)], 0.03)
    after = layer.weight.detach()
    cosine = (before * after).sum() / before.norm() / after.norm()
    assert float(torch.acos(cosine)) == pytest.approx(0.03, rel=0.3)


def test_padded_weights_move_as_those_without():
    torch.manual_seed(0)
    plain = ReducedResNet18(3)
    padded = ReducedResNet18(3)
    padded.load_state_dict(plain.state_dict())
    padded.pad_channels(8)
    encoders = plain, padded
    found = [Matrices(encoder) for encoder in encoders]
    torch.testing.assert_close(found[0].lengths, found[1].lengths)
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for encoder, one in zip(encoders, found, strict=True):
        gradient = torch.autograd.grad(encoder(x).square().sum(), one.weights)
        one.turn(gradient, 0.05)
    assert padded.conv1.weight.shape != plain.conv1.weight.shape
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(padded.state_dict()[name], value, atol=2e-3, rtol=1e-2, msg=name)
    for module in padded.modules():
        if isinstance(module, nn.Conv2d):
            assert not module.weight[module.out_channels :].any()
            assert not module.weight[:, module.in_channels :].any()


def test_which_weights_are_matrices():
    shared, frozen = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Embedding(3, 4), shared, frozen, nn.Sequential(shared)
    )
    assert [tuple(weight.shape) for weight in Matrices(module).weights] == [(2, 1, 3, 3), (4, 4)]
    apart = nn.Conv2d(3, 4, 3)
    apart.weight = nn.Parameter(torch.zeros(4, 6, 3, 3)[:, ::2])  # not in one piece: a step would move a copy
    assert Matrices(apart).weights == []
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))  # its weight is no parameter
    assert Matrices(computed).weights == []
    none = Matrices(nn.Sequential(nn.BatchNorm2d(2)))
    none.turn([], 0.1)
    assert none.weights == []


def test_a_weight_of_zeros_can_leave_them():
    layer = nn.Linear(6, 12)
    nn.init.zeros_(layer.weight)
    found = Matrices(layer)
    assert float(found.lengths[0]) == pytest.approx(2.0)  # that of the usual first values
    found.turn([drawn(12, 6)], 0.02)
    assert float(layer.weight.detach().norm()) == pytest.approx(0.04, rel=0.2)


@pytest.mark.device
@pytest.mark.parametrize("width", [20, 64])
def test_kernels_turn_as_torch_does_and_always_alike(width, monkeypatch):
    """Blocks that did not wait for each other would give other bits now and then."""
    moved = []
    for by_kernels in [False] + [True] * 20:
        torch.manual_seed(0)
        encoder = ReducedResNet18(3, width)
        encoder.pad_channels(8)
        found = Matrices(encoder.cuda().to(memory_format=torch.channels_last))
        gradients, velocities = ([torch.randn_like(w) for w in found.weights] for _ in range(2))
        if not by_kernels:
            monkeypatch.setattr(cuda_turn, "suits", lambda weights: False)
        else:
            monkeypatch.undo()
            assert cuda_turn.suits(found._matrices(found.weights))
        found.turn(gradients, 0.05, velocities, 0.9)
        moved.append([w.detach().clone() for w in found.weights])
    for plain, first, *others in zip(*moved, strict=True):
        torch.testing.assert_close(first, plain, atol=1e-5, rtol=1e-4)
        assert all(torch.equal(first, other) for other in others)
