"""BatchNorm, the addition of the shortcut and ReLU in two passes over the data, each way, on CUDA (Triton).

The step of an online learner is many small kernels that wait for memory; reading and writing each activation once
instead of three times is what makes it faster. Sums are made in a fixed order: partial sums per program, added up by
the program that finishes last, so results are the same bit for bit every time. A convolution that has made the sums of
its result already hands them over. Sums in bfloat16 are left to `cuda_norm`, which is faster. Segments of a batch that
have statistics of their own take no kernels of their own.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrlearn.models import cuda_norm
from scrlearn.models.cuda_norm import floats

TILE = 4096
WHOLE_ROWS = 2560
WHOLE_CHANNELS = 8
MANY_CHANNELS, MORE_ROWS = 128, 4096  # many channels are many programs: on the way forward each can take more rows


@triton.jit
def _load(pointer, rows, columns, mask, channels: tl.constexpr):
    return tl.load(pointer + rows[:, None] * channels + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _total(partial, which: tl.constexpr, programs, columns, inside, channels: tl.constexpr, block: tl.constexpr):
    """Add up the programs' partial sums, in order; past the first-level cache, which may hold old values."""
    span: tl.constexpr = 8192 // block  # few turns: they are waited for one after the other
    total = tl.zeros((span, block), tl.float32)
    for first in range(0, programs, span):
        program = first + tl.arange(0, span)
        mask = (program < programs)[:, None] & inside[None, :]
        place = partial + (program[:, None] * 2 + which) * channels + columns[None, :]
        total += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _settled(
    saved, mean, variance, weight, bias, old_mean, old_var, rows_total, momentum, eps, columns, inside,
    channels: tl.constexpr,
):  # fmt: skip
    """Save what the backward pass needs of a segment; gives scale and shift, and the running statistics after it."""
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0) * inverse
    shift = tl.load(bias + columns, mask=inside, other=0.0) - mean * scale
    tl.store(saved + columns, mean, mask=inside)
    tl.store(saved + channels + columns, inverse, mask=inside)
    tl.store(saved + 2 * channels + columns, scale, mask=inside)
    tl.store(saved + 3 * channels + columns, shift, mask=inside)
    unbiased = variance * rows_total / (rows_total - 1)
    return scale, shift, old_mean + momentum * (mean - old_mean), old_var + momentum * (unbiased - old_var)


@triton.jit
def _from_sums(
    sums, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, columns, inside,
    channels: tl.constexpr, segments: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """From partial sums of values and squares to scale and shift, segment after segment."""
    moved_mean = tl.load(running_mean + columns, mask=inside, other=0.0)
    moved_var = tl.load(running_var + columns, mask=inside, other=0.0)
    for segment in range(segments):
        own = sums + segment * programs * 2 * channels
        mean = _total(own, 0, programs, columns, inside, channels, block) / rows_total
        square = _total(own, 1, programs, columns, inside, channels, block) / rows_total
        variance = tl.maximum(square - mean * mean, 0.0)
        _, _, moved_mean, moved_var = _settled(
            saved + segment * 4 * channels, mean, variance, weight, bias, moved_mean, moved_var, rows_total, momentum,
            eps, columns, inside, channels,
        )  # fmt: skip
    tl.store(running_mean + columns, moved_mean, mask=inside)
    tl.store(running_var + columns, moved_var, mask=inside)


@triton.jit
def _statistics(
    x, partial, counter, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, programs,
    channels: tl.constexpr, segments: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Mean and variance of each channel; the last program turns them into scale and shift."""
    columns = tl.arange(0, block)
    inside = columns < channels
    segment = tl.program_id(1)
    sums = tl.zeros((tile, block), tl.float32)
    squares = tl.zeros((tile, block), tl.float32)
    for first in range(tl.program_id(0) * tile, rows_total, programs * tile):
        rows = first + tl.arange(0, tile)
        mask = (rows < rows_total)[:, None] & inside[None, :]
        value = _load(x + segment * rows_total * channels, rows, columns, mask, channels)
        sums += value
        squares += value * value
    place = partial + (segment * programs + tl.program_id(0)) * 2 * channels + columns
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + channels, tl.sum(squares, 0), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == programs * segments - 1:
        _from_sums(
            partial, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, columns,
            inside, channels, segments, block,
        )  # fmt: skip
        tl.store(counter, 0)


@triton.jit
def _settle(
    sums, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps,
    channels: tl.constexpr, segments: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Mean and variance of a few channels from sums that somebody else has made."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    _from_sums(
        sums, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, columns,
        columns < channels, channels, segments, block,
    )  # fmt: skip


@triton.jit
def _finish(
    value, scale, shift, residual, y, rows, columns, mask,
    channels: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """Scale and shift, add the shortcut, cut below zero, write."""
    value = value * scale[None, :] + shift[None, :]
    if has_residual:
        value += _load(residual, rows, columns, mask, channels)
    if relu:
        value = tl.maximum(value, 0.0)
    tl.store(y + rows[:, None] * channels + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _normalise(
    x, residual, y, saved, rows_total,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, block)
    inside = columns < channels
    segment = tl.program_id(1)
    start = segment * rows_total * channels
    saved += segment * 4 * channels
    scale = tl.load(saved + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(saved + 3 * channels + columns, mask=inside, other=0.0)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    value = _load(x + start, rows, columns, mask, channels)
    _finish(value, scale, shift, residual + start, y + start, rows, columns, mask, channels, has_residual, relu)


@triton.jit
def _answer(
    x, residual, y, weight, bias, running_mean, running_var, rows_total, eps,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """By the running statistics, which every program turns into scale and shift for itself."""
    columns = tl.arange(0, block)
    inside = columns < channels
    variance = tl.load(running_var + columns, mask=inside, other=1.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0) / tl.sqrt(variance + eps)
    mean = tl.load(running_mean + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0) - mean * scale
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    value = _load(x, rows, columns, mask, channels)
    _finish(value, scale, shift, residual, y, rows, columns, mask, channels, has_residual, relu)


@triton.jit
def _through_relu(
    dy, also, y, x, scale, shift, rows, columns, mask,
    channels: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr, twice: tl.constexpr,
):  # fmt: skip
    """The gradient before ReLU, and the input; without a shortcut the sign is computed again, not read."""
    gradient = _load(dy, rows, columns, mask, channels)
    if twice:
        gradient += _load(also, rows, columns, mask, channels)
    value = _load(x, rows, columns, mask, channels)
    if relu:
        if has_residual:
            sign = _load(y, rows, columns, mask, channels)
        else:
            sign = value * scale[None, :] + shift[None, :]
        gradient = tl.where(sign > 0, gradient, 0.0)
    return gradient, value


@triton.jit
def _slopes(total, product, mean, inverse, scale, rows_total):
    """b and c of the input's gradient: dx = scale · g + b · x + c."""
    b = -scale * inverse * product / rows_total
    return b, -scale * total / rows_total - b * mean


@triton.jit
def _gradients_from_sums(
    partial, programs, saved, d_weight, d_bias, coefficients, rows_total, columns, inside,
    channels: tl.constexpr, segments: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias, added up over the segments, and each segment's coefficients."""
    all_totals = tl.zeros((block,), tl.float32)
    all_products = tl.zeros((block,), tl.float32)
    for segment in range(segments):
        of_batch = saved + segment * 4 * channels + columns
        mean = tl.load(of_batch, mask=inside, other=0.0)
        inverse = tl.load(of_batch + channels, mask=inside, other=0.0)
        scale = tl.load(of_batch + 2 * channels, mask=inside, other=0.0)
        own = partial + segment * programs * 2 * channels
        total = _total(own, 0, programs, columns, inside, channels, block)
        product = _total(own, 1, programs, columns, inside, channels, block) * inverse
        all_totals += total
        all_products += product
        b, c = _slopes(total, product, mean, inverse, scale, rows_total)
        tl.store(coefficients + segment * 2 * channels + columns, b, mask=inside)
        tl.store(coefficients + (segment * 2 + 1) * channels + columns, c, mask=inside)
    tl.store(d_bias + columns, all_totals, mask=inside)
    tl.store(d_weight + columns, all_products, mask=inside)


@triton.jit
def _backward_sums(
    dy, also, y, x, partial, counter, saved, d_weight, d_bias, coefficients, rows_total, programs,
    channels: tl.constexpr, segments: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    has_residual: tl.constexpr, relu: tl.constexpr, twice: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, block)
    inside = columns < channels
    segment = tl.program_id(1)
    start = segment * rows_total * channels
    of_batch = saved + segment * 4 * channels + columns
    mean = tl.load(of_batch, mask=inside, other=0.0)
    scale = tl.load(of_batch + 2 * channels, mask=inside, other=0.0)
    shift = tl.load(of_batch + 3 * channels, mask=inside, other=0.0)
    sums = tl.zeros((tile, block), tl.float32)
    products = tl.zeros((tile, block), tl.float32)
    for first in range(tl.program_id(0) * tile, rows_total, programs * tile):
        rows = first + tl.arange(0, tile)
        mask = (rows < rows_total)[:, None] & inside[None, :]
        gradient, value = _through_relu(
            dy + start, also + start, y + start, x + start, scale, shift, rows, columns, mask, channels, has_residual,
            relu, twice,
        )  # fmt: skip
        sums += gradient
        products += gradient * (value - mean[None, :])
    place = partial + (segment * programs + tl.program_id(0)) * 2 * channels + columns
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + channels, tl.sum(products, 0), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == programs * segments - 1:
        _gradients_from_sums(
            partial, programs, saved, d_weight, d_bias, coefficients, rows_total, columns, inside, channels, segments,
            block,
        )  # fmt: skip
        tl.store(counter, 0)


@triton.jit
def _backward_input(
    dy, also, y, x, saved, coefficients, dx, d_residual, rows_total,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
    twice: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, block)
    inside = columns < channels
    segment = tl.program_id(1)
    start = segment * rows_total * channels
    saved += segment * 4 * channels
    coefficients += segment * 2 * channels
    a = tl.load(saved + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(saved + 3 * channels + columns, mask=inside, other=0.0)
    b = tl.load(coefficients + columns, mask=inside, other=0.0)
    c = tl.load(coefficients + channels + columns, mask=inside, other=0.0)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    gradient, value = _through_relu(
        dy + start, also + start, y + start, x + start, a, shift, rows, columns, mask, channels, has_residual, relu,
        twice,
    )  # fmt: skip
    place = start + rows[:, None] * channels + columns[None, :]
    tl.store(dx + place, (a[None, :] * gradient + b[None, :] * value + c[None, :]).to(dx.dtype.element_ty), mask=mask)
    if has_residual:
        tl.store(d_residual + place, gradient.to(d_residual.dtype.element_ty), mask=mask)


@triton.jit
def _whole_forward(
    x, residual, y, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps,
    channels: tl.constexpr, segments: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """Everything in one kernel, for a few thousand rows: a program holds all values of its channels in a segment."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    rows = tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    moved_mean = tl.load(running_mean + columns, mask=inside, other=0.0)
    moved_var = tl.load(running_var + columns, mask=inside, other=0.0)
    for segment in range(segments):
        start = segment * rows_total * channels
        value = _load(x + start, rows, columns, mask, channels)
        mean = tl.sum(value, 0) / rows_total
        centred = tl.where(mask, value - mean[None, :], 0.0)
        variance = tl.sum(centred * centred, 0) / rows_total
        scale, shift, moved_mean, moved_var = _settled(
            saved + segment * 4 * channels, mean, variance, weight, bias, moved_mean, moved_var, rows_total, momentum,
            eps, columns, inside, channels,
        )  # fmt: skip
        _finish(value, scale, shift, residual + start, y + start, rows, columns, mask, channels, has_residual, relu)
    tl.store(running_mean + columns, moved_mean, mask=inside)
    tl.store(running_var + columns, moved_var, mask=inside)


@triton.jit
def _whole_backward(
    dy, also, y, x, saved, d_weight, d_bias, dx, d_residual, rows_total,
    channels: tl.constexpr, segments: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    has_residual: tl.constexpr, relu: tl.constexpr, twice: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    rows = tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    all_totals = tl.zeros((block,), tl.float32)
    all_products = tl.zeros((block,), tl.float32)
    for segment in range(segments):
        start = segment * rows_total * channels
        of_batch = saved + segment * 4 * channels + columns
        mean = tl.load(of_batch, mask=inside, other=0.0)
        inverse = tl.load(of_batch + channels, mask=inside, other=0.0)
        scale = tl.load(of_batch + 2 * channels, mask=inside, other=0.0)
        shift = tl.load(of_batch + 3 * channels, mask=inside, other=0.0)
        gradient, value = _through_relu(
            dy + start, also + start, y + start, x + start, scale, shift, rows, columns, mask, channels, has_residual,
            relu, twice,
        )  # fmt: skip
        total = tl.sum(gradient, 0)
        product = tl.sum(tl.where(mask, gradient * (value - mean[None, :]), 0.0), 0) * inverse
        all_totals += total
        all_products += product
        b, c = _slopes(total, product, mean, inverse, scale, rows_total)
        place = start + rows[:, None] * channels + columns[None, :]
        out = scale[None, :] * gradient + b[None, :] * value + c[None, :]
        tl.store(dx + place, out.to(dx.dtype.element_ty), mask=mask)
        if has_residual:
            tl.store(d_residual + place, gradient.to(d_residual.dtype.element_ty), mask=mask)
    tl.store(d_bias + columns, all_totals, mask=inside)
    tl.store(d_weight + columns, all_products, mask=inside)


class _BatchNorm(torch.autograd.Function):
    """Autograd around the kernels."""

    @staticmethod
    def forward(
        ctx, x, residual, weight, bias, running_mean, running_var, counter, relu, momentum, eps, sums, segments, twice
    ):
        """Statistics, then normalise + add + ReLU."""
        channels = x.shape[1]
        rows = x.numel() // channels // segments
        has_residual = residual is not None
        y = torch.empty_like(x)
        added = residual if has_residual else x
        form = {"channels": channels, "has_residual": has_residual, "relu": relu}
        if rows <= (MORE_ROWS if channels >= MANY_CHANNELS else WHOLE_ROWS):
            grid, shape = _whole(rows, channels)
            saved = floats(x, segments * 4 * channels)
            told = (weight, bias, running_mean, running_var, saved, rows, momentum, eps)
            _whole_forward[grid](x, added, y, *told, segments=segments, **form, **shape)
        else:
            saved = _learned(x, counter, weight, bias, running_mean, running_var, momentum, eps, sums, segments)
            grid, shape = _pass(rows, channels, segments)
            _normalise[grid](x, added, y, saved, rows, **form, **shape)
        ctx.save_for_backward(x, y if has_residual and relu else x, weight, saved, counter)
        ctx.form = rows, channels, has_residual, relu, segments
        ctx.set_materialize_grads(False)  # no zeros for a second result that nobody has used
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx, *gradients):
        """Sums over the batch, then the gradients of input and shortcut."""
        x, y, weight, saved, counter = ctx.saved_tensors
        rows, channels, has_residual, relu, segments = ctx.form
        dy, *more = (g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None)
        both = (dy, *(more or [dy]))
        dx = torch.empty_like(x)
        # without ReLU the shortcut's gradient is dy itself
        separate = has_residual and (relu or bool(more))
        form = {"channels": channels, "has_residual": separate, "relu": relu, "twice": bool(more)}
        if rows <= WHOLE_ROWS:
            grid, shape = _whole(rows, channels)
            d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
            d_residual = torch.empty_like(x) if separate else dx
            written = (d_weight, d_bias, dx, d_residual)
            _whole_backward[grid](*both, y, x, saved, *written, rows, segments=segments, **form, **shape)
        else:
            d_weight, d_bias, coefficients, d_residual = _summed_back(
                both, y, x, counter, weight, saved, segments, form
            )
            if d_residual is not None:  # all that follows is in it, read once
                both = (d_residual, d_residual)
                form |= {"has_residual": False, "relu": False, "twice": False}
            elif separate:
                d_residual = torch.empty_like(x)
            grid, shape = _pass(rows, channels, segments)
            written = (dx, dx if d_residual is None else d_residual)
            _backward_input[grid](*both, y, x, saved, coefficients, *written, rows, **form, **shape)
        return dx, (d_residual if separate else dy) if has_residual else None, d_weight, d_bias, *[None] * 9


def _learned(x, counter, weight, bias, running_mean, running_var, momentum, eps, sums, segments):
    """Mean, inverse deviation, scale and shift of each segment; moves the running statistics."""
    channels = x.shape[1]
    rows = x.numel() // channels // segments
    told = (weight, bias, running_mean, running_var)
    if cuda_norm.suits(x):
        if sums is not None:
            return cuda_norm.settle(sums, rows, *told, momentum, eps, segments)
        return cuda_norm.statistics(x, counter, *told, momentum, eps, segments)
    saved = floats(x, segments * 4 * channels)
    told = (*told, saved, rows, momentum, eps)
    form = {"channels": channels, "segments": segments}
    if sums is not None:
        grid = (triton.cdiv(channels, WHOLE_CHANNELS),)
        _settle[grid](sums, len(sums) // segments, *told, block=WHOLE_CHANNELS, num_warps=8, **form)
    else:
        programs, shape = _reduction(rows, channels, segments)
        partial = floats(x, segments * programs * 2 * channels)
        _statistics[(programs, segments)](x, partial, counter, *told, programs, **form, **shape)
    return saved


def _summed_back(both, y, x, counter, weight, saved, segments, form):
    """Gradients of weight and bias, the coefficients of the input's, and that of the shortcut if it comes along."""
    if cuda_norm.suits(x):
        also = both[1] if form["twice"] else None
        return cuda_norm.backward_sums(
            both[0], y, x, counter, saved, form["has_residual"], form["relu"], segments, also
        )  # fmt: skip
    channels = x.shape[1]
    rows = x.numel() // channels // segments
    programs, shape = _reduction(rows, channels, segments)
    partial, coefficients = (
        floats(x, segments * programs * 2 * channels),
        floats(x, segments * 2 * channels),
    )
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
    _backward_sums[(programs, segments)](
        *both, y, x, partial, counter, saved, d_weight, d_bias, coefficients, rows, programs,
        segments=segments, **form, **shape,
    )  # fmt: skip
    return d_weight, d_bias, coefficients, None


def _whole(rows: int, channels: int) -> tuple[tuple[int], dict[str, int]]:
    tile = triton.next_power_of_2(rows)
    warps = min(max(tile * WHOLE_CHANNELS // 2048, 1), 16)
    return (triton.cdiv(channels, WHOLE_CHANNELS),), {"tile": tile, "block": WHOLE_CHANNELS, "num_warps": warps}


def _reduction(rows: int, channels: int, segments: int) -> tuple[int, dict[str, int]]:
    block = triton.next_power_of_2(channels)
    tile, programs = (8192 // block, 264) if block <= 32 else (16384 // block, 132)  # measured on an H200
    programs = max(programs // segments, 1)
    return min(triton.cdiv(rows, tile), programs), {"tile": tile, "block": block, "num_warps": 8}


def _pass(rows: int, channels: int, segments: int = 1) -> tuple[tuple[int, int], dict[str, int]]:
    block = triton.next_power_of_2(channels)
    tile = max(TILE // block, 1)
    return (triton.cdiv(rows, tile), segments), {"tile": tile, "block": block, "num_warps": 4}


def batch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    counter: Tensor,
    relu: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    sums: Tensor | None = None,
    segments: int = 1,
    twice: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Training-mode BatchNorm of channels-last images, plus a shortcut, then ReLU; updates the running statistics.

    `sums`, where they are known already: parts × 2 × channels, the sums of values and of squares.
    `segments`: the batch is so many runs of images of one length, each normalised by its own statistics, as if they
    came one after the other. Then there are as many parts of the sums for each.
    `twice`: give the result two times, for two readers; the kernels add up the gradients that come back from them.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    told = (weight, bias, running_mean, running_var, counter, relu, momentum, eps, sums, segments, twice)
    return _BatchNorm.apply(x, residual, *told)


def by_running_statistics(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    relu: bool,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm of channels-last images as it answers, plus a shortcut, then ReLU; without gradients."""
    x = x.contiguous(memory_format=torch.channels_last)
    added = x if residual is None else residual.contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    rows = x.numel() // channels
    y = torch.empty_like(x)
    grid, shape = _pass(rows, channels)
    _answer[grid](
        x, added, y, weight, bias, running_mean, running_var, rows, eps,
        channels=channels, has_residual=residual is not None, relu=relu, **shape,
    )  # fmt: skip
    return y
