"""The loss of each image by itself, for policies that rank images by it.

A network with a projection is trained by the contrastive loss, any other by cross-entropy. A softmax probe beside a
projection is left out, so that adding one never changes what is replayed or kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from scrlearn.learners.base import Learner


def losses_per_image(learner: Learner, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each image: its cross-entropy, or its term of the contrastive loss over this batch, as it is."""
    network = learner.network
    if network.projection is None:
        return F.cross_entropy(network.logits(x), y, reduction="none")
    z = network.project(network.features(x))
    return contrastive_losses(z, y, z, y, temperature_of(learner))


def contrastive_losses(z: Tensor, y: Tensor, keys: Tensor, key_labels: Tensor, temperature: float) -> Tensor:
    """The terms of the supervised contrastive loss, one an anchor; the first keys are the anchors themselves.

    >>> z = torch.eye(2)
    >>> contrastive_losses(z, torch.tensor([0, 1]), z, torch.tensor([0, 1]), 1.0).tolist()  # no positives
    [0.0, 0.0]
    """
    itself = torch.eye(len(z), len(keys), dtype=torch.bool, device=z.device)
    logits = (z @ keys.T / temperature).masked_fill(itself, -torch.inf)
    log_probability = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    positive = (y[:, None] == key_labels[None, :]) & ~itself
    # the minus inside: an anchor without positives gives 0, not -0
    return (-log_probability).masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)


def temperature_of(learner: Learner) -> float:
    """τ of the learner's objective."""
    return float(getattr(getattr(learner, "objective", None), "temperature", 0.1))
