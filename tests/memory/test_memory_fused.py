"""The memory's kernels give exactly what the plain operations give on the CPU, from the same random numbers."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from scrlearn.memory import fused
from scrlearn.memory.balanced import LEAVES_FIRST, BalancedReservoir
from scrlearn.memory.buffer import Memory
from scrlearn.memory.reservoir import Reservoir

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def memories(capacity, filled, seen):
    made = [Memory(capacity, (1, 2, 2), device) for device in ("cpu", "cuda")]
    for memory in made:
        memory.images.zero_()
        memory.filled.fill_(filled)
        memory.seen.fill_(seen)
        memory.size = filled
    return made


def uniform(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("count", "capacity", "filled", "seen"),
    [
        (10, 50, 0, 0),
        (10, 50, 45, 45),
        (10, 50, 50, 1000),
        (1, 5, 5, 7),
        (17, 3, 2, 2),
        (100, 20, 20, 10**9),
        (600, 70, 70, 99),
    ],
)
def test_the_same_images_are_kept(count, capacity, filled, seen):
    plain, fast = memories(capacity, filled, seen)
    drawn = uniform(count)
    slots = Reservoir._slots(plain, drawn), Reservoir._slots(fast, drawn.cuda())
    assert torch.equal(slots[0], slots[1].cpu())
    images = (torch.arange(count) % 256).to(torch.uint8)[:, None, None, None].expand(count, 1, 2, 2)
    for memory, own in zip((plain, fast), slots, strict=True):
        memory.write(own, images.to(memory.device), torch.arange(count, device=memory.device))
        assert memory.seen.item() == seen + count
        assert memory.filled.item() == min(capacity, filled + count)
    for name in ("images", "labels"):  # without the spare slot
        assert torch.equal(getattr(plain, name)[:-1], getattr(fast, name)[:-1].cpu())


@pytest.mark.parametrize(("count", "filled"), [(10, 400), (100, 2000), (3, 60), (1, 16), (500, 9000), (1000, 50_000)])
def test_the_same_images_are_drawn(count, filled):
    drawn = uniform(2 * count + 16, seed=count)
    value = (drawn * filled).long()
    repeats = (value[:, None] == value[None, :]).tril(-1).any(1)
    expected = value[torch.argsort(repeats.to(torch.int8), stable=True)[:count]]
    found = fused.pick(drawn.cuda(), torch.tensor(filled).cuda(), count)
    assert torch.equal(found.cpu(), expected)
    assert len(set(found.tolist())) == count


def balanced(capacity, classes, device):
    policy = BalancedReservoir()
    policy.key = torch.zeros(capacity + 1, dtype=torch.float64, device=device)
    policy.rank = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
    policy.limit = torch.ones(classes, dtype=torch.float64, device=device)
    return policy, torch.full((capacity + 1,), -1, device=device)


@pytest.mark.parametrize(
    ("capacity", "count", "steps", "classes"),
    [(30, 10, 40, 12), (7, 10, 20, 3), (50, 1, 80, 5), (1500, 10, 200, 12), (5, 33, 6, 4), (2100, 100, 30, 12)],
)
def test_the_same_images_are_exchanged(capacity, count, steps, classes):
    random = torch.Generator().manual_seed(count)
    plain, labels = balanced(capacity, classes, "cpu")
    fast, near = balanced(capacity, classes, "cuda")
    for step in range(steps):
        some = classes if step % 3 else max(1, classes // 3)  # now and then only a few classes come
        y = torch.randint(0, some, (count,), generator=random)
        key = torch.rand(count, generator=random, dtype=torch.float64)
        slots = plain._exchange(labels[:-1], y, key)
        told = (near[:-1], y.cuda(), key.cuda(), fast.key, fast.rank, fast.limit, LEAVES_FIRST)
        assert torch.equal(fused.exchange(*told).cpu(), slots)
        labels[slots], near[slots.cuda()] = y, y.cuda()
        for name in ("key", "rank"):  # without the spare slot
            assert torch.equal(getattr(plain, name)[:-1], getattr(fast, name)[:-1].cpu())
        assert torch.equal(plain.limit, fast.limit.cpu())
