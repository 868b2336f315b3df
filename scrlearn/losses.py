"""The losses: supervised contrastive (Eq. 3 of the paper), distillation, cross-entropy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 4096  # of the loss in one kernel, which takes all rows at once


class Mixture(NamedTuple):
    """What rows are that show two images: `other`, the class of the second, and `share`, how much of the row it is."""

    other: Tensor
    share: Tensor


class Narrow(NamedTuple):
    """Rows that are told from the classes of some alone: which `rows` (true or false for each), and those `classes`."""

    rows: Tensor
    classes: Tensor


def supervised_contrastive_loss(
    z: Tensor,
    y: Tensor,
    temperature: float = 0.1,
    mixture: Mixture | None = None,
    view_weight: float = 1.0,
    narrow: Narrow | None = None,
) -> Tensor:
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
    mixture
        Where rows are of two classes each: what else they are. Every other row j is then a positive of i as much as the
        two are alike, and its term counts so much in the mean:

        .. math:: w_{ij} = \sum_c p_{ic} \, p_{jc}

        where :math:`p_{ic}` is how much of row i is of class c. For rows of one class this is 1 or 0, and the loss the
        one above.
    view_weight
        How many times as much the other view of the same image counts as another positive. Other than 1, the rows must
        be a view of each image, and then the other view of each, in the same order.
    narrow
        Anchors whose A(i) holds only rows of some classes, by `y`.

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
        return fused(z, y, temperature, mixture, view_weight, narrow)
    itself = left_out = torch.eye(len(z), dtype=torch.bool, device=z.device)
    if narrow is not None:
        left_out = itself | (narrow.rows[:, None] & ~among(y, narrow.classes)[None, :])
    logits = (z @ z.T / temperature).masked_fill(left_out, -torch.inf)
    some = ~left_out.all(1, keepdim=True)  # a sum over nothing has no logarithm
    log_probability = logits - torch.where(some, torch.logsumexp(logits, dim=1, keepdim=True), 0.0)
    if mixture is not None or view_weight != 1:
        alike = _alike(y, mixture, z.dtype).masked_fill(left_out, 0.0)
        if view_weight != 1:
            alike = torch.where(itself.roll(len(z) // 2, dims=1), view_weight * alike, alike)
        whole = alike.sum(1)
        likelihood = (log_probability.masked_fill(left_out, 0.0) * alike).sum(1) / torch.where(whole > 0, whole, 1.0)
        return -likelihood.mean()
    positive = (y[:, None] == y[None, :]) & ~left_out
    # masked_fill before the sum: -inf on the diagonal times 0 would be NaN
    likelihood = log_probability.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    return -likelihood.mean()


def among(y: Tensor, classes: Tensor) -> Tensor:
    """Which rows are of these classes."""
    return (y[:, None] == classes[None, :]).any(1)


def _alike(y: Tensor, mixture: Mixture | None, dtype: torch.dtype) -> Tensor:
    """How much two rows are of one class, for all pairs."""
    if mixture is None:
        return (y[:, None] == y[None, :]).to(dtype)
    parts = ((y, 1 - mixture.share), (mixture.other, mixture.share))
    terms = [
        (classes[:, None] == others[None, :]) * (much[:, None] * as_much[None, :]).to(dtype)
        for classes, much in parts
        for others, as_much in parts
    ]
    return terms[0] + terms[1] + terms[2] + terms[3]


@functools.cache
def _fused() -> Callable[[Tensor, Tensor, float, Mixture | None, float, Narrow | None], Tensor] | None:
    """The loss as one kernel for CUDA; None without Triton."""
    try:
        from scrlearn.losses_fused import supervised_contrastive_loss as fused
    except ImportError:
        return None
    return fused


@functools.cache
def _fused_cross_entropy() -> Callable[[Tensor, Tensor, Mixture], Tensor] | None:
    """Cross-entropy of rows of two classes as one kernel for CUDA; None without Triton."""
    try:
        from scrlearn.losses_fused import cross_entropy_loss as fused
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


def cross_entropy_loss(
    logits: Tensor, y: Tensor, mixture: Mixture | None = None, narrow: Narrow | None = None
) -> Tensor:
    """Mean cross-entropy; columns of classes not seen yet hold ``-inf`` and take no part.

    Rows that show two images (`mixture`) have the cross-entropies of both classes, each as much as it is there. Rows
    that are told from some classes alone (`narrow`) leave the others' columns out.
    """
    suits = narrow is None and logits.is_cuda and logits.dtype == torch.float32
    if mixture is not None and suits and (fused := _fused_cross_entropy()) is not None:
        return fused(logits, y, mixture)
    if narrow is not None:
        others = torch.ones_like(logits[0], dtype=torch.bool).index_fill_(0, narrow.classes, False)
        logits = logits.masked_fill(narrow.rows[:, None] & others[None, :], -torch.inf)
    if mixture is None:
        return F.cross_entropy(logits, y)
    log_probability = torch.log_softmax(logits, dim=1)
    own, other = (log_probability.gather(1, classes[:, None]).squeeze(1) for classes in (y, mixture.other))
    other = torch.where(mixture.share > 0, other, own)  # a class that is not there may be one that is left out
    return -torch.lerp(own, other, mixture.share.to(own.dtype)).mean()
