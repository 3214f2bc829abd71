"""Lowering: turn a problem and a plan into the program that the simulator runs."""

from meshwise.strategies.lowering.costs.stage import StageCosts
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.tasks.cuts import Granularity

__all__ = ["Granularity", "StageCosts", "lower"]
