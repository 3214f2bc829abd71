"""Memory of a plan: what stays for the whole step, and the peak that a schedule reaches."""

from functools import lru_cache
from typing import NamedTuple

from simulator.cluster import Accelerator
from simulator.program import Category, MemoryChange
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.stage import StageCost
from strategies.plan import Plan
from strategies.schedule import ActionKind, Schedule
from strategies.training import Training


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


class Moment(NamedTuple):
    """An action with the microbatches that each chunk of the rank holds while it runs."""

    kind: ActionKind
    chunk: int
    held: tuple[int, ...]


@lru_cache(maxsize=1024)
def moments(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """Return the distinct moments of one pipeline rank, from its order of actions alone.

    Memory changes only on the rank's compute stream, so its peak does not depend on time.
    """
    held = [0] * (schedule.num_stages // schedule.num_ranks)
    found: dict[Moment, None] = {}
    for action in schedule.orders[rank]:
        chunk = action.stage // schedule.num_ranks
        held[chunk] += action.kind is ActionKind.FORWARD
        found[Moment(action.kind, chunk, tuple(held))] = None
        held[chunk] -= action.kind is ActionKind.BACKWARD
    return tuple(found)


def peak_activations(schedule: Schedule, rank: int, chunks: tuple[StageCost, ...]) -> int:
    """Return the most bytes of activations and working memory that a pipeline rank holds."""
    kept = [chunk.kept for chunk in chunks]
    extra = {
        ActionKind.FORWARD: [chunk.forward_extra for chunk in chunks],
        ActionKind.BACKWARD: [sum(chunk.backward_extra) for chunk in chunks],
    }
    return max(
        sum(count * size for count, size in zip(moment.held, kept, strict=True)) + extra[moment.kind][moment.chunk]
        for moment in moments(schedule, rank)
    )
