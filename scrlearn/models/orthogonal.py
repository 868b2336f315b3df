"""Gradient descent that turns every direction alike: orthogonalised velocities (Muon). Graph-safe."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ROUNDS = 5
POLYNOMIAL = 3.4445, -4.775, 2.0315  # of Jordan et al.: five rounds bring singular values from 0.003 to 1 near 1


def as_matrix(weight: Tensor) -> Tensor:
    """A row for each output; of a convolution whose channels come last this is a view."""
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def orthogonalised(directions: Sequence[Tensor]) -> list[Tensor]:
    r"""Each matrix X = U S Vᵀ with its singular values brought near 1: about U Vᵀ, in the shape that was given.

    By Newton and Schulz's iteration, with the odd polynomial of Jordan et al. in each of five rounds,

    .. math:: X \leftarrow a X + b \, (X X^\top) X + c \, (X X^\top)^2 X

    from X / ‖X‖. As every round multiplies X by a polynomial of A = X Xᵀ from the left, the rounds are made on A, which
    is small, for all matrices of one height at once, and X is multiplied at the end. Rows and columns of zeros stay
    zero, and so does a matrix of zeros.

    References
    ----------
    Jordan et al., "Muon: An Optimizer for Hidden Layers in Neural Networks", 2024; Bernstein and Newhouse, "Old
    Optimizer, New Norm: An Anthology", 2024.

    Examples
    --------
    >>> x = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.2, 0.0]])
    >>> [round(float(s), 1) for s in torch.linalg.svdvals(orthogonalised([x])[0])]
    [1.1, 0.7]
    """
    found: list[Tensor] = [*directions]
    heights: defaultdict[int, list[int]] = defaultdict(list)
    for place, direction in enumerate(directions):
        heights[len(direction)].append(place)
    for places in heights.values():
        flat = [as_matrix(directions[place]) for place in places]
        for place, x, p in zip(places, flat, _polynomials(flat), strict=True):
            found[place] = _in_shape(p @ x, directions[place])
    return found


def _polynomials(flat: list[Tensor]) -> Tensor:
    """For each matrix (all of one height) what it is multiplied by."""
    a, b, c = POLYNOMIAL
    square = torch.stack([x @ x.T for x in flat])
    whole = square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=torch.finfo(square.dtype).tiny)
    square = square / whole
    one = torch.eye(square.shape[1], dtype=square.dtype, device=square.device) / whole.sqrt()
    for left in reversed(range(ROUNDS)):
        rest = torch.baddbmm(square, square, square, beta=b, alpha=c)  # the polynomial less a, which commutes with all
        one = torch.baddbmm(one, rest, one, beta=a)
        if left:
            once = torch.baddbmm(square, rest, square, beta=a)
            square = torch.baddbmm(once, rest, once, beta=a)
    return one


def _in_shape(matrix: Tensor, like: Tensor) -> Tensor:
    if like.ndim == 2:
        return matrix
    outputs, channels, height, width = like.shape
    return matrix.view(outputs, height, width, channels).permute(0, 3, 1, 2)


class Matrices:
    r"""The weights of a module that are matrices (of convolutions and linear layers), and how they are turned.

    .. math:: W' = W - \eta \frac{\ell}{\sqrt{r}} \, O, \qquad W \leftarrow \frac{\ell}{\|W'\|} W'

    where O is the orthogonalised direction, r the smaller side of the matrix (so that ‖O‖ is about √r), η the rate and
    ℓ the length that the weight had at first: a step turns it by about η, and its length stays.

    Parameters
    ----------
    module
        Whose weights; those that are not trained are left out.

    Examples
    --------
    >>> layer = nn.Linear(3, 2)
    >>> found, before = Matrices(layer), layer.weight.norm().item()
    >>> found.turn([torch.randn(2, 3)], rate=0.02)
    >>> abs(layer.weight.norm().item() - before) < 1e-5
    True
    """

    def __init__(self, module: nn.Module) -> None:
        found = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        # by the weight: layers may share one
        layers = list({id(layer.weight): layer for layer in found if layer.weight.requires_grad}.values())
        self.weights: list[Tensor] = [layer.weight for layer in layers]
        self.lengths = torch.stack([_length(layer.weight) for layer in layers]) if layers else torch.zeros(0)
        self._sides = [_smaller_side(layer) for layer in layers]

    @torch.no_grad()
    def turn(self, directions: Sequence[Tensor], rate: float) -> None:
        """One step against these directions."""
        if not self.weights:
            return
        moves = orthogonalised(directions)
        steps = [rate / math.sqrt(side) for side in self._sides]
        torch._foreach_mul_(moves, steps)
        torch._foreach_mul_(moves, [*self.lengths.unbind()])
        torch._foreach_sub_(self.weights, moves)
        now = torch.stack(torch._foreach_norm(self.weights))
        torch._foreach_mul_(self.weights, [*(self.lengths / now).unbind()])


def _length(weight: Tensor) -> Tensor:
    """Its Frobenius norm; of a weight that is all zero, what PyTorch's own first values would have."""
    length = weight.detach().float().norm()
    return torch.where(length > 0, length, math.sqrt(len(weight) / 3))


def _smaller_side(layer: nn.Conv2d | nn.Linear) -> int:
    """Of the layer's own matrix, whatever its weights are padded to."""
    if isinstance(layer, nn.Linear):
        return min(layer.in_features, layer.out_features)
    height, width = layer.kernel_size
    return min(layer.out_channels, layer.in_channels // layer.groups * height * width)
