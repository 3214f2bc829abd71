"""Host offload: what ranks keep in host memory, and how parameters whose states are there are updated.

Either the host steps [1]_ [2]_: gradients go to the host, the host updates, and parameters come back. Or the device
steps [3]_: states come to the device, are updated there, and go back, through two buffers of a chunk each, which a
rank has from the end of its passes to the end of the update. Both run chunk after chunk, so that both directions of
PCIe, the host's memory and the device work at once, while the device updates the parameters whose states it has.
Gradients and parameters that are on the host themselves stay there.

References
----------
.. [1] Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021 (the host steps).
.. [2] DeepSpeed, ``offload_optimizer.ratio`` (ZeRO-Offload++, "Twin-Flow": the device steps the rest meanwhile).
.. [3] Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", SC 2021,
   section 5.2 (states are brought in, updated and written back chunk by chunk).
"""

from math import ceil
from typing import NamedTuple

from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.optimizer import Parameters, updated_parameters
from meshwise.strategies.plan.offloading import CHUNKS, STEPS, STEPS_ON_DEVICE, STEPS_ON_HOST, StepPlace, fraction_of
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

ACTIVATIONS, PARAMETERS, GRADIENTS = "host activations", "host parameters", "host gradients"
"""Roles of copies between ranks and hosts while passes run."""

SUM, SQUARES_ON_HOST = "host sum", "host squares"
"""Roles of work on a host: it adds gradients, and reads them for their norm."""


class OnHost(NamedTuple):
    """What a rank keeps in host memory for the whole step.

    Parameters
    ----------
    optimizer
        The fraction of the parameters it updates whose states are there.
    parameters
        Elements of parameters that are there, and of as many gradients; elements of shards where ZeRO 3 shares them.
    """

    optimizer: float = 0.0
    parameters: int = 0


ALL_ON_DEVICES = OnHost()
"""A rank that keeps nothing in host memory."""


class Update(NamedTuple):
    """How a pipeline rank updates its parameters.

    Parameters
    ----------
    has_device_states
        Whether some states are on the device.
    steps
        The stages, of `STEPS`, of every chunk whose states are on the host; none where no states are.
    has_host_gradients
        Whether some gradients are on the host.
    """

    device: bool = True
    steps: tuple[int, ...] = ()
    gradients: bool = False

    @property
    def streamed(self) -> bool:
        """Whether states come to the device to be updated."""
        return STEPS_ON_DEVICE[0] in self.steps


HOST_ADAM = 250e-12
"""Seconds a parameter of a fused Adam on a host whose memory bandwidth is not known.

Published timings of fused host optimizers lie about there (DeepSpeed CPUAdam); they name no processor."""


def host_elements(plan: Plan, held: Parameters, on_host: OnHost) -> int:
    """Return how many of the parameters that a rank updates have their states on the host."""
    return fraction_of(updated_parameters(plan, held.elements, held.experts), on_host.optimizer)


def host_states(training: Training, plan: Plan, held: Parameters, on_host: OnHost) -> int:
    """Return the bytes of a rank's optimizer states that are on the host."""
    factored = updated_parameters(plan, held.factored, held.factored_experts)
    elements = host_elements(plan, held, on_host)
    return elements * training.optimizer_bytes + fraction_of(factored, on_host.optimizer) * training.factored_bytes


def update(training: Training, plan: Plan, held: Parameters, on_host: OnHost) -> Update:
    """Return how a rank updates its parameters; stages that move no bytes are left out."""
    if not on_host.optimizer:
        return Update()
    steps = STEPS_ON_HOST if plan.offload.step is StepPlace.HOST else STEPS_ON_DEVICE
    moving = tuple(n for n in steps if not STEPS[n].kind or update_bytes(training, plan, held, on_host, n))
    return Update(on_host.optimizer < 1, moving, on_host.parameters > 0)


def update_bytes(training: Training, plan: Plan, held: Parameters, on_host: OnHost, step: int) -> float:
    """Return the bytes that one chunk of one of `STEPS` moves."""
    elements, states = host_elements(plan, held, on_host), host_states(training, plan, held, on_host)
    apart, there = elements - on_host.parameters, on_host.parameters
    gradient, parameter = training.gradient_bytes, training.parameter_bytes
    # In the order of `STEPS`: first the three stages of a step on the host, then those of a step on the device.
    moved = (
        apart * gradient,
        elements * (gradient + parameter) + 2 * states,
        apart * parameter,
        states + there * gradient,
        0,
        states + there * parameter,
    )
    return moved[step] / CHUNKS


def chunk_buffer(training: Training, plan: Plan, held: Parameters, on_host: OnHost) -> int:
    """Return the bytes on the device of one chunk that it updates with states from the host."""
    each = on_host.parameters * (training.gradient_bytes + training.parameter_bytes)
    return ceil((host_states(training, plan, held, on_host) + each) / CHUNKS)


def host_ticks(updated: int) -> int:
    """Return the ticks of one chunk of the host's step where its memory is not modelled."""
    return to_ticks(updated * HOST_ADAM / CHUNKS)
