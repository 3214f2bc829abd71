"""Gradient clipping: the norm of all gradients, between their reduction and the optimizer's step.

Every rank reads its gradients once, and the sum of their squares, a scalar of 4 bytes, is
all-reduced over the ranks that share one copy of the model, those of expert groups among them. With
ZeRO the ranks of the data and context axes hold shares of the gradients, and the sum is over all
ranks. Gradients that are in host memory the host reads. Scaling the gradients is not counted: the
optimizer multiplies them as it reads them.

References
----------
Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013,
section 3.2; Megatron-LM, ``core/optimizer/clip_grads.py`` (which groups sum the norm).
"""

from simulator.accelerator import Accelerator
from simulator.collective_kinds import Collective
from simulator.compute import optimizer_time
from simulator.units import to_ticks
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.parameters import Parameters
from strategies.mesh import CONTEXT, DATA, REPLICA
from strategies.plan import Plan
from strategies.training import Training

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
