"""The demonstration's process: SCR and fine-tuning learn digits class by class; what happens goes out as JSON lines.

A process of its own, so that it cannot hold up or change the model that is served: it has the lowest priority, one
thread, and its own generators, and it ends as soon as nobody reads its lines any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scrlearn.data import load
from scrlearn.data.streams import Stream, class_incremental
from scrlearn.learners import Learner, make_learner
from scrlearn.service.pictures import picture

METHODS = ("scr", "fine-tune")
MEMORY_SIZE = 200
BATCH_SIZE = 10
TEST_EVERY = 2  # batches between two points of the curves
LOWEST_PRIORITY = 19


def events(limit: int | None = None) -> Iterator[dict[str, Any]]:
    """What happens, step by step: each event names the fields of `DemoState` that it changes; "point" adds one.

    Parameters
    ----------
    limit
        At most this many training images of each class; None: all.

    Examples
    --------
    >>> first, second = next(events(limit=10)), [*events(limit=10)][-1]
    >>> first["total"], second["images"], second["point"]["classes"]
    (100, 100, 10)
    """
    stream = class_incremental(load("digits"), tasks=10, batch_size=BATCH_SIZE, limit=limit)
    test = stream.dataset.test.read(torch.arange(len(stream.dataset.test)))
    learners = {method: _learner(method, test) for method in METHODS}
    total = sum(stream.steps(task) for task in stream.tasks) * BATCH_SIZE
    examples = [picture(test[int(task.test[0])]) for task in stream.tasks]
    classes = [{"label": n, "image": image} for n, image in zip(stream.class_names, examples, strict=True)]
    yield {"status": "running", "classes": classes, "total": total}
    images = 0
    for task in stream.tasks:
        for number, (x, y) in enumerate(stream.batches(task), start=1):
            for learner in learners.values():
                learner.learn(x, y)
            images += len(x)
            event = {
                "images": images,
                "label": stream.class_names[task.index],
                "batch": [picture(image) for image in x],
            }
            if number % TEST_EVERY == 0 or number == stream.steps(task):
                event |= _test(learners, stream, test, task.index + 1, images)
            yield event


def _learner(method: str, images: Tensor) -> Learner:
    channels, height, width = images.shape[1:]
    memory = {"memory_size": MEMORY_SIZE} if method == "scr" else {}
    return make_learner(method, image_shape=(channels, height, width), device="cpu", seed=0, **memory)


def _test(learners: dict[str, Learner], stream: Stream, test: Tensor, classes: int, images: int) -> dict[str, Any]:
    """Ask both about the test images of the classes seen so far."""
    seen = stream.test_labels < classes
    truth = stream.test_labels[seen]
    known: dict[str, list[float]] = {}
    accuracy: dict[str, float] = {}
    for method, learner in learners.items():
        right = (learner.predict(test[seen]) == truth).double()
        known[method] = [round(float(right[truth == number].mean()), 4) for number in range(classes)]
        accuracy[method] = round(float(right.mean()), 4)
    return {"known": known, "point": {"images": images, "classes": classes, "accuracy": accuracy}}


def main() -> None:
    """Write the events to the standard output, until their end or that of the reader."""
    if hasattr(os, "nice"):
        os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for event in events():
            print(json.dumps(event), flush=True)
        print(json.dumps({"status": "finished", "label": None}), flush=True)
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush must not fail once more


if __name__ == "__main__":
    main()
