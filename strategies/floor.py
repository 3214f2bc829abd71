"""A lower bound of the step time that holds for every plan of a problem."""

from simulator.accelerator import Accelerator
from simulator.operator_graph import BATCH, Operator
from strategies.problem import Problem
from strategies.training import Training

LEAST_PRODUCTS = 2
"""How often a step computes the FLOP of a forward pass, at least: once forward, and once for one of two gradients."""


def least_step_time(problem: Problem) -> float:
    """Return the seconds in which all free devices compute a batch at their peak, without anything else.

    It is ``2 * flops of a batch / sum of peaks``. Of a backward pass only one gradient of each operator counts, as much
    as its forward: a network may need none of its first inputs, or of frozen weights.
    """
    cluster, training = problem.cluster, problem.training
    flops = sum(
        _least_flops(operator, training.global_batch) * block.repeat
        for block in problem.graph.blocks
        for operator in block.operators
    )
    speeds, free = dict(cluster.speeds), list(cluster.free_devices)
    peaks = [_peak(node.accelerator, training) for node, _ in cluster.nodes]
    kinds = cluster.node_kinds[cluster.device_nodes[free]].tolist()
    rate: float = sum(peaks[kind] * speeds.get(device, 1.0) for device, kind in zip(free, kinds, strict=True))
    return LEAST_PRODUCTS * flops / rate


def _least_flops(operator: Operator, global_batch: int) -> float:
    """Return the FLOP of one forward of an operator in a step: for each sample, or where it has no batch at least once.

    A product of parameters runs once a microbatch, and with all samples in one of them once in all.
    """
    samples = global_batch if BATCH in dict(operator.dims) else 1
    return operator.flops * operator.executed_fraction * samples


def _peak(accelerator: Accelerator, training: Training) -> float:
    """Return the fastest that any operator of a step may compute, in FLOP/s: of fp8 training some run in bf16."""
    return max(rate for dtype, rate in accelerator.peak_flops if dtype in (training.precision, training.dtype))
