"""The losses: supervised contrastive (Eq. 3 of the paper) and distillation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 4096  # of the loss in one kernel, which takes all rows at once


def supervised_contrastive_loss(z: Tensor, y: Tensor, temperature: float = 0.1) -> Tensor:
    r"""Supervised contrastive loss, averaged over the anchors.

    .. math::
        \frac{1}{|I|} \sum_{i \in I} \frac{-1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{\exp(z_i \cdot z_p / \tau)}{\sum_{j \in A(i)} \exp(z_i \cdot z_j / \tau)}

    Parameters
    ----------
    z
        Projections, already L2-normalised; the rows are all views of all images (n × d).
    y
        The class of each row (n).
    temperature
        τ: small values separate the classes more sharply.

    An anchor without any positive adds nothing (its sum over P(i) is empty), so the loss stays finite.

    References
    ----------
    Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020; Mai et al., 2021, Eq. 3.

    Examples
    --------
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> round(supervised_contrastive_loss(z, torch.tensor([0, 0, 1, 1]), temperature=1.0).item(), 4)
    0.5514
    """
    if z.is_cuda and z.dtype == torch.float32 and len(z) <= MOST_ROWS and (fused := _fused()) is not None:
        return fused(z, y, temperature)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    log_probability = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    positive = (y[:, None] == y[None, :]) & ~itself
    # masked_fill before the sum: -inf on the diagonal times 0 would be NaN
    likelihood = log_probability.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    return -likelihood.mean()


@functools.cache
def _fused() -> Callable[[Tensor, Tensor, float], Tensor] | None:
    """The loss as one kernel for CUDA; None without Triton."""
    try:
        from scrlearn.losses_fused import supervised_contrastive_loss as fused
    except ImportError:
        return None
    return fused


def distillation_loss(
    student: Tensor, teacher: Tensor, temperature: float = 2.0, weight: Tensor | None = None
) -> Tensor:
    r"""How far the student's softened outputs are from the teacher's, times T².

    .. math:: T^2 \cdot \mathrm{KL}\big(\sigma(t / T) \,\|\, \sigma(s / T)\big)

    Columns where the teacher has no class (``-inf``) are left out on both sides; a teacher without any class teaches
    nothing, and the loss is 0. Averaged over the rows, each times its `weight` where one is given.

    References
    ----------
    Hinton et al., "Distilling the Knowledge in a Neural Network", 2015.
    """
    known = torch.isfinite(teacher)
    some = known.any(dim=1, keepdim=True)  # a softmax over nothing would be NaN
    teacher = torch.where(some, teacher, 0.0)
    student = torch.where(some, student.masked_fill(~known, -torch.inf), 0.0)
    target = torch.softmax(teacher / temperature, dim=1)
    log_target = torch.log_softmax(teacher / temperature, dim=1).masked_fill(~known, 0.0)
    log_student = torch.log_softmax(student / temperature, dim=1)
    divergence = target * (log_target - log_student.masked_fill(~known, 0.0))
    each = divergence.sum(1)
    return (each if weight is None else weight * each).mean() * temperature**2


def cross_entropy_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy; columns of classes not seen yet hold ``-inf`` and take no part."""
    return F.cross_entropy(logits, y)
