"""The layouts under which a user's module can be trained on this machine, from the simple to the complex."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from meshwise.executor.module_measures.figures import ModuleFigures
from meshwise.executor.modules.layout import RECOMPUTES, ModuleLayout
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
    blocks
        Seconds of every block of the module by its name, where it can be cut into stages between blocks; else none.
    divides_batch, divides_samples, shards_states, recomputes
        Whether ranks may divide the batch, a rank its samples into microbatches, and ranks share states; and whether
        the module has blocks that can be computed again.
    """

    data: tuple[int, ...]
    blocks: tuple[tuple[str, float], ...] = ()
    divides_batch: bool = True
    divides_samples: bool = True
    shards_states: bool = True
    recomputes: bool = True


def find_choices(
    data: Sequence[int], figures: ModuleFigures | None, num_layers: int, *, is_captured: bool = False
) -> Choices:
    """Return what may be chosen of so many ranks: what the first batch has shown to be refused is left out.

    A module without buffers that was captured can be cut into stages.
    """
    if figures is None:
        return Choices(tuple(data), recomputes=num_layers > 0)
    is_cut = is_captured and not (figures.buffers or figures.whole_microbatch or figures.whole_states)
    return Choices(
        tuple(data),
        tuple((block.path, block.forward + block.backward) for block in figures.blocks) if is_cut else (),
        divides_batch=not figures.whole_batch,
        divides_samples=not figures.whole_batch and not figures.whole_microbatch,
        shards_states=not figures.whole_states,
        recomputes=bool(figures.blocks),
    )


def list_refusals(figures: ModuleFigures) -> Iterator[str]:
    """Yield what is not tried because the first batch has shown that a run would refuse it, with the reason."""
    if figures.whole_batch:
        yield f"not tried: ranks and microbatches that divide the batch, as {figures.whole_batch}"
    elif figures.whole_microbatch:
        yield f"not tried: microbatches, as {figures.whole_microbatch}"
    if figures.whole_states and not figures.whole_batch:
        yield f"not tried: ZeRO, as {figures.whole_states}"


def list_layouts(batch: int, choices: Choices) -> Iterator[ModuleLayout]:
    """Yield every layout of a batch: without recomputation, stages, shards and microbatches first.

    >>> [layout.describe() for layout in list_layouts(2, Choices((2,), shards_states=False, recomputes=False))]
    ['data 2, 1 microbatch']
    """
    for recompute in RECOMPUTES if choices.recomputes else (Recompute.NONE,):
        for ranks in choices.data:
            for pipeline in divisors(ranks):
                yield from _list_divided(batch, choices, ranks // pipeline, pipeline, recompute)


def _list_divided(
    batch: int, choices: Choices, data: int, pipeline: int, recompute: Recompute
) -> Iterator[ModuleLayout]:
    """Yield every layout of a number of data ranks and pipeline ranks."""
    if batch % data or (data > 1 and not choices.divides_batch):
        return
    if pipeline > 1 and (len(choices.blocks) < pipeline or not choices.divides_samples):
        return
    cuts = find_cuts(choices.blocks, pipeline)
    stages = (0, 1, 2, 3) if data > 1 and choices.shards_states else (0,)
    counts = [count for count in divisors(batch // data) if pipeline <= count <= MOST_MICROBATCHES]
    counts = counts if choices.divides_samples else [1]
    for zero, count in product(stages, counts):
        for shards in divisors(data)[1:] if zero else [0]:
            yield ModuleLayout(data, zero, shards % data, True, count, recompute, pipeline, cuts=cuts)


def find_cuts(blocks: Sequence[tuple[str, float]], stages: int) -> tuple[str, ...]:
    """Return the names of the blocks at which stages after the first begin, so that the slowest stage is fastest.

    >>> find_cuts([("a", 3.0), ("b", 1.0), ("c", 1.0), ("d", 1.0)], 2)
    ('b',)
    >>> find_cuts([("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 1.0)], 3)
    ('b', 'c')
    """
    # slowest[i]: of the best division of the first i blocks into so many stages, with the places where stages begin
    sums = [0.0, *accumulate(seconds for _, seconds in blocks)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(stages):
        best = {
            end: min(
                (max(slowest, sums[end] - sums[start]), (*starts, start))
                for start, (slowest, starts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(blocks) + 1)
        }
    return tuple(blocks[start][0] for start in best[len(blocks)][1][1:]) if stages > 1 else ()
