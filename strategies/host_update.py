"""A lower bound of an update whose optimizer states are on hosts: what a rank's own copies take, alone on their links.

The stages of an update are pipelined over equal chunks, each on a stream of its own (`strategies.lowering.offload`).
With c chunks and stages that take t ticks a chunk, the last chunk leaves after at least ``sum(t) + (c - 1) max(t)``.
"""

import numpy as np

from simulator.cluster import Cluster
from simulator.interconnect.interconnect import interconnect
from simulator.units import to_ticks
from strategies.lowering.loads import host_phases
from strategies.lowering.offload import OnHost, host_elements, host_ticks, update, update_bytes
from strategies.lowering.parameters import Parameters
from strategies.lowering.placed import HOST_KINDS
from strategies.offloading import CHUNKS, HOST, STEPS
from strategies.plan import Plan
from strategies.training import Training


def seconds_per_byte(cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a byte to, on and from the host, where one rank alone moves it; of all devices the least.

    0 where no link carries it.
    """
    network, devices = interconnect(cluster), np.arange(cluster.num_devices)[:, None]
    found = {}
    for kind in HOST_KINDS:
        (phase,) = host_phases(cluster, kind, devices)
        slowest = np.zeros(len(devices))
        np.maximum.at(slowest, phase.group, phase.load / network.bandwidth[phase.link])
        found[kind] = float(slowest.min())
    return found


def update_ticks(training: Training, plan: Plan, held: Parameters, rates: dict[str, float], position: int) -> int:
    """Return at most the ticks of the part of a rank's update that its host has a part in."""
    on_host = OnHost(plan.offload.at("optimizer", position))
    each = [0]
    for number in update(training, plan, held, on_host).steps:
        kind = STEPS[number].kind
        seconds = update_bytes(training, plan, held, on_host, number) * rates.get(kind, 0.0)
        alone = kind == HOST and rates[HOST] == 0.0
        each.append(host_ticks(host_elements(plan, held, on_host)) if alone else to_ticks(seconds))
    # a tick less a chunk: rates are rounded where they are simulated
    return max(sum(each) + (CHUNKS - 1) * max(each) - len(STEPS) * CHUNKS, 0)
