"""The network as it was when the last task ended."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from scrlearn.models import Network


class Teacher:
    """A frozen copy of a learner's network, renewed in place, so a captured graph goes on asking the right one.

    Parameters
    ----------
    network
        The student.
    training
        Whether BatchNorm takes the statistics of the batch it is asked about, as it does in the student beside it. The
        paper's released code never switches its teachers to evaluation mode.

    Examples
    --------
    >>> from scrlearn.classifiers import SoftmaxHead
    >>> student = Network(torch.nn.Flatten(), head=SoftmaxHead(4, ahead=2))
    >>> teacher = Teacher(student)
    >>> _ = student.head.weight.data.zero_()
    >>> teacher.copy(student)
    >>> teacher.network.head.weight.any().item()
    False
    """

    def __init__(self, network: Network, training: bool = True) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False).train(training)

    @torch.no_grad()
    def copy(self, network: Network) -> None:
        """Become the network of this moment."""
        for own, new in zip(self._tensors(self.network), self._tensors(network), strict=True):
            own.copy_(new)

    @staticmethod
    def _tensors(network: Network) -> list[Tensor]:
        return [*network.parameters(), *network.buffers()]

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """What the teacher says; ``-inf`` for classes it does not know."""
        return self.network.logits(x)

    def reserve(self, classes: int) -> None:
        """Make room as the student did, so that their outputs stand side by side."""
        if self.network.head is not None and self.network.head.reserve(classes):
            self.network.requires_grad_(False)

    def forget(self, label: int) -> None:
        """A removed class is no longer taught."""
        if self.network.head is not None:
            self.network.head.active[label] = False

    def state_dict(self) -> dict[str, Any]:
        """The copy's weights."""
        return self.network.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved teacher stood."""
        self.network.load_state_dict(state)
