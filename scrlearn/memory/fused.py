"""The memory's bookkeeping on CUDA (Triton): a kernel each in the place of ten small ones.

They give exactly what the operations in `buffer.py` and `reservoir.py` give, from the same random numbers.
"""

# Triton's kernels are its own language in Python's syntax, which mypy cannot check
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
