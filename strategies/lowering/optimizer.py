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
from strategies.lowering.parameters import Parameters
from strategies.plan import Plan
from strategies.training import Training


def updated_parameters(plan: Plan, parameters: int, experts: int = 0) -> int:
    """Return how many of a rank's parameters, some of them of experts, its optimizer updates."""
    if not plan.zero:
        return parameters
    return ceil((parameters - experts) / plan.shards) + ceil(experts / plan.expert_shards)


def state_bytes(training: Training, plan: Plan, held: Parameters) -> int:
    """Return the bytes of optimizer state that one rank keeps."""
    factored = updated_parameters(plan, held.factored, held.factored_experts) * training.factored_bytes
    return updated_parameters(plan, held.elements, held.experts) * training.optimizer_bytes + factored


def step_bytes(training: Training, plan: Plan, held: Parameters) -> int:
    """Return the bytes that the optimizer's step reads and writes: gradients in, state in and out, parameters out."""
    each = training.gradient_bytes + training.updated_bytes
    return updated_parameters(plan, held.elements, held.experts) * each + 2 * state_bytes(training, plan, held)


def optimizer_ticks(
    accelerator: Accelerator, training: Training, plan: Plan, held: Parameters, part: float = 1.0
) -> int:
    """Return the ticks of the optimizer's step, the casts of weights that layers multiply by in fp8 included.

    ``part`` is the fraction of what is held that it updates.
    """
    if training.frozen:
        return 0
    cut = plan.zero >= 2 and plan.shards > 1  # every parameter on its own, where others share them out
    tensors = ceil(part * (ceil(held.tensors / plan.shards) if plan.zero and not cut else held.tensors))
    cast = held.quantised * (training.parameter_bytes + training.quantised_bytes) if training.quantised_bytes else 0
    seconds = optimizer_time(accelerator, part * (step_bytes(training, plan, held) + cast), tensors)
    if cut or plan.operator_ranks > 1:
        seconds += tensors * accelerator.sharded_launch
    return to_ticks(seconds)
