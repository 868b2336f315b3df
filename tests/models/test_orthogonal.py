"""Orthogonalised directions against the iteration in plain steps, and against singular values."""

import math

import pytest
import torch
from torch import nn

from scrlearn.models import ReducedResNet18
from scrlearn.models.orthogonal import POLYNOMIAL, ROUNDS, Matrices, as_matrix, orthogonalised

SHAPES = [(6, 4), (4, 6), (20, 3, 3, 3), (40, 20, 1, 1), (5, 5, 3, 3), (1, 7)]


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


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_all_are_what_the_iteration_gives(scale, last):
    given = [scale * drawn(*shape, seed=place) for place, shape in enumerate(SHAPES)]
    if last:
        given = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in given]
    for x, found in zip(given, orthogonalised(given), strict=True):
        assert found.shape == x.shape
        torch.testing.assert_close(as_matrix(found).double(), iterated(as_matrix(x)), atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [(160, 1440), (80, 40), (32, 32)])
def test_singular_values_come_near_1_and_directions_stay(shape):
    x = drawn(*shape)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    found = left.T @ orthogonalised([x])[0] @ right.T
    told = values / values.norm() > 0.01  # five rounds bring these up
    assert 0.6 < float(found.diagonal()[told].min()) <= float(found.diagonal().max()) < 1.25
    assert float((found - found.diagonal().diag()).abs().max()) < 1e-3


def test_few_directions_stay_few():
    x = drawn(30, 2) @ drawn(2, 50, seed=1)
    values = torch.linalg.svdvals(orthogonalised([x])[0])
    assert float(values[1]) > 0.6
    assert float(values[2]) < 1e-4


def test_zeros_stay_zeros():
    x = torch.zeros(24, 32)
    x[:20, :27] = drawn(20, 27)
    wide, narrow, nothing = orthogonalised([x, x[:20, :27], torch.zeros(24, 8)])
    torch.testing.assert_close(wide[:20, :27], narrow, atol=1e-4, rtol=0)
    assert not wide[20:].any()
    assert not wide[:, 27:].any()
    assert not nothing.any()


def test_a_step_turns_a_weight_and_keeps_its_length():
    layer = nn.Conv2d(3, 5, 3)
    before, direction, rate = layer.weight.detach().clone(), drawn(5, 3, 3, 3), 0.02
    found = Matrices(layer)
    found.turn([direction], rate)
    length = before.norm()
    moved = before - rate * length / math.sqrt(5) * orthogonalised([direction])[0]
    torch.testing.assert_close(layer.weight.detach(), moved * length / moved.norm())
    for seed in range(200):
        found.turn([drawn(5, 3, 3, 3, seed=seed)], rate)
    torch.testing.assert_close(layer.weight.detach().norm(), length)


def test_an_angle_is_about_the_rate():
    layer = nn.Linear(300, 40)
    before = layer.weight.detach().clone()
    Matrices(layer).turn([drawn(40, 300)], 0.03)
    cosine = (before * layer.weight.detach()).sum() / before.norm().square()
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
    none = Matrices(nn.Sequential(nn.BatchNorm2d(2)))
    none.turn([], 0.1)
    assert none.weights == []


def test_a_weight_of_zeros_can_leave_them():
    layer = nn.Linear(6, 12)
    nn.init.zeros_(layer.weight)
    found = Matrices(layer)
    found.turn([drawn(12, 6)], 0.02)
    assert float(layer.weight.detach().norm()) == pytest.approx(2.0)  # that of the usual first values
    assert layer.weight.isfinite().all()


def test_no_gradient_moves_nothing():
    layer = nn.Linear(6, 12)
    before = layer.weight.detach().clone()
    Matrices(layer).turn([torch.zeros(12, 6)], 0.02)
    torch.testing.assert_close(layer.weight.detach(), before)
