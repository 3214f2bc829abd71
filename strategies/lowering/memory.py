"""Memory of a plan: what stays for the whole step, and the peak that a schedule reaches."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from simulator.accelerator import Accelerator
from simulator.program import Category, IntArray, MemoryChange
from strategies.lowering.offload import offloads_optimizer
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.recompute import BlockMemory
from strategies.orders import orders
from strategies.plan import Plan
from strategies.training import Training


def resident(
    accelerator: Accelerator, training: Training, plan: Plan, parameters: int, experts: int, rank_class: int
) -> tuple[MemoryChange, ...]:
    """Return what one rank holds for the whole step, on its device and on its host."""
    states = updated_parameters(plan, parameters, experts) * training.optimizer_bytes
    on_host = offloads_optimizer(plan)
    sizes = {
        Category.PARAMETERS: parameters * training.parameter_bytes,
        Category.GRADIENTS: parameters * training.gradient_bytes,
        Category.OPTIMIZER: 0 if on_host else states,
        Category.BUFFERS: int(accelerator.reserved),
    }
    held = tuple(MemoryChange(rank_class, category, size) for category, size in sizes.items())
    return (*held, MemoryChange(rank_class, Category.OPTIMIZER, states, host=True)) if on_host else held


class StageMemory(NamedTuple):
    """Bytes of one microbatch of one stage on one rank.

    Parameters
    ----------
    kept
        Held from forward to backward.
    forward, backward
        Held beyond ``kept`` at the fullest moment of each pass.
    """

    kept: int
    forward: int
    backward: int


def stage_memory(runs: Iterable[tuple[BlockMemory, int]]) -> StageMemory:
    """Return what a stage holds whose blocks come in runs of equal ones.

    Forward keeps block after block and backward gives back the last one first, so that each run
    is fullest at its last block.

    >>> stage_memory([(BlockMemory(kept=10, recomputed=5, working=20), 3), (BlockMemory(2, 0, 1), 1)])
    StageMemory(kept=32, forward=18, backward=23)
    """
    held = forward = backward = 0
    for memory, count in runs:
        held += count * memory.kept
        forward = max(forward, held + memory.working)
        backward = max(backward, held + memory.recomputed + memory.working)
    return StageMemory(held, max(forward - held, 0), max(backward - held, 0))


def peak_activations(plan: Plan, stages: Sequence[StageMemory]) -> IntArray:
    """Return the most bytes of activations and working memory that each pipeline rank holds.

    Memory changes only on the ranks' compute streams, so that the order of actions gives the
    peak, whatever time they take.
    """
    rows = orders(plan.schedule_name, plan.pipeline, plan.num_microbatches, plan.chunks)
    changes = np.array([(memory.kept, -memory.kept) for memory in stages], dtype=np.int64).ravel()
    above = np.array([(memory.forward, memory.kept + memory.backward) for memory in stages], dtype=np.int64).ravel()
    held = np.cumsum(changes[rows.passes])  # a rank gives back all it takes, so the next begins with nothing
    held += above[rows.passes]
    result: IntArray = np.maximum.reduceat(held, rows.start[:-1])
    return result
