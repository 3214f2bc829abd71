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


def updated_parameters(plan: Plan, parameters: int) -> int:
    """Return how many parameters one rank's optimizer updates."""
    return ceil(parameters / plan.data) if plan.zero else parameters


def optimizer_ticks(accelerator: Accelerator, training: Training, plan: Plan, parameters: int, num_tensors: int) -> int:
    """Return the ticks of the optimizer's step: gradients in, state in and out, parameters out."""
    tensors = ceil(num_tensors / plan.data) if plan.zero else num_tensors
    each = training.gradient_bytes + 2 * training.optimizer_bytes + training.parameter_bytes
    seconds = optimizer_time(accelerator, updated_parameters(plan, parameters), each, tensors)
    if plan.tensor > 1:
        seconds += tensors * accelerator.sharded_launch
    return to_ticks(seconds)
