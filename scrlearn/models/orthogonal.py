"""Gradient descent that turns every direction alike: orthogonalised velocities (Muon). Graph-safe."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scrlearn.models import cuda_turn

ROUNDS = 5
POLYNOMIAL = 3.4445, -4.775, 2.0315  # of Jordan et al.: five rounds bring singular values from 0.003 to 1 near 1


def as_matrix(tensor: Tensor, like: Tensor) -> Tensor:
    """A row for each output; columns in the order in which `like`, a weight of this shape, lies in memory.

    Of tensors that lie as `like` does this is a view.
    """
    if tensor.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1)


def polynomials(matrices: Sequence[Tensor]) -> Tensor:
    r"""What matrices of one height are multiplied by from the left, so that their singular values come near 1.

    With X = U S Vᵀ the products are about U Vᵀ. They are those of Newton and Schulz's iteration with the odd polynomial
    of Jordan et al. in each of five rounds,

    .. math:: X \leftarrow a X + b \, (X X^\top) X + c \, (X X^\top)^2 X

    from X / ‖X‖. As every round multiplies X by a polynomial of A = X Xᵀ, the rounds are made on A, which is small, and
    for all matrices at once. Rows and columns of zeros stay zero, and so does a matrix of zeros.

    References
    ----------
    Jordan et al., "Muon: An Optimizer for Hidden Layers in Neural Networks", 2024; Bernstein and Newhouse, "Old
    Optimizer, New Norm: An Anthology", 2024.

    Examples
    --------
    >>> x = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.2, 0.0]])
    >>> [round(float(s), 1) for s in torch.linalg.svdvals(polynomials([x])[0] @ x)]
    [1.1, 0.7]
    """
    a, b, c = POLYNOMIAL
    square = torch.stack([x @ x.T for x in matrices])
    whole = square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=torch.finfo(square.dtype).tiny)
    square = square / whole
    one = torch.eye(square.shape[1], dtype=square.dtype, device=square.device) / whole.sqrt()
    for left in reversed(range(ROUNDS)):
        rest = torch.baddbmm(square, square, square, beta=b, alpha=c)  # the polynomial less a; all of them commute
        one = torch.baddbmm(one, rest, one, beta=a)
        if left:
            once = torch.baddbmm(square, rest, square, beta=a)
            square = torch.baddbmm(once, rest, once, beta=a)
    return one


class Matrices:
    r"""The weights of a module that are matrices (of convolutions and linear layers), and how they are turned.

    .. math:: W \leftarrow \sqrt{1 - \eta^2} \; W - \eta \frac{\ell}{\sqrt{r}} \, O

    where O is the orthogonalised direction, r the smaller side of the matrix, η the rate, and ℓ the length that the
    weight had at first. ‖O‖ is about √r, and what comes before BatchNorm has no gradient along itself, so that a step
    turns W by an angle of about η, and its length stays about what it was.

    Parameters
    ----------
    module
        Whose weights; those that are not trained are left out.

    References
    ----------
    Directions: see `polynomials`. Lengths in balance: Kosson, Messmer, Jaggi, "Rotational Equilibrium: How Weight Decay
    Balances Learning Across Neural Networks", ICML 2024.

    Examples
    --------
    >>> layer = nn.Linear(30, 20)
    >>> found, before = Matrices(layer), layer.weight.norm().item()
    >>> found.turn([torch.randn(20, 30)], rate=0.02)
    >>> abs(layer.weight.norm().item() / before - 1) < 0.01
    True
    """

    def __init__(self, module: nn.Module) -> None:
        found = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        # by the weight: layers may share one
        layers = list({id(layer.weight): layer for layer in found if _can_be_turned(layer.weight)}.values())
        layers.sort(key=lambda layer: len(layer.weight))
        self.weights: list[Tensor] = [layer.weight for layer in layers]
        heights = [len(weight) for weight in self.weights]
        self._of_one_height = [
            slice(heights.index(h), heights.index(h) + heights.count(h)) for h in sorted(set(heights))
        ]
        device = self.weights[0].device if layers else None
        self.lengths = torch.tensor([_length(layer.weight) for layer in layers], device=device)
        self._roots = [math.sqrt(_smaller_side(layer)) for layer in layers]
        self._roots_there = torch.tensor(self._roots, device=device)  # a recorded step takes no numbers from the host

    @torch.no_grad()
    def turn(
        self,
        gradients: Sequence[Tensor],
        rate: float,
        velocities: Sequence[Tensor] = (),
        momentum: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """One step against these gradients; with velocities, which move too, against where they will be one step ahead.

        `scale` shortens the gradients that velocities take in.
        """
        if not self.weights:
            return
        own, past = (scale * (1 + momentum), momentum**2) if velocities else (1.0, 0.0)
        rule = cuda_turn.Rule(own, past, math.sqrt(1 - rate**2), POLYNOMIAL, ROUNDS)
        weights, slopes, older = (self._matrices(each) for each in (self.weights, gradients, velocities))
        if cuda_turn.suits(weights):
            cuda_turn.turn(weights, slopes, older or None, [rate / root for root in self._roots], self.lengths, rule)
        else:
            self._turn(weights, slopes, older, rate * self.lengths / self._roots_there, rule)
        if velocities:
            torch._foreach_mul_(list(velocities), momentum)
            torch._foreach_add_(list(velocities), list(gradients), alpha=scale)

    def _matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [as_matrix(*pair) for pair in zip(tensors, self.weights, strict=True)] if tensors else []

    def _turn(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        velocities: list[Tensor],
        steps: Tensor,
        rule: cuda_turn.Rule,
    ) -> None:
        directions = gradients
        if velocities:
            directions = [*torch._foreach_mul(velocities, rule.past)]
            torch._foreach_add_(directions, gradients, alpha=rule.own)
        for part in self._of_one_height:
            lefts = polynomials(directions[part]) * steps[part, None, None]
            for weight, left, direction in zip(weights[part], lefts, directions[part], strict=True):
                weight.addmm_(left, direction, beta=rule.keep, alpha=-1)


def _can_be_turned(weight: Tensor) -> bool:
    """Whether it is trained, and lies so that its matrix is a view of it."""
    if not isinstance(weight, nn.Parameter):  # one that is computed anew each time, from others
        return False
    return weight.requires_grad and as_matrix(weight, weight).data_ptr() == weight.data_ptr()


def _length(weight: Tensor) -> float:
    """Its Frobenius norm; of a weight that is all zero, what PyTorch's own first values would have."""
    return float(weight.detach().float().norm()) or math.sqrt(len(weight) / 3)


def _smaller_side(layer: nn.Conv2d | nn.Linear) -> int:
    """Of the layer's own matrix, whatever its weights are padded to."""
    if isinstance(layer, nn.Linear):
        return min(layer.in_features, layer.out_features)
    height, width = layer.kernel_size
    return min(layer.out_channels, layer.in_channels // layer.groups * height * width)
