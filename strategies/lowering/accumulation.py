"""Gradients of weights added to those of a step's other microbatches, where the products that make them do not.

The gradient that backward makes of a parameter is read, and the sum is read and written: of fp16 gradients in an
fp16 sum 6 bytes a parameter, every microbatch. The first one is counted alike, to which Megatron-LM adds zeros. The
host starts nothing, for it is a hook of autograd's threads.

References
----------
PyTorch, ``torch/csrc/autograd/functions/accumulate_grad.h``. Megatron-LM, ``_make_param_hook`` of
``model/distributed.py`` (``main_grad.add_``); since 2022 its products add their gradients themselves
(``--no-gradient-accumulation-fusion`` turns that off).
"""

from simulator.accelerator import Accelerator
from simulator.kernels.memory_bound import streaming_time
from simulator.operator_graph import ITEMSIZE, OperatorKind
from simulator.program import TaskKind
from simulator.units import to_ticks
from strategies.lowering.operator import BlockLayout, BlockSteps
from strategies.lowering.redistribution import defers
from strategies.lowering.step import Step


def with_accumulation(
    layout: BlockLayout, accelerator: Accelerator, steps: BlockSteps, gradient_bytes: int
) -> BlockSteps:
    """Return the steps of a block whose gradients are added to a buffer of so many bytes an element.

    Those of an operator's parameters follow the last step of its backward.
    """
    block = layout.block
    operators = {operator.name: operator for operator in block.operators if operator.parameters}
    last = {step.operators: at for at, step in enumerate(steps.backward) if step.kind is TaskKind.BACKWARD}
    backward: list[Step] = []
    for at, step in enumerate(steps.backward):
        backward.append(step)
        operator = operators.get(step.operators)
        if operator is None or last.get(step.operators) != at:
            continue
        parameters = [block.tensor[name] for name in operator.parameters]
        traffic = sum(layout.parameter_share(each) * (ITEMSIZE[each.dtype] + 2 * gradient_bytes) for each in parameters)
        launch = len(parameters) * accelerator.launch
        seconds = streaming_time(traffic, accelerator.bandwidth(OperatorKind.ELEMENTWISE), launch)
        what = f"gradients of {operator.name} added"
        backward.append(Step(TaskKind.BACKWARD, to_ticks(seconds), what, 0, deferred=defers(operator)))
    return steps._replace(backward=tuple(backward))
