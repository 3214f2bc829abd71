"""From a problem and a plan to the program that the simulator runs."""

from strategies.lowering.costs.stage import StageCosts
from strategies.lowering.lower import lower
from strategies.lowering.tasks.cuts import Granularity

__all__ = ["Granularity", "StageCosts", "lower"]
