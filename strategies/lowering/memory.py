"""Memory of a plan: what stays for the whole step, and the peak that a schedule reaches."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Accelerator
from simulator.program import Category, MemoryChange
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.stage import StageCost
from strategies.plan import Plan
from strategies.schedule import ActionKind, schedule
from strategies.training import Training

IntArray = NDArray[np.int64]


def resident(
    accelerator: Accelerator, training: Training, plan: Plan, parameters: int, rank_class: int
) -> tuple[MemoryChange, ...]:
    """Return what one rank holds for the whole step."""
    sizes = {
        Category.PARAMETERS: parameters * training.parameter_bytes,
        Category.GRADIENTS: parameters * training.gradient_bytes,
        Category.OPTIMIZER: updated_parameters(plan, parameters) * training.optimizer_bytes,
        Category.BUFFERS: int(accelerator.reserved),
    }
    return tuple(MemoryChange(rank_class, category, size) for category, size in sizes.items())


class Moments(NamedTuple):
    """The distinct moments of one pipeline rank, a row each.

    ``held[i, chunk]`` microbatches are held while an action of ``chunks[i]`` runs, forward
    or ``backward[i]``.
    """

    held: IntArray
    chunks: IntArray
    backward: IntArray


@lru_cache(maxsize=8192)
def moments(name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> Moments:
    """Return the moments of a pipeline rank, from its order of actions alone.

    Memory changes only on the rank's compute stream, so its peak does not depend on time.
    """
    order = schedule(name, ranks, microbatches, chunks).orders[rank]
    held = [0] * chunks
    found: dict[tuple[int, ...], None] = {}
    for action in order:
        chunk, backward = action.stage // ranks, action.kind is ActionKind.BACKWARD
        held[chunk] += not backward
        found[chunk, backward, *held] = None
        held[chunk] -= backward
    table = np.array(list(found), dtype=np.int64)
    return Moments(table[:, 2:], table[:, 0], table[:, 1])


def peak_activations(plan: Plan, rank: int, chunks: tuple[StageCost, ...]) -> int:
    """Return the most bytes of activations and working memory that a pipeline rank holds."""
    kept = np.array([chunk.kept for chunk in chunks], dtype=np.int64)
    extra = np.array([[chunk.forward_extra, sum(chunk.backward_extra)] for chunk in chunks], dtype=np.int64)
    rows = moments(plan.schedule_name, plan.pipeline, plan.num_microbatches, plan.chunks, rank)
    return int((rows.held @ kept + extra[rows.chunks, rows.backward]).max())
