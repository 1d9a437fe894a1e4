"""Learning: a cost model over the space, and the strategies that decide what to measure next."""

from tuner.learn.search import STRATEGIES, Search
from tuner.learn.space import SearchSpace
from tuner.learn.types import Observation, Origin, Proposal, Quality

__all__ = ["STRATEGIES", "Observation", "Origin", "Proposal", "Quality", "Search", "SearchSpace"]
