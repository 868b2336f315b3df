"""Semantic drift compensation: class means that follow the encoder without any stored image."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scrlearn.classifiers import NearestClassMean
from scrlearn.errors import InputError

RECENT = 0.05
SMOOTHING = 0.1


def drift(prototypes: Tensor, before: Tensor, after: Tensor, width: float = 0.3) -> Tensor:
    r"""How far each prototype moved while the encoder changed, estimated from images at hand.

    .. math::
        \hat\Delta_c = \frac{\sum_i w_i\, (z_i^{after} - z_i^{before})}{\sum_i w_i}, \qquad
        w_i = \exp\Big(-\frac{\|z_i^{before} - \mu_c\|^2}{2 \sigma^2}\Big)

    Parameters
    ----------
    prototypes
        μ, one row a class (C×d).
    before, after
        Features of the same images by the encoder before and after it changed (N×d each).
    width
        σ: how near an image must be to a prototype to speak for it.

    Examples
    --------
    >>> before = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> after = before + torch.tensor([[0.0, 0.5], [0.0, 0.0]])  # only what is near the first prototype moves
    >>> drift(before, before, after).round(decimals=4)
    tensor([[0.0000, 0.5000],
            [0.0000, 0.0000]])
    """
    square = (before**2).sum(1) - 2 * prototypes @ before.T  # ‖μ‖² is the same for all images and cancels
    # softmax: the weights divided by their sum, which stays defined where all of them are tiny
    return torch.softmax(-square / (2 * width**2), dim=1) @ (after - before)


class DriftCompensation:
    """Prototypes that need no stored image: running class means, moved along with the encoder.

    *Classes of the running task.* After every step the batch's features join the means of their classes. An image
    counts at least a twentieth, so that what the encoder made of the class long ago is forgotten.

    *Classes of earlier tasks.* After every step the drift since the task began is estimated from the batch, by its
    features through the encoder of that moment and through the present one (`drift`). The estimates of the batches are
    averaged, the newest counting a tenth, and the prototypes stand where they stood when the task began plus this
    average. The paper does the same once, at the task's end, with all images of the task; in one pass they are not
    there any more. Adding up the drift of single steps instead adds up their errors: on split digits that was worse
    than no compensation.

    So it lives on `end_task`: without it every class counts as running. All features are L2-normalised.

    Parameters
    ----------
    features
        d, the length of the feature vectors.
    width
        σ of the weights; the paper's value is 0.3, for normalised features.
    classes
        Room for this many classes; `reserve` makes more.
    device
        Where the means live.

    References
    ----------
    Yu et al., "Semantic Drift Compensation for Class-Incremental Learning", CVPR 2020.

    Examples
    --------
    >>> store = DriftCompensation(features=2, classes=2)
    >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> store.observe(z, torch.tensor([0, 0]))
    >>> store.end_task()
    >>> turned = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])  # what the encoder makes of the same two images now
    >>> store.compensate(z, turned)
    >>> store.observe(turned, torch.tensor([1, 1]))
    >>> store.means[0]  # was (0.5, 0.5)
    tensor([-0.1000,  0.7000])
    """

    def __init__(
        self, features: int, width: float = 0.3, classes: int = 16, device: torch.device | str = "cpu"
    ) -> None:
        if width <= 0:
            raise InputError(f"drift_width is {width}; it must be above 0.")
        self.width = width
        self.means = torch.zeros(classes, features, device=device)
        self.counts = torch.zeros(classes, dtype=torch.int64, device=device)
        self.running = torch.zeros(classes, dtype=torch.bool, device=device)
        self.origin = torch.zeros(classes, features, device=device)
        self.moved = torch.zeros(classes, features, device=device)
        self.batches = torch.zeros((), device=device)

    def observe(self, features: Tensor, y: Tensor) -> None:
        """Let the features of a batch join the running means of their classes. Graph-safe."""
        classes = torch.arange(len(self.means), device=y.device)
        member = (classes[:, None] == y[None, :]).to(features.dtype)
        new = member.sum(1)
        self.counts += new.long()
        self.running |= new > 0
        share = torch.maximum(new / self.counts.clamp(min=1), 1 - (1 - RECENT) ** new)[:, None]
        self.means += share * (member @ features / new.clamp(min=1)[:, None] - self.means)

    def compensate(self, before: Tensor, after: Tensor) -> None:
        """Move the prototypes of earlier tasks: a batch's features when this task began, and now. Graph-safe."""
        self.batches += 1
        estimate = drift(self.origin, before, after, self.width)
        self.moved += (1 / self.batches).clamp(min=SMOOTHING) * (estimate - self.moved)
        earlier = ((self.counts > 0) & ~self.running)[:, None]
        self.means.copy_(torch.where(earlier, self.origin + self.moved, self.means))

    def end_task(self) -> None:
        """From here on, drift is counted from the encoder of this moment."""
        self.origin.copy_(self.means)
        self.moved.zero_()
        self.batches.zero_()
        self.running.zero_()

    def classifier(self, num_classes: int) -> NearestClassMean:
        """The nearest-class-mean classifier with these prototypes."""
        return NearestClassMean(F.normalize(self.means[:num_classes], dim=1), self.counts[:num_classes] > 0)

    def reserve(self, classes: int) -> None:
        """Make room for this many classes."""
        room = max(0, classes - len(self.counts))
        for name in ("means", "counts", "running", "origin", "moved"):
            old: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(room, *old.shape[1:])]))

    def forget(self, label: int) -> None:
        """Remove a class."""
        for tensor in (self.means, self.counts, self.running, self.origin, self.moved):
            tensor[label] = 0

    def state_dict(self) -> dict[str, Any]:
        """The prototypes, and what their compensation has come to."""
        names = ("means", "counts", "running", "origin", "moved", "batches")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved one stood."""
        self.reserve(len(state["counts"]))
        for name, value in state.items():
            getattr(self, name).copy_(value)
