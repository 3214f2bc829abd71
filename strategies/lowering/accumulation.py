"""Gradient accumulation: the gradients of a microbatch are added to the sum of those before.

A product can add them as it makes them (Megatron-LM, ``--gradient-accumulation-fusion``). Where it does not, autograd
adds them tensor by tensor (PyTorch, ``torch/csrc/autograd/functions/accumulate_grad.h``): it reads what was made and
the sum, and writes the sum. What stays small beside a backward is left out: that the first microbatch has nothing to
add to, and the host's time, for no operator runs in Python.
"""

from simulator.accelerator import Accelerator
from simulator.kernels.memory_bound import streaming_time
from simulator.operator_graph import OperatorKind
from simulator.program import TaskKind
from simulator.units import to_ticks
from strategies.lowering.step import Step
from strategies.plan import Plan
from strategies.training import Training


def accumulates(training: Training, plan: Plan) -> bool:
    """Return whether kernels of their own add up gradients; from ZeRO 2 on ranks add up shards alone."""
    return not training.conventions.fused_gradients and plan.num_microbatches > 1 and plan.zero < 2


def accumulation(accelerator: Accelerator, training: Training, elements: int, tensors: int) -> Step:
    """Return the step that adds so many gradients of so many tensors."""
    traffic = elements * (training.parameter_bytes + 2 * training.gradient_bytes)
    seconds = streaming_time(traffic, accelerator.bandwidth(OperatorKind.ELEMENTWISE), tensors * accelerator.launch)
    return Step(TaskKind.BACKWARD, to_ticks(seconds), "gradient accumulation", 0, deferred=True)
