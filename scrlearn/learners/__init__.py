"""The methods: what a learner is, the one replay loop, and the table that names them."""

from scrlearn.learners.base import CLASSIFIERS, Learner
from scrlearn.learners.methods import METHODS, Method, find_method, make_learner
from scrlearn.learners.replay import Replay

__all__ = ["CLASSIFIERS", "METHODS", "Learner", "Method", "Replay", "find_method", "make_learner"]
