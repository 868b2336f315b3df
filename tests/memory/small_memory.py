"""A memory without a learner around it, and images that carry their number in the stream."""

from types import SimpleNamespace

import numpy as np
import torch
from scipy import stats

from scrlearn.memory import Memory

SHAPE = (1, 1, 2)


def numbered(start, count):
    numbers = torch.arange(start, start + count)
    return torch.stack([numbers // 256, numbers % 256], dim=1).to(torch.uint8).view(-1, *SHAPE)


def numbers_of(images):
    pairs = images.flatten(1).long()
    return (pairs[:, 0] * 256 + pairs[:, 1]).tolist()


def owner(capacity, seed=0, memory_batch=10):
    """What a policy needs to see of a learner."""
    return SimpleNamespace(
        memory=Memory(capacity, SHAPE, "cpu"),
        generator=torch.Generator().manual_seed(seed),
        memory_batch=memory_batch,
    )


def offer(learner, update, start, labels):
    """Offer images with consecutive numbers to the memory, as a step would."""
    y = torch.as_tensor(labels)
    update(learner, numbered(start, len(y)), y)
    learner.memory.advance(len(y))


def filled(size, capacity=None, seed=0):
    """A memory that holds images 0, 1, 2, …, image i of class i."""
    learner = owner(size if capacity is None else capacity, seed)
    learner.memory.write(torch.arange(size), numbered(0, size), torch.arange(size))
    learner.memory.advance(size)
    return learner


def p_value_of_uniform_subsets(times, rounds):
    """Chi-square test that each of n things is equally likely to be in a subset, all subsets having one size.

    Inside one subset the things exclude each other, which shrinks the statistic of independent ones by (n − 1) / n.
    """
    times = np.asarray(times, dtype=np.float64)
    n, share = len(times), times.sum() / len(times) / rounds
    statistic = ((times - rounds * share) ** 2).sum() / (rounds * share * (1 - share)) * (n - 1) / n
    return stats.chi2.sf(statistic, n - 1)
