"""A lower bound of the step time that holds for every plan of a problem."""

from simulator.accelerator import Accelerator
from strategies.problem import Problem
from strategies.training import Training

LEAST_PRODUCTS = 2
"""How often a step computes the FLOP of a forward pass, at least: once forward, and once for one of two gradients."""


def least_step_time(problem: Problem) -> float:
    """Return the seconds in which all free devices compute a batch at their peak, without anything else.

    It is ``2 * global_batch * flops / sum of peaks``. Of a backward pass only one gradient of each operator counts, as
    much as its forward: a network may need none of its first inputs, or of frozen weights.
    """
    cluster, training = problem.cluster, problem.training
    flops = sum(
        operator.flops * operator.executed_fraction * block.repeat
        for block in problem.graph.blocks
        for operator in block.operators
    )
    speeds, free = dict(cluster.speeds), list(cluster.free_devices)
    peaks = [_peak(node.accelerator, training) for node, _ in cluster.nodes]
    kinds = cluster.node_kinds[cluster.device_nodes[free]].tolist()
    rate: float = sum(peaks[kind] * speeds.get(device, 1.0) for device, kind in zip(free, kinds, strict=True))
    return LEAST_PRODUCTS * training.global_batch * flops / rate


def _peak(accelerator: Accelerator, training: Training) -> float:
    """Return the fastest that any operator of a step may compute, in FLOP/s: of fp8 training some run in bf16."""
    return max(rate for dtype, rate in accelerator.peak_flops if dtype in (training.precision, training.dtype))
