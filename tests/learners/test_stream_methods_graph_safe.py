"""Steps of EWC++, LwF, iCaRL, the offline bound and drift compensation never wait for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scrlearn.checkpoint import digest
from scrlearn.learners import make_learner

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")
CASES = {
    "ewc++": ("ewc++", {"fold_every": 2}),
    "lwf": ("lwf", {}),
    "icarl": ("icarl", {}),
    "offline": ("offline", {"epochs": 8, "batch": 16}),
    "lwf, sdc": ("lwf", {"memory_size": 0, "classifier": "ncm"}),
    "fine-tune, sdc, averaged": ("fine-tune", {"memory_size": 0, "classifier": "ncm", "averaging": 0.9}),
}


class NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in WAITING, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask waits for the device"
        return function(*args, **(kwargs or {}))


def tasks(count, batches, size=10):
    random = torch.Generator().manual_seed(0)
    for task in range(count):
        x = torch.randint(0, 256, (batches, size, 1, 8, 8), dtype=torch.uint8, generator=random)
        y = torch.randint(12 * task, 12 * task + 12, (batches, size), generator=random)  # the head grows on the way
        yield list(zip(x, y, strict=True))


def build(case, **options):
    method, own = CASES[case]
    return make_learner(method, image_shape=(1, 8, 8), **{"memory_size": 25} | own | options)


@pytest.mark.parametrize("case", CASES)
def test_steps_never_wait_for_the_device(case):
    learner = build(case, device="cpu", precision="fp32")
    assert learner.graph_safe
    for task in tasks(2, 4):
        for x, y in task:
            learner.reserve(int(y.max()) + 1)
            learner.set_training(True)
            learner.signature(len(x))
            with NoWaiting():
                learner.step(x, y)
            learner.advance(len(x))
        learner.end_task()
    if case == "offline":
        learner._restart()
        learner.set_training(True)
        with NoWaiting():
            learner.train_step(*learner.memory.contents())


@pytest.mark.device
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_step_gives_the_same_bits(case, precision):
    from scrlearn.engine import GraphRunner

    learners = [build(case, device="cuda", precision=precision) for _ in range(2)]
    learners[1].runner = GraphRunner(learners[1])
    for learner in learners:
        for task in tasks(3, 12):
            for x, y in task:
                learner.learn(x, y)
            learner.end_task()
        learner.finish()
        torch.cuda.synchronize()
    assert digest(learners[0].state_dict()) == digest(learners[1].state_dict())
    assert learners[1].runner.recordings
