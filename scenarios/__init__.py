"""Scenarios: YAML files become values, and the command line runs them.

>>> from scenarios import load
>>> load("gpt3-175b-1024-a100").problem.cluster.num_devices
1024
"""

from scenarios.errors import Fault, ScenarioError
from scenarios.loader import load
from scenarios.scenario import Scenario

__all__ = ["Fault", "Scenario", "ScenarioError", "load"]
