"""A recorded step goes on reading the tensors it was made with, so none may be replaced while there is room."""

import pytest
import torch
from digit_stream import make
from torch import nn

from scrlearn.learners import METHODS

CASES = {name: (name, {}) for name in METHODS} | {
    "scr, balanced": ("scr", {"update": "balanced"}),
    "scr, aser": ("scr", {"retrieve": "aser", "update": "aser"}),
    "scr, gss": ("scr", {"update": "gss"}),
    "scr, mir": ("scr", {"retrieve": "mir"}),
    "er, herding": ("er", {"update": "herding"}),
    "lwf, sdc": ("lwf", {"memory_size": 0, "classifier": "ncm"}),
    "er, momentum and averaging": ("er", {"momentum": 0.9, "averaging": 0.9}),
    "er, orthogonal": ("er", {"orthogonal": 0.02, "momentum": 0.9, "averaging": 0.9}),
}
CACHES = ("_stored", "_prototypes", "_discriminant")


def tensors(thing, path="", seen=None):
    """Every tensor that hangs on an object, by the way there."""
    seen = {} if seen is None else seen
    if id(thing) in seen or path.endswith(CACHES):
        return {}
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        return {path: thing}
    if isinstance(thing, nn.Module):
        parts = {**dict(thing.named_parameters()), **dict(thing.named_buffers())}
    elif isinstance(thing, dict):
        parts = thing
    elif isinstance(thing, list | tuple):
        parts = dict(enumerate(thing))
    elif type(thing).__module__.startswith("scrlearn."):
        parts = vars(thing)
    else:
        return {}
    found = {}
    for name, part in parts.items():
        found |= tensors(part, f"{path}.{name}", seen)
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_is_replaced_while_there_is_room(case):
    method, options = CASES[case]
    if method == "offline":
        options = {"epochs": 1, "batch": 4, "memory_size": 100}  # its memory would grow
    learner = make(method, **{"memory_size": 12, **options})
    x = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 4
    learner.learn(x, y)
    before = tensors(learner)
    assert any("memory" in path for path in before)
    assert any("network" in path or "weights" in path for path in before)
    learner.learn(x, y + 2)
    learner.end_task()
    learner.learn(x, y)
    learner.forget(1)
    learner.learn(x, y)
    learner.finish()
    after = tensors(learner)
    assert after.keys() == before.keys()
    assert [path for path in before if after[path] is not before[path]] == []
