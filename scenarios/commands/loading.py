"""The scenario that a command is given, as its options change it, and by whose conventions its plans are priced."""

from dataclasses import replace
from typing import Any

from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.loader import find_target, load, move_to_cluster_file
from meshwise.scenarios.scenario import FRAMEWORK_OF, Scenario


def load_scenario(
    name: str,
    plan: str | None = None,
    cluster: str | None = None,
    target: str | None = None,
    *,
    brave: bool = False,
) -> Scenario:
    """Return the scenario of a file or the library, as options change it.

    Parameters
    ----------
    plan
        A plan file that replaces the scenario's own plan.
    cluster
        A cluster file whose machine replaces the scenario's.
    target
        The trainer, or ``execute``, by whose conventions plans are priced and whose words they are in.
    brave
        Whether a plan fits that is predicted to, however likely it lacks memory.
    """
    value = load(name, plan)
    if cluster is not None:
        value = move_to_cluster_file(value, cluster)
    if brave:
        value = value.without_margin()
    return value if target is None else value.for_target(target)


def add_plan_target(scenario: Scenario, plan: str | None) -> Scenario:
    """Return a scenario whose plan is for the trainer that its file names, where no target was asked for."""
    found = None if plan is None else find_target(plan)
    if found is None or scenario.asked_target is not None:
        return scenario
    return replace(scenario, asked_target=found[0].name)


def describe_pricing(scenario: Scenario, *, simulated: bool = False) -> str:
    """Return by whose conventions plans of a scenario are priced, and whether it says so or that is assumed.

    Where they are not ``simulated`` yet, also how `meshwise simulate` prices them so.
    """
    framework, target = scenario.problem.training.framework, scenario.asked_target
    if scenario.framework is not None:
        return framework
    if target is None or FRAMEWORK_OF.get(target) != framework:
        return f"{framework}, which is assumed: the scenario names no framework"
    if simulated:
        return f"{framework}, as plans for {target} are"
    return f"{framework}, for which the plan is; meshwise simulate --for {target} prices it so too"


def pricing_document(scenario: Scenario) -> dict[str, Any]:
    """Return whose conventions price plans and in whose words they are, as JSON-ready data."""
    framework = {"name": scenario.problem.training.framework, "stated": scenario.framework is not None}
    target = None if scenario.target is None else Acceptance(scenario.target, scenario.spec).called
    return {"framework": framework, "target": target}
