"""Memory of a plan: what stays for the whole step, and the peak that a schedule reaches."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from simulator.accelerator import Accelerator
from simulator.program import Category, IntArray, MemoryChange
from strategies.lowering.gradient_storage import begin_in_step
from strategies.lowering.offload import ALL_ON_DEVICES, OnHost, host_states
from strategies.lowering.optimizer import state_bytes, updated_parameters
from strategies.lowering.parameters import Parameters
from strategies.lowering.recompute import BlockMemory
from strategies.orders import actions
from strategies.plan import Plan
from strategies.training import Training


class Copies(NamedTuple):
    """How many versions of its weights, and how many buffers of gradients, a rank keeps."""

    weights: int
    gradients: int


ONCE = Copies(1, 1)


def resident(
    accelerator: Accelerator,
    training: Training,
    plan: Plan,
    parameters: Parameters,
    buffers: int,
    rank_class: int,
    on_host: OnHost = ALL_ON_DEVICES,
    several: Copies = ONCE,
) -> tuple[MemoryChange, ...]:
    """Return what one rank holds for the whole step, on its device and on its host.

    Gradients that begin with a backward are not among it.

    Parameters
    ----------
    buffers
        Bytes that the framework keeps besides.
    on_host
        What of it is on the host.
    several
        How often weights and gradients are kept.
    """
    share = updated_parameters(plan, parameters.elements, parameters.experts)
    gathered = plan.zero == 3 and plan.shards > 1  # copies in fp8 are then made of each block and given up with it
    quantised = 0 if gathered else parameters.quantised * training.more_bytes
    states, states_away = state_bytes(training, plan, parameters), host_states(training, plan, parameters, on_host)
    kept_bytes = 0 if begin_in_step(training, plan) else training.gradient_bytes
    weights, gradients = ((share if plan.zero >= least else parameters.elements) for least in (3, 2))
    weights -= on_host.parameters
    if plan.shards > 1 and plan.zero == 2 and training.conventions.keeps_shards and not training.mains_as_shards:
        weights += share
    if plan.shards > 1 and plan.zero == 3 and training.mains_as_shards:
        weights = 0
    sizes = {
        Category.PARAMETERS: several.weights * (weights * training.parameter_bytes + quantised),
        Category.GRADIENTS: several.gradients * (gradients - on_host.parameters) * kept_bytes,
        Category.OPTIMIZER: states - states_away,
        Category.BUFFERS: int(accelerator.reserved) + buffers,
    }
    away = {
        Category.PARAMETERS: on_host.parameters * training.parameter_bytes * (not training.mains_as_shards),
        Category.GRADIENTS: on_host.parameters * training.gradient_bytes,
        Category.OPTIMIZER: states_away,
    }
    held = tuple(MemoryChange(rank_class, category, size) for category, size in sizes.items())
    return (*held, *(MemoryChange(rank_class, category, size, host=True) for category, size in away.items() if size))


class StageMemory(NamedTuple):
    """Bytes of one microbatch of one stage on one rank.

    Parameters
    ----------
    kept
        Held from forward to backward.
    forward, backward
        Held beyond ``kept`` at the fullest moment of each pass.
    deferred
        Where backward is split, held from the gradients of inputs to those of weights.
    inputs, weights
        Held beyond ``kept`` and beyond ``deferred`` at the fullest moment of those passes.
    """

    kept: int
    forward: int
    backward: int
    deferred: int = 0
    inputs: int = 0
    weights: int = 0

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """What each kind of action takes, or gives back."""
        return self.kept, -self.kept, self.deferred - self.kept, -self.deferred

    @property
    def above(self) -> tuple[int, int, int, int]:
        """What each kind of action holds at its fullest moment, beyond what is held after it."""
        inputs = self.kept - self.deferred + self.inputs
        return self.forward, self.kept + self.backward, inputs, self.deferred + self.weights


def stage_memory(runs: Iterable[tuple[BlockMemory, int]]) -> StageMemory:
    """Return what a stage holds whose blocks come in runs of equal ones.

    Forward keeps block after block and backward gives back the last one first, so that each run
    is fullest at its last block.

    >>> layer = BlockMemory(kept=10, recomputed=5, forward=20, backward=20)
    >>> stage_memory([(layer, 3), (BlockMemory(2, 0, 1, 1), 1)])[:3]
    (32, 18, 23)
    """
    held = forward = backward = 0
    listed = list(runs)
    for memory, count in listed:
        held += count * memory.kept
        forward = max(forward, held + memory.forward)
        backward = max(backward, held + memory.recomputed + memory.backward)
    deferred = sum(memory.deferred * count for memory, count in listed)
    inputs, weights = _fullest_inputs(listed) - held, _fullest_weights(listed)
    return StageMemory(held, max(forward - held, 0), max(backward - held, 0), deferred, inputs, weights)


def _fullest_inputs(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes while a stage makes the gradients of its inputs, the last block first.

    A block then gives back what it kept, and leaves what the gradients of its weights need.
    """
    held = sum(memory.kept * count for memory, count in runs)
    most = held
    for memory, count in reversed(runs):
        step = memory.deferred - memory.kept
        fullest = memory.recomputed + memory.gradients + memory.inputs
        most = max(most, held + fullest, held + step * (count - 1) + fullest)
        held += step * count
    return most


def _fullest_weights(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes above the first while a stage makes the gradients of its weights, the last block first."""
    held = most = 0
    for memory, count in reversed(runs):
        most = max(most, held + memory.weights)
        held -= memory.deferred * count
    return most


def peak_activations(plan: Plan, stages: Sequence[StageMemory]) -> IntArray:
    """Return the most bytes of activations and working memory that each pipeline rank holds.

    Memory changes only on the ranks' compute streams, so that the order of actions gives the
    peak, whatever time they take.
    """
    rows = actions(plan.schedule_name, plan.pipeline, plan.ordered_microbatches, plan.chunks)
    changes = np.array([memory.changes for memory in stages], dtype=np.int64)
    above = np.array([memory.above for memory in stages], dtype=np.int64)
    held = np.cumsum(changes[rows.stage, rows.kind])  # a rank gives back all it takes, so the next begins with nothing
    held += above[rows.stage, rows.kind]
    result: IntArray = np.maximum.reduceat(held, rows.start[:-1])
    return result
