"""Frameworks that plan the memory of a step, and so reserve nothing beside tensors."""

from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.plan.framework import ENTRIES
from meshwise.strategies.plan.problem import Training

PLANNING_FAMILIES = ("xla", "mindspore")
"""Families of frameworks that compile a step and plan its memory: XLA's buffer assignment, and in MindSpore's graph
mode its "safe optimized memory allocation solver", by which the operators of a graph share one static block."""


def plans_memory(training: Training, cluster: Cluster) -> bool:
    """Return whether memory is planned or pageable, so that nothing is reserved beside tensors."""
    is_host = any(device.computes_collectives for device in cluster.accelerators)
    return is_host or ENTRIES[training.framework].family in PLANNING_FAMILIES
