"""The layouts under which a user's module can be trained on this machine, from the simple to the complex."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from meshwise.executor.modules.layout import RECOMPUTES, ModuleLayout
from meshwise.executor.user_training.figures import ModuleFigures
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.recomputation import Recompute

MOST_MICROBATCHES = 32
"""Microbatches of a rank that are tried, at most."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be chosen for a module.

    Parameters
    ----------
    data
        Numbers of ranks.
    divides_batch, divides_samples, shards_states, recomputes
        Whether ranks may divide the batch, a rank its samples into microbatches, and ranks share states; and whether
        the module has blocks that can be computed again.
    """

    data: tuple[int, ...]
    divides_batch: bool = True
    divides_samples: bool = True
    shards_states: bool = True
    recomputes: bool = True


def find_choices(data: Sequence[int], figures: ModuleFigures | None, num_layers: int) -> Choices:
    """Return what may be chosen of so many ranks: what the first batch has shown to be refused is left out."""
    if figures is None:
        return Choices(tuple(data), recomputes=num_layers > 0)
    return Choices(
        tuple(data),
        divides_batch=not figures.whole_batch,
        divides_samples=not figures.whole_batch and not figures.whole_microbatch,
        shards_states=not figures.whole_states,
        recomputes=bool(figures.blocks),
    )


def list_layouts(batch: int, choices: Choices) -> Iterator[ModuleLayout]:
    """Yield every layout of a batch: without recomputation, shards and microbatches first.

    >>> [layout.describe() for layout in list_layouts(2, Choices((2,), shards_states=False, recomputes=False))]
    ['data 2, 1 microbatch']
    """
    recomputes = RECOMPUTES if choices.recomputes else (Recompute.NONE,)
    for recompute, data in product(recomputes, choices.data):
        if batch % data or (data > 1 and not choices.divides_batch):
            continue
        stages = (0, 1, 2, 3) if data > 1 and choices.shards_states else (0,)
        counts = [count for count in divisors(batch // data) if count <= MOST_MICROBATCHES]
        for zero, count in product(stages, counts if choices.divides_samples else [1]):
            for shards in divisors(data)[1:] if zero else [0]:
                yield ModuleLayout(data, zero, shards % data, num_microbatches=count, recompute=recompute)
