"""What a view of a batch costs, against the usual loop over the images: `python benchmarks/augment.py`.

Prints milliseconds per call and, as a ratio, how many times the loop's time that is. On a CUDA device (`--device
cuda`) the call is also replayed as a CUDA graph, as a learner's step does, with and without `torch.compile`.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from scrlearn.augment import Augment


def loop_view(augment: Augment, x: Tensor, rng: random.Random) -> Tensor:
    """The same view, one image after the other: the plain way, with the parameters drawn in Python."""
    return torch.stack([one_view(augment, image, rng) for image in x])


def one_view(augment: Augment, image: Tensor, rng: random.Random) -> Tensor:
    top, left, height, width = crop_box(augment, image.shape[1], image.shape[2], rng)
    y = F.interpolate(image[None, :, top : top + height, left : left + width], size=image.shape[1:], mode="bilinear")[0]
    if rng.random() < augment.flip:
        y = y.flip(2)
    if rng.random() < augment.jitter:
        y = (y + rng.uniform(-augment.brightness, augment.brightness)).clamp(0, 1)
        y = (y * (1 + rng.uniform(-augment.contrast, augment.contrast))).clamp(0, 1)
        hue, saturation, value = to_hsv(y)
        saturation = (saturation * (1 + rng.uniform(-augment.saturation, augment.saturation))).clamp(0, 1)
        y = from_hsv(hue + rng.uniform(-augment.hue, augment.hue), saturation, value)
    if rng.random() < augment.grey:
        y = (0.299 * y[0] + 0.587 * y[1] + 0.114 * y[2]).expand_as(y)
    return y


def crop_box(augment: Augment, h: int, w: int, rng: random.Random) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = h * w * rng.uniform(*augment.scale)
        ratio = math.exp(rng.uniform(math.log(augment.ratio[0]), math.log(augment.ratio[1])))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= h and 0 < width <= w:
            return rng.randint(0, h - height), rng.randint(0, w - width), height, width
    return 0, 0, h, w


def to_hsv(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    red, green, blue = y
    value, low = y.amax(0), y.amin(0)
    chroma = (value - low).clamp(min=1e-12)
    hue = torch.where(value == green, 2 + (blue - red) / chroma, 4 + (red - green) / chroma)
    hue = torch.where(value == red, ((green - blue) / chroma) % 6, hue)
    return hue / 6, (value - low) / value.clamp(min=1e-12), value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    k = (torch.tensor([5.0, 3.0, 1.0], device=hue.device)[:, None, None] + hue * 6) % 6
    return value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1)


def milliseconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median time of a call, each waited for, after a few to warm up."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(5):
        once()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < until:
        taken.append(once())
    return 1000 * sorted(taken)[len(taken) // 2]


def replayed(view: Callable[[Tensor, torch.Generator], Tensor], x: Tensor, g: torch.Generator) -> Callable[[], None]:
    """The call captured as a CUDA graph; one replay makes ten views, so that the launch is spread over them."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            view(x, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(g)
    with torch.cuda.graph(graph):
        for _ in range(10):
            view(x, g)
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=110, help="images in a batch: 10 of the stream, 100 of the memory")
    parser.add_argument("--size", type=int, nargs="+", default=[32, 84])
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each figure")
    parser.add_argument("--compile", action="store_true", help="also through torch.compile")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}; batch of {options.batch}")
    for size in options.size:
        measure(device, options.batch, size, options.seconds, options.compile)


def measure(device: torch.device, batch: int, size: int, seconds: float, compiled: bool) -> None:
    x = torch.rand(batch, 3, size, size, device=device)
    last = x.contiguous(memory_format=torch.channels_last)
    g = torch.Generator(device).manual_seed(0)
    scr, rng = Augment(), random.Random(0)
    loop = milliseconds(lambda: loop_view(scr, x, rng), device, seconds)

    def report(what: str, ms: float) -> None:
        print(f"  {size}×{size}  {what:28} {ms:9.3f} ms   {ms / loop:.4f} of the loop", flush=True)

    report("loop over the images", loop)
    report("Augment()", milliseconds(lambda: scr(x, g), device, seconds))
    report("Augment(), channels last", milliseconds(lambda: scr(last, g), device, seconds))
    other, plain = Augment(form="torchvision"), Augment(jitter=0, grey=0)
    report('Augment(form="torchvision")', milliseconds(lambda: other(x, g), device, seconds))
    report("crop_flip", milliseconds(lambda: plain(x, g), device, seconds))
    report("parameters alone", milliseconds(lambda: scr.parameters(batch, size, size, g), device, seconds))
    apply = torch.compile(scr.apply, fullgraph=True) if compiled else scr.apply

    def view(x: Tensor, g: torch.Generator) -> Tensor:
        return apply(x, scr.parameters(batch, size, size, g))

    if compiled:
        report("apply compiled", milliseconds(lambda: view(last, g), device, seconds))
    if device.type == "cuda":
        report("in a CUDA graph", milliseconds(replayed(scr, last, g), device, seconds) / 10)
        if compiled:
            report("compiled, in a CUDA graph", milliseconds(replayed(view, last, g), device, seconds) / 10)


if __name__ == "__main__":
    main()
