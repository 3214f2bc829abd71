"""Scenarios: YAML files become values, and the command line runs them.

>>> from scenarios import load
>>> load("gpt3-175b-1024-a100").problem.cluster.num_devices
1024
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwise.scenarios.files.errors import Fault, ScenarioError
    from meshwise.scenarios.loader import load
    from meshwise.scenarios.scenario import Scenario

__all__ = ["Fault", "Scenario", "ScenarioError", "load"]

_HOMES = {
    "Fault": "meshwise.scenarios.files.errors",
    "Scenario": "meshwise.scenarios.scenario",
    "ScenarioError": "meshwise.scenarios.files.errors",
    "load": "meshwise.scenarios.loader",
}


def __getattr__(name: str) -> object:
    """Import what is asked for only then, so that ``meshwise --help`` answers at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
