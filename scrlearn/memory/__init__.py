"""The bounded store of images, and its policies: who is kept, who is replayed.

A new policy is one file and one line in `RETRIEVALS` or `UPDATES`.
"""

from scrlearn.memory.buffer import Memory
from scrlearn.memory.policy import Retrieval, Update
from scrlearn.memory.random import NoRetrieval, RandomRetrieval
from scrlearn.memory.reservoir import Reservoir

RETRIEVALS: dict[str, type[Retrieval]] = {
    "none": NoRetrieval,
    "random": RandomRetrieval,
}

UPDATES: dict[str, type[Update]] = {
    "reservoir": Reservoir,
}

__all__ = ["RETRIEVALS", "UPDATES", "Memory", "Retrieval", "Update"]
