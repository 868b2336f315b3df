"""3×3 and 1×1 convolutions of few channels, forward and backward, on CUDA (Triton).

The libraries' kernels are built for 64 channels and more; with 24 or 40 they leave most of a tile empty, and some fall
back to conversions. Here a tile holds all channels. With channels last, the three neighbours of a row of taps lie side
by side in memory, so a row is one load and one product, not three. What `cuda_conv` and `cuda_strided` can do is left
to them: they are faster, and do most of the work. Weights are taken in float32 and their gradient comes out in float32.
While a result is written its sums over the batch are made, which BatchNorm needs next. All sums are made in a fixed
order.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrlearn.models import cuda_conv, cuda_strided

PROGRAMS = 132


@triton.jit
def _neighbours(
    x, first, inside, column, start: tl.constexpr, size: tl.constexpr,
    inner: tl.constexpr, span: tl.constexpr, from_width: tl.constexpr,
):  # fmt: skip
    """For each place, `size` values of the pixels side by side from `column` on; zeros outside the image."""
    k = start + tl.arange(0, size)
    from_column = column[:, None] + (k // inner)[None, :]
    mask = inside[:, None] & (k < span)[None, :] & (from_column >= 0) & (from_column < from_width)
    return tl.load(x + first[:, None] + k[None, :], mask=mask, other=0.0).to(tl.bfloat16)


@triton.jit
def _row_of_taps(
    x, w, first, inside, column, total, down, start: tl.constexpr, size: tl.constexpr, inner: tl.constexpr,
    outer: tl.constexpr, side: tl.constexpr, from_width: tl.constexpr, block_out: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    """Add the products of a row of neighbours with its weights. Backward: the taps are turned around."""
    span: tl.constexpr = side * inner
    pixels = _neighbours(x, first, inside, column, start, size, inner, span, from_width)
    k = start + tl.arange(0, size)
    n = tl.arange(0, block_out)
    if backward:
        tap = (side - 1 - down) * side + (side - 1 - k // inner)
        place = ((k % inner) * (side * side) + tap)[:, None] * outer + n[None, :]
    else:
        place = (down * span + k)[:, None] + n[None, :] * (side * span)
    weights = tl.load(w + place, mask=(k < span)[:, None] & (n < outer)[None, :], other=0.0)
    return tl.dot(pixels, weights.to(tl.bfloat16), total)


@triton.jit
def _convolve(
    x, w, y, sums, rows_total,
    height: tl.constexpr, width: tl.constexpr, from_height: tl.constexpr, from_width: tl.constexpr,
    inner: tl.constexpr, outer: tl.constexpr, side: tl.constexpr, stride: tl.constexpr, backward: tl.constexpr,
    has_sums: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr, rest: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """Pixels × channels of the result, and the tile's sums of values and squares. Backward: for stride 1."""
    n = tl.arange(0, block_out)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    column = (rows % width) * stride - side // 2
    row = ((rows // width) % height) * stride - side // 2
    image = rows // (width * height)
    total = tl.zeros((tile, block_out), tl.float32)
    for down in tl.static_range(0, side):
        inside = (rows < rows_total) & (row + down >= 0) & (row + down < from_height)
        first = ((image * from_height + row + down) * from_width + column) * inner
        total = _row_of_taps(
            x, w, first, inside, column, total, down, 0, piece, inner, outer, side, from_width, block_out, backward
        )  # fmt: skip
        if rest > 0:
            total = _row_of_taps(
                x, w, first, inside, column, total, down, piece, rest, inner, outer, side, from_width, block_out,
                backward,
            )  # fmt: skip
    value = total.to(y.dtype.element_ty)
    mask = (rows < rows_total)[:, None] & (n < outer)[None, :]
    tl.store(y + rows[:, None] * outer + n[None, :], value, mask=mask)
    if has_sums:
        value = value.to(tl.float32)
        place = sums + tl.program_id(0) * 2 * outer + n
        tl.store(place, tl.sum(value, 0), mask=n < outer)
        tl.store(place + outer, tl.sum(value * value, 0), mask=n < outer)


@triton.jit
def _every_other(
    x, w, first, inside, column, total, down, odd_row, odd_column, start: tl.constexpr, size: tl.constexpr,
    inner: tl.constexpr, outer: tl.constexpr, side: tl.constexpr, from_width: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    span: tl.constexpr = 2 * inner
    pixels = _neighbours(x, first, inside, column, start, size, inner, span, from_width)
    k = start + tl.arange(0, size)
    n = tl.arange(0, block_out)
    right = k // inner
    if side == 3:
        tap = tl.where(odd_row, 2 - 2 * down, 1) * 3 + tl.where(odd_column, 2 - 2 * right, 1)
        used = (k < span) & (odd_column | (right == 0))
    else:
        tap = 0 * k
        used = (k < inner) & (odd_column == 0)
    place = ((k % inner) * (side * side) + tap)[:, None] * outer + n[None, :]
    weights = tl.load(w + place, mask=used[:, None] & (n < outer)[None, :], other=0.0)
    return tl.dot(pixels, weights.to(tl.bfloat16), total)


@triton.jit
def _back_through_stride(
    x, w, y, rows_total,
    height: tl.constexpr, width: tl.constexpr, from_height: tl.constexpr, from_width: tl.constexpr,
    inner: tl.constexpr, outer: tl.constexpr, side: tl.constexpr,
    tile: tl.constexpr, piece: tl.constexpr, rest: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """The input's gradient at stride 2. A pixel in an odd row or column has met two taps of it, in an even one one."""
    n = tl.arange(0, block_out)
    odd_row, odd_column = tl.program_id(1) // 2 == 1, tl.program_id(1) % 2 == 1
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    column = rows % from_width
    row = (rows // from_width) % from_height
    image = rows // (from_width * from_height)
    to_row, to_column = 2 * row + odd_row.to(tl.int32), 2 * column + odd_column.to(tl.int32)
    total = tl.zeros((tile, block_out), tl.float32)
    for down in tl.static_range(0, 2):
        used = (down == 0) & (odd_row == 0) if side == 1 else (down == 0) | odd_row
        inside = (rows < rows_total) & (row + down < from_height) & used
        first = ((image * from_height + row + down) * from_width + column) * inner
        total = _every_other(
            x, w, first, inside, column, total, down, odd_row, odd_column, 0, piece, inner, outer, side, from_width,
            block_out,
        )  # fmt: skip
        if rest > 0:
            total = _every_other(
                x, w, first, inside, column, total, down, odd_row, odd_column, piece, rest, inner, outer, side,
                from_width, block_out,
            )  # fmt: skip
    given = (rows < rows_total) & (to_row < height) & (to_column < width)
    place = ((image * height + to_row) * width + to_column)[:, None] * outer + n[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=given[:, None] & (n < outer)[None, :])


@triton.jit
def _weight_gradient(
    x, dy, partial, rows_total, programs,
    height: tl.constexpr, width: tl.constexpr, from_height: tl.constexpr, from_width: tl.constexpr,
    inner: tl.constexpr, outer: tl.constexpr, side: tl.constexpr, stride: tl.constexpr,
    tile: tl.constexpr, piece: tl.constexpr, rest: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """Partial sums of one row of taps over a share of the pixels."""
    span: tl.constexpr = side * inner
    n = tl.arange(0, block_out)
    down = tl.program_id(1)
    total = tl.zeros((piece, block_out), tl.float32)
    total_rest = tl.zeros((rest if rest > 0 else 16, block_out), tl.float32)
    for begin in range(tl.program_id(0) * tile, rows_total, programs * tile):
        rows = begin + tl.arange(0, tile)
        column = (rows % width) * stride - side // 2
        row = ((rows // width) % height) * stride - side // 2 + down
        image = rows // (width * height)
        given = (rows < rows_total)[:, None] & (n < outer)[None, :]
        gradient = tl.load(dy + rows[:, None] * outer + n[None, :], mask=given, other=0.0).to(tl.bfloat16)
        inside = (rows < rows_total) & (row >= 0) & (row < from_height)
        first = ((image * from_height + row) * from_width + column) * inner
        pixels = _neighbours(x, first, inside, column, 0, piece, inner, span, from_width)
        total = tl.dot(tl.trans(pixels), gradient, total)
        if rest > 0:
            pixels = _neighbours(x, first, inside, column, piece, rest, inner, span, from_width)
            total_rest = tl.dot(tl.trans(pixels), gradient, total_rest)
    # the layout of a channels-last weight: output channel, tap, input channel
    base = partial + tl.program_id(0) * (outer * side * span) + down * span + n[None, :] * (side * span)
    k = tl.arange(0, piece)[:, None]
    tl.store(base + k, total, mask=(k < span) & (n < outer)[None, :])
    if rest > 0:
        k = piece + tl.arange(0, rest)[:, None]
        tl.store(base + k, total_rest, mask=(k < span) & (n < outer)[None, :])


@triton.jit
def _add_up(partial, out, size, programs, rows: tl.constexpr, block: tl.constexpr):
    """The sum over all programs' partial sums, in order."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((rows, block), tl.float32)
    for first in range(0, programs, rows):
        program = first + tl.arange(0, rows)
        mask = (program < programs)[:, None] & (columns < size)[None, :]
        total += tl.load(partial + program[:, None] * size + columns[None, :], mask=mask, other=0.0)
    tl.store(out + columns, tl.sum(total, 0), mask=columns < size)


@triton.jit
def _widen(
    x, y, pixels, area, of_image, of_channel, of_pixel,
    channels: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, integers: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Pixels in bfloat16, channels last, with zeros behind the last channel."""
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    c = tl.arange(0, block)
    inside = (rows < pixels)[:, None]
    first = (rows // area) * of_image + (rows % area) * of_pixel
    place = x + first[:, None] + c[None, :] * of_channel
    value = tl.load(place, mask=inside & (c < channels)[None, :], other=0).to(tl.float32)
    if integers:
        value *= 1.0 / 255.0  # as PyTorch divides by a number
    tl.store(y + rows[:, None] * wide + c[None, :], value.to(tl.bfloat16), mask=inside & (c < wide)[None, :])


def widened(x: Tensor, channels: int) -> Tensor:
    """Images (bytes, or floats in [0, 1]) as the kernels want them: bfloat16, with zeros as more channels.

    One kernel, whatever order the images lie in.
    """
    n, _, height, width = x.shape
    if x.stride(2) != width * x.stride(3):  # the pixels of a channel do not lie at equal distances
        x = x.contiguous()
    y = _images(x, channels, (height, width))
    pixels, tile = n * height * width, 256
    form = {"channels": x.shape[1], "wide": channels, "block": triton.next_power_of_2(channels), "tile": tile}
    form["integers"] = x.dtype == torch.uint8
    strides = (x.stride(0), x.stride(1), x.stride(3))
    _widen[(triton.cdiv(pixels, tile),)](x, y, pixels, height * width, *strides, **form)
    return y


def _block(values: int) -> int:
    return max(16, triton.next_power_of_2(values))


def _pieces(span: int) -> dict[str, int]:
    """A row of taps as one power of two or as two, whichever leaves less of a product empty."""
    whole = _block(span)
    if whole <= 32 or 4 * span > 3 * whole:
        return {"piece": whole, "rest": 0}
    return {"piece": whole // 2, "rest": _block(span - whole // 2)}


def _after(x: Tensor, stride: int) -> tuple[int, ...]:
    """Height and width of the result."""
    return tuple(-(-side // stride) for side in x.shape[2:])


def _images(like: Tensor, channels: int, size: tuple[int, ...]) -> Tensor:
    shape = (len(like), channels, *size)
    return torch.empty(shape, dtype=torch.bfloat16, device=like.device, memory_format=torch.channels_last)


def _run(
    x: Tensor, weight: Tensor, size: tuple[int, ...], stride: int, backward: bool = False, segments: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The result; and its sums, where they are wanted for some segments and no tile lies in two of them."""
    outer, inner, side = weight.shape[:3]
    if backward:
        outer, inner = inner, outer
    y = _images(x, outer, size)
    form = {"height": size[0], "width": size[1], "from_height": x.shape[2], "from_width": x.shape[3]}
    form |= {"inner": inner, "outer": outer, "side": side, "block_out": _block(outer)}
    form["tile"] = tile = 128 if outer <= 32 else 64
    if backward and stride == 2:
        rows = x.numel() // inner
        _back_through_stride[(triton.cdiv(rows, tile), 4)](x, weight, y, rows, **form, **_pieces(2 * inner))
        return y, None
    if cuda_conv.suits(x, weight, stride):
        return y, cuda_conv.convolve(x, weight, y, backward, segments)
    rows = y.numel() // outer
    has_sums = cuda_conv.apart(rows, tile, segments)
    programs = triton.cdiv(rows, tile)
    sums = torch.empty((programs, 2, outer), dtype=torch.float32, device=x.device) if has_sums else None
    form |= {"stride": stride, "backward": backward, "has_sums": has_sums}
    _convolve[(programs,)](x, weight, y, y if sums is None else sums, rows, **form, **_pieces(side * inner))
    return y, sums


def _sum_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    if cuda_conv.suits(x, weight, stride):
        partial = cuda_conv.weight_gradient(x, dy, weight)
    else:
        partial = _partial_weight_gradient(x, dy, weight, stride)
    return _added_up(partial, torch.empty_like(weight, memory_format=torch.channels_last))


def _added_up(partial: Tensor, total: Tensor) -> Tensor:
    size = total.numel()
    _add_up[(triton.cdiv(size, 32),)](partial, total, size, len(partial), rows=128, block=32)
    return total


def _partial_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    outer, inner, side = weight.shape[:3]
    rows = dy.numel() // outer
    tile = 128 if max(inner, outer) <= 32 else 64
    programs = min(triton.cdiv(rows, tile), PROGRAMS)
    partial = torch.empty((programs, weight.numel()), dtype=torch.float32, device=x.device)
    _weight_gradient[(programs, side)](
        x, dy, partial, rows, programs, height=dy.shape[2], width=dy.shape[3], from_height=x.shape[2],
        from_width=x.shape[3], inner=inner, outer=outer, side=side, stride=stride, tile=tile, block_out=_block(outer),
        **_pieces(side * inner), num_stages=1,
    )  # fmt: skip
    return partial


class _Convolution(torch.autograd.Function):
    """Autograd around the kernels."""

    @staticmethod
    def forward(ctx, x, weight, stride, segments):
        """The convolution, and its sums for BatchNorm."""
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        y, sums = _run(x, weight, _after(x, stride), stride, segments=segments)
        if sums is not None:
            ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)  # no zeros for the sums
        return y, sums

    @staticmethod
    def backward(ctx, dy, _):
        """Gradients of input and weight."""
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _ = _run(dy, weight, x.shape[2:], ctx.stride, backward=True)
        return dx, _sum_weight_gradient(x, dy, weight, ctx.stride), None, None


def convolve(
    x: Tensor, weight: Tensor, stride: int = 1, training: bool = True, segments: int = 1
) -> tuple[Tensor, Tensor | None]:
    """3×3 (padding 1) or 1×1 convolution of channels-last images, stride 1 or 2; float32 weights, bfloat16 out.

    While training it also gives, for tiles of the result, the sums of its channels' values and of their squares
    (tiles × 2 × channels); where BatchNorm looks at segments of the batch one by one, only if none shares a tile with
    the next. Otherwise there are no sums, and no gradients.
    """
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    if training:
        return _Convolution.apply(x, weight, stride, segments)
    return _run(x, weight, _after(x, stride), stride)


class _Downsampling(torch.autograd.Function):
    """Autograd around the kernels of `cuda_strided`."""

    @staticmethod
    def forward(ctx, x, weight, small, segments):
        """Both results, and their sums for BatchNorm."""
        ctx.save_for_backward(x, weight, small)
        *results, sums = _downsampled(x, weight, small, segments)
        sums = sums.unbind()
        ctx.mark_non_differentiable(*sums)
        ctx.set_materialize_grads(False)  # no zeros for the sums
        return *results, *sums

    @staticmethod
    def backward(ctx, *gradients):
        """Gradients of input and weights."""
        x, weight, small = ctx.saved_tensors
        form = {"like": x, "channels": len(weight), "size": _after(x, 2)}
        gradients = tuple(
            _images(**form).zero_() if dy is None else dy.contiguous(memory_format=torch.channels_last)
            for dy in gradients[:2]
        )
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            cuda_strided.input_gradient(gradients, weight, small, dx)
        partial = cuda_strided.weight_gradients(x, gradients, weight)
        return dx, *cuda_strided.apart(_added_up(partial, torch.empty_like(partial[0])), weight), None


def _downsampled(x: Tensor, weight: Tensor, small: Tensor, segments: int) -> tuple[Tensor, Tensor, Tensor | None]:
    results = tuple(_images(x, len(weight), _after(x, 2)) for _ in range(2))
    return *results, cuda_strided.downsample(x, weight, small, results, segments)


def downsample(
    x: Tensor, weight: Tensor, small: Tensor, training: bool = True, segments: int = 1
) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """A 3×3 and a 1×1 convolution of stride 2 of the same images: what `convolve` gives for either.

    Only where `cuda_strided.suits`.
    """
    x, weight, small = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight, small))
    if not training:
        return tuple((y, None) for y in _downsampled(x, weight, small, segments=0)[:2])
    y, of_small, *sums = _Downsampling.apply(x, weight, small, segments)
    return tuple(zip((y, of_small), sums, strict=True))
