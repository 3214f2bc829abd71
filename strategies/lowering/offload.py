"""Host offload: optimizer states stay in host memory, and the host updates the parameters.

Gradients go to the host, the host steps, parameters come back: chunk after chunk, so that both
directions of PCIe and the host's memory work at once.

References
----------
Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021.
"""

from typing import NamedTuple

import numpy as np

from simulator.cluster import Cluster
from simulator.collective import Phase
from simulator.interconnect.interconnect import Interconnect, interconnect
from simulator.interconnect.routes import FloatArray, Routes
from simulator.program import IntArray, StreamKind, TaskKind
from simulator.units import to_ticks
from strategies.lowering.optimizer import step_bytes, updated_parameters
from strategies.lowering.parameters import Parameters
from strategies.plan import Plan
from strategies.training import Training

TO_HOST, HOST, FROM_HOST = "to host", "host", "from host"
"""Kinds of transfers of one rank: its gradients, what the host's step reads and writes, its parameters."""

HOST_KINDS = (TO_HOST, HOST, FROM_HOST)

CHUNKS = 8
"""Pieces in which the update is pipelined."""


class HostStep(NamedTuple):
    """One stage of the update on a stream of its own."""

    kind: str
    task: TaskKind
    stream: StreamKind
    name: str


STEPS = (
    HostStep(TO_HOST, TaskKind.HOST_COPY, StreamKind.TO_HOST, "gradients to host"),
    HostStep(HOST, TaskKind.HOST_COPY, StreamKind.HOST, "optimizer on host"),
    HostStep(FROM_HOST, TaskKind.HOST_COPY, StreamKind.FROM_HOST, "parameters from host"),
)


HOST_ADAM = 250e-12
"""Seconds a parameter of a fused Adam on a host whose memory bandwidth is not known.

Published timings of fused host optimizers lie about there (DeepSpeed CPUAdam); they name no processor.
"""

_MEMORY = "memory in"


def offloads_optimizer(plan: Plan) -> bool:
    """Return whether optimizer states live on the host."""
    return "optimizer" in plan.offload


def host_bytes(training: Training, plan: Plan, held: Parameters, kind: str) -> float:
    """Return the bytes that one chunk of a rank's update moves."""
    updated = updated_parameters(plan, held.elements, held.experts)
    each = {
        TO_HOST: updated * training.gradient_bytes,
        HOST: step_bytes(training, plan, held),
        FROM_HOST: updated * training.parameter_bytes,
    }
    return each[kind] / CHUNKS


def host_ticks(updated: int) -> int:
    """Return the ticks of one chunk of the host's step where its memory is not modelled."""
    return to_ticks(updated * HOST_ADAM / CHUNKS)


def host_phases(cluster: Cluster, kind: str, devices: IntArray) -> tuple[Phase, ...]:
    """Return what one byte to, on or from the host puts on links, for each device (rows of one)."""
    network = interconnect(cluster)
    routes = _routes(network, kind, devices[:, 0])
    latency: FloatArray = np.bincount(routes.pair, network.latency[routes.link], len(devices)).astype(np.float64)
    return (Phase(latency, routes.pair, routes.link, routes.share),)


def _routes(network: Interconnect, kind: str, devices: IntArray) -> Routes:
    if kind == FROM_HOST:
        return network.from_host(devices)
    routes = network.to_host(devices)
    if kind == TO_HOST:
        return routes
    memory = {int(link): network.kind(int(link)) == _MEMORY for link in np.unique(routes.link)}
    chosen = np.array([memory[link] for link in routes.link.tolist()], dtype=bool)
    return Routes(routes.pair[chosen], routes.link[chosen], routes.share[chosen])
