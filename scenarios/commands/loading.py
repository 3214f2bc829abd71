"""The scenario that a command is given, and its options that change machine, limits and prices."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scenarios.scenario import Scenario


def load_scenario(
    name: str,
    plan: str | None = None,
    cluster: str | None = None,
    target: str | None = None,
    *,
    brave: bool = False,
) -> "Scenario":
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
    from scenarios.loader import load, move_to_cluster_file

    value = load(name, plan)
    if cluster is not None:
        value = move_to_cluster_file(value, cluster)
    if brave:
        value = value.without_margin()
    return value if target is None else value.for_target(target)
