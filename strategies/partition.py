"""How the layers of a network are divided among pipeline stages."""

from functools import lru_cache

from simulator.operator_graph import OperatorGraph
from strategies.plan import Stage


@lru_cache(maxsize=1024)
def partition(graph: OperatorGraph, stages: int, how: str | tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the blocks of every stage: layers by ``how``, what comes before and after at the ends.

    ``"balanced"`` evens out forward FLOP, the blocks before and after the layers included.
    """
    names = [name for name, _ in graph.occurrences]
    layers = [name for name, block in graph.occurrences if block.repeat > 1] or names[:1]
    first = names.index(layers[0])
    before, after = names[:first], names[first + len(layers) :]
    counts = _counts(graph, stages, len(layers), how)
    result: list[Stage] = []
    position = 0
    for index, count in enumerate(counts):
        blocks = layers[position : position + count]
        blocks = (before if index == 0 else []) + blocks + (after if index == stages - 1 else [])
        result.append(Stage(tuple(blocks)))
        position += count
    return tuple(result)


def _counts(graph: OperatorGraph, stages: int, layers: int, how: str | tuple[int, ...]) -> list[int]:
    if isinstance(how, tuple):
        return list(how)
    if how == "even":
        return [layers // stages] * stages
    flops = {name: block.flops for name, block in graph.occurrences}
    repeated = [block for block in graph.blocks if block.repeat > 1]
    layer = repeated[0].flops if repeated else 1.0
    ends = [name for name, block in graph.occurrences if block.repeat == 1]
    head = sum(flops[name] for name in ends) / layer if repeated else 0.0
    counts = [1] * stages
    load = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda i: (load[i], i))
        counts[lightest] += 1
        load[lightest] += 1
    return counts


def num_layers(graph: OperatorGraph) -> int:
    """Return how often the graph's repeated blocks occur in all."""
    return sum(block.repeat for block in graph.blocks if block.repeat > 1) or 1
