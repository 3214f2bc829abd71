"""Links of a machine as its owner measured them with nccl-tests, for a fit of the rest to measured steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwise.scenarios.collectives.text_fit import fit_links_to_file
from meshwise.scenarios.machine_fit.posterior import Prior
from meshwise.scenarios.machine_fit.run_fit import find_machine
from meshwise.scenarios.published.runs import Run
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.factors import FACTORS

LEAST_DEVIATION = 0.03
"""Least deviation of a measured link: in steps ranks arrive at collectives at different moments."""

_INSIDE, _BETWEEN = ("intra_rate", "intra_latency"), ("inter_rate", "inter_latency")


class MeasuredLinks(NamedTuple):
    """Runs on a machine with measured links, the prior with which the rest is fitted, and how well links fit."""

    runs: tuple[Run, ...]
    prior: Prior
    summary: str


def measure_links(runs: Sequence[Run], prior: Prior, path: str) -> MeasuredLinks:
    """Return runs on machines whose links are fitted to a file of collectives, and a prior that knows these links.

    Raises
    ------
    ValueError
        Where no run has a scenario, or the file has no measurement that can be used.
    """
    known_runs = [run for run in runs if run.scenario is not None]
    if not known_runs:
        raise ValueError("links are measured for the machine of the runs, met no run that can be simulated")
    fit = fit_links_to_file(path, find_machine(known_runs))
    deviation = max(fit.error, LEAST_DEVIATION)
    names = (_INSIDE if fit.inside else ()) + (_BETWEEN if fit.between else ())
    deviations = dict(zip(FACTORS, prior.deviations, strict=True))
    measured_prior = prior.know_factors({name: (1.0, min(deviation, deviations[name])) for name in names})
    moved_runs = tuple(_move_run(run, fit.machine, inside=fit.inside > 0, between=fit.between > 0) for run in runs)
    return MeasuredLinks(moved_runs, measured_prior, fit.summary)


def _move_run(run: Run, machine: Cluster, *, inside: bool, between: bool) -> Run:
    """Return a run on its own machine with the measured links, where its accelerator is the measured machine's."""
    if run.scenario is None:
        return run
    problem, measured_node = run.scenario.problem, machine.first_node
    if problem.cluster.accelerator.name != measured_node.accelerator.name:
        return run
    nodes = []
    for node, count in problem.cluster.nodes:
        is_alike = type(node.network) is type(measured_node.network) and node.devices <= measured_node.devices
        network = measured_node.network if inside and is_alike else node.network
        nodes.append((replace(node, network=network, nic=measured_node.nic if between else node.nic), count))
    cluster = replace(problem.cluster, nodes=tuple(nodes))
    return replace(run, scenario=replace(run.scenario, problem=replace(problem, cluster=cluster)))
