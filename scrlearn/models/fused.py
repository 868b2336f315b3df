"""BatchNorm, the addition of the shortcut and ReLU in two passes over the data, each way, on CUDA (Triton).

The step of an online learner is many small kernels that wait for memory; reading and writing each activation once
instead of three times is what makes it faster. Sums are made in a fixed order: partial sums per program, added up by
the program that finishes last, so results are the same bit for bit every time. A convolution that has made the sums of
its result already hands them over. Sums in bfloat16 are left to `cuda_norm`, which is faster.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrlearn.models import cuda_norm

TILE = 4096
WHOLE_ROWS = 2560
WHOLE_CHANNELS = 8


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
def _keep(
    saved, running_mean, running_var, mean, variance, inverse, scale, shift, rows_total, momentum, columns, inside,
    channels: tl.constexpr,
):  # fmt: skip
    """Save what the backward pass needs and move the running statistics."""
    tl.store(saved + columns, mean, mask=inside)
    tl.store(saved + channels + columns, inverse, mask=inside)
    tl.store(saved + 2 * channels + columns, scale, mask=inside)
    tl.store(saved + 3 * channels + columns, shift, mask=inside)
    unbiased = variance * rows_total / (rows_total - 1)
    old_mean = tl.load(running_mean + columns, mask=inside, other=0.0)
    old_var = tl.load(running_var + columns, mask=inside, other=0.0)
    tl.store(running_mean + columns, old_mean + momentum * (mean - old_mean), mask=inside)
    tl.store(running_var + columns, old_var + momentum * (unbiased - old_var), mask=inside)


@triton.jit
def _from_sums(
    sums, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, columns, inside,
    channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """From partial sums of values and squares to scale and shift."""
    mean = _total(sums, 0, programs, columns, inside, channels, block) / rows_total
    square = _total(sums, 1, programs, columns, inside, channels, block) / rows_total
    variance = tl.maximum(square - mean * mean, 0.0)
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0) * inverse
    shift = tl.load(bias + columns, mask=inside, other=0.0) - mean * scale
    _keep(
        saved, running_mean, running_var, mean, variance, inverse, scale, shift, rows_total, momentum, columns,
        inside, channels,
    )  # fmt: skip


@triton.jit
def _statistics(
    x, partial, counter, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, programs,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Mean and variance of each channel; the last program turns them into scale and shift."""
    columns = tl.arange(0, block)
    inside = columns < channels
    sums = tl.zeros((tile, block), tl.float32)
    squares = tl.zeros((tile, block), tl.float32)
    for first in range(tl.program_id(0) * tile, rows_total, programs * tile):
        rows = first + tl.arange(0, tile)
        value = _load(x, rows, columns, (rows < rows_total)[:, None] & inside[None, :], channels)
        sums += value
        squares += value * value
    place = partial + tl.program_id(0) * 2 * channels + columns
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + channels, tl.sum(squares, 0), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == programs - 1:
        _from_sums(
            partial, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, columns,
            inside, channels, block,
        )  # fmt: skip
        tl.store(counter, 0)


@triton.jit
def _settle(
    sums, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps,
    channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Mean and variance of a few channels from sums that somebody else has made."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    _from_sums(
        sums, programs, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps, columns,
        columns < channels, channels, block,
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
    scale = tl.load(saved + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(saved + 3 * channels + columns, mask=inside, other=0.0)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    value = _load(x, rows, columns, mask, channels)
    _finish(value, scale, shift, residual, y, rows, columns, mask, channels, has_residual, relu)


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
    dy, y, x, scale, shift, rows, columns, mask,
    channels: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """The gradient before ReLU, and the input; without a shortcut the sign is computed again, not read."""
    gradient = _load(dy, rows, columns, mask, channels)
    value = _load(x, rows, columns, mask, channels)
    if relu:
        if has_residual:
            sign = _load(y, rows, columns, mask, channels)
        else:
            sign = value * scale[None, :] + shift[None, :]
        gradient = tl.where(sign > 0, gradient, 0.0)
    return gradient, value


@triton.jit
def _backward_sums(
    dy, y, x, partial, counter, weight, saved, d_weight, d_bias, coefficients, rows_total, programs,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, block)
    inside = columns < channels
    mean = tl.load(saved + columns, mask=inside, other=0.0)
    inverse = tl.load(saved + channels + columns, mask=inside, other=0.0)
    scale = tl.load(saved + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(saved + 3 * channels + columns, mask=inside, other=0.0)
    sums = tl.zeros((tile, block), tl.float32)
    products = tl.zeros((tile, block), tl.float32)
    for first in range(tl.program_id(0) * tile, rows_total, programs * tile):
        rows = first + tl.arange(0, tile)
        mask = (rows < rows_total)[:, None] & inside[None, :]
        gradient, value = _through_relu(
            dy, y, x, scale, shift, rows, columns, mask, channels, has_residual, relu
        )  # fmt: skip
        sums += gradient
        products += gradient * (value - mean[None, :])
    place = partial + tl.program_id(0) * 2 * channels + columns
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + channels, tl.sum(products, 0), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == programs - 1:
        total = _total(partial, 0, programs, columns, inside, channels, block)
        product = _total(partial, 1, programs, columns, inside, channels, block) * inverse
        tl.store(d_bias + columns, total, mask=inside)
        tl.store(d_weight + columns, product, mask=inside)
        # dx = a · dz + b · x + c
        b = -scale * inverse * product / rows_total
        tl.store(coefficients + columns, b, mask=inside)
        tl.store(coefficients + channels + columns, -scale * total / rows_total - b * mean, mask=inside)
        tl.store(counter, 0)


@triton.jit
def _backward_input(
    dy, y, x, saved, coefficients, dx, d_residual, rows_total,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, block)
    inside = columns < channels
    a = tl.load(saved + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(saved + 3 * channels + columns, mask=inside, other=0.0)
    b = tl.load(coefficients + columns, mask=inside, other=0.0)
    c = tl.load(coefficients + channels + columns, mask=inside, other=0.0)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    gradient, value = _through_relu(
        dy, y, x, a, shift, rows, columns, mask, channels, has_residual, relu
    )  # fmt: skip
    place = rows[:, None] * channels + columns[None, :]
    tl.store(dx + place, (a[None, :] * gradient + b[None, :] * value + c[None, :]).to(dx.dtype.element_ty), mask=mask)
    if has_residual:
        tl.store(d_residual + place, gradient.to(d_residual.dtype.element_ty), mask=mask)


@triton.jit
def _whole_forward(
    x, residual, y, weight, bias, running_mean, running_var, saved, rows_total, momentum, eps,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """Everything in one kernel, for a few thousand rows: a program holds all values of its channels."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    rows = tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    value = _load(x, rows, columns, mask, channels)
    mean = tl.sum(value, 0) / rows_total
    centred = tl.where(mask, value - mean[None, :], 0.0)
    variance = tl.sum(centred * centred, 0) / rows_total
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0) * inverse
    shift = tl.load(bias + columns, mask=inside, other=0.0) - mean * scale
    _keep(
        saved, running_mean, running_var, mean, variance, inverse, scale, shift, rows_total, momentum, columns,
        inside, channels,
    )  # fmt: skip
    _finish(value, scale, shift, residual, y, rows, columns, mask, channels, has_residual, relu)


@triton.jit
def _whole_backward(
    dy, y, x, saved, d_weight, d_bias, dx, d_residual, rows_total,
    channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    rows = tl.arange(0, tile)
    mask = (rows < rows_total)[:, None] & inside[None, :]
    mean = tl.load(saved + columns, mask=inside, other=0.0)
    inverse = tl.load(saved + channels + columns, mask=inside, other=0.0)
    scale = tl.load(saved + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(saved + 3 * channels + columns, mask=inside, other=0.0)
    gradient, value = _through_relu(dy, y, x, scale, shift, rows, columns, mask, channels, has_residual, relu)
    total = tl.sum(gradient, 0)
    product = tl.sum(tl.where(mask, gradient * (value - mean[None, :]), 0.0), 0) * inverse
    tl.store(d_bias + columns, total, mask=inside)
    tl.store(d_weight + columns, product, mask=inside)
    b = -scale * inverse * product / rows_total
    c = -scale * total / rows_total - b * mean
    place = rows[:, None] * channels + columns[None, :]
    out = scale[None, :] * gradient + b[None, :] * value + c[None, :]
    tl.store(dx + place, out.to(dx.dtype.element_ty), mask=mask)
    if has_residual:
        tl.store(d_residual + place, gradient.to(d_residual.dtype.element_ty), mask=mask)


class _BatchNorm(torch.autograd.Function):
    """Autograd around the kernels."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, running_mean, running_var, counter, relu, momentum, eps, sums):
        """Statistics, then normalise + add + ReLU."""
        channels = x.shape[1]
        rows = x.numel() // channels
        has_residual = residual is not None
        y = torch.empty_like(x)
        added = residual if has_residual else x
        form = {"channels": channels, "has_residual": has_residual, "relu": relu}
        if rows <= WHOLE_ROWS:
            grid, shape = _whole(rows, channels)
            saved = torch.empty(4 * channels, dtype=torch.float32, device=x.device)
            _whole_forward[grid](
                x, added, y, weight, bias, running_mean, running_var, saved, rows, momentum, eps, **form, **shape
            )
        else:
            saved = _learned(x, counter, weight, bias, running_mean, running_var, momentum, eps, sums)
            grid, shape = _pass(rows, channels)
            _normalise[grid](x, added, y, saved, rows, **form, **shape)
        ctx.save_for_backward(x, y if has_residual and relu else x, weight, saved, counter)
        ctx.form = rows, channels, has_residual, relu
        return y

    @staticmethod
    def backward(ctx, dy):
        """Sums over the batch, then the gradients of input and shortcut."""
        x, y, weight, saved, counter = ctx.saved_tensors
        rows, channels, has_residual, relu = ctx.form
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        # without ReLU the shortcut's gradient is dy itself
        separate = has_residual and relu
        d_residual = torch.empty_like(x) if separate else dx
        form = {"channels": channels, "has_residual": separate, "relu": relu}
        if rows <= WHOLE_ROWS:
            grid, shape = _whole(rows, channels)
            d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
            _whole_backward[grid](dy, y, x, saved, d_weight, d_bias, dx, d_residual, rows, **form, **shape)
        else:
            d_weight, d_bias, coefficients = _summed_back(dy, y, x, counter, weight, saved, separate, relu)
            grid, shape = _pass(rows, channels)
            _backward_input[grid](dy, y, x, saved, coefficients, dx, d_residual, rows, **form, **shape)
        return dx, (d_residual if separate else dy) if has_residual else None, d_weight, d_bias, *[None] * 7


def _learned(x, counter, weight, bias, running_mean, running_var, momentum, eps, sums):
    """Mean, inverse deviation, scale and shift of the batch; moves the running statistics."""
    channels = x.shape[1]
    rows = x.numel() // channels
    told = (weight, bias, running_mean, running_var)
    if cuda_norm.suits(x):
        if sums is not None:
            return cuda_norm.settle(sums, rows, *told, momentum, eps)
        return cuda_norm.statistics(x, counter, *told, momentum, eps)
    saved = torch.empty(4 * channels, dtype=torch.float32, device=x.device)
    told = (*told, saved, rows, momentum, eps)
    if sums is not None:
        grid = (triton.cdiv(channels, WHOLE_CHANNELS),)
        _settle[grid](sums, len(sums), *told, channels=channels, block=WHOLE_CHANNELS, num_warps=8)
    else:
        programs, shape = _reduction(rows, channels)
        partial = torch.empty(programs * 2 * channels, dtype=torch.float32, device=x.device)
        _statistics[(programs,)](x, partial, counter, *told, programs, channels=channels, **shape)
    return saved


def _summed_back(dy, y, x, counter, weight, saved, separate, relu):
    """Gradients of weight and bias, and the coefficients of the input's."""
    if cuda_norm.suits(x):
        return cuda_norm.backward_sums(dy, y, x, counter, saved, separate, relu)
    channels = x.shape[1]
    rows = x.numel() // channels
    programs, shape = _reduction(rows, channels)
    partial = torch.empty(programs * 2 * channels, dtype=torch.float32, device=x.device)
    coefficients = torch.empty(2 * channels, dtype=torch.float32, device=x.device)
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
    _backward_sums[(programs,)](
        dy, y, x, partial, counter, weight, saved, d_weight, d_bias, coefficients, rows, programs,
        channels=channels, has_residual=separate, relu=relu, **shape,
    )  # fmt: skip
    return d_weight, d_bias, coefficients


def _whole(rows: int, channels: int) -> tuple[tuple[int], dict[str, int]]:
    tile = triton.next_power_of_2(rows)
    warps = min(max(tile * WHOLE_CHANNELS // 2048, 1), 16)
    return (triton.cdiv(channels, WHOLE_CHANNELS),), {"tile": tile, "block": WHOLE_CHANNELS, "num_warps": warps}


def _reduction(rows: int, channels: int) -> tuple[int, dict[str, int]]:
    block = triton.next_power_of_2(channels)
    tile, programs = (8192 // block, 264) if block <= 32 else (16384 // block, 132)  # measured on an H200
    return min(triton.cdiv(rows, tile), programs), {"tile": tile, "block": block, "num_warps": 8}


def _pass(rows: int, channels: int) -> tuple[tuple[int], dict[str, int]]:
    block = triton.next_power_of_2(channels)
    tile = max(TILE // block, 1)
    return (triton.cdiv(rows, tile),), {"tile": tile, "block": block, "num_warps": 4}


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
) -> Tensor:
    """Training-mode BatchNorm of channels-last images, plus a shortcut, then ReLU; updates the running statistics.

    `sums`, where they are known already: parts × 2 × channels, the sums of values and of squares.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    return _BatchNorm.apply(x, residual, weight, bias, running_mean, running_var, counter, relu, momentum, eps, sums)


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
