"""The losses and their gradients on CUDA (Triton): a kernel in the place of forty.

The gradients are known in closed form. That of the supervised contrastive loss, by the products of two rows i ≠ j, is
for an anchor i with positives P(i)

    (softmax over j of z_i · z_j / τ  −  [j ∈ P(i)] / |P(i)|) / (n τ).

Rows of two classes, and other views that count more, have weights in the place of [j ∈ P(i)], and their sum in that of
|P(i)|.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrlearn.losses import Mixture, Narrow, among


@triton.jit
def _anchor(
    products, y, also, share, narrow, among, loss, gradient, rows, inverse_temperature, view_weight,
    block: tl.constexpr, mixed: tl.constexpr, weighs_views: tl.constexpr, narrowed: tl.constexpr,
):  # fmt: skip
    """The loss of one anchor, and its gradient by the products with all other rows."""
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, block)
    others = (j < rows) & (j != i)
    if narrowed:
        others &= (tl.load(narrow + i) == 0) | (tl.load(among + j, mask=j < rows, other=0) != 0)
    logits = tl.load(products + i * rows + j, mask=others, other=0.0) * inverse_temperature
    top = tl.max(tl.where(others, logits, float("-inf")), 0)
    weight = tl.where(others, tl.exp(logits - top), 0.0)
    total = tl.sum(weight, 0)
    theirs, own = tl.load(y + j, mask=j < rows, other=0), tl.load(y + i)
    alike = tl.where(theirs == own, 1.0, 0.0)
    if mixed:
        their_other, own_other = tl.load(also + j, mask=j < rows, other=0), tl.load(also + i)
        their_share, own_share = tl.load(share + j, mask=j < rows, other=0.0), tl.load(share + i)
        alike *= (1 - own_share) * (1 - their_share)
        alike += tl.where(their_other == own, (1 - own_share) * their_share, 0.0)
        alike += tl.where(theirs == own_other, own_share * (1 - their_share), 0.0)
        alike += tl.where(their_other == own_other, own_share * their_share, 0.0)
    if weighs_views:
        alike = tl.where(j == (i + rows // 2) % rows, view_weight * alike, alike)
    alike = tl.where(others, alike, 0.0)
    whole = tl.sum(alike, 0)
    each = 1.0 / tl.where(whole > 0, whole, 1.0)
    likelihood = tl.sum(tl.where(alike > 0, alike * (logits - top - tl.log(total)), 0.0), 0) * each
    tl.store(loss + i, -likelihood)
    slope = tl.where(others, weight / total, 0.0) * tl.where(whole > 0, 1.0, 0.0) - alike * each
    tl.store(gradient + i * rows + j, slope * inverse_temperature / rows, mask=j < rows)


class _SupervisedContrastive(torch.autograd.Function):
    """Autograd around the kernel."""

    @staticmethod
    def forward(ctx, z, y, temperature, mixture, view_weight, narrow):
        """The mean over the anchors."""
        rows = len(z)
        products = z @ z.T
        each, gradient = torch.empty_like(products[0]), torch.empty_like(products)
        block = triton.next_power_of_2(rows)
        also, share = (y, each) if mixture is None else (part.contiguous() for part in mixture)
        narrowed = present = y
        if narrow is not None:
            narrowed, present = narrow.rows.view(torch.int8), among(y, narrow.classes).view(torch.int8)
        _anchor[(rows,)](
            products, y, also, share, narrowed, present, each, gradient, rows, 1.0 / temperature, float(view_weight),
            block=block, mixed=mixture is not None, weighs_views=view_weight != 1, narrowed=narrow is not None,
            num_warps=1 if block <= 512 else 8,
        )  # fmt: skip
        ctx.save_for_backward(z, gradient)
        return each.mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        """A product has two factors."""
        z, gradient = ctx.saved_tensors
        return (gradient + gradient.T) @ z * d_loss, None, None, None, None, None


def supervised_contrastive_loss(
    z: Tensor,
    y: Tensor,
    temperature: float,
    mixture: Mixture | None = None,
    view_weight: float = 1.0,
    narrow: Narrow | None = None,
) -> Tensor:
    """What `scrlearn.losses.supervised_contrastive_loss` gives, for float32 rows on a CUDA device."""
    return _SupervisedContrastive.apply(z.contiguous(), y.contiguous(), temperature, mixture, view_weight, narrow)


@triton.jit
def _row(logits, y, also, share, loss, gradient, rows, classes, block: tl.constexpr):
    """The cross-entropy of one row, as much of each of its two classes as it shows, and its gradient."""
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, block)
    there = j < classes
    x = tl.load(logits + i * classes + j, mask=there, other=float("-inf"))
    top = tl.max(x, 0)
    weight = tl.exp(x - top)
    total = tl.sum(weight, 0)
    much = tl.load(share + i)
    target = tl.where(j == tl.load(y + i), 1 - much, 0.0) + tl.where(j == tl.load(also + i), much, 0.0)
    tl.store(loss + i, -tl.sum(tl.where(target > 0, target * (x - top - tl.log(total)), 0.0), 0))
    tl.store(gradient + i * classes + j, (weight / total - target) / rows, mask=there)


class _CrossEntropy(torch.autograd.Function):
    """Autograd around the kernel."""

    @staticmethod
    def forward(ctx, logits, y, mixture):
        """The mean over the rows."""
        rows, classes = logits.shape
        gradient, each = torch.empty_like(logits), torch.empty_like(logits[:, 0])
        also, share = (part.contiguous() for part in mixture)
        block = triton.next_power_of_2(classes)
        _row[(rows,)](
            logits, y, also, share, each, gradient, rows, classes, block=block, num_warps=1 if block <= 512 else 8
        )
        ctx.save_for_backward(gradient)
        return each.mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        """By the logits alone."""
        (gradient,) = ctx.saved_tensors
        return gradient * d_loss, None, None


def cross_entropy_loss(logits: Tensor, y: Tensor, mixture: Mixture) -> Tensor:
    """What `scrlearn.losses.cross_entropy_loss` gives for rows of two classes, for float32 logits on a CUDA device."""
    return _CrossEntropy.apply(logits.contiguous(), y.contiguous(), mixture)
