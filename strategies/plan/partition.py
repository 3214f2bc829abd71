"""Division of the layers of a network into pipeline stages."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from meshwise.simulator.brief import brief
from meshwise.simulator.operator_graph import OperatorGraph


@dataclass(frozen=True, slots=True)
class Stage:
    """Names of the blocks of the graph that run together on one pipeline rank."""

    blocks: tuple[str, ...]

    __repr__ = brief()


@lru_cache(maxsize=1024)
def partition(graph: OperatorGraph, stages: int, how: str | tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the blocks of every stage.

    ``division`` is ``"even"``, ``"balanced"`` or the number of layers per stage. Blocks before the layers are in the
    first stage, blocks after them in the last. ``"balanced"`` evens out forward FLOP, including those blocks. With
    more stages than layers, the last stage and then the first have no layers, where they have other blocks.
    """
    names = [name for name, _ in graph.occurrences]
    layers = [name for name, block in graph.occurrences if block.layer] or names[:1]
    first = names.index(layers[0])
    before, after = names[:first], names[first + len(layers) :]
    result: list[Stage] = []
    position = 0
    for index, count in enumerate(_counts(graph, stages, layers, how)):
        blocks = layers[position : position + count]
        blocks = (before if index == 0 else []) + blocks + (after if index == stages - 1 else [])
        result.append(Stage(tuple(blocks)))
        position += count
    return tuple(result)


def _counts(graph: OperatorGraph, stages: int, layers: list[str], how: str | tuple[int, ...]) -> list[int]:
    if isinstance(how, tuple):
        return list(how)
    if how == "even":
        return [len(layers) // stages] * stages
    if stages > len(layers):
        last = int(graph.occurrences[-1][0] != layers[-1])
        return [0] * (stages - len(layers) - last) + [1] * len(layers) + [0] * last
    flops = {name: block.flops for name, block in graph.occurrences}
    each = [flops[name] for name in layers]
    head = sum(size for name, size in flops.items() if name not in set(layers))
    if len(set(each)) > 1:
        return _different(stages, each, head)
    heavier = inf if head else 0.0  # any block with FLOP outweighs layers without
    return _alike(stages, len(each), head / each[0] if each[0] else heavier)


def _alike(stages: int, layers: int, head: float) -> list[int]:
    """Return how many equal layers each stage has: each layer goes to the lightest stage.

    Loads are in layers; the last stage begins with ``end_load`` more.
    """
    counts = [1] * stages
    load = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda i: (load[i], i))
        counts[lightest] += 1
        load[lightest] += 1
    return counts


def _different(stages: int, layers: list[float], head: float) -> list[int]:
    """Return how many of some layers of different load each stage has, so that the heaviest stage is lightest.

    The classic linear partition: bisection for the least load at which filling stages one after another, from the
    last to the first, needs no more than ``stages``. The last stage has ``end_load`` besides its layers.

    >>> _different(2, [3.0, 1.0, 1.0, 1.0], 0.0), _different(2, [1.0, 1.0, 1.0], 1.0)
    ([1, 3], [2, 1])
    """
    low, high = max(layers), sum(layers) + head
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(layers, head, middle)) <= stages else (middle, high)
    counts = _filled(layers, head, high)
    while len(counts) < stages:  # a stage has at least one layer
        widest = max(range(len(counts)), key=lambda i: counts[i])
        counts[widest : widest + 1] = [counts[widest] - counts[widest] // 2, counts[widest] // 2]
    return counts


def _filled(layers: list[float], head: float, most: float) -> list[int]:
    """Return how many layers each stage has, filled from the last stage on up to ``max_load``, one layer at least."""
    counts, load = [0], head
    for size in reversed(layers):
        # the tolerance is for sums in another order than the limit's
        if counts[0] and load + size > most * (1 + 1e-12):
            counts.insert(0, 0)
            load = 0.0
        counts[0] += 1
        load += size
    return counts


def most_stages(graph: OperatorGraph) -> int:
    """Return the largest number of stages with a block each: one per layer, and one for each end with other blocks."""
    names = [block.layer for _, block in graph.occurrences]
    if not any(names):
        return 1
    return num_layers(graph) + int(not names[0]) + int(not names[-1])


def share_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers per stage where the blocks before and after the layers count as one layer each.

    Megatron-LM divides layers so under ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``, and Llama 3 405B was divided so (Grattafiori et al. 2024, section
    3.3.2). A remainder goes to the stages in the middle.

    >>> share_ends(126, 16), share_ends(6, 8), share_ends(5, 3)
    ((7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7), (0, 1, 1, 1, 1, 1, 1, 0), (1, 3, 1))
    """
    least, more = divmod(layers + 2, stages)
    first = (stages - more) // 2
    counts = [least + (first <= stage < first + more) for stage in range(stages)]
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    return tuple(counts)


def num_layers(graph: OperatorGraph) -> int:
    """Return the number of layers of a network; 1 for a graph without layers, whose first block then counts as one."""
    return sum(block.repeat for block in graph.blocks if block.layer) or 1
