"""Single images through an encoder from elsewhere."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SingleImages:
    """Lets BatchNorm layers, which cannot train on one value a channel, use running statistics for a single image.

    It hangs on the encoder, is copied and pickled with it, and does nothing for larger batches.

    Parameters
    ----------
    encoder
        Any module.

    Examples
    --------
    >>> import torch
    >>> encoder = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4))
    >>> _ = SingleImages(encoder)
    >>> encoder(torch.zeros(1, 1, 2, 2)).shape
    torch.Size([1, 4])
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.turned: list[nn.Module] = []
        encoder.register_forward_pre_hook(self.before)
        encoder.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Switch the layers that train, where there is a single image."""
        if module.training and len(inputs[0]) == 1:
            norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
            self.turned = [layer for layer in norms if layer.training]
            for layer in self.turned:
                layer.training = False

    def after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Switch them back."""
        for layer in self.turned:
            layer.training = True
        self.turned = []
