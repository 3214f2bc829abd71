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

from meshwise.strategies.lowering.costs.optimizer import Parameters, count_updated_parameters
from meshwise.strategies.plan.offloading import (
    STEPS,
    STEPS_ON_DEVICE,
    STEPS_ON_HOST,
    UPDATE_CHUNKS,
    StepPlace,
    Update,
    count_fraction,
)
from meshwise.strategies.plan.plan import SharedStates
from meshwise.strategies.plan.problem import Training


class HostShare(NamedTuple):
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


NO_HOST_SHARE = HostShare()
"""A rank that keeps nothing in host memory."""


def host_elements(plan: SharedStates, parameters: Parameters, host_share: HostShare) -> int:
    """Return how many of the parameters that a rank updates have their states on the host."""
    return count_fraction(
        count_updated_parameters(plan, parameters.elements, parameters.expert_elements), host_share.optimizer
    )


def host_states(training: Training, plan: SharedStates, parameters: Parameters, host_share: HostShare) -> int:
    """Return the bytes of a rank's optimizer states that are on the host."""
    num_factored = count_updated_parameters(plan, parameters.factored_elements, parameters.factored_expert_elements)
    elements = host_elements(plan, parameters, host_share)
    return (
        elements * training.optimizer_bytes
        + count_fraction(num_factored, host_share.optimizer) * training.factored_bytes
    )


def plan_update(
    training: Training, plan: SharedStates, parameters: Parameters, host_share: HostShare, place: StepPlace
) -> Update:
    """Return how a rank updates its parameters, those with states on the host at ``place``.

    Stages that move no bytes are left out.
    """
    if not host_share.optimizer:
        return Update()
    steps = STEPS_ON_HOST if place is StepPlace.HOST else STEPS_ON_DEVICE
    moving_steps = tuple(
        n for n in steps if not STEPS[n].kind or update_bytes(training, plan, parameters, host_share, n)
    )
    return Update(host_share.optimizer < 1, moving_steps, host_share.parameters > 0)


def update_bytes(
    training: Training, plan: SharedStates, parameters: Parameters, host_share: HostShare, step: int
) -> float:
    """Return the bytes that one chunk of one of `STEPS` moves."""
    elements, states = host_elements(plan, parameters, host_share), host_states(training, plan, parameters, host_share)
    num_on_device, num_on_host = elements - host_share.parameters, host_share.parameters
    gradient_bytes, parameter_bytes = training.gradient_bytes, training.parameter_bytes
    # In the order of `STEPS`: first the three stages of a step on the host, then those of a step on the device.
    bytes_of_step = (
        num_on_device * gradient_bytes,
        elements * (gradient_bytes + parameter_bytes) + 2 * states,
        num_on_device * parameter_bytes,
        states + num_on_host * gradient_bytes,
        0,
        states + num_on_host * parameter_bytes,
    )
    return bytes_of_step[step] / UPDATE_CHUNKS


def chunk_buffer(training: Training, plan: SharedStates, parameters: Parameters, host_share: HostShare) -> int:
    """Return the bytes on the device of one chunk that it updates with states from the host."""
    extra_bytes = host_share.parameters * (training.gradient_bytes + training.parameter_bytes)
    return ceil((host_states(training, plan, parameters, host_share) + extra_bytes) / UPDATE_CHUNKS)
