"""The supervised contrastive loss and its gradient on CUDA (Triton): a kernel in the place of forty.

The gradient is known in closed form. By the products of two rows i ≠ j it is, for an anchor i with positives P(i),

    (softmax over j of z_i · z_j / τ  −  [j ∈ P(i)] / |P(i)|) / (n τ).
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _anchor(products, y, loss, gradient, rows, inverse_temperature, block: tl.constexpr):
    """The loss of one anchor, and its gradient by the products with all other rows."""
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, block)
    others = (j < rows) & (j != i)
    logits = tl.load(products + i * rows + j, mask=others, other=0.0) * inverse_temperature
    top = tl.max(tl.where(others, logits, float("-inf")), 0)
    weight = tl.where(others, tl.exp(logits - top), 0.0)
    total = tl.sum(weight, 0)
    positive = others & (tl.load(y + j, mask=j < rows, other=0) == tl.load(y + i))
    share = 1.0 / tl.maximum(tl.sum(positive.to(tl.float32), 0), 1.0)
    any_positive = tl.sum(positive.to(tl.int32), 0) > 0
    likelihood = tl.sum(tl.where(positive, logits - top - tl.log(total), 0.0), 0) * share
    tl.store(loss + i, -likelihood)
    slope = tl.where(any_positive & others, weight / total, 0.0) - tl.where(positive, share, 0.0)
    tl.store(gradient + i * rows + j, slope * inverse_temperature / rows, mask=j < rows)


class _SupervisedContrastive(torch.autograd.Function):
    """Autograd around the kernel."""

    @staticmethod
    def forward(ctx, z, y, temperature):
        """The mean over the anchors."""
        rows = len(z)
        products = z @ z.T
        each, gradient = torch.empty_like(products[0]), torch.empty_like(products)
        block = triton.next_power_of_2(rows)
        _anchor[(rows,)](
            products, y, each, gradient, rows, 1.0 / temperature, block=block, num_warps=1 if block <= 512 else 8
        )
        ctx.save_for_backward(z, gradient)
        return each.mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        """A product has two factors."""
        z, gradient = ctx.saved_tensors
        return (gradient + gradient.T) @ z * d_loss, None, None


def supervised_contrastive_loss(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """What `scrlearn.losses.supervised_contrastive_loss` gives, for float32 rows on a CUDA device."""
    return _SupervisedContrastive.apply(z.contiguous(), y.contiguous(), temperature)
