"""The classifiers: a softmax head that grows with the classes, the nearest class mean, and that in a learned metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.randomness import derived_seed

SMALLEST_SHARE = 1e-4
INVERSE_TEMPERATURES = 0.1, 1e6  # cosines are rounded to about 1e-7
OFFSETS_COST = 1e-2


class SoftmaxHead(nn.Module):
    """A layer whose classes appear as they are met: linear, or by directions alone.

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
    temperature
        Above 0, scores are the cosines of features and weights divided by this, so that no class is preferred for the
        length of its weights (Hou et al., "Learning a Unified Classifier Incrementally via Rebalancing", CVPR 2019);
        the bias then plays no part. 0: a linear layer.

    Examples
    --------
    >>> head = SoftmaxHead(4, seed=0)
    >>> head.meet(torch.tensor([0, 2]))
    >>> torch.isfinite(head(torch.zeros(1, 4)))[0, :4].tolist()
    [True, False, True, False]
    """

    active: Tensor

    def __init__(self, features: int, seed: int = 0, ahead: int = 0, temperature: float = 0.0) -> None:
        super().__init__()
        self.features, self.seed, self.temperature = features, seed, temperature
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
        if self.temperature:
            scores = F.linear(F.normalize(features, dim=1), F.normalize(self.weight, dim=1)) / self.temperature
        else:
            scores = F.linear(features, self.weight, self.bias)
        return scores.masked_fill(~self.active, -torch.inf)


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
    centre
        What all classes have in common: it is taken from the normalised features, and what is left is normalised once
        more. None: nothing is.

    References
    ----------
    Mensink et al., 2013; Rebuffi et al. (iCaRL), 2017; Mai et al., 2021, Eq. 4 and 5; with a centre: Wang et al.,
    "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot Learning", 2019.

    Examples
    --------
    >>> ncm = NearestClassMean.fit(torch.eye(2), torch.tensor([0, 2]), num_classes=3)
    >>> ncm.scores(torch.tensor([[0.2, 0.9]])).argmax(1).item()
    2
    """

    prototypes: Tensor
    present: Tensor
    centre: Tensor | None = None

    @classmethod
    def fit(cls, features: Tensor, y: Tensor, num_classes: int, centred: bool = False) -> NearestClassMean:
        """Prototypes from features and their classes; rows with class −1 are left out.

        `centred`: the mean of the class means is the centre.
        """
        # a product with the one-hot labels: unlike a scatter it adds in a fixed order on every device
        member = (y[None, :] == torch.arange(num_classes, device=y.device)[:, None]).to(features.dtype)
        count, present = member.sum(1, keepdim=True).clamp(min=1), member.any(1)
        z, centre = F.normalize(features, dim=1), None
        if centred:
            centre = (member @ z / count).sum(0) / present.sum().clamp(min=1)
            z = F.normalize(z - centre, dim=1)
        return cls(F.normalize(member @ z / count, dim=1), present, centre)

    def directions(self, features: Tensor) -> Tensor:
        """What is compared with the prototypes: normalised features, seen from the centre if there is one."""
        z = F.normalize(features, dim=1)
        return z if self.centre is None else F.normalize(z - self.centre, dim=1)

    def temperature(self, features: Tensor, y: Tensor, default: float) -> float:
        """At which temperature cosines are logits: where the features that the prototypes were made from are told best.

        Each is compared with a prototype of its class made without it; see `leave_one_out` and `fit_temperature`.
        """
        scores, others = leave_one_out(self.directions(features), y, len(self.present))
        return fit_temperature(scores[others], y[others], default)

    def distances(self, features: Tensor) -> Tensor:
        """Euclidean distances of normalised features to the prototypes, ``inf`` where there is none."""
        cosine = self.directions(features) @ self.prototypes.T
        distance = (2 - 2 * cosine).clamp(min=0).sqrt()  # both sides have length 1
        return distance.masked_fill(~self.present, torch.inf)

    def scores(self, features: Tensor) -> Tensor:
        """Larger is nearer: cosine similarity, ``-inf`` where a class has no prototype."""
        cosine = self.directions(features) @ self.prototypes.T
        return cosine.masked_fill(~self.present, -torch.inf)


@dataclass(frozen=True)
class LinearDiscriminant:
    r"""Nearest class mean in the metric of the classes' shared covariance: linear discriminant analysis.

    All classes are taken as Gaussians with means μ and one covariance, with equal weight. The score of a class is its
    log-density up to what all classes have in common,

    .. math:: \mu_c^\top \Sigma^{-1} z - \tfrac{1}{2} \mu_c^\top \Sigma^{-1} \mu_c, \qquad
        \Sigma = (1 - \rho)\, S + \rho\, \frac{\operatorname{tr} S}{d} I, \qquad
        S = \frac{1}{n} \sum_i (z_i - \mu_{y_i})(z_i - \mu_{y_i})^\top

    for features z of length 1. A memory holds fewer images than S has entries, so S is drawn towards a multiple of the
    identity. ρ is given, or the value that Ledoit and Wolf estimate to be best from the same images; those were trained
    on, and vary less than new images do, so that a larger one may be better. With ρ = 1 the nearest mean by Euclidean
    distance wins. A class without any sample has no mean and is never predicted.

    Parameters
    ----------
    weight, bias
        Scores are ``z @ weight.T + bias``; one row a class.
    present
        Which classes have a mean.
    shrinkage
        ρ.

    References
    ----------
    Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004; for streams: Hayes
    and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR-W 2020.

    Examples
    --------
    >>> z = torch.tensor([[1.0, 0.3], [1.0, -0.3], [0.3, 1.0], [-0.3, 1.0]])
    >>> lda = LinearDiscriminant.fit(z, torch.tensor([0, 0, 2, 2]), num_classes=3)
    >>> lda.scores(torch.tensor([[0.2, 0.9]])).argmax(1).item()
    2
    """

    weight: Tensor
    bias: Tensor
    present: Tensor
    shrinkage: Tensor

    @classmethod
    def fit(cls, features: Tensor, y: Tensor, num_classes: int, shrinkage: float = 0.0) -> LinearDiscriminant:
        """Means and metric from features and their classes; a shrinkage of 0 is estimated."""
        z = F.normalize(features, dim=1).double()  # the covariance of few images is badly conditioned
        member = (y[None, :] == torch.arange(num_classes, device=y.device)[:, None]).double()
        means = (member @ z) / member.sum(1, keepdim=True).clamp(min=1)
        covariance, share = shrunk_covariance(z - means[y], shrinkage)
        weight = torch.linalg.solve(covariance, means.T).T
        bias = -(weight * means).sum(1) / 2
        return cls(weight, bias, member.any(1), share)

    def scores(self, features: Tensor) -> Tensor:
        """Log-density of each class up to a constant, ``-inf`` where a class has no mean."""
        scores = F.normalize(features, dim=1).double() @ self.weight.T + self.bias
        return scores.float().masked_fill(~self.present, -torch.inf)


def leave_one_out(features: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Cosine similarities of images to the prototypes made from them, each image's own prototype without itself.

    Without an image, the sum of its class is the sum less the image, so this costs no more than the prototypes do. Also
    given: which images have a class with another image, and so can be compared with it at all.

    >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> leave_one_out(z, torch.tensor([0, 0, 1]), num_classes=2)
    (tensor([[0.8000, 0.0000],
            [0.8000, 0.6000],
            [0.3162, 1.0000]]), tensor([ True,  True, False]))
    """
    features = F.normalize(features, dim=1)
    ncm = NearestClassMean.fit(features, y, num_classes)
    member = (y[None, :] == torch.arange(num_classes, device=y.device)[:, None]).to(features.dtype)
    others = member.sum(1)[y] > 1
    own = F.normalize((member @ features)[y] - features, dim=1)
    scores = ncm.scores(features)
    rows = torch.arange(len(y), device=y.device)[others]
    scores[rows, y[others]] = (own * features).sum(1)[others]
    return scores, others


def fit_temperature(scores: Tensor, y: Tensor, default: float) -> float:
    r"""The temperature T for which ``softmax(scores / T)`` says best how likely each class is.

    It minimises the negative log-likelihood of the classes, which is convex in 1/T. As Platt does for two classes, the
    right class has the weight 1 − 1/(n + 2) of n samples and the others share the rest, so that samples that are all
    right do not make everything certain.

    Parameters
    ----------
    scores, y
        One row a sample, best of samples that the scores were not made from; and their classes. Classes that have
        ``-inf`` everywhere are left out.
    default
        What to give where nothing can be told: no samples, one class, or the same scores for all classes.

    References
    ----------
    Guo et al., "On Calibration of Modern Neural Networks", ICML 2017; Platt, "Probabilistic Outputs for Support Vector
    Machines", 1999.

    Examples
    --------
    >>> round(fit_temperature(torch.eye(2).repeat(9, 1), torch.tensor([0, 1] * 9), default=1.0), 3)
    0.34
    """
    present = torch.isfinite(scores).all(0)
    if len(y) == 0 or int(present.sum()) < 2:
        return default
    s = scores[:, present].double()
    s = s - s.mean(1, keepdim=True)  # then the scores of the others add up to minus the right one's
    if not bool(s.any()):
        return default
    right = s.gather(1, (present.cumsum(0) - 1)[y][:, None])[:, 0]
    rest = 1 / (len(y) + 2)
    target = float(((1 - rest) * right - rest * right / (s.shape[1] - 1)).mean())
    low, high = INVERSE_TEMPERATURES
    inverse = 1 / default
    for _ in range(60):  # Newton's steps, and halves of what is left where one leads outside
        p = torch.softmax(inverse * s, dim=1)
        mean = (p * s).sum(1)
        slope = float(mean.mean()) - target
        curvature = float(((p * s * s).sum(1) - mean.square()).mean())
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        before, inverse = inverse, inverse - slope / curvature if curvature > 0 else math.inf
        if not low < inverse < high:
            inverse = math.sqrt(low * high)
        if abs(inverse - before) <= 1e-4 * inverse:
            break
    return 1 / inverse


def fit_offsets(scores: Tensor, shares: Tensor, default: float) -> Tensor:
    r"""What to add to the score of each class, so that no class is said too readily.

    Images are told by :math:`p_{ic} = \sigma(\alpha s_i + \beta)_c`. The scale α and the offsets β minimise

    .. math:: -\frac{1}{n} \sum_i \sum_c w_c t_{ic} \log p_{ic} + \lambda \sum_c \beta_c^2, \qquad \lambda = 10^{-2}

    where :math:`t_{ic}` is how much of image i is of class c, and the weights :math:`w_c` let all classes count the
    same: a class of which three images are stored is not a rare one to those who ask. This is convex, and where the
    offsets are best each class is predicted as much as it is there (up to λ). They are given in the unit of the scores,
    β/α.

    Parameters
    ----------
    scores
        One row an image, best of images that nobody has learned by heart. Classes that have ``-inf`` anywhere, or are
        in no image, get no offset.
    shares
        How much each image is of each class.
    default
        A temperature to begin with.

    Returns
    -------
    One number a class, 0 where nothing can be told: no images, one class, or scores that say nothing of the classes.

    Examples
    --------
    >>> scores = torch.tensor([[2.0, 2.5], [3.0, 1.5], [2.0, 3.5], [1.0, 4.0]])
    >>> offsets = fit_offsets(scores, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), default=1.0)
    >>> (scores + offsets).argmax(1).tolist()
    [0, 0, 1, 1]
    """
    offsets, present = scores.new_zeros(scores.shape[1]), torch.isfinite(scores).all(0) & shares.any(0)
    if int(present.sum()) < 2:
        return offsets
    s, t = scores[:, present].double(), shares[:, present].double()
    s = s - s.mean(1, keepdim=True)  # what all classes have in common says nothing of them
    there = t.sum(0)
    t = t * (there.mean() / there)
    classes = s.shape[1]
    point = torch.cat([s.new_tensor([1 / default]), s.new_zeros(classes)])

    def loss(point: Tensor) -> Tensor:
        log_probability = torch.log_softmax(point[0] * s + point[1:], dim=1)
        return -(t * log_probability).sum(1).mean() + OFFSETS_COST * point[1:].square().sum()

    now = loss(point)
    for _ in range(50):  # Newton's steps, halved until they go down
        p = torch.softmax(point[0] * s + point[1:], dim=1) * t.sum(1, keepdim=True)
        gradient = torch.cat([((p - t) * s).sum()[None], (p - t).sum(0)]) / len(s)
        gradient[1:] += 2 * OFFSETS_COST * point[1:]
        step = torch.linalg.solve(_curvature(s, p), gradient)
        if float(gradient @ step) < 1e-12:
            break
        while float(after := loss(point - step)) > float(now) and float(step.abs().max()) > 1e-9:
            step = step / 2
        point, now = point - step, after
    if float(point[0]) <= 0:
        return offsets
    offsets[present] = ((point[1:] - point[1:].mean()) / point[0]).to(offsets.dtype)
    return offsets


def _curvature(s: Tensor, p: Tensor) -> Tensor:
    """The second derivatives of that loss by the scale and the offsets."""
    whole = p.sum(1, keepdim=True).clamp(min=1e-12)
    mean = (p * s).sum(1, keepdim=True) / whole
    second = p.new_zeros(1 + s.shape[1], 1 + s.shape[1])
    second[0, 0] = (p * (s - mean).square()).sum()
    second[0, 1:] = second[1:, 0] = (p * (s - mean)).sum(0)
    second[1:, 1:] = torch.diag(p.sum(0)) - p.T @ (p / whole)
    second /= len(s)
    second += torch.diag(torch.cat([second.new_tensor([1e-9]), second.new_full((s.shape[1],), 2 * OFFSETS_COST)]))
    return second


def shrunk_covariance(centred: Tensor, share: float = 0.0) -> tuple[Tensor, Tensor]:
    """The covariance of centred vectors (one a row), drawn towards a multiple of the identity; and how much of it.

    Where the share is not given, it is the estimate of Ledoit and Wolf (2004), but at least 10⁻⁴, so that there is an
    inverse. Vectors that are all zero give a tiny multiple of the identity.

    >>> covariance, share = shrunk_covariance(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    >>> covariance
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    count, length = centred.shape
    covariance = centred.T @ centred / count
    identity = torch.eye(length, dtype=centred.dtype, device=centred.device)
    size = covariance.diagonal().mean()
    if share:
        chosen = torch.full_like(size, share)
    else:
        distance = (covariance - size * identity).square().sum()
        # how far the vectors' own outer products lie from their mean, which is the covariance
        error = (centred.square().sum(1).square().mean() - covariance.square().sum()) / count
        chosen = torch.where(distance > 0, (error / distance).clamp(SMALLEST_SHARE, 1), 1.0)
    return (1 - chosen) * covariance + chosen * size.clamp(min=1e-12) * identity, chosen
