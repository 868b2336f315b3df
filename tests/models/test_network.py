"""The network around any encoder: what goes in, what comes out, and what is said of an encoder that does not fit."""

import pytest
import torch
from torch import nn

from scrlearn.classifiers import SoftmaxHead
from scrlearn.errors import InputError
from scrlearn.models import PROJECTIONS, Network, ReducedResNet18, feature_dim, projection_head, resnet
from scrlearn.models.network import to_float


class Odd(nn.Module):
    """An encoder that answers, or fails, as it is told."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(x)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 6))


# ---------------------------------------------------------------- features


def test_any_module_from_images_to_vectors_is_an_encoder():
    for encoder, length in ((nn.Flatten(), 64), (plain(), 6), (Odd(lambda x: x.mean((2, 3))), 1)):
        network = Network(encoder).eval()
        assert feature_dim(encoder, (1, 8, 8)) == length
        assert network(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape == (3, length)


def test_bytes_and_the_same_pixels_as_floats_give_the_same_features():
    network = Network(plain()).eval()
    x = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(network.features(x), network.features(x.float() / 255))
    assert torch.equal(network(x), network.features(x))


def test_pixels_become_fractions_and_floats_stay():
    assert to_float(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([0.0, 0.2, 1.0])
    floats = torch.tensor([0.25, 3.0])
    assert to_float(floats) is floats


@pytest.mark.parametrize("bf16", [False, True])
def test_features_are_float32_whatever_the_encoder_computes_in(bf16):
    x = torch.rand(5, 3, 16, 16)
    torch.manual_seed(0)
    encoder = ReducedResNet18().eval()
    features = Network(encoder, bf16=bf16).eval().features(x)
    assert features.dtype == torch.float32
    exact = encoder(x)
    error = (features - exact).norm() / exact.norm()
    assert error < (0.03 if bf16 else 1e-5)
    assert (error > 1e-5) == bf16  # bfloat16 was really used
    assert Network(Odd(lambda x: x.flatten(1).half())).features(x).dtype == torch.float32


@pytest.mark.parametrize("make", [plain, lambda: ReducedResNet18(1)])
def test_segments_have_the_bits_of_forwards_one_after_the_other(make):
    found = []
    for at_once in (True, False):
        torch.manual_seed(0)
        network = Network(make()).train()
        x = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8)
        parts = [network.features(x, segments=3)] if at_once else [network.features(part) for part in x.chunk(3)]
        found.append([torch.cat(parts), *network.buffers()])
        assert not network.takes_segments(x)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_weights_of_all_kernels_that_take_float32_stay_so(monkeypatch):
    """Read as float32, bfloat16 is nonsense, and there is only half as much of it."""
    for name in ("_fused_convolution", "_fused_downsampling"):
        monkeypatch.setattr(resnet, name, lambda: (None, None))
    encoder = ReducedResNet18(3)
    encoder.pad_channels(8)
    cast = Network(encoder, bf16=True)._cast_weights()
    own = {name for name, weight in encoder.named_parameters() if weight.ndim == 4} - set(cast)
    for name in ("conv1", "blocks.2.conv1", "blocks.2.shortcut.0", "blocks.4.conv1", "blocks.4.shortcut.0"):
        assert f"{name}.weight" in own
    for name in ("blocks.4.conv2", "blocks.5.conv1", "blocks.6.conv1", "blocks.6.shortcut.0"):
        assert cast[f"{name}.weight"].dtype == torch.bfloat16


def test_logits_are_the_heads_and_need_one():
    head = SoftmaxHead(64, ahead=3)
    x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(Network(nn.Flatten(), head=head).logits(x), head(to_float(x).flatten(1)))
    with pytest.raises(InputError, match="no softmax head"):
        Network(nn.Flatten()).logits(x)


# ---------------------------------------------------------------- projections


def test_projection_kinds_are_those_of_the_paper():
    mlp, linear, none = (projection_head(kind, 160) for kind in PROJECTIONS)
    first, relu, second = mlp
    assert (first.in_features, first.out_features, second.in_features, second.out_features) == (160, 160, 160, 128)
    assert isinstance(relu, nn.ReLU)
    assert (linear.in_features, linear.out_features) == (160, 128)
    assert not list(none.parameters())
    features = torch.randn(4, 160)
    torch.testing.assert_close(mlp(features), second(first(features).clamp(min=0)))
    assert torch.equal(none(features), features)
    assert projection_head("linear", 7, dim=3)(torch.zeros(1, 7)).shape == (1, 3)


@pytest.mark.parametrize(("kind", "length"), [("mlp", 128), ("linear", 128), ("none", 64), (None, 64)])
def test_projections_lie_on_the_unit_sphere(kind, length):
    network = Network(nn.Flatten(), projection_head(kind, 64) if kind else None)
    projected = network.project(torch.randn(5, 64) * 100)
    assert projected.shape == (5, length)
    torch.testing.assert_close(projected.norm(dim=1), torch.ones(5))


def test_an_unknown_projection_gets_a_suggestion():
    with pytest.raises(InputError, match=r'no projection "lineer"\. Did you mean "linear"'):
        projection_head("lineer", 4)


# ---------------------------------------------------------------- looking at a foreign encoder


def test_finding_the_length_changes_nothing_in_the_encoder():
    encoder = plain()
    encoder[1].eval()
    modes = [module.training for module in encoder.modules()]
    mean = encoder[1].running_mean.clone()
    assert feature_dim(encoder, (1, 8, 8)) == 6
    assert [module.training for module in encoder.modules()] == modes
    assert torch.equal(encoder[1].running_mean, mean)
    assert all(p.grad is None for p in encoder.parameters())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("sizes differ"), "sizes differ"),
        (ValueError("too small"), "too small"),
        (KeyError("pixel_values"), "pixel_values"),
        (TypeError("missing a mask"), "missing a mask"),
        (AssertionError("224 expected"), "224 expected"),
        (IndexError("out of range"), "out of range"),
    ],
)
def test_whatever_an_encoder_raises_is_explained(error, said):
    def fail(x):
        raise error

    encoder = nn.Sequential(Odd(fail)).train()
    with pytest.raises(
        InputError, match=rf"Sequential does not take 3×8×9 images .*{said}.*resize the images"
    ) as caught:
        feature_dim(encoder, (3, 8, 9))
    assert caught.value.__cause__ is error
    assert encoder.training


def test_an_encoder_for_other_channels():
    with pytest.raises(InputError, match="ReducedResNet18 does not take 3×32×32 images"):
        feature_dim(ReducedResNet18(1), (3, 32, 32))


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (lambda x: x, r"\(1, 1, 8, 8\)"),
        (lambda x: x.flatten(), r"\(64,\)"),
        (lambda x: x.sum(), r"\(\)"),
        (lambda x: x.view(-1, 8), r"\(8, 8\)"),
        (lambda x: (x.flatten(1), x), "tuple"),
        (lambda x: {"features": x.flatten(1)}, "dict"),
        (lambda x: None, "NoneType"),
    ],
)
def test_an_encoder_that_gives_no_vectors(answer, given):
    with pytest.raises(InputError, match=f"must map images N×C×H×W to vectors N×d, but one image gave {given}"):
        feature_dim(Odd(answer), (1, 8, 8))


def test_an_interruption_is_no_fault_of_the_encoder():
    def stop(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feature_dim(Odd(stop), (1, 8, 8))
