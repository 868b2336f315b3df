"""Encoders and projection heads, and how they are put together."""

from scrlearn.models.network import Network, feature_dim
from scrlearn.models.projection import PROJECTIONS, projection_head
from scrlearn.models.resnet import ReducedResNet18

__all__ = ["PROJECTIONS", "Network", "ReducedResNet18", "feature_dim", "projection_head"]
