"""The two classifiers: a softmax head that grows with the classes, and the nearest class mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.randomness import derived_seed


class SoftmaxHead(nn.Module):
    """A linear layer whose classes appear as they are met.

    Rows are kept ready ahead of use, in a capacity that doubles; a class that has not been met has the score
    ``-inf``, so it is neither predicted nor trained as a negative. Each row starts from values that depend on the
    seed and its class alone, so a result does not depend on when the capacity grew.

    Parameters
    ----------
    features
        Length of the feature vectors.
    seed
        Seed of the rows' first values.
    ahead
        Classes that count as met from the start ("classes ahead of time"): the released code of the paper gives all
        classes of the data set here, so that classes still to come are trained as negatives.

    Examples
    --------
    >>> head = SoftmaxHead(4, seed=0)
    >>> head.meet(torch.tensor([0, 2]))
    >>> torch.isfinite(head(torch.zeros(1, 4)))[0, :4].tolist()
    [True, False, True, False]
    """

    active: Tensor

    def __init__(self, features: int, seed: int = 0, ahead: int = 0) -> None:
        super().__init__()
        self.features, self.seed = features, seed
        self.weight = nn.Parameter(torch.empty(0, features))
        self.bias = nn.Parameter(torch.empty(0))
        self.register_buffer("active", torch.zeros(0, dtype=torch.bool))
        self.reserve(max(16, ahead))
        self.active[:ahead] = True

    @property
    def capacity(self) -> int:
        """Classes there is room for without growing."""
        return len(self.weight)

    def reserve(self, classes: int) -> bool:
        """Make room for this many classes; says whether the layer had to grow."""
        if classes <= self.capacity:
            return False
        new = max(classes, 2 * self.capacity)
        rows = [self._first_row(c) for c in range(self.capacity, new)]
        first = torch.stack(rows).to(self.weight.device)
        self.weight = nn.Parameter(torch.cat([self.weight.data, first[:, :-1]]))
        self.bias = nn.Parameter(torch.cat([self.bias.data, first[:, -1]]))
        self.active = torch.cat([self.active, self.active.new_zeros(new - len(self.active))])
        return True

    def _first_row(self, label: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "head", label))
        bound = 1 / math.sqrt(self.features)
        return torch.rand(self.features + 1, generator=generator) * 2 * bound - bound

    def meet(self, y: Tensor) -> None:
        """From now on these classes can be predicted."""
        self.active.index_fill_(0, y, True)

    def forward(self, features: Tensor) -> Tensor:
        """Scores of all classes, ``-inf`` for those not met."""
        return F.linear(features, self.weight, self.bias).masked_fill(~self.active, -torch.inf)


@dataclass(frozen=True)
class NearestClassMean:
    """The nearest-class-mean classifier: the class whose prototype is nearest to the image's feature vector.

    Features are L2-normalised, averaged per class, and normalised again. A class without any sample has no
    prototype and is never predicted.

    Parameters
    ----------
    prototypes
        One row a class.
    present
        Which classes have a prototype.

    References
    ----------
    Mensink et al., 2013; Rebuffi et al. (iCaRL), 2017; Mai et al., 2021, Eq. 4 and 5.

    Examples
    --------
    >>> ncm = NearestClassMean.fit(torch.eye(2), torch.tensor([0, 2]), num_classes=3)
    >>> ncm.scores(torch.tensor([[0.2, 0.9]])).argmax(1).item()
    2
    """

    prototypes: Tensor
    present: Tensor

    @classmethod
    def fit(cls, features: Tensor, y: Tensor, num_classes: int) -> NearestClassMean:
        """Prototypes from features and their classes; rows with class −1 are left out."""
        features = F.normalize(features, dim=1)
        # a product with the one-hot labels: unlike a scatter it adds in a fixed order on every device
        member = (y[None, :] == torch.arange(num_classes, device=y.device)[:, None]).to(features.dtype)
        prototypes = F.normalize((member @ features) / member.sum(1, keepdim=True).clamp(min=1), dim=1)
        return cls(prototypes, member.any(1))

    def distances(self, features: Tensor) -> Tensor:
        """Euclidean distances of normalised features to the prototypes, ``inf`` where there is none."""
        cosine = F.normalize(features, dim=1) @ self.prototypes.T
        distance = (2 - 2 * cosine).clamp(min=0).sqrt()  # both sides have length 1
        return distance.masked_fill(~self.present, torch.inf)

    def scores(self, features: Tensor) -> Tensor:
        """Larger is nearer: cosine similarity, ``-inf`` where a class has no prototype."""
        cosine = F.normalize(features, dim=1) @ self.prototypes.T
        return cosine.masked_fill(~self.present, -torch.inf)
