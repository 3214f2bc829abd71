"""The parameters of a rank, the optimizer's step and state, when gradients are there, and their norm.

How many parameters there are, and what optimizer and precision keep of them besides, whole or shared over the data axis
(optimizer parallel).

When a rank has memory for gradients: all the time, or from the first backward of a step to its end.

Megatron keeps one contiguous buffer for the gradients of all parameters from its start on
(``core/distributed/param_and_grad_buffer.py``). torch drops gradients when they have been read, and autograd makes new
ones in the first backward of the next step (``Optimizer.zero_grad``, ``set_to_none=True``, its default); the buckets of
DistributedDataParallel stay, of which gradients are views (``gradient_as_bucket_view``).

Gradient clipping: the norm of all gradients, between their reduction and the optimizer's step.

Every rank reads its gradients once, and the sum of their squares, a scalar of 4 bytes, is
all-reduced over the ranks that share one copy of the model, those of expert groups among them. With
ZeRO the ranks of the data and context axes hold shares of the gradients, and the sum is over all
ranks. Gradients that are in host memory the host reads. Scaling the gradients is not counted: the
optimizer multiplies them as it reads them.

References
----------
Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", SC 2020, section 5 (stage 1 shares the optimizer state).
Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013,
section 3.2; Megatron-LM, ``core/optimizer/clip_grads.py`` (which groups sum the norm).
"""

from math import ceil
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import optimizer_time
from meshwise.simulator.operator_graph import ITEMSIZE
from meshwise.simulator.units import to_ticks
from meshwise.strategies.plan.mesh import CONTEXT, DATA, OPERATOR_AXES, REPLICA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training


class Parameters(NamedTuple):
    """Parameters on one rank.

    Parameters
    ----------
    elements, tensors
        How many, and in how many tensors.
    factored
        Rows and columns of all matrices, and elements of all vectors.
    quantised
        Elements of weights that layers multiply by in fp8.
    experts, factored_experts
        The part of ``elements`` and of ``factored`` that only one expert uses, where experts are shared.
    replicated
        For each of `meshwise.strategies.plan.mesh.OPERATOR_AXES` the part of ``elements`` that every rank along it has,
        with gradients of its own tokens, heads or samples alone.
    """

    elements: int
    tensors: int
    factored: int = 0
    quantised: int = 0
    experts: int = 0
    factored_experts: int = 0
    replicated: tuple[int, ...] = (0,) * len(OPERATOR_AXES)


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


def in_ddp_buckets(training: Training, plan: Plan) -> bool:
    """Return whether torch's DistributedDataParallel sums gradients, in buckets that stay.

    It takes no parameters that are cut, sums beneath whole backwards, leaves whole gradients on all ranks, and sums in
    the precision of parameters, which is too little of 16 bits.
    """
    if plan.replicas == 1 or plan.zero or plan.operator_ranks * plan.expert > 1 or plan.asynchronous:
        return False
    in_time = plan.overlap_gradients and not plan.splits_backward
    return in_time and plan.gradient_reduction == "all_reduce" and ITEMSIZE[training.dtype] > 2


def begin_in_step(training: Training, plan: Plan) -> bool:
    """Return whether gradients are there only from the first backward of a step on.

    Those that go to the host as they are made are counted there all the time.
    """
    drops = training.conventions.drops_gradients and not training.frozen
    stay = plan.asynchronous or any(plan.offload.parameters) or in_ddp_buckets(training, plan)
    return drops and not stay


SQUARES = (Collective.ALL_REDUCE, 4.0)
"""The sum of squares of gradients: what reduces it, and its bytes."""


def norm_axes(training: Training, plan: Plan) -> tuple[str, ...]:
    """Return the axes along which the norm is summed; none without clipping."""
    if not training.gradient_clipping:
        return ()
    whole = (REPLICA,) if plan.zero else (REPLICA, DATA, CONTEXT)  # ranks along these hold the same gradients
    return tuple(axis.name for axis in plan.mesh.axes if axis.name not in whole)


def norm_ticks(accelerator: Accelerator, training: Training, plan: Plan, held: Parameters, on_host: int = 0) -> int:
    """Return the ticks in which a rank reads its gradients once, but for those of so many elements on its host."""
    size = (updated_parameters(plan, held.elements, held.experts) - on_host) * training.gradient_bytes
    return to_ticks(optimizer_time(accelerator, size))
