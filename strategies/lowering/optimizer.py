"""Optimizer parallel: the optimizer's step and state, whole or shared over the data axis.

References
----------
Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", SC 2020, section 5 (stage 1 shares the optimizer state).
"""

from math import ceil

from simulator.accelerator import Accelerator
from simulator.compute import optimizer_time
from simulator.units import to_ticks
from strategies.plan import Plan
from strategies.training import Training


def updated_parameters(plan: Plan, parameters: int, experts: int = 0) -> int:
    """Return how many of a rank's parameters, some of them of experts, its optimizer updates."""
    if not plan.zero:
        return parameters
    return ceil((parameters - experts) / plan.shards) + ceil(experts / plan.expert_shards)


def optimizer_ticks(
    accelerator: Accelerator, training: Training, plan: Plan, parameters: int, experts: int, num_tensors: int
) -> int:
    """Return the ticks of the optimizer's step: gradients in, state in and out, parameters out."""
    tensors = ceil(num_tensors / plan.shards) if plan.zero else num_tensors
    each = training.gradient_bytes + 2 * training.optimizer_bytes + training.parameter_bytes
    seconds = optimizer_time(accelerator, updated_parameters(plan, parameters, experts), each, tensors)
    if plan.tensor > 1:
        seconds += tensors * accelerator.sharded_launch
    return to_ticks(seconds)
