"""The memory's bookkeeping on CUDA (Triton): a kernel each in the place of ten small ones.

They give exactly what the operations in `buffer.py`, `reservoir.py` and `balanced.py` give, from the same random
numbers.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOM_BLOCK = 1024


@triton.jit
def _has_twin(values, pointer, own, count, later: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr):
    """Which of the values in memory come again later, or came before."""
    found = tl.zeros((block,), tl.int32)
    for first in range(0, block, chunk):
        j = first + tl.arange(0, chunk)
        other = tl.load(pointer + j, mask=j < count, other=-1)
        order = (j[None, :] > own[:, None]) if later else (j[None, :] < own[:, None])
        same = (values[:, None] == other[None, :]) & order & (j < count)[None, :]
        found = tl.maximum(found, tl.max(same.to(tl.int32), 1))
    return found


@triton.jit
def _resolve(slots, out, seen, filled, count, capacity, block: tl.constexpr, chunk: tl.constexpr):
    i = tl.arange(0, block)
    slot = tl.load(slots + i, mask=i < count, other=-1)
    replaced = _has_twin(slot, slots, i, count, True, block, chunk)
    tl.store(out + i, tl.where(replaced > 0, capacity, slot), mask=i < count)
    passed, there = tl.load(seen), tl.load(filled)
    tl.debug_barrier()  # every thread has read before one writes
    tl.store(seen, passed + count)
    tl.store(filled, tl.minimum(there + count, capacity))


@triton.jit
def _draw_slots(uniform, seen, filled, slots, count, capacity, block: tl.constexpr):
    i = tl.arange(0, block)
    free = tl.load(filled) + i
    drawn = (tl.load(uniform + i, mask=i < count, other=0.0) * (tl.load(seen) + i + 1).to(tl.float64)).to(tl.int64)
    slot = tl.where(free < capacity, free, tl.minimum(drawn, capacity))
    tl.store(slots + i, slot, mask=i < count)


@triton.jit
def _pick(uniform, filled, drawn, out, draws, count, block: tl.constexpr, chunk: tl.constexpr):
    i = tl.arange(0, block)
    value = (tl.load(uniform + i, mask=i < draws, other=0.0) * tl.load(filled).to(tl.float64)).to(tl.int64)
    tl.store(drawn + i, value, mask=i < draws)
    tl.debug_barrier()  # they are read by other threads next
    repeat = tl.where(i < draws, _has_twin(value, drawn, i, draws, False, block, chunk), 1)
    fresh = 1 - repeat
    # first those that are new, then the repeats, each in their order
    place = tl.where(fresh > 0, tl.cumsum(fresh, 0), tl.sum(fresh, 0) + tl.cumsum(repeat, 0)) - 1
    tl.store(out + place, value, mask=(place < count) & (i < draws))


@triton.jit
def _make_room(
    labels, key, rank, limit, y, new_key, counts, score, capacity, count, leaves_first,
    block: tl.constexpr,
):  # fmt: skip
    """Stored images move back behind new ones of their class with smaller keys; how soon each would leave."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    there = i < capacity
    label = tl.load(labels + i, mask=there, other=-2)
    own = tl.load(key + i, mask=there, other=0.0)
    place = tl.load(rank + i, mask=there, other=0)
    for j in range(count):
        of, new = tl.load(y + j), tl.load(new_key + j)
        from_here = tl.where(new < tl.load(limit + of), new, 2.0)  # keys are below 1: an image not taken moves nobody
        place += ((label == of) & (own >= from_here)).to(tl.int64)
        before = (label == of) & (own < new)
        tl.store(counts + tl.program_id(0) * count + j, tl.sum(before.to(tl.int64), 0))
    tl.store(rank + i, place, mask=there)
    leaves = tl.where(label < 0, leaves_first + (capacity - i).to(tl.float64), place.to(tl.float64) + own)
    tl.store(score + i, leaves, mask=there)


@triton.jit
def _join(
    limit, y, new_key, counts, new_rank, score, capacity, count, programs, block: tl.constexpr, chunk: tl.constexpr
):
    """The rank of each new image in its class, and how soon it would leave."""
    j = tl.arange(0, block)
    inside = j < count
    label, own = tl.load(y + j, mask=inside, other=-1), tl.load(new_key + j, mask=inside, other=0.0)
    place = tl.zeros((block,), tl.int64)
    for program in range(programs):
        place += tl.load(counts + program * count + j, mask=inside, other=0)
    for first in range(0, block, chunk):
        k = first + tl.arange(0, chunk)
        other, key = tl.load(y + k, mask=k < count, other=-2), tl.load(new_key + k, mask=k < count, other=0.0)
        taken = (k < count) & (key < tl.load(limit + other, mask=k < count, other=0.0))
        before = (other[None, :] == label[:, None]) & (key[None, :] < own[:, None]) & taken[None, :]
        place += tl.sum(before.to(tl.int64), 1)
    taken = own < tl.load(limit + label, mask=inside, other=0.0)
    tl.store(new_rank + j, place, mask=inside)
    leaves = tl.where(taken, place.to(tl.float64) + own, float("inf"))
    tl.store(score + capacity + j, leaves, mask=inside)


@triton.jit
def _of_either(stored, new, place, is_new, inside, capacity, nothing: tl.constexpr):
    """What is known of an image, stored or new."""
    old = tl.load(stored + place, mask=inside & (is_new == 0), other=nothing)
    return tl.where(is_new, tl.load(new + place - capacity, mask=inside & is_new, other=nothing), old)


@triton.jit
def _exchange(
    leaving, labels, key, rank, limit, y, new_key, new_rank, slots, capacity, count,
    block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """New images that stay take the slots of stored ones that leave, in order; classes note what they gave up."""
    j = tl.arange(0, block)
    inside = j < count
    least = tl.full((block,), 1.0, tl.float64)
    gone = tl.load(leaving + j, mask=inside, other=-1)
    new = gone >= capacity
    label = _of_either(labels, y, gone, new, inside, capacity, -1)
    leaves = tl.zeros((block,), tl.int32)
    for first in range(0, block, chunk):
        k = first + tl.arange(0, chunk)
        other = tl.load(leaving + k, mask=k < count, other=-1)
        again = other >= capacity
        of = _of_either(labels, y, other, again, k < count, capacity, -2)
        own = _of_either(key, new_key, other, again, k < count, capacity, 1.0)
        least = tl.minimum(least, tl.min(tl.where(of[None, :] == label[:, None], own[None, :], 1.0), 1))
        leaves = tl.maximum(leaves, tl.max((other[None, :] == (capacity + j)[:, None]).to(tl.int32), 1))
    bound = tl.load(limit + label, mask=inside & (label >= 0), other=1.0)
    stays = inside & (leaves == 0)
    # the n-th that stays takes the n-th slot that is freed
    free = tl.where(inside & (gone < capacity), tl.cumsum((inside & (gone < capacity)).to(tl.int32), 0) - 1, -1)
    wanted = tl.where(stays, tl.cumsum(stays.to(tl.int32), 0) - 1, -2)
    tl.store(slots + tl.where(free >= 0, free, block), gone, mask=free >= 0)
    tl.debug_barrier()  # everything has been read, and the freed slots are there
    slot = tl.load(slots + tl.maximum(wanted, 0), mask=stays, other=0)
    slot = tl.where(stays, slot, capacity)
    own, place = tl.load(new_key + j, mask=inside, other=0.0), tl.load(new_rank + j, mask=inside, other=0)
    tl.debug_barrier()
    tl.store(slots + j, slot, mask=inside)
    tl.store(limit + label, tl.minimum(bound, least), mask=inside & (label >= 0))
    tl.store(key + slot, own, mask=stays)
    tl.store(rank + slot, place, mask=stays)


def _form(count: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(count))
    return {"block": block, "chunk": max(16, min(block, 16384 // block)), "num_warps": 4 if block <= 512 else 8}


def resolve(slots: Tensor, seen: Tensor, filled: Tensor, capacity: int) -> Tensor:
    """Of two images for one slot the later stays, the other goes to the spare slot; and count what has passed."""
    out = torch.empty_like(slots)
    _resolve[(1,)](slots.contiguous(), out, seen, filled, len(slots), capacity, **_form(len(slots)))
    return out


def draw_slots(uniform: Tensor, seen: Tensor, filled: Tensor, capacity: int) -> Tensor:
    """A slot of the reservoir for each image: a free one, then one at random, or the spare one."""
    slots = torch.empty(len(uniform), dtype=torch.int64, device=uniform.device)
    block = max(16, triton.next_power_of_2(len(uniform)))
    _draw_slots[(1,)](uniform, seen, filled, slots, len(uniform), capacity, block=block)
    return slots


def pick(uniform: Tensor, filled: Tensor, count: int) -> Tensor:
    """Distinct slots: the first of the draws that are new."""
    drawn = torch.empty(len(uniform), dtype=torch.int64, device=uniform.device)
    out = torch.empty(count, dtype=torch.int64, device=uniform.device)
    _pick[(1,)](uniform, filled, drawn, out, len(uniform), count, **_form(len(uniform)))
    return out


def exchange(
    labels: Tensor, y: Tensor, new_key: Tensor, key: Tensor, rank: Tensor, limit: Tensor, leaves_first: float
) -> Tensor:
    """The balanced reservoir's choice: a slot for each new image, the spare one for those that do not stay.

    Moves keys, ranks and limits on.
    """
    capacity, count = len(key) - 1, len(y)
    programs = triton.cdiv(capacity, ROOM_BLOCK)
    score = torch.empty(capacity + count, dtype=torch.float64, device=y.device)
    counts = torch.empty(programs * count, dtype=torch.int64, device=y.device)
    new_rank, slots = torch.empty_like(y), torch.empty_like(y)
    told = (y, new_key, counts)
    _make_room[(programs,)](labels, key, rank, limit, *told, score, capacity, count, leaves_first, block=ROOM_BLOCK)
    _join[(1,)](limit, *told, new_rank, score, capacity, count, programs, **_form(count))
    leaving = score.topk(count).indices
    _exchange[(1,)](leaving, labels, key, rank, limit, y, new_key, new_rank, slots, capacity, count, **_form(count))
    return slots
