"""Tied parameters: one parameter used by two blocks, kept twice where they are on two stages.

Shoeybi et al. 2019, "Megatron-LM": the word embedding is also the output layer; with a
pipeline its gradient is summed between the first and the last stage.
"""

from simulator.operator_graph import OperatorGraph
from strategies.plan import Plan


def tied_parameters(graph: OperatorGraph, plan: Plan) -> list[tuple[tuple[int, int], tuple[str, str]]]:
    """Return the pairs of pipeline positions that keep one parameter each, and it by block and name."""
    if not graph.tied or plan.pipeline == 1:
        return []
    placed = {block: at for stage, at in zip(plan.stages, plan.positions, strict=True) for block in stage.blocks}
    found = [((placed.get(first[0], -1), placed.get(second[0], -1)), second) for first, second in graph.tied]
    return [(pair, parameter) for pair, parameter in found if pair[0] != pair[1] and min(pair) >= 0]
