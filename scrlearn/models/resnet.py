"""The paper's encoder: a ResNet18 with a third of the channels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrlearn.models import cuda_strided

Twice = tuple[Tensor, Tensor]  # one result for two readers, whose gradients the fused kernels add up
FEW = 2  # values per channel that BatchNorm cannot learn a variance from
MOMENTUM = 0.1  # share of a batch in BatchNorm's running statistics
MOST_CHANNELS = 64  # of convolutions with kernels of their own: from there on the libraries' are as good


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that can add a shortcut and apply ReLU, and takes a single value per channel, or two.

    A stream may deliver one tiny image at a time, and one value has no variance; two have one, which says nothing and
    may be next to 0. So few join the running statistics first and are normalised by them. By the running statistics of
    before they could have any size, and training would diverge.
    Counting batches is left out: with a fixed momentum nothing reads the count, and it costs a kernel a layer.
    On CUDA, with Triton, training and answers without gradients run as fused kernels.
    """

    counter: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None
        self.register_buffer("counter", torch.zeros(1, dtype=torch.int32), persistent=False)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        relu: bool = False,
        sums: Tensor | None = None,
        segments: int = 1,
        twice: bool = False,
    ) -> Any:
        """Normalise with the batch's statistics while training, with the running ones otherwise.

        `sums` are those of the batch, where the convolution before has made them. `segments`: the batch is so many runs
        of images of one length, each of which has statistics of its own. `twice`: give the result for two readers.
        """
        mean, var = self.running_mean, self.running_var
        few = self.training and x.numel() <= FEW * segments * x.shape[1]
        if not few and _own_kernels_for(self, x) and (kernels := _fused_kernels()) is not None:
            train, answer = kernels
            if self.training:
                told = (self.weight, self.bias, mean, var, self.counter, relu)
                return train(x, residual, *told, sums=sums, segments=segments, twice=twice)
            out = answer(x, residual, self.weight, self.bias, mean, var, relu)
            return (out, out) if twice else out
        if self.training and segments > 1:
            out = torch.cat([self._normalise(part, few) for part in x.chunk(segments)])
        else:
            out = self._normalise(x, few)
        if residual is not None:
            out = out + residual
        out = torch.relu(out) if relu else out
        return (out, out) if twice else out

    def _normalise(self, x: Tensor, few: bool) -> Tensor:
        if few:
            return self._normalise_few(x)
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, MOMENTUM, self.eps)

    def _normalise_few(self, x: Tensor) -> Tensor:
        """By exponentially weighted statistics that the values are a part of (West, 1979)."""
        old_mean, old_var = _tensor(self.running_mean), _tensor(self.running_var)
        values = x.to(old_mean.dtype)
        own_var, own_mean = torch.var_mean(values, (0, 2, 3), correction=0)
        away = own_mean - old_mean
        mean = old_mean + MOMENTUM * away
        var = (1 - MOMENTUM) * (old_var + MOMENTUM * away**2) + MOMENTUM * own_var
        scale = self.weight / torch.sqrt(var + self.eps)
        out = (values - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]
        with torch.no_grad():
            old_mean.copy_(mean)
            old_var.copy_(var)
        return out.to(x.dtype)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        # a state without a version would be taken for an old one that lacks its count of batches
        super()._load_from_state_dict(state, prefix, {**metadata, "version": 2}, *rest)


class Convolution(nn.Conv2d):
    """A 3×3 or 1×1 convolution without bias; with few channels it has kernels of its own on CUDA, with Triton."""

    def __init__(self, channels_in: int, channels: int, size: int = 3, stride: int = 1) -> None:
        super().__init__(channels_in, channels, size, stride, size // 2, bias=False)

    @property
    def own_kernels(self) -> bool:
        """Whether bfloat16 on CUDA means the fused kernels."""
        return max(self.weight.shape[:2]) <= MOST_CHANNELS and _fused_convolution() is not None

    @property
    def float_weights(self) -> bool:
        """Whether it means kernels that take float32 weights: these, or those for two convolutions at once."""
        outer, inner = self.weight.shape[:2]
        return self.own_kernels or (cuda_strided.takes(outer, inner, self.stride) and _fused_downsampling() is not None)

    def with_sums(self, x: Tensor, segments: int = 1) -> tuple[Tensor, Tensor | None]:
        """The convolved images, and their sums for BatchNorm where the kernels make them on the way."""
        if torch.is_autocast_enabled("cuda") and _own_kernels_for(self, x) and self.own_kernels:
            return _fused_convolution()(x, self.weight, self.stride[0], self.training, segments)  # type: ignore[misc]
        return super().forward(x), None

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        return self.with_sums(x)[0]


def normalised(
    convolution: Convolution, norm: BatchNorm, x: Tensor, segments: int, residual: Tensor | None = None, **how: bool
) -> Any:
    """A convolution and the BatchNorm after it; `how`: relu and twice, as there."""
    out, sums = convolution.with_sums(x, segments)
    return norm(out, residual, sums=sums, segments=segments, **how)


class Shortcut(nn.Sequential):
    """A 1×1 convolution and BatchNorm, where a block changes the size or the number of channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__(Convolution(channels_in, channels, 1, stride), BatchNorm(channels))

    def forward(self, x: Tensor, segments: int = 1) -> Tensor:
        """The block's input in the shape of its output."""
        convolution, norm = self
        assert isinstance(convolution, Convolution)
        assert isinstance(norm, BatchNorm)
        out: Tensor = normalised(convolution, norm, x, segments)
        return out


def _own_kernels_for(module: nn.Module, x: Tensor) -> bool:
    """Whether the fused kernels can do it: they train, or answer without gradients, and count places in 32 bits."""
    if not x.is_cuda:  # before anything asks for a size: an exported model must stay free in its number of images
        return False
    size = len(x) * x.shape[2] * x.shape[3] * max(x.shape[1], MOST_CHANNELS)
    wanted = module.training or not torch.is_grad_enabled()
    return wanted and x.dtype in (torch.float32, torch.bfloat16) and size < 2**31


@functools.cache
def _fused_kernels() -> tuple[Callable[..., Tensor | Twice], Callable[..., Tensor]] | None:
    """BatchNorm while training, and as it answers."""
    try:
        from scrlearn.models.fused import batch_norm, by_running_statistics
    except ImportError:  # no Triton: PyTorch's own kernels do the same, slower
        return None
    return batch_norm, by_running_statistics


@functools.cache
def widening() -> Callable[[Tensor, int], Tensor] | None:
    """What brings images into the form that the kernels take, in one go; None without Triton."""
    try:
        from scrlearn.models.fused_conv import widened
    except ImportError:
        return None
    return widened


@functools.cache
def _fused_downsampling() -> tuple[Callable[..., bool], Callable[..., Any]] | None:
    """The convolutions of stride 2 of a block and of its shortcut, at once; and where that can be done."""
    try:
        from scrlearn.models.fused_conv import downsample
    except ImportError:
        return None
    return cuda_strided.suits, downsample


@functools.cache
def _fused_convolution() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    try:
        from scrlearn.models.fused_conv import convolve
    except ImportError:
        return None
    return convolve


class _Averaged(torch.autograd.Function):
    """Average pooling whose gradient is spread over the windows: no pixel lies in two of them.

    PyTorch's own kernel asks for each pixel which windows it lies in, and takes as long as a convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: tuple[int, int]) -> Tensor:
        """The averages of the windows, which lie side by side."""
        ctx.shape, ctx.pool = x.shape, pool
        return F.avg_pool2d(x, pool)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Every pixel's share; zeros where no window fits any more."""
        (dy,), (rows, columns) = gradients, ctx.pool
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        inside = dx[:, :, : dy.shape[2] * rows, : dy.shape[3] * columns]
        if inside.shape != dx.shape:
            dx.zero_()
        windows = inside.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))
        torch.div(dy[:, :, :, None, :, None].expand_as(windows), rows * columns, out=windows)
        return dx, None


def averaged(x: Tensor, pool: tuple[int, int], training: bool) -> Tensor:
    """Average pooling with windows side by side, in training."""
    if training and x.is_cuda and x.requires_grad:  # else it may be for `torch.func`, which cannot take it
        pooled: Tensor = _Averaged.apply(x, pool)  # type: ignore[no-untyped-call]
        return pooled
    return F.avg_pool2d(x, pool)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Convolution(channels_in, channels, stride=stride)
        self.bn1 = BatchNorm(channels)
        self.conv2 = Convolution(channels, channels)
        self.bn2 = BatchNorm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = Shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor, again: Tensor, segments: int = 1) -> Twice:
        """The block's output, for the next block's convolution and for its shortcut; so comes its input."""
        if isinstance(self.shortcut, Shortcut) and (both := self._convolved_at_once(x, segments)) is not None:
            (out, sums), (shortcut, shortcut_sums) = both
            out = self.bn1(out, sums=sums, segments=segments, relu=True)
            shortcut = self.shortcut[1](shortcut, sums=shortcut_sums, segments=segments)
        else:
            out = normalised(self.conv1, self.bn1, x, segments, relu=True)
            shortcut = self.shortcut(again, segments) if isinstance(self.shortcut, Shortcut) else again
        twice: Twice = normalised(self.conv2, self.bn2, out, segments, shortcut, relu=True, twice=True)
        return twice

    def _convolved_at_once(self, x: Tensor, segments: int) -> Any:
        """What `with_sums` gives of the first convolution and of the shortcut's, where one kernel makes both."""
        if not torch.is_autocast_enabled("cuda") or not _own_kernels_for(self, x) or _fused_downsampling() is None:
            return None
        small = self.shortcut[0]  # type: ignore[index]
        suits, downsample = _fused_downsampling()  # type: ignore[misc]
        if not suits(x, self.conv1.weight, small.weight, self.conv1.stride + small.stride):
            return None
        return downsample(x, self.conv1.weight, small.weight, self.training, segments)


class ReducedResNet18(nn.Module):
    """Reduced ResNet18: 3×3 stem, no max-pool, 2-2-2-2 basic blocks of 20, 40, 80, 160 channels, 4×4 average pool.

    Gives 160 features for 32×32 images and 640 for 84×84. Where the last map is smaller than 4×4 (images of
    24×24 and less) the whole map is averaged.

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
        self.conv1 = Convolution(channels, width)
        self.bn1 = BatchNorm(width)
        blocks: list[nn.Module] = []
        channels_in = width
        for stage, stride in enumerate((1, 2, 2, 2)):
            for repeat in range(2):
                blocks.append(BasicBlock(channels_in, width * 2**stage, stride if repeat == 0 else 1))
                channels_in = width * 2**stage
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor, segments: int = 1) -> Tensor:
        """Images (N×C×H×W, floats) to features (N×d).

        `segments`: while training, each of so many runs of images, all of one length, is normalised by its own
        statistics, as if it had a forward of its own.
        """
        if (missing := self.conv1.weight.shape[1] - x.shape[1]) > 0:
            x = F.pad(x, (0, 0, 0, 0, 0, missing)).contiguous(memory_format=torch.channels_last)
        out, again = normalised(self.conv1, self.bn1, x, segments, relu=True, twice=True)
        for block in self.blocks:
            out, again = block(out, again, segments)
        pool = (min(4, out.shape[2]), min(4, out.shape[3]))
        return averaged(out, pool, self.training).flatten(1)

    def takes_segments(self, x: Tensor) -> bool:
        """Whether two batches like this one should go through as segments: where training has the fused kernels.

        Other kernels gain nothing by it. A single image is left alone.
        """
        return self.training and x.is_cuda and len(x) > 1 and _fused_kernels() is not None

    def pad_channels(self, multiple: int) -> None:
        """Widen all layers with zeros to a multiple of channels that the hardware likes; images are widened likewise.

        The added channels hold exact zeros and get exactly zero gradients, so the network computes the same function
        and stays that way under training. Saved states have the layers' own sizes.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                shape = (
                    *(_rounded(n, multiple) for n in (module.out_channels, module.in_channels)),
                    *module.kernel_size,
                )
                module.weight = nn.Parameter(_widened(module.weight.data, shape))
            elif isinstance(module, BatchNorm):
                shape = (_rounded(module.num_features, multiple),)
                module.weight = nn.Parameter(_widened(module.weight.data, shape))
                module.bias = nn.Parameter(_widened(module.bias.data, shape))
                module.running_mean = _widened(_tensor(module.running_mean), shape)
                module.running_var = _widened(_tensor(module.running_var), shape)
        self.register_state_dict_post_hook(_narrow_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_widen_state)  # type: ignore[no-untyped-call]


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _widened(tensor: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    wide = tensor.new_zeros(shape)
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


def _own_shapes(module: nn.Module, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that padding widens, by name, with the shapes they have without it."""
    for name, part in module.named_modules(prefix=prefix.removesuffix(".")):
        if isinstance(part, nn.Conv2d):
            yield f"{name}.weight", (part.out_channels, part.in_channels, *part.kernel_size)
        elif isinstance(part, BatchNorm):
            for key in ("weight", "bias", "running_mean", "running_var"):
                yield f"{name}.{key}", (part.num_features,)


def _narrow_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Cut the zeros off before a state is saved."""
    for name, shape in _own_shapes(module, prefix):
        state[name] = state[name][tuple(map(slice, shape))]


def _widen_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put the zeros back before a state is loaded; one of another network stays as it is and is refused."""
    wide = {f"{prefix}{name}": own.shape for name, own in (*module.named_parameters(), *module.named_buffers())}
    for name, shape in _own_shapes(module, prefix):
        if name in state and tuple(state[name].shape) == shape:
            state[name] = _widened(state[name], wide[name])
