"""The kernels that a block with a shortcut begins with, and average pooling, against what does the same without them.

    python benchmarks/gpu_downsample.py [--images 220] [--sizes 84,32] [--json FILE]

Microseconds of the two convolutions of stride 2 (3×3, and the shortcut's 1×1) of the reduced ResNet18, for images of
these sizes: forward, the gradient of the input, and of the weights; by our kernels for both at once, and by those that
would do them one after the other (Triton's up to 64 channels, cuDNN's beyond). "least" is the time to copy what must be
read and written, at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_step import card
from torch import Tensor

RUNS, SETS = 20, 4  # measured in turns on several inputs, so that none is in the cache already


class Given(NamedTuple):
    x: Tensor
    large: Tensor
    small: Tensor
    dy: Tensor
    dy_small: Tensor


def timed(function: Callable[..., Any], sets: Sequence[Any]) -> float:
    """Median of seconds on the device."""
    for given in sets:
        function(given)
    torch.cuda.synchronize()
    times = []
    for run in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the host is ahead, so that only the device is timed
        begin.record()
        function(sets[run % len(sets)])
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def images(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)


def weights(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") / 10).contiguous(memory_format=torch.channels_last)


def made_up(count: int, inner: int, outer: int, size: int) -> Given:
    half = -(-size // 2)
    of_results = (images(count, outer, half, half) for _ in range(2))
    return Given(
        images(count, inner, size, size), weights(outer, inner, 3, 3), weights(outer, inner, 1, 1), *of_results
    )


def library_back(x: Tensor, weight: Tensor, dy: Tensor, mask: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
    side = weight.shape[2] // 2
    return torch.ops.aten.convolution_backward(
        dy, x, weight.bfloat16(), None, (2, 2), (side, side), (1, 1), False, (0, 0), 1, mask
    )


def kinds(own: bool) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """By name: one after the other, and at once."""
    from scrlearn.models import cuda_strided, fused_conv

    def forward(g: Given) -> list[Tensor]:
        if own:
            return [fused_conv._run(g.x, w, fused_conv._after(g.x, 2), 2, segments=1)[0] for w in (g.large, g.small)]
        return [F.conv2d(g.x, w.bfloat16(), stride=2, padding=w.shape[2] // 2) for w in (g.large, g.small)]

    def back(g: Given) -> list[Tensor]:
        pairs = ((g.large, g.dy), (g.small, g.dy_small))
        if own:
            return [fused_conv._run(dy, w, g.x.shape[2:], 2, backward=True)[0] for w, dy in pairs]
        return [library_back(g.x, w, dy, (True, False, False))[0] for w, dy in pairs]

    def of_weights(g: Given) -> list[Tensor]:
        pairs = ((g.large, g.dy), (g.small, g.dy_small))
        if own:
            return [fused_conv._sum_weight_gradient(g.x, dy, w, 2) for w, dy in pairs]
        return [library_back(g.x, w, dy, (False, True, False))[1] for w, dy in pairs]

    def at_once(g: Given) -> list[Tensor]:
        return list(fused_conv._downsampled(g.x, g.large, g.small, 1)[:2])

    def back_at_once(g: Given) -> list[Tensor]:
        dx = torch.empty_like(g.x)
        cuda_strided.input_gradient((g.dy, g.dy_small), g.large, g.small, dx)
        return [dx]

    def of_weights_at_once(g: Given) -> list[Tensor]:
        partial = cuda_strided.weight_gradients(g.x, (g.dy, g.dy_small), g.large)
        return list(cuda_strided.apart(fused_conv._added_up(partial, torch.empty_like(partial[0])), g.large))

    return {
        "forward": (forward, at_once),
        "gradient of the input": (back, back_at_once),
        "gradients of the weights": (of_weights, of_weights_at_once),
    }


def pooling(count: int, size: int) -> tuple[float, float]:
    """Both ways, by PyTorch and by ours."""
    from scrlearn.models import resnet

    pool = (min(4, size), min(4, size))
    sets = [
        (images(count, 160, size, size).requires_grad_(), images(count, 160, size // pool[0], size // pool[1]))
        for _ in range(SETS)
    ]
    both = (F.avg_pool2d, partial(resnet.averaged, training=True))
    before, now = (timed(lambda pair, by=by: torch.autograd.grad(by(pair[0], pool), *pair), sets) for by in both)
    return before, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=220)
    parser.add_argument("--sizes", default="84,32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing to measure.")
        return
    from scrlearn.models import cuda_strided

    torch.backends.cudnn.deterministic = True
    bandwidth = card()["bytes_per_second"]
    rows = {}
    print(f"{torch.cuda.get_device_name()}: µs one after the other, at once, and the least")
    for size in map(int, given.sizes.split(",")):
        for inner, outer, side in ((24, 40, size), (40, 80, -(-size // 2))):
            sets = [made_up(given.images, inner, outer, side) for _ in range(SETS)]
            x, large, small = sets[0][:3]
            if not cuda_strided.suits(x, large, small, (2, 2)):
                print(f"{inner} to {outer} channels, {side}×{side}: the kernels cannot do it here")
                continue
            least = 2 * (x.numel() + 2 * sets[0].dy.numel()) / bandwidth
            for kind, ways in kinds(own=outer <= 64).items():
                times = [timed(way, sets) for way in ways]
                name = f"{inner} to {outer} channels, {side}×{side}, {kind}"
                rows[name] = {"one_after_the_other": times[0], "at_once": times[1], "least": least}
                print(f"{times[0] * 1e6:8.1f} {times[1] * 1e6:8.1f} {least * 1e6:8.1f}  {name}", flush=True)
        last = -(-size // 8)
        before, now = pooling(given.images, last)
        rows[f"pooling, {last}×{last}"] = {"one_after_the_other": before, "at_once": now}
        print(f"{before * 1e6:8.1f} {now * 1e6:8.1f}           average pooling, {last}×{last}, both ways", flush=True)
    if given.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "options": vars(given)}
        given.json.write_text(json.dumps({**about, "seconds": rows}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
