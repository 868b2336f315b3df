"""The network of a learner: an encoder, and on top of it a projection, a softmax head, or both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.classifiers import SoftmaxHead
from scrlearn.errors import InputError


class Network(nn.Module):
    """Images in, features, projections and logits out.

    Takes uint8 images or floats in [0, 1]. The encoder runs in bfloat16 where that is asked for; features come out
    as float32, so that losses, projections and prototypes are always computed in full precision.
    """

    def __init__(
        self, encoder: nn.Module, projection: nn.Module | None = None, head: SoftmaxHead | None = None, bf16: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.head = head
        self.bf16 = bf16

    def features(self, x: Tensor) -> Tensor:
        """Encoder features, float32."""
        x = to_float(x)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            features: Tensor = self.encoder(x.contiguous(memory_format=torch.channels_last))
        return features.float()

    def project(self, features: Tensor) -> Tensor:
        """Projected features on the unit sphere, where the contrastive loss compares them."""
        projected = features if self.projection is None else self.projection(features)
        return F.normalize(projected, dim=1)

    def logits(self, x: Tensor) -> Tensor:
        """Class scores of the softmax head."""
        if self.head is None:
            raise InputError("This network has no softmax head.")
        logits: Tensor = self.head(self.features(x))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return self.features(x)


def to_float(x: Tensor) -> Tensor:
    """Pixels as float32 in [0, 1]; floats pass unchanged."""
    return x.float() / 255.0 if x.dtype == torch.uint8 else x


def feature_dim(encoder: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """How many features the encoder gives for images of this shape, found by one look at a blank image."""
    state = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        with torch.no_grad():
            out = encoder(torch.zeros(1, *image_shape))
    except (RuntimeError, ValueError) as error:
        shape = "×".join(map(str, image_shape))
        raise InputError(
            f"The encoder {type(encoder).__name__} does not take {shape} images (channels×height×width): {error}. "
            "Give an encoder for this size, or resize the images."
        ) from error
    finally:
        for module, training in state.items():
            module.training = training
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 1:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"The encoder must map images N×C×H×W to vectors N×d, but one image gave {found}.")
    return int(out.shape[1])
