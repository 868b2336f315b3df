"""EWC++: weights that mattered for the tasks before are held where they were."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scrlearn.errors import InputError
from scrlearn.learners.base import fitted
from scrlearn.learners.keeper import Keeper
from scrlearn.losses import cross_entropy_loss


class EWC(Keeper):
    r"""Elastic Weight Consolidation with a running Fisher information (EWC++).

    The loss on a batch is

    .. math:: \mathrm{CE} + \lambda \sum_k F_k \, (\theta_k - \theta^*_k)^2

    where θ* are the weights at the end of the previous task and F says how much each of them mattered. Its running
    estimate is made of the squared gradients of the batch's cross-entropy: before the 50th, 100th, … batch of a task
    the mean of those collected is folded in, :math:`\hat F \leftarrow (1 - \alpha) \hat F + \alpha \, \overline{g^2}`
    (a task too short for that is folded in when it ends), and at the task's end F is the estimate scaled to [0, 1] over
    all weights. Without `end_task` there is no penalty, and this is fine-tuning. Images are stored for the
    nearest-class-mean classifier only, never trained on.

    The step of each weight is divided by 1 + 2 η λ F, which makes it the exact step for the penalty: with a learning
    rate η = 0.1 and λ above 10 the plain one overshoots ever further from θ* and ends in NaN, because the largest F is
    1. (In the paper's released code the step is the plain one and the penalty's gradient joins the squares; of the
    values it was tuned over, 0, 100 and 1000, only 0 is stable, and there the two are the same.)

    Parameters
    ----------
    strength
        λ. The paper's row was made with 0, which is fine-tuning.
    alpha
        α, the share of the newest batches in the running Fisher information.
    fold_every
        Batches between two foldings.
    others
        See `Keeper` (who is kept) and `Learner`.

    References
    ----------
    Chaudhry et al., "Riemannian Walk for Incremental Learning", ECCV 2018; Kirkpatrick et al. (EWC), PNAS 2017.

    Examples
    --------
    >>> learner = EWC(image_shape=(1, 8, 8), strength=10.0, fold_every=2, seed=0)
    >>> x = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    >>> for _ in range(2):
    ...     _ = learner.learn(x, torch.arange(10) % 2)
    >>> learner.end_task()
    >>> max(f.max().item() for f in learner.importance)
    1.0
    """

    trains_on_memory = False
    needs_task_ends = True

    def __init__(self, *, strength: float = 100.0, alpha: float = 0.9, fold_every: int = 50, **others: Any) -> None:
        for name, value, good in (
            ("strength", strength, strength >= 0),
            ("alpha", alpha, 0 < alpha <= 1),
            ("fold_every", fold_every, fold_every >= 1),
        ):
            if not good:
                raise InputError(f"{name} is {value}, which is out of range.")
        super().__init__(**others)
        self.strength, self.alpha, self.fold_every = strength, alpha, fold_every
        self.squares = [torch.zeros_like(w) for w in self.weights]
        self.fisher = [torch.zeros_like(w) for w in self.weights]
        self.importance = [torch.zeros_like(w) for w in self.weights]
        self.anchor = [w.detach().clone() for w in self.weights]
        self.batches_of_task = 0

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on the stream batch with the penalty; its squared gradient joins the Fisher information."""
        if self._folds():
            self._fold(self.fold_every)
        loss = cross_entropy_loss(self.network.logits(x), y)
        gradient = self.gradient(loss)
        torch._foreach_addcmul_(self.squares, gradient, gradient)
        if self.tasks and self.strength:
            self._add_penalty(gradient)
        self.descend(gradient)
        self.keep(x, y)
        return loss

    @torch.no_grad()
    def _add_penalty(self, gradient: list[Tensor]) -> None:
        """Add the gradient of λ Σ F (θ − θ*)², and shorten each weight's step by 1 + 2 η λ F."""
        pull = torch._foreach_sub(self.weights, self.anchor)
        torch._foreach_mul_(pull, self.importance)
        torch._foreach_add_(gradient, pull, alpha=2 * self.strength)
        divisor = torch._foreach_mul(self.importance, 2 * self.learning_rate * self.strength)
        torch._foreach_add_(divisor, 1.0)
        torch._foreach_div_(gradient, divisor)

    def _folds(self) -> bool:
        return (self.batches_of_task + 1) % self.fold_every == 0

    def _fold(self, batches: int) -> None:
        """Put the mean of the collected squares into the running estimate, and collect anew."""
        torch._foreach_mul_(self.fisher, 1 - self.alpha)
        torch._foreach_add_(self.fisher, self.squares, alpha=self.alpha / batches)
        torch._foreach_zero_(self.squares)

    def end_task(self) -> None:
        """Scale the running estimate to [0, 1] over all weights, and hold them where they are now."""
        super().end_task()
        if 0 < self.batches_of_task < self.fold_every:
            self._fold(self.batches_of_task)
        low = torch.stack([f.min() for f in self.fisher]).min()
        high = torch.stack([f.max() for f in self.fisher]).max()
        span = (high - low).clamp(min=1e-32)  # before the first folding all of it is zero
        for importance, fisher in zip(self.importance, self.fisher, strict=True):
            importance.copy_((fisher - low) / span)
        torch._foreach_copy_(self.anchor, [w.detach() for w in self.weights])
        self.batches_of_task = 0

    def advance(self, images: int) -> None:
        """Count the batches of the task."""
        super().advance(images)
        self.batches_of_task += 1

    def signature(self, images: int) -> Hashable:
        """Whether this batch folds, and whether there is a penalty yet."""
        return super().signature(images), self._folds(), self.tasks > 0

    def _after_growth(self) -> None:
        """New rows of the head matter nothing yet and are held at their first values."""
        super()._after_growth()
        for name in ("squares", "fisher", "importance"):
            setattr(self, name, [fitted(t, w) for t, w in zip(getattr(self, name), self.weights, strict=True)])
        first = [w.detach().clone() for w in self.weights]
        for old, new in zip(self.anchor, first, strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
        self.anchor = first

    def state_dict(self) -> dict[str, Any]:
        """The Fisher information and the old weights too."""
        state = super().state_dict() | {"batches_of_task": self.batches_of_task}
        for name in ("squares", "fisher", "importance", "anchor"):
            state[name] = {str(i): t for i, t in enumerate(getattr(self, name))}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The Fisher information and the old weights too."""
        super().load_state_dict(state)
        self.batches_of_task = state["batches_of_task"]
        for name in ("squares", "fisher", "importance", "anchor"):
            for i, tensor in enumerate(getattr(self, name)):
                tensor.copy_(fitted(state[name][str(i)], tensor))
