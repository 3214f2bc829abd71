"""Collectives on any cluster: their predicted times, and links fitted to the measured ones.

A machine that was measured by its owner needs no name here: its wiring says how many steps and bytes a collective puts
on links inside nodes and on NICs, and only latency, launch and bandwidth of these two are fitted, with the machine's
own figures as prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.calibration.link_fits import CollectiveCase, LinkFigures, build_cluster_terms, predict_seconds
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, candidates, choose, idle_time, phases
from meshwise.simulator.interconnect.routes import FloatArray
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.topology import Graph, Link, NodeNetwork, PcieTree, Torus


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A measured collective on the first ``ranks // nodes`` devices of each of ``nodes`` nodes.

    ``size`` in bytes is counted as in `meshwise.simulator.collectives.choose`; ``algorithm`` is None where the library
    chose it.
    """

    collective: Collective
    ranks: int
    nodes: int
    size: float
    seconds: float
    algorithm: Algorithm | None = None


def place_ranks(machine: Cluster, ranks: int, nodes: int) -> tuple[int, ...]:
    """Return the devices of ``ranks`` ranks on ``nodes`` nodes of a machine of equal nodes.

    Raises
    ------
    ValueError
        Where nodes do not divide ranks, or the machine has fewer nodes or devices.

    >>> from meshwise.simulator.catalog import cluster
    >>> place_ranks(cluster("dgx-h100", 2), 4, 2)
    (0, 1, 8, 9)
    """
    devices, used_devices = machine.first_node.devices, ranks // nodes
    count = sum(count for _, count in machine.nodes)
    if ranks < 2 or ranks % nodes:
        raise ValueError(f"nodes divide the ranks, of which there are at least 2, met {ranks} ranks on {nodes} nodes")
    if nodes > count or used_devices > devices:
        raise ValueError(f"{machine.name} has {count} nodes of {devices} devices, met {ranks} ranks on {nodes} nodes")
    return tuple(devices * node + rank for node in range(nodes) for rank in range(used_devices))


def predict_message(
    machine: Cluster, collective: Collective, group: tuple[int, ...], size: float, algorithm: Algorithm | None = None
) -> float:
    """Return the predicted seconds of a collective of ``size`` bytes among ``group`` on an idle machine.

    A stated ``algorithm`` that the group cannot run counts as not stated: then the fastest runs.
    """
    devices = np.array(group)
    if algorithm is None or algorithm not in algorithms(machine, collective, devices):
        algorithm = choose(machine, collective, devices, size)
    return idle_time(machine, phases(machine, collective, algorithm, devices[None, :]), 0, size)


@dataclass(frozen=True, slots=True)
class MachineFit:
    """A machine with fitted links.

    Parameters
    ----------
    machine
        The machine, with the fitted figures in its nodes.
    inside, between
        Messages inside a node and between nodes that the fit used; links of a kind without messages keep their figures.
    prior_error, error
        Mean absolute relative error of the messages with the machine's own figures, and with the fitted ones.
    """

    machine: Cluster
    inside: int
    between: int
    prior_error: float
    error: float

    __repr__ = brief_repr()

    @property
    def summary(self) -> str:
        """How many messages there were, and how far off they are before and after the fit."""
        counts = f"{self.inside} messages inside a node, {self.between} between nodes"
        return f"mean error of {counts}: {self.prior_error:.1%} before, {self.error:.1%} after the fit"


_PRIOR_SCALE = {"latency": 2.0, "launch": 2.0, "bandwidth": 5.0}
"""A ratio e of a figure to its prior counts as this share of one message's error in logarithms: a few messages move
bandwidths, which data sheets tell within some 10 %, less than latencies, of which they tell nothing.
"""
_MAX_RATIO = {"latency": 50.0, "launch": 50.0, "bandwidth": 20.0}
_LEAST_DELAY = 1e-7
"""Seconds that a latency or launch of zero counts as in logarithms."""


def fit_machine_links(messages: Sequence[TimedMessage], machine: Cluster) -> MachineFit:
    """Return a machine whose latency, launch and bandwidth inside nodes and between them fit measured messages.

    Errors are logs of predicted over measured time; beyond 10 % they count linearly, so that no message dominates. The
    prior is the machine's own figures. No bandwidth exceeds 1.25 times the prior's: the excess is more likely an
    algorithm that the model lacks. Links inside nodes are fitted to messages inside a node where there are some.

    Raises
    ------
    ValueError
        Where the machine is a torus, a graph or a PCIe tree, has nodes of several kinds, or there are no messages.
    """
    node = _check_machine(machine)
    if not messages:
        raise ValueError("a fit of links has measured messages, met none")
    inside = [message for message in messages if message.nodes == 1]
    between = [message for message in messages if message.nodes > 1]
    fitted_node = node
    if inside:
        fitted_node = _fit_links(machine, fitted_node, inside, is_between=False)
    if between:
        fitted_node = _fit_links(machine, fitted_node, between, is_between=True)
    fitted_machine = _with_node(machine, fitted_node)
    return MachineFit(
        fitted_machine,
        len(inside),
        len(between),
        _mean_error(machine, messages),
        _mean_error(fitted_machine, messages),
    )


def _check_machine(machine: Cluster) -> Node:
    if isinstance(machine.fabric, Torus | Graph) or isinstance(machine.first_node.network, PcieTree):
        raise ValueError(f"links are fitted to nodes with one network and NICs, met {machine.name}, which has others")
    if len(machine.nodes) > 1:
        raise ValueError(f"links are fitted to machines of equal nodes, met {len(machine.nodes)} kinds of node")
    return machine.first_node


def _with_node(machine: Cluster, node: Node) -> Cluster:
    ((_, count),) = machine.nodes
    return replace(machine, nodes=((node, count),))


def _with_network_link(network: NodeNetwork, link: Link) -> NodeNetwork:
    return replace(network, link=link)


def _fit_links(machine: Cluster, node: Node, messages: Sequence[TimedMessage], *, is_between: bool) -> Node:
    """Return a node with one kind of link fitted: the NIC, or the link inside the node."""
    link = node.nic if is_between else node.network.link
    prior = np.log([max(link.latency, _LEAST_DELAY), max(link.launch, _LEAST_DELAY), link.bandwidth])
    spread = np.log(list(_MAX_RATIO.values()))
    low, high = prior - spread, prior + spread
    high[2] = prior[2] + log(1.25)
    cases = _group_cases(machine, messages)
    measured = np.array([message.seconds for message in messages])
    scales = np.array(list(_PRIOR_SCALE.values()))

    def rebuild(values: FloatArray) -> Node:
        latency, launch, bandwidth = np.exp(values).tolist()
        fitted_link = Link(latency, bandwidth, launch)
        if is_between:
            return replace(node, nic=fitted_link)
        return replace(node, network=_with_network_link(node.network, fitted_link))

    def residuals(values: FloatArray) -> FloatArray:
        fitted_node = rebuild(values)
        figures = LinkFigures(fitted_node.network.link, fitted_node.nic, machine.library)
        seconds = predict_seconds(cases, len(messages), figures)
        return np.concatenate([np.log(seconds / measured), (values - prior) / scales])

    weights = np.concatenate([np.full(len(messages), 1.0 / len(messages) ** 0.5), np.full(3, 0.1)])
    fitted_values, _ = least_squares(residuals, prior, (low, high), weights)
    return rebuild(fitted_values)


def _group_cases(machine: Cluster, messages: Sequence[TimedMessage]) -> tuple[CollectiveCase, ...]:
    """Return messages grouped by devices, collective and algorithm, with the terms of their algorithms."""
    indices: dict[tuple[int, int, Collective, Algorithm | None], list[int]] = {}
    for index, message in enumerate(messages):
        key = message.ranks, message.nodes, message.collective, message.algorithm
        indices.setdefault(key, []).append(index)
    cases = []
    for (ranks, nodes, collective, stated), rows in indices.items():
        group = place_ranks(machine, ranks, nodes)
        legal_algorithms = algorithms(machine, collective, np.array(group))
        chosen = [name for name in candidates(machine, collective) if name in legal_algorithms]
        selection = [stated] if stated in legal_algorithms else chosen
        terms = tuple(build_cluster_terms(machine, group, collective, name) for name in selection if name is not None)
        cases.append(CollectiveCase(np.array(rows), np.array([messages[row].size for row in rows]), terms))
    return tuple(cases)


def _mean_error(machine: Cluster, messages: Sequence[TimedMessage]) -> float:
    errors = [
        abs(
            predict_message(
                machine,
                message.collective,
                place_ranks(machine, message.ranks, message.nodes),
                message.size,
                message.algorithm,
            )
            / message.seconds
            - 1
        )
        for message in messages
    ]
    return float(np.mean(errors))
