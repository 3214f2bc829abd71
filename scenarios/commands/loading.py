"""Load the scenario of a command with its options applied, and describe whose conventions price its plans."""

from dataclasses import replace
from typing import Any

from meshwise.scenarios.console import note
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.loader import find_target, load, move_to_cluster_file
from meshwise.scenarios.scenario import FRAMEWORK_OF, Scenario


def load_scenario(
    name: str, plan: str | None = None, cluster: str | None = None, target: str | None = None, *, brave: bool = False
) -> Scenario:
    """Return the scenario of a file or the library with the options applied.

    Parameters
    ----------
    plan
        A plan file that replaces the scenario's own plan.
    cluster
        A cluster file whose machine replaces the scenario's.
    target
        The trainer, or ``execute``, that plans are for: its conventions price them, and it must be able to express
        them.
    brave
        Whether a plan fits without a safety margin, however likely it runs out of memory.
    """
    value = load(name, plan)
    if cluster is not None:
        value = move_to_cluster_file(value, cluster)
    if brave:
        value = value.without_margin()
    return value if target is None else value.for_target(target)


def tell_usual_loads(scenario: Scenario) -> None:
    """Say on stderr, where loads vary, that a command does not look at that."""
    if scenario.loads is not None:
        note(
            "loads that vary are for simulate and search: here sequences are full, experts usual and no device is slow"
        )


def add_plan_target(scenario: Scenario, plan: str | None) -> Scenario:
    """Return a scenario with the trainer of its plan file (``TARGET:FILE``) as target, unless it already has one."""
    target = None if plan is None else find_target(plan)
    if target is None or scenario.asked_target is not None:
        return scenario
    return replace(scenario, asked_target=target[0].name)


def describe_pricing(scenario: Scenario, *, simulated: bool = False) -> str:
    """Return the framework whose memory conventions price the plans of a scenario, and whether that is assumed.

    For a plan that is not ``simulated`` yet, also the option with which `meshwise simulate` uses the same conventions.
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
    """Return the framework that prices plans and the target that plans are for, as JSON-ready data."""
    framework = {"name": scenario.problem.training.framework, "stated": scenario.framework is not None}
    target = None if scenario.target is None else Acceptance(scenario.target, scenario.spec).versioned_name
    return {"framework": framework, "target": target}
