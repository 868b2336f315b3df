"""Projection heads: where the contrastive loss looks at the features from."""

from __future__ import annotations

from torch import nn

from scrlearn.errors import InputError, suggest

PROJECTIONS = ("mlp", "linear", "none")


def projection_head(kind: str, features: int, dim: int = 128) -> nn.Module:
    """The projection network of the paper: an MLP with one hidden layer, one linear layer, or nothing.

    >>> projection_head("mlp", 160)
    Sequential(
      (0): Linear(in_features=160, out_features=160, bias=True)
      (1): ReLU()
      (2): Linear(in_features=160, out_features=128, bias=True)
    )
    """
    if kind == "mlp":
        return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, dim))
    if kind == "linear":
        return nn.Linear(features, dim)
    if kind == "none":
        return nn.Identity()
    raise InputError(f'There is no projection "{kind}".{suggest(kind, PROJECTIONS)}')
