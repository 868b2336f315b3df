"""The network of a learner: an encoder, and on top of it a projection, a softmax head, or both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from scrlearn.classifiers import SoftmaxHead
from scrlearn.errors import InputError
from scrlearn.models.resnet import Convolution, ReducedResNet18, widening


class Network(nn.Module):
    """Images in, features, projections and logits out.

    Takes uint8 images or floats in [0, 1]. The encoder runs in bfloat16 where that is asked for; features come out
    as float32, so that losses, projections and prototypes are always computed in full precision.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projection: nn.Module | None = None,
        head: SoftmaxHead | None = None,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.head = head
        self.bf16 = bf16

    def features(self, x: Tensor, segments: int = 1) -> Tensor:
        """Encoder features, float32.

        `segments`: the batch is so many runs of images, all of one length, and each has BatchNorm statistics of its
        own, as if they came one after the other. They do, except where one pass is faster (`takes_segments`).
        """
        if segments > 1 and not self.takes_segments(x[: len(x) // segments]):
            return torch.cat([self.features(part) for part in x.chunk(segments)])
        if not (self.bf16 and x.is_cuda and isinstance(self.encoder, ReducedResNet18)):
            x = to_float(x).contiguous(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                features: Tensor = self.encoder(*((x,) if segments == 1 else (x, segments)))
            return features.float()
        own = self.training or not torch.is_grad_enabled()  # the kernels' way
        wide, widen = self.encoder.conv1.weight.shape[1], widening()
        if own and widen is not None and wide > x.shape[1]:
            x = widen(x, wide)
        else:
            x = to_float(x).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            weights = self._cast_weights() if own else {}  # for the kernels of the libraries
            features = functional_call(self.encoder, weights, (x, segments))
        return features.float()

    def takes_segments(self, x: Tensor) -> bool:
        """Whether two batches like this one go through the encoder in one pass, each with its own statistics."""
        return isinstance(self.encoder, ReducedResNet18) and self.encoder.takes_segments(x)

    def _cast_weights(self) -> dict[str, Tensor]:
        """Convolutions' weights in bfloat16, all by one kernel; autocast would launch one for each."""
        named = {
            f"{name}.weight": module.weight
            for name, module in self.encoder.named_modules()
            if isinstance(module, nn.Conv2d) and not (isinstance(module, Convolution) and module.float_weights)
        }
        copies = _Cast.apply(*named.values())  # type: ignore[no-untyped-call]
        return dict(zip(named, copies, strict=True))

    def project(self, features: Tensor) -> Tensor:
        """Projected features on the unit sphere, where the contrastive loss compares them."""
        projected = features if self.projection is None else self.projection(features)
        return F.normalize(projected, dim=1)

    def logits(self, x: Tensor, segments: int = 1) -> Tensor:
        """Class scores of the softmax head."""
        if self.head is None:
            raise InputError("This network has no softmax head.")
        logits: Tensor = self.head(self.features(x, segments))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return self.features(x)


class _Cast(torch.autograd.Function):
    """Many tensors to bfloat16 at once, and their gradients back to float32 at once."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        """The bfloat16 copies."""
        copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
        torch._foreach_copy_(copies, list(weights))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """The gradients in float32."""
        copies = [torch.empty_like(g, dtype=torch.float32) for g in gradients]
        torch._foreach_copy_(copies, list(gradients))
        return tuple(copies)


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
    except Exception as error:  # a module from elsewhere may fail in any way
        shape = "×".join(map(str, image_shape))
        raise InputError(
            f"The encoder {type(encoder).__name__} does not take {shape} images (channels×height×width): "
            f"{type(error).__name__}: {error}. "
            "Give an encoder for this size, or resize the images."
        ) from error
    finally:
        for module, training in state.items():
            module.training = training
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 1:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"The encoder must map images N×C×H×W to vectors N×d, but one image gave {found}.")
    return int(out.shape[1])
