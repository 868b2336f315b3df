"""Steps of methods with looking policies never wait for the device, so that they can be recorded as graphs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scrlearn.checkpoint import digest
from scrlearn.learners import make_learner

COMPOSITIONS = {
    "a-gem": ("a-gem", {"from_start": True}),
    "mir": ("mir", {}),
    "gss": ("gss", {}),
    "er, balanced": ("er", {"update": "balanced"}),
    "scr, mir": ("scr", {"retrieve": "mir", "memory_batch": 10}),
    "scr, gss": ("scr", {"update": "gss", "memory_batch": 10}),
}


class NoWaiting(TorchDispatchMode):
    """Fails on every operation that would make the host wait for a value."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
        assert name not in self.WAITING, f"{name} waits for the device"
        assert not masked, f"{name} by a mask waits for the device"
        return function(*args, **(kwargs or {}))


def batches(count, size=10, classes=6):
    random = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randint(0, 256, (size, 1, 8, 8), dtype=torch.uint8, generator=random)
        yield x, torch.randint(0, classes, (size,), generator=random)


def test_the_guard_notices_waiting():
    values = torch.arange(3.0)
    for wait in (lambda: values.sum().item(), lambda: bool(values.any()), lambda: values[values > 1], values.nonzero):
        with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
            wait()


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_steps_never_wait_for_the_device(composition):
    method, options = COMPOSITIONS[composition]
    learner = make_learner(method, image_shape=(1, 8, 8), memory_size=25, device="cpu", precision="fp32", **options)
    assert learner.graph_safe
    for x, y in batches(5):  # empty, filling, filling past the end, full
        learner.reserve(int(y.max()) + 1)
        learner.set_training(True)
        with NoWaiting():
            learner.step(x, y)
        learner.advance(len(x))
    assert learner.memory.full


@pytest.mark.device
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_recorded_step_gives_the_same_bits(composition, precision):
    from scrlearn.engine import GraphRunner

    method, options = COMPOSITIONS[composition]
    digests = []
    for recorded in (False, True):
        learner = make_learner(
            method, image_shape=(1, 8, 8), memory_size=60, device="cuda", precision=precision, **options
        )
        if recorded:
            learner.runner = GraphRunner(learner)
        for step, (x, y) in enumerate(batches(30)):
            learner.learn(x, y if step < 15 else y + 20)  # the counters grow on the way
        torch.cuda.synchronize()
        digests.append(digest(learner.state_dict()))
    assert digests[0] == digests[1]
    assert learner.runner.recordings
