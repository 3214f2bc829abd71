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

MOST_VALUES = 16
"""Most different loads that are levels themselves."""
NUM_LEVELS = 9
"""Levels from the least load to the largest where loads are more: what tasks take is interpolated between two."""


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
    """Return the levels of some loads, rising: their own values where they are few, else closer ones for small loads.

    Small kernels take a time of their own beside that of their work: there ticks are no line.

    >>> choose_grid(np.array([3, 1, 3])).tolist()
    [1.0, 3.0]
    >>> choose_grid(np.arange(65)).tolist()
    [0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0, 64.0]
    """
    unique_values = np.unique(values).astype(np.float64)
    if len(unique_values) <= MOST_VALUES:
        return unique_values
    steps = np.linspace(0.0, 1.0, NUM_LEVELS) ** 2
    grid: FloatArray = unique_values[0] + (unique_values[-1] - unique_values[0]) * steps
    return grid


def choose_quantiles(values: FloatArray) -> FloatArray:
    """Return levels of some loads such that about as many loads are nearest to each; their own where they are few."""
    unique_values = np.unique(values)
    if len(unique_values) <= MOST_VALUES:
        return unique_values
    quantiles: FloatArray = np.quantile(values, (np.arange(MOST_VALUES) + 0.5) / MOST_VALUES, method="nearest")
    return np.unique(quantiles)


def find_nearest(grid: FloatArray, value: float) -> float:
    """Return the level of a grid that is nearest to a value.

    >>> find_nearest(np.array([1.0, 3.0]), 1.9)
    1.0
    """
    return float(grid[np.argmin(np.abs(grid - value))])
