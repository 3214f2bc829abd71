"""Lowering: turn a problem and a plan into the program that the simulator runs."""

from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts

__all__ = ["Granularity", "StageCosts", "lower"]
