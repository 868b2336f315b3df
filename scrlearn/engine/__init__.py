"""How learners run: eagerly, or with every step as one CUDA graph; one alone, or many side by side on one device."""

from scrlearn.engine.graph import GraphRunner, why_not_graph
from scrlearn.engine.run import START, Hooks, Position, check_engine, most_side_by_side, run, side_by_side, train

__all__ = [
    "START",
    "GraphRunner",
    "Hooks",
    "Position",
    "check_engine",
    "most_side_by_side",
    "run",
    "side_by_side",
    "train",
    "why_not_graph",
]
