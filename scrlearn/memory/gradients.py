"""The gradients of many groups of images, from one forward and one backward over all of them.

In evaluation mode images do not meet inside the network, so the gradients of a layer's outputs hold those of all images
side by side, and a group's gradient by a weight is a product of what went into the layer with what came back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn.grad import conv2d_weight
from torch.overrides import TorchFunctionMode


class Run(NamedTuple):
    """Groups that lie one after the other in a batch, all of the same number of rows."""

    groups: int
    size: int


def group_gradients(
    loss: Callable[[], Tensor], weights: Sequence[Tensor], runs: Sequence[Run]
) -> list[list[Tensor]] | None:
    """For each run and each weight, the gradients of the run's groups (groups × the weight's shape).

    The weights must be those of convolutions, linear layers and BatchNorm with running statistics, each called on the
    whole batch; between them may be anything without weights that keeps the images apart. A weight that is used in
    another way (a grouped convolution, LayerNorm, one weight made from another) makes the answer None; then
    `gradients_by_vmap` gives the same, more slowly. Graph-safe. Layers may run in bfloat16; the gradients are float32.

    Parameters
    ----------
    loss
        Runs the network on the batch, in which the rows of each group lie together, and adds up the groups' losses.
    weights
        What the gradients are taken by; zeros for those that the loss does not depend on.
    runs
        How the rows of the batch are grouped.

    Examples
    --------
    >>> layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> single, pair = group_gradients(lambda: layer(x).sum(), [layer.weight], [Run(1, 1), Run(1, 2)])
    >>> single[0].tolist(), pair[0].tolist()
    ([[[1.0, 2.0]]], [[[8.0, 10.0]]])
    """
    with torch.enable_grad(), _Recorder(weights, sum(groups * size for groups, size in runs)) as recorder:
        total = loss()
    layers = recorder.layers
    recorded = {id(w) for layer in layers for w in (layer.weight, layer.bias)}
    # a weight that the loss depends on, but that no layer has shown, was used behind the recorder's back
    hidden = [w for w in weights if id(w) not in recorded]
    found = torch.autograd.grad(total, [*(layer.edge for layer in layers), *hidden], allow_unused=True)
    seen = [(layer, g) for layer, g in zip(layers, found[: len(layers)], strict=True) if g is not None]
    if recorder.lost or any(g is not None for g in found[len(layers) :]) or any(layer.stale for layer, _ in seen):
        return None
    with torch.no_grad(), torch.autocast(total.device.type, enabled=False):
        return _by_run(seen, weights, runs)


def gradients_by_vmap(loss: nn.Module, weights: Sequence[Tensor], *inputs: Tensor) -> list[Tensor]:
    """For each weight, the gradients of a module that gives a loss, one for each of the inputs along their first axis.

    For any module that `torch.func.vmap` takes; several times slower than `group_gradients`, most of all on a GPU.
    """
    names = {id(weight): name for name, weight in loss.named_parameters()}

    def value(given: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        answer: Tensor = functional_call(loss, given, inputs)
        return answer

    given = {names[id(weight)]: weight.detach() for weight in weights}
    gradients = vmap(grad(value), in_dims=(None, *(0 for _ in inputs)))(given, *inputs)
    return list(gradients.values())


def gram(runs: Sequence[Sequence[Tensor]]) -> Tensor:
    """The inner products of the gradients of all groups with each other, from the gradients by run and weight.

    >>> gram([[torch.tensor([[1.0, 2.0]])], [torch.tensor([[3.0, 4.0]])]]).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    vectors = [[g.reshape(len(g), -1) for g in gradients if g.ndim < 3] for gradients in runs]
    products = []
    if vectors[0]:
        rows = torch.cat([torch.cat(of_run, dim=1) for of_run in vectors])
        products.append(rows @ rows.T)
    for gradients in zip(*([g for g in gradients if g.ndim > 2] for gradients in runs), strict=True):
        # a convolution's gradients lie with their channels last; for inner products any order will do
        rows = torch.cat([(g.movedim(2, -1) if g.ndim == 5 else g).flatten(2) for g in gradients])
        # a product for each output: twenty rows of a million numbers would keep a small part of a GPU busy
        products.append(torch.bmm(rows.transpose(0, 1), rows.permute(1, 2, 0)).sum(0))
    return torch.stack(products).sum(0)


# ---------------------------------------------------------------- what the forward did


@dataclass(kw_only=True)
class _Layer:
    """A layer as the forward has called it."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    # not the output itself: what follows may change it in place
    edge: GradientEdge
    version: int

    @property
    def stale(self) -> bool:
        """Whether the input was changed after the layer had read it."""
        return self.x._version != self.version

    def places(self, values: Tensor) -> Tensor:
        """The input, or a gradient of the output, as rows × places × channels."""
        return values.flatten(1, -2) if values.ndim > 2 else values[:, None]

    def by_weight(self, gradient: Tensor, runs: Sequence[Run]) -> list[Tensor]:
        """For each run, the groups' gradients by the weight of a linear layer."""
        return _products(self.places(gradient), self.places(self.x), runs)


@dataclass(kw_only=True)
class _BatchNorm(_Layer):
    mean: Tensor
    variance: Tensor
    eps: float

    def places(self, values: Tensor) -> Tensor:
        """Channels stand second, not last."""
        return super().places(values.movedim(1, -1))


@dataclass(kw_only=True)
class _Convolution(_Layer):
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def places(self, values: Tensor) -> Tensor:
        """Channels stand second, not last."""
        return super().places(values.movedim(1, -1))

    def by_weight(self, gradient: Tensor, runs: Sequence[Run]) -> list[Tensor]:
        """For each run, the groups' gradients by the weight."""
        x = self.x.to(gradient.dtype)  # as autocast has taken it
        if x.is_cuda:
            return self._at_once(x, gradient, runs)
        return [
            torch.stack([self._of_one(a, b) for a, b in zip(xs.split(size), gs.split(size), strict=True)]).float()
            for (_, size), xs, gs in zip(runs, _parts(x, runs), _parts(gradient, runs), strict=True)
        ]

    def _of_one(self, x: Tensor, gradient: Tensor) -> Tensor:
        """On a CPU the library's own way is the fastest, and it needs no copies of the images."""
        assert self.weight is not None
        found: Tensor = conv2d_weight(x, self.weight.shape, gradient, self.stride, self.padding, self.dilation)
        return found

    def _at_once(self, x: Tensor, gradient: Tensor, runs: Sequence[Run]) -> list[Tensor]:
        """On a GPU few large products: of the gradients with the pixels that each place was made of."""
        height, width = self.padding
        x = F.pad(x, (width, width, height, height)) if height or width else x
        for axis in (0, 1):
            # F.unfold would do, but it launches a kernel for every image
            span = self.dilation[axis] * (self.size[axis] - 1) + 1
            x = x.unfold(2 + axis, span, self.stride[axis])[..., :: self.dilation[axis]]
        windows = x.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        products = _products(self.places(gradient), windows, runs)
        return [product.unflatten(2, (*self.size, -1)).movedim(4, 2) for product in products]


class _Recorder(TorchFunctionMode):
    """Notes every layer that is called with wanted weights, and whether such a weight is used in any other way.

    Not hooks on modules: those miss layers that are called as functions, and nothing has to be removed again.
    """

    def __init__(self, weights: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        self.wanted = {id(weight) for weight in weights}
        self.rows = rows
        self.layers: list[_Layer] = []
        self.lost = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for, and note it."""
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function is F.batch_norm and _uses_batch(*args, **kwargs):
            self.lost = True  # the images have met
        elif self._among((*args, *kwargs.values())) and _carries_gradient(out):
            layer = LAYERS[function](out, *args, **kwargs) if function in LAYERS else None
            if layer is None or len(layer.x) != self.rows:
                self.lost = True
            else:
                self.layers.append(layer)
        return out

    def _among(self, values: Sequence[Any]) -> bool:
        """Whether a wanted weight is among the arguments."""
        return any(id(v) in self.wanted or (isinstance(v, list | tuple) and self._among(v)) for v in values)


def _carries_gradient(out: Any) -> bool:
    if isinstance(out, list | tuple):
        return any(map(_carries_gradient, out))
    return isinstance(out, Tensor) and out.requires_grad


# the arguments below are named as in torch.nn.functional, whose calls are passed on as they come


def _uses_batch(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> bool:
    return training


def _linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Layer | None:
    if input.ndim < 2:
        return None
    return _Layer(x=input, weight=weight, bias=bias, edge=get_gradient_edge(out), version=input._version)


def _convolution(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Layer | None:
    size, dilation = _pair(weight.shape[2:]), _pair(dilation)
    if isinstance(padding, str):
        whole = [d * (s - 1) if padding == "same" else 0 for d, s in zip(dilation, size, strict=True)]
        if any(w % 2 for w in whole):
            return None  # more on one side than on the other
        padding = [w // 2 for w in whole]
    if input.ndim != 4 or groups != 1:
        return None
    return _Convolution(
        x=input,
        weight=weight,
        bias=bias,
        edge=get_gradient_edge(out),
        version=input._version,
        size=size,
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=dilation,
    )


def _batch_norm(
    out: Tensor,
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> _Layer:
    return _BatchNorm(
        x=input,
        weight=weight,
        bias=bias,
        edge=get_gradient_edge(out),
        version=input._version,
        mean=running_mean,
        variance=running_var,
        eps=eps,
    )


LAYERS: dict[Any, Callable[..., _Layer | None]] = {
    F.linear: _linear,
    F.conv2d: _convolution,
    F.batch_norm: _batch_norm,
}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


# ---------------------------------------------------------------- what follows from it


def _by_run(
    seen: Sequence[tuple[_Layer, Tensor]], weights: Sequence[Tensor], runs: Sequence[Run]
) -> list[list[Tensor]]:
    """For each run and weight the groups' gradients, added up over the weight's uses."""
    wanted = {id(weight) for weight in weights}
    found: list[dict[int, Tensor]] = [{} for _ in runs]
    by_weight = [
        (layer.weight, layer.by_weight(gradient, runs))
        for layer, gradient in seen
        if id(layer.weight) in wanted and not isinstance(layer, _BatchNorm)
    ]
    for weight, gradients in (*by_weight, *_by_vectors(seen, wanted, runs)):
        for known, gradient in zip(found, gradients, strict=True):
            known[id(weight)] = known[id(weight)] + gradient if id(weight) in known else gradient
    return [
        [known[id(w)] if id(w) in known else w.new_zeros(run.groups, *w.shape) for w in weights]
        for run, known in zip(runs, found, strict=True)
    ]


def _by_vectors(
    seen: Sequence[tuple[_Layer, Tensor]], wanted: set[int], runs: Sequence[Run]
) -> list[tuple[Tensor | None, list[Tensor]]]:
    """The gradients by biases and by the weights of BatchNorm: a few sums a layer, the rest for all layers together."""
    vectors: list[tuple[Tensor | None, Tensor]] = []
    norms, totals, products = [], [], []
    for layer, gradient in seen:
        scales = isinstance(layer, _BatchNorm) and layer.weight is not None
        if layer.bias is None and not scales:
            continue
        places = layer.places(gradient)
        total = places.sum(1, dtype=torch.float32)
        vectors.append((layer.bias, total))
        if isinstance(layer, _BatchNorm) and scales:
            norms.append(layer)
            totals.append(total)
            products.append((places * layer.places(layer.x)).sum(1, dtype=torch.float32))
    if norms:
        mean, eps = torch.cat([norm.mean for norm in norms]), [norm.eps for norm in norms]
        inverse = torch.cat(torch._foreach_add([norm.variance for norm in norms], eps)).rsqrt()
        slopes = (torch.cat(products, dim=1) - mean * torch.cat(totals, dim=1)) * inverse
        each = slopes.split([len(norm.mean) for norm in norms], dim=1)
        vectors += [(norm.weight, slope) for norm, slope in zip(norms, each, strict=True)]
    vectors = [(weight, vector) for weight, vector in vectors if id(weight) in wanted]
    if not vectors:
        return []
    lengths = [vector.shape[1] for _, vector in vectors]
    parts = _parts(torch.cat([vector for _, vector in vectors], dim=1), runs)
    sums = [part.unflatten(0, run).sum(1).split(lengths, dim=1) for part, run in zip(parts, runs, strict=True)]
    return [(weight, [of_run[i] for of_run in sums]) for i, (weight, _) in enumerate(vectors)]


def _products(left: Tensor, right: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """For each run, groups × outputs × inputs: the sums over rows and places of output gradients times inputs.

    Both come as rows × places × channels.
    """
    (places, outputs), inputs = left.shape[1:], right.shape[2]
    # where a weight is small against the images, a product a row and their sum give a GPU more to do at once
    by_row = outputs * inputs < places * (outputs + inputs)
    found = []
    for run, a, b in zip(runs, _parts(left, runs), _parts(right, runs), strict=True):
        if not by_row:
            a, b = (factor.reshape(run.groups, -1, factor.shape[2]) for factor in (a, b))
        product = _bmm(a.mT, b)
        found.append(product.unflatten(0, run).sum(1) if by_row and run.size > 1 else product)
    return found


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products with sums and results in float32."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.bmm(a, b.to(a.dtype), out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _parts(values: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """The rows of each run."""
    return list(values.split([groups * size for groups, size in runs]))
