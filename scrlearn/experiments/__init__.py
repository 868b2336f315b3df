"""Experiments: a configuration in, a result out; the runner, its results, their tables and figures."""

from scrlearn.experiments.config import RunConfig
from scrlearn.experiments.loop import evaluate
from scrlearn.experiments.record import Moment
from scrlearn.experiments.result import Result, summary
from scrlearn.experiments.runner import load_learner, run, run_seeds
from scrlearn.experiments.stopping import Interrupted

__all__ = [
    "Interrupted",
    "Moment",
    "Result",
    "RunConfig",
    "evaluate",
    "load_learner",
    "run",
    "run_seeds",
    "summary",
]
