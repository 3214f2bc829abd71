"""Levels of load: the problem of a step whose sequences all have one length, or one share of attention's pairs."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwise.simulator.models.encoders import Bert
from meshwise.simulator.models.model import Model, build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorGraph, OperatorKind
from meshwise.simulator.program import IntArray
from meshwise.strategies.loads.lengths import FloatArray
from meshwise.strategies.plan.problem import Problem

MOST_LEVELS = 16
"""Most levels between the least load and the largest; a load in between counts as the nearest of them."""


class Level(NamedTuple):
    """What all sequences of a microbatch have: tokens, pairs of attention over those of a full sequence, and experts.

    ``imbalance`` is the load of the most loaded expert over the mean; None for that of the model.
    """

    tokens: int
    density: float = 1.0
    imbalance: float | None = None


def has_lengths(spec: Model) -> bool:
    """Return whether samples of a model are sequences of any length."""
    return isinstance(spec, Transformer | Bert)


def build_level_problem(problem: Problem, spec: Model, level: Level) -> Problem:
    """Return the problem whose sequences all have a level; the problem itself where that is its own."""
    training, graph = problem.training, problem.graph
    if level == Level(training.sequence):
        return problem
    if isinstance(spec, Transformer):
        if spec.positions == "learned" and spec.max_positions is None:
            spec = replace(spec, max_positions=training.sequence)  # short sequences do not shorten the table
        if level.imbalance is not None and spec.experts is not None:
            most = spec.experts.count / spec.experts.top_k
            imbalance = min(max(level.imbalance, 1.0), most)
            spec = replace(spec, experts=replace(spec.experts, imbalance=imbalance))
    if level != Level(graph.sequence):
        graph = build(spec, level.tokens, training.dtype)
    graph = graph if level.density == 1.0 else thin_attention(graph, level.density)
    return replace(problem, graph=graph, training=replace(training, sequence=level.tokens))


def thin_attention(graph: OperatorGraph, density: float) -> OperatorGraph:
    """Return a graph whose fused attention computes ``density`` times its pairs of tokens, for packed samples.

    Attention that keeps its scores computes all of them.
    """
    blocks = []
    for block in graph.blocks:
        operators = (
            replace(operator, flops_per_point=operator.flops_per_point * density)
            if operator.kind is OperatorKind.ATTENTION
            else operator
            for operator in block.operators
        )
        blocks.append(replace(block, operators=tuple(operators)))
    return replace(graph, blocks=tuple(blocks))


def find_attention_share(graph: OperatorGraph) -> float:
    """Return the share of fused attention in the FLOP of a full sequence."""
    operators = [(operator, block.repeat) for block in graph.blocks for operator in block.operators]
    total = sum(operator.flops * repeat for operator, repeat in operators)
    fused = sum(operator.flops * repeat for operator, repeat in operators if operator.kind is OperatorKind.ATTENTION)
    return fused / total if total else 0.0


def choose_grid(values: FloatArray | IntArray) -> FloatArray:
    """Return the levels of some loads: their own values where they are few, else evenly spaced ones.

    >>> choose_grid(np.array([3, 1, 3])).tolist(), len(choose_grid(np.arange(100)))
    ([1.0, 3.0], 16)
    """
    unique_values = np.unique(values).astype(np.float64)
    if len(unique_values) <= MOST_LEVELS:
        return unique_values
    return np.linspace(unique_values[0], unique_values[-1], MOST_LEVELS)


def find_nearest(grid: FloatArray, values: FloatArray | IntArray) -> IntArray:
    """Return the index of the level of a rising grid that is nearest to each value.

    >>> find_nearest(np.array([1.0, 3.0]), np.array([0.0, 1.9, 2.1])).tolist()
    [0, 0, 1]
    """
    result: IntArray = np.searchsorted((grid[1:] + grid[:-1]) / 2, values, side="left").astype(np.int64)
    return result
