"""The paper's encoder: a ResNet18 with a third of the channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that also takes a single value per channel.

    A stream may deliver one tiny image at a time; its variance is undefined, so the running statistics are used.
    Counting batches is left out: with a fixed momentum nothing reads the count, and it costs a kernel a layer.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the batch's statistics while training, with the running ones otherwise."""
        batch = self.training and x.numel() > x.shape[1]
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, batch, 0.1, self.eps)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = BatchNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = BatchNorm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), BatchNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ReducedResNet18(nn.Module):
    """Reduced ResNet18: 3×3 stem, no max-pool, 2-2-2-2 basic blocks of 20, 40, 80, 160 channels, 4×4 average pool.

    Gives 160 features for 32×32 images and 640 for 84×84. Where the last map is smaller than 4×4 (images under
    28×28) the whole map is averaged.

    Parameters
    ----------
    channels
        Channels of the images (3, or 1 for grey ones).
    width
        Channels of the first stage; 64 is the full ResNet18.

    References
    ----------
    He et al., 2016; reduced as in Lopez-Paz and Ranzato, "Gradient Episodic Memory", NeurIPS 2017.

    Examples
    --------
    >>> ReducedResNet18()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 160])
    """

    def __init__(self, channels: int = 3, width: int = 20) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = BatchNorm(width)
        blocks: list[nn.Module] = []
        channels_in = width
        for stage, stride in enumerate((1, 2, 2, 2)):
            for repeat in range(2):
                blocks.append(BasicBlock(channels_in, width * 2**stage, stride if repeat == 0 else 1))
                channels_in = width * 2**stage
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N×C×H×W, floats) to features (N×d)."""
        out = self.blocks(torch.relu(self.bn1(self.conv1(x))))
        pool = (min(4, out.shape[2]), min(4, out.shape[3]))
        return F.avg_pool2d(out, pool).flatten(1)
