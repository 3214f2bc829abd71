"""The optimizer of one rank: its parameters, the cost of its step and its state, memory of gradients, and clipping.

State that optimizer and precision keep besides parameters is whole on every rank, or shared over the data axis
(ZeRO [1]_).

Gradients have memory all the time, or from the first backward of a step to its end. Megatron keeps one contiguous
buffer for the gradients of all parameters from its start on (``core/distributed/param_and_grad_buffer.py``). torch
drops gradients when they have been read, and autograd makes new ones in the first backward of the next step
(``Optimizer.zero_grad``, ``set_to_none=True``, its default); the buckets of DistributedDataParallel stay, and
gradients are views of them (``gradient_as_bucket_view``).

Gradient clipping needs the norm of all gradients between their reduction and the optimizer's step [2]_. Every rank
reads its gradients once, and the sum of their squares, a scalar of 4 bytes, is all-reduced over the ranks that share
one copy of the model, expert groups included [3]_. With ZeRO the ranks of the data and context axes hold shares of
the gradients, and the sum is over all ranks. The host reads gradients that are in host memory. Scaling the gradients
is not counted: the optimizer multiplies them as it reads them.

References
----------
.. [1] Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5
   (stage 1 shares the optimizer state).
.. [2] Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
.. [3] Megatron-LM, ``core/optimizer/clip_grads.py`` (which groups sum the norm).
"""

from math import ceil
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import ITEMSIZE
from meshwise.strategies.plan.mesh import EXPERT_DATA, GROUPS, OPERATOR_AXES, REPLICA
from meshwise.strategies.plan.plan import Plan, SharedStates
from meshwise.strategies.plan.problem import Training


class Parameters(NamedTuple):
    """Counts of the parameters on one rank.

    Parameters
    ----------
    elements, tensors
        Number of elements, and of tensors.
    factored_elements
        Rows and columns of all matrices, and elements of all vectors.
    quantised_elements
        Elements of weights that layers multiply by in fp8.
    expert_elements, factored_expert_elements
        The part of ``elements`` and of ``factored_elements`` that only one expert uses, where ranks share experts.
    replicated_elements
        For each of `meshwise.strategies.plan.mesh.OPERATOR_AXES` the part of ``elements`` that every rank along it has
        whole, with gradients of its own tokens, heads or samples alone.
    """

    elements: int
    tensors: int
    factored_elements: int = 0
    quantised_elements: int = 0
    expert_elements: int = 0
    factored_expert_elements: int = 0
    replicated_elements: tuple[int, ...] = (0,) * len(OPERATOR_AXES)


def count_updated_parameters(plan: SharedStates, parameters: int, expert_parameters: int = 0) -> int:
    """Return how many of a rank's parameters its optimizer updates; ``expert_parameters`` of them are of experts."""
    if not plan.zero:
        return parameters
    return ceil((parameters - expert_parameters) / plan.shards) + ceil(expert_parameters / plan.expert_shards)


def state_bytes(training: Training, plan: SharedStates, parameters: Parameters) -> int:
    """Return the bytes of optimizer state that one rank keeps."""
    factored_bytes = (
        count_updated_parameters(plan, parameters.factored_elements, parameters.factored_expert_elements)
        * training.factored_bytes
    )
    return (
        count_updated_parameters(plan, parameters.elements, parameters.expert_elements) * training.optimizer_bytes
        + factored_bytes
    )


def step_bytes(training: Training, plan: SharedStates, parameters: Parameters) -> int:
    """Return the bytes that the optimizer's step reads and writes: gradients in, state in and out, parameters out."""
    # State counts twice, because the step reads and writes it.
    element_bytes = training.gradient_bytes + training.updated_bytes
    return count_updated_parameters(
        plan, parameters.elements, parameters.expert_elements
    ) * element_bytes + 2 * state_bytes(training, plan, parameters)


def uses_ddp_buckets(training: Training, plan: SharedStates) -> bool:
    """Return whether torch's DistributedDataParallel sums gradients, in buckets that stay allocated.

    It takes no parameters that are cut, sums beneath whole backwards, leaves whole gradients on all ranks, and sums in
    the precision of the parameters, which is not enough in 16 bits.
    """
    if plan.replicas == 1 or plan.zero or plan.operator_ranks * plan.expert > 1 or plan.asynchronous:
        return False
    overlaps_backward = plan.overlap_gradients and not plan.splits_backward
    return overlaps_backward and plan.gradient_reduction == "all_reduce" and ITEMSIZE[training.dtype] > 2


def allocates_gradients(training: Training, plan: SharedStates) -> bool:
    """Return whether gradients have memory only from the first backward of a step on.

    Gradients that go to the host as they are made count there all the time.
    """
    drops_gradients = training.conventions.drops_gradients and not training.frozen
    keeps_gradients = plan.asynchronous or plan.offloads_parameters or uses_ddp_buckets(training, plan)
    return drops_gradients and not keeps_gradients


NORM_SUM = (Collective.ALL_REDUCE, 4.0)
"""The all-reduce of the sum of squares of gradients, and its bytes."""


def norm_axes(training: Training, plan: Plan) -> tuple[str, ...]:
    """Return the axes along which the norm is summed; none without clipping."""
    if not training.gradient_clipping:
        return ()
    shared_axes = (
        (REPLICA,) if plan.zero else (REPLICA, *GROUPS[EXPERT_DATA])
    )  # ranks along these hold the same gradients
    return tuple(axis.name for axis in plan.mesh.axes if axis.name not in shared_axes)


def flat_gradient_bytes(training: Training, plan: SharedStates, parameters: int) -> int:
    """Return the bytes of the flat gradient buffer that is summed after the last backward.

    A sum that leaves each rank its share needs the share too. There is none without a flush: no framework here runs
    such schedules.
    """
    flattens = training.conventions.flattens_gradients and not uses_ddp_buckets(training, plan)
    if not flattens or plan.replicas == 1 or plan.zero >= 2 or plan.asynchronous:
        return 0
    num_shard_elements = ceil(parameters / plan.shards) if plan.zero and plan.shards > 1 else 0
    return (parameters + num_shard_elements) * training.gradient_bytes


def step_temporary_bytes(training: Training, plan: SharedStates, parameters: Parameters) -> int:
    """Return the bytes that live only while the optimizer steps on a device: copies of gradients, and roots of moments.

    A step on a host works parameter by parameter. There are none without a flush: no framework has such schedules.
    """
    conventions, element_bytes = training.conventions, 0
    if training.optimizer_bytes and not plan.asynchronous:
        # Kernels of 8-bit optimizers keep roots in registers.
        if conventions.steps_together and training.optimizer == "adamw" and training.state_precision != "int8":
            element_bytes += training.state_bytes
        has_main_weights = training.main_bytes > 0
        element_bytes += 4 * (conventions.widens_gradients and has_main_weights and training.gradient_bytes == 2)
    return count_updated_parameters(plan, parameters.elements, parameters.expert_elements) * element_bytes
