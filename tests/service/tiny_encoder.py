"""An encoder by name, as `scr serve --encoder tiny_encoder:tiny` finds it."""

import torch
from torch import nn


def tiny() -> nn.Module:
    """An encoder that learns in a millisecond, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
