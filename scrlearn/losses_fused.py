"""The supervised contrastive loss and its gradient on CUDA (Triton): a kernel in the place of forty.

The gradient is known in closed form. By the products of two rows i ≠ j it is, for an anchor i with positives P(i),

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
