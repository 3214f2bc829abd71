"""The layouts under which a user's module can be trained on this machine, from the simple to the complex."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import Any

from meshwise.executor.module_measures.figures import ModuleFigures
from meshwise.executor.modules.layout import RECOMPUTES, CutAxes, ModuleLayout, read_cut_words
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.recomputation import Recompute

MOST_MICROBATCHES = 32
"""Microbatches of a rank that are tried, at most."""
FEWEST_CUT_SAMPLES = 2
"""Samples of a microbatch on all data ranks together, at least, where operators are cut."""
SCHEDULES = (("gpipe", 1), ("interleaved", 2), ("interleaved", 4))
"""Other schedules that are tried where 1F1B is among the fastest, with their stages of a rank.

Those that split backward are not: torch takes longer for its two halves than for the whole, which is not measured.
"""
CUT_WITH = frozenset(("pipeline", "zero", "recompute"))
"""What plans that cut operators are tried with: ``pipeline``, ``zero`` and ``recompute`` where steps can run them."""


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
    cut_axes
        Over which ranks operators can be cut, one way at a time.
    divides_cut_samples
        Whether a rank may divide its samples into microbatches there.
    """

    data: tuple[int, ...]
    blocks: tuple[tuple[str, float], ...] = ()
    divides_batch: bool = True
    divides_samples: bool = True
    shards_states: bool = True
    recomputes: bool = True
    cut_axes: tuple[CutAxes, ...] = ()
    divides_cut_samples: bool = False


def find_choices(
    data: Sequence[int],
    figures: ModuleFigures | None,
    num_layers: int,
    *,
    is_captured: bool = False,
    cut_axes: Sequence[CutAxes] = (),
    has_weight: bool = False,
) -> Choices:
    """Return what may be chosen of so many ranks: what the first batch has shown to be refused is left out.

    A module without buffers that was captured can be cut into stages.

    Parameters
    ----------
    cut_axes
        Over which ranks the operators of the module may be cut.
    has_weight
        Whether its loss is a pair (sum, weight), of which a cut module takes no microbatches.
    """
    if figures is None:
        return Choices(tuple(data), recomputes=num_layers > 0, cut_axes=tuple(cut_axes))
    is_cut = is_captured and not (figures.buffers or figures.whole_microbatch or figures.whole_states)
    return Choices(
        tuple(data),
        tuple((block.path, block.forward + block.backward) for block in figures.blocks) if is_cut else (),
        divides_batch=not figures.whole_batch,
        divides_samples=not figures.whole_batch and not figures.whole_microbatch,
        shards_states=not figures.whole_states,
        recomputes=bool(figures.blocks),
        cut_axes=tuple(cut_axes),
        divides_cut_samples=not (figures.whole_batch or figures.whole_microbatch or has_weight),
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

    Of a pipeline it is that of 1F1B; where operators are cut, how is still to be chosen.

    >>> [layout.describe() for layout in list_layouts(2, Choices((2,), shards_states=False, recomputes=False))]
    ['data 2, 1 microbatch']
    """
    for recompute in RECOMPUTES if choices.recomputes else (Recompute.NONE,):
        for ranks in choices.data:
            for pipeline in divisors(ranks):
                yield from _list_divided(batch, choices, ranks // pipeline, pipeline, recompute)
    for ranks, axes in product(choices.data, choices.cut_axes):
        words = read_cut_words(axes)
        if ranks % prod(words.values()) == 0:
            yield from _list_cut(batch, choices, ranks // prod(words.values()), words)


def _list_divided(
    batch: int, choices: Choices, data: int, pipeline: int, recompute: Recompute
) -> Iterator[ModuleLayout]:
    """Yield every layout of a number of data ranks and pipeline ranks."""
    if batch % data or (data > 1 and not choices.divides_batch):
        return
    if pipeline > 1 and (len(choices.blocks) < pipeline or not choices.divides_samples):
        return
    cuts = find_cuts(choices.blocks, pipeline)
    counts = [count for count in divisors(batch // data) if pipeline <= count <= MOST_MICROBATCHES]
    counts = counts if choices.divides_samples else [1]
    for zero, count in product(_list_zero_stages(choices, data), counts):
        for shards in divisors(data)[1:] if zero else [0]:
            yield ModuleLayout(data, zero, shards % data, True, count, recompute, pipeline, cuts=cuts)


def _list_zero_stages(choices: Choices, data: int) -> tuple[int, ...]:
    return (0, 1, 2, 3) if data > 1 and choices.shards_states else (0,)


def _list_cut(batch: int, choices: Choices, ranks: int, words: Mapping[str, Any]) -> Iterator[ModuleLayout]:
    """Yield every layout that cuts operators as words say, of so many ranks that are left to other axes."""
    recomputes: tuple[Recompute, ...] = (Recompute.NONE,)
    if "recompute" in CUT_WITH and choices.recomputes and choices.divides_batch:
        recomputes = RECOMPUTES
    pipelines = divisors(ranks) if "pipeline" in CUT_WITH and choices.divides_cut_samples else (1,)
    for pipeline, recompute in product(pipelines, recomputes):
        data = ranks // pipeline
        if batch % data or pipeline > max(len(choices.blocks), 1):
            continue
        counts = [
            count
            for count in divisors(batch // data)
            if pipeline <= count <= MOST_MICROBATCHES
            and batch // count >= FEWEST_CUT_SAMPLES
            and batch // data // count % words.get("expert", 1) == 0  # they have samples of their own elsewhere
        ]
        counts = [count for count in counts if choices.divides_cut_samples or count == 1]
        stages = _list_zero_stages(choices, data) if "zero" in CUT_WITH and choices.divides_batch else (0,)
        cuts = find_cuts(choices.blocks, pipeline)
        for zero, count in product(stages, counts):
            yield ModuleLayout(data, zero, 0, True, count, recompute, pipeline, cuts=cuts, **words)


def list_other_schedules(layout: ModuleLayout, choices: Choices) -> Iterator[ModuleLayout]:
    """Yield a pipeline under every other schedule that exists for its numbers, with as many stages as it has.

    >>> blocks = tuple((f"layers.{place}", 1.0) for place in range(4))
    >>> layout = ModuleLayout(pipeline=2, num_microbatches=4, zero=1)
    >>> [other.schedule for other in list_other_schedules(layout, Choices((2,), blocks))]
    ['gpipe', 'interleaved']
    """
    for schedule, chunks in SCHEDULES:
        stages = layout.pipeline * chunks
        if stages > len(choices.blocks):
            continue
        try:
            yield replace(layout, schedule=schedule, chunks=chunks, cuts=find_cuts(choices.blocks, stages))
        except ValueError:  # the layout says which schedules there are
            continue


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
