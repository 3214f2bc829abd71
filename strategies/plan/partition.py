"""Division of the layers of a network into pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import inf

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.memo import HashedTuple
from meshwise.simulator.operator_graph import OperatorGraph


@dataclass(frozen=True, slots=True)
class Stage:
    """Names of the blocks of the graph that run together on one pipeline rank."""

    blocks: tuple[str, ...]

    __repr__ = brief_repr()


@lru_cache(maxsize=1024)
def partition_layers(graph: OperatorGraph, stages: int, division: str | tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the blocks of every stage.

    ``division`` is ``"even"``, ``"balanced"`` or the number of layers per stage. Blocks before the layers are in the
    first stage, blocks after them in the last, and blocks between two layers with the first of these. ``"balanced"``
    evens out forward FLOP, including those blocks. With more stages than layers, the last stage and then the first have
    no layers, where they have other blocks.
    """
    names = [name for name, _ in graph.occurrences]
    layers = [name for name, block in graph.occurrences if block.layer] or names[:1]
    starts = [names.index(name) for name in layers]
    runs = [names[start:end] for start, end in zip(starts, [*starts[1:], starts[-1] + 1], strict=True)]
    head_blocks, tail_blocks = names[: starts[0]], names[starts[-1] + 1 :]
    result: list[Stage] = []
    position = 0
    for index, count in enumerate(_count_layers(graph, stages, runs, division)):
        blocks = list(chain(*runs[position : position + count]))
        blocks = (head_blocks if index == 0 else []) + blocks + (tail_blocks if index == stages - 1 else [])
        result.append(Stage(tuple(blocks)))
        position += count
    return HashedTuple(result)


def _count_layers(
    graph: OperatorGraph, stages: int, runs: list[list[str]], division: str | tuple[int, ...]
) -> list[int]:
    """Return the number of layers of every stage; ``runs`` are layers, each with the blocks up to the next."""
    if isinstance(division, tuple):
        return list(division)
    if division == "even":
        return [len(runs) // stages] * stages
    if stages > len(runs):
        num_tail_stages = int(graph.occurrences[-1][0] != runs[-1][-1])
        return [0] * (stages - len(runs) - num_tail_stages) + [1] * len(runs) + [0] * num_tail_stages
    flops = {name: block.flops for name, block in graph.occurrences}
    layer_flops = [sum(flops[name] for name in run) for run in runs]
    inner_names = set(chain(*runs))
    end_flops = sum(size for name, size in flops.items() if name not in inner_names)
    if len(set(layer_flops)) > 1:
        return _balance_unequal_layers(stages, layer_flops, end_flops)
    end_load = inf if end_flops else 0.0  # any block with FLOP outweighs layers without
    return _balance_equal_layers(stages, len(layer_flops), end_flops / layer_flops[0] if layer_flops[0] else end_load)


def _balance_equal_layers(stages: int, layers: int, end_load: float) -> list[int]:
    """Return how many equal layers each stage has: each layer goes to the lightest stage.

    Loads are in layers; the last stage begins with ``end_load`` more.
    """
    counts = [1] * stages
    loads = [1.0] * (stages - 1) + [1.0 + end_load]
    for _ in range(layers - stages):
        lightest_stage = min(range(stages), key=lambda i: (loads[i], i))
        counts[lightest_stage] += 1
        loads[lightest_stage] += 1
    return counts


def _balance_unequal_layers(stages: int, layers: list[float], end_load: float) -> list[int]:
    """Return how many of some layers of different load each stage has, so that the heaviest stage is lightest.

    The classic linear partition: bisection for the least load at which filling stages one after another, from the
    last to the first, needs no more than ``stages``. The last stage has ``end_load`` besides its layers.

    >>> _balance_unequal_layers(2, [3.0, 1.0, 1.0, 1.0], 0.0), _balance_unequal_layers(2, [1.0, 1.0, 1.0], 1.0)
    ([1, 3], [2, 1])
    """
    low, high = max(layers), sum(layers) + end_load
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill_stages(layers, end_load, middle)) <= stages else (middle, high)
    counts = _fill_stages(layers, end_load, high)
    while len(counts) < stages:  # a stage has at least one layer
        widest_stage = max(range(len(counts)), key=lambda i: counts[i])
        counts[widest_stage : widest_stage + 1] = [
            counts[widest_stage] - counts[widest_stage] // 2,
            counts[widest_stage] // 2,
        ]
    return counts


def _fill_stages(layers: list[float], end_load: float, max_load: float) -> list[int]:
    """Return how many layers each stage has, filled from the last stage on up to ``max_load``, one layer at least."""
    counts, load = [0], end_load
    for size in reversed(layers):
        # the tolerance is for sums in another order than the limit's
        if counts[0] and load + size > max_load * (1 + 1e-12):
            counts.insert(0, 0)
            load = 0.0
        counts[0] += 1
        load += size
    return counts


def count_possible_stages(graph: OperatorGraph) -> int:
    """Return the largest number of stages with a block each: one per layer, and one for each end with other blocks."""
    occurrences = graph.occurrences
    if not any(block.layer for _, block in occurrences):
        return 1
    return num_layers(graph) + sum(not block.layer for _, block in (occurrences[0], occurrences[-1]))


def share_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers per stage where the blocks before and after the layers count as one layer each.

    Megatron-LM divides layers so under ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``, and Llama 3 405B was divided so (Grattafiori et al. 2024, section
    3.3.2). A remainder goes to the stages in the middle.

    >>> share_ends(126, 16), share_ends(6, 8), share_ends(5, 3)
    ((7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7), (0, 1, 1, 1, 1, 1, 1, 0), (1, 3, 1))
    """
    base_count, num_extra = divmod(layers + 2, stages)
    extra_start = (stages - num_extra) // 2
    counts = [base_count + (extra_start <= stage < extra_start + num_extra) for stage in range(stages)]
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    return tuple(counts)


def count_stage_layers(graph: OperatorGraph, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the number of layers of every stage; the first block of a graph without layers counts as one."""
    layers = {name for name, block in graph.occurrences if block.layer} or {graph.occurrences[0][0]}
    return tuple(sum(name in layers for name in stage.blocks) for stage in stages)


def num_layers(graph: OperatorGraph) -> int:
    """Return the number of layers of a network; 1 for a graph without layers, whose first block then counts as one."""
    return sum(block.repeat for block in graph.blocks if block.layer) or 1
