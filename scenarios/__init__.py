"""Scenarios: YAML files become values, and the command line runs them.

>>> from scenarios import load
>>> load("gpt3-175b-1024-a100").problem.cluster.num_devices
1024
"""

from typing import TYPE_CHECKING

from scenarios.errors import Fault, ScenarioError

if TYPE_CHECKING:
    from scenarios.loader import load
    from scenarios.scenario import Scenario

__all__ = ["Fault", "Scenario", "ScenarioError", "load"]


def __getattr__(name: str) -> object:
    """Import what is asked for only then, so that ``meshwise --help`` answers at once."""
    if name == "load":
        from scenarios.loader import load

        return load
    if name == "Scenario":
        from scenarios.scenario import Scenario

        return Scenario
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
