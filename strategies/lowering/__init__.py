"""From a problem and a plan to the program that the simulator runs."""

from strategies.lowering.lower import lower
from strategies.lowering.pieces import Granularity
from strategies.lowering.stage import StageCosts

__all__ = ["Granularity", "StageCosts", "lower"]
