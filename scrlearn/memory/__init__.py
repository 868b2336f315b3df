"""The bounded store of images, and its policies: who is kept, who is replayed.

A new policy is one file and one line in `RETRIEVALS` or `UPDATES`.
"""

from scrlearn.memory.aser import ASERRetrieval, ASERUpdate
from scrlearn.memory.balanced import BalancedReservoir
from scrlearn.memory.buffer import Memory
from scrlearn.memory.gss import GSSUpdate
from scrlearn.memory.herding import Herding
from scrlearn.memory.mir import MIRRetrieval
from scrlearn.memory.policy import Retrieval, Update
from scrlearn.memory.random import NoRetrieval, RandomRetrieval
from scrlearn.memory.reservoir import Reservoir

RETRIEVALS: dict[str, type[Retrieval]] = {
    "none": NoRetrieval,
    "random": RandomRetrieval,
    "mir": MIRRetrieval,
    "aser": ASERRetrieval,
}

UPDATES: dict[str, type[Update]] = {
    "reservoir": Reservoir,
    "balanced": BalancedReservoir,
    "gss": GSSUpdate,
    "herding": Herding,
    "aser": ASERUpdate,
}

__all__ = ["RETRIEVALS", "UPDATES", "Memory", "Retrieval", "Update"]
