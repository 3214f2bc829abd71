"""When a rank has memory for gradients: all the time, or from the first backward of a step to its end.

Megatron keeps one contiguous buffer for the gradients of all parameters from its start on
(``core/distributed/param_and_grad_buffer.py``). torch drops gradients when they have been read, and autograd makes new
ones in the first backward of the next step (``Optimizer.zero_grad``, ``set_to_none=True``, its default); the buckets of
DistributedDataParallel stay, of which gradients are views (``gradient_as_bucket_view``).
"""

from simulator.operator_graph import ITEMSIZE
from strategies.plan import Plan
from strategies.training import Training


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
