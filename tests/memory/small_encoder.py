"""Digits, and a quick encoder for many short runs on them."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from scrlearn.randomness import seeded

SHAPE = (1, 8, 8)


class Small(nn.Module):
    """A quick encoder with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 24),
        )

    def forward(self, x):
        return self.layers(x)


def small():
    with seeded(0, "test"):
        return Small()


def digits(start, stop):
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy((images[start:stop] * 15).astype(np.uint8)).view(-1, *SHAPE)
    return x, torch.from_numpy(labels[start:stop])
