"""meshwise: simulate, search and execute parallel training plans for large neural networks.

>>> import meshwise as mw
>>> scenario = mw.load("megatron/gpt-1.7b-32-a100")
>>> scenario.problem.cluster.num_devices
32

Every public name is imported at its first use, so that ``import meshwise`` loads neither torch nor pandas.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwise.executor.capture.capture import capture as capture
    from meshwise.executor.launch.run import Run as Run
    from meshwise.executor.launch.run import execute as execute
    from meshwise.executor.token_data.reading import read_tokens as read_tokens
    from meshwise.scenarios.files.errors import Fault as Fault
    from meshwise.scenarios.files.errors import ScenarioError as ScenarioError
    from meshwise.scenarios.loader import load as load
    from meshwise.scenarios.module_plans.own_loop import parallelize as parallelize
    from meshwise.scenarios.scenario import Scenario as Scenario
    from meshwise.scenarios.simulation import Simulation as Simulation
    from meshwise.simulator.catalog import accelerator as accelerator
    from meshwise.simulator.catalog import cluster as cluster
    from meshwise.simulator.engine import simulate as simulate
    from meshwise.simulator.machine.accelerator import Accelerator as Accelerator
    from meshwise.simulator.machine.cluster import Cluster as Cluster
    from meshwise.simulator.machine.cluster import Node as Node
    from meshwise.simulator.machine.host import Host as Host
    from meshwise.simulator.machine.topology import Link as Link
    from meshwise.simulator.models.model import build as build
    from meshwise.simulator.models.transformer import Transformer as Transformer
    from meshwise.simulator.operator_graph import OperatorGraph as OperatorGraph
    from meshwise.simulator.timeline import Timeline as Timeline
    from meshwise.strategies.lowering.lower import lower as lower
    from meshwise.strategies.plan.layout import Layout as Layout
    from meshwise.strategies.plan.mesh import Mesh as Mesh
    from meshwise.strategies.plan.plan import Plan as Plan
    from meshwise.strategies.plan.problem import Problem as Problem
    from meshwise.strategies.plan.problem import Training as Training
    from meshwise.strategies.schedules.schedule import SCHEDULES as SCHEDULES
    from meshwise.strategies.schedules.schedule import Schedule as Schedule
    from meshwise.strategies.search.algorithms import ALGORITHMS as ALGORITHMS
    from meshwise.strategies.search.driver import SearchResult as SearchResult
    from meshwise.strategies.search.simulated_search import search as search
    from meshwise.strategies.search.space import Space as Space

__version__ = "0.1.0"

_HOMES = {
    "ALGORITHMS": "strategies.search.algorithms",
    "SCHEDULES": "strategies.schedules.schedule",
    "Accelerator": "simulator.machine.accelerator",
    "Cluster": "simulator.machine.cluster",
    "Fault": "scenarios.files.errors",
    "Host": "simulator.machine.host",
    "Layout": "strategies.plan.layout",
    "Link": "simulator.machine.topology",
    "Mesh": "strategies.plan.mesh",
    "Node": "simulator.machine.cluster",
    "OperatorGraph": "simulator.operator_graph",
    "Plan": "strategies.plan.plan",
    "Problem": "strategies.plan.problem",
    "Run": "executor.launch.run",
    "Scenario": "scenarios.scenario",
    "ScenarioError": "scenarios.files.errors",
    "Schedule": "strategies.schedules.schedule",
    "SearchResult": "strategies.search.driver",
    "Simulation": "scenarios.simulation",
    "Space": "strategies.search.space",
    "Timeline": "simulator.timeline",
    "Training": "strategies.plan.problem",
    "Transformer": "simulator.models.transformer",
    "accelerator": "simulator.catalog",
    "build": "simulator.models.model",
    "capture": "executor.capture.capture",
    "cluster": "simulator.catalog",
    "execute": "executor.launch.run",
    "load": "scenarios.loader",
    "lower": "strategies.lowering.lower",
    "parallelize": "scenarios.module_plans.own_loop",
    "read_tokens": "executor.token_data.reading",
    "search": "strategies.search.simulated_search",
    "simulate": "simulator.engine",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, and keep it here, where pdoc looks for it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwise' has no attribute {name!r}")
    try:
        globals()[name] = getattr(import_module(f"meshwise.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        words = f"meshwise.{name} needs torch: pip install 'meshwise[exec]'"
        raise ModuleNotFoundError(words, name="torch") from None
    return globals()[name]


def __dir__() -> list[str]:
    """Return all public names, imported or not."""
    return sorted({*globals(), *__all__})
