"""Random cost graphs: chains, residual connections, branches, and anything that points forward."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from meshwise.strategies.operators.cost_graph import CostGraph, Edge, IntArray, Shortfall, Solution, find_leanest_choice

from .brute_force import brute_force

CASES = 300
MOST_CHOICES = 30_000


class Case(NamedTuple):
    graph: CostGraph
    limit: int | None
    answer: Solution | Shortfall


def costs(times: list[list[int]], kept: list[list[int]], edges: list[tuple[int, int, list[list[int]]]]) -> CostGraph:
    """Return a graph without transient memory."""
    columns = [tuple(np.array(each) for each in column) for column in (times, kept)]
    nothing = tuple(np.zeros_like(each) for each in columns[0])
    joined = tuple(Edge(source, target, np.array(table)) for source, target, table in edges)
    return CostGraph(columns[0], columns[1], nothing, joined, (-1,) * len(times))


def chain(nodes: int, generator: np.random.Generator) -> set[tuple[int, int]]:
    return {(node, node + 1) for node in range(nodes - 1)}


def residual(nodes: int, generator: np.random.Generator) -> set[tuple[int, int]]:
    return chain(nodes, generator) | {(node, node + 3) for node in range(0, nodes - 3, 3)}


def branches(nodes: int, generator: np.random.Generator) -> set[tuple[int, int]]:
    middle = range(1, nodes - 1)
    return {(0, node) for node in middle} | {(node, nodes - 1) for node in middle}


def anything(nodes: int, generator: np.random.Generator) -> set[tuple[int, int]]:
    return {(a, b) for b in range(1, nodes) for a in range(b) if generator.random() < 0.35}


def random_graph(seed: int, most_choices: int = MOST_CHOICES) -> CostGraph:
    generator = np.random.default_rng(seed)
    nodes = int(generator.integers(3, 15))
    sizes = generator.integers(2, 9, nodes)
    while np.prod(sizes.astype(float)) > most_choices:
        sizes[int(generator.integers(nodes))] = 2
        if sizes.max() == 2:
            break
    pairs = sorted((chain, residual, branches, anything)[seed % 4](nodes, generator))
    pairs += pairs[: seed % 3]  # parallel edges
    high = (4, 30, 10**9)[seed % 3]

    def drawn(shape: object) -> IntArray:
        return generator.integers(0, high, shape)  # type: ignore[no-any-return, call-overload]

    columns = [tuple(drawn(size) for size in sizes) for _ in range(3)]
    edges = tuple(Edge(a, b, drawn((sizes[a], sizes[b]))) for a, b in pairs)
    return CostGraph(*columns, edges, (-1,) * nodes)


@cache
def case(seed: int) -> Case:
    """Return a random graph, none or some limit, and what brute force finds."""
    graph = random_graph(seed)
    free = brute_force(graph)
    least = graph.memory(find_leanest_choice(graph))
    share = (None, 0.0, 0.2, 0.5, 0.9)[seed % 5]
    limit = None if share is None else int(least + share * (free.memory - least))
    limit = least - 1 if seed % 25 == 1 else limit
    return Case(graph, limit, free if limit is None else brute_force(graph, limit))


def cases() -> Iterator[Case]:
    return map(case, range(CASES))


def layers(number: int, operators: int, choices: int, seed: int) -> CostGraph:
    """Return identical layers with two residual connections each; the middle and the last operator add them."""
    generator = np.random.default_rng(seed)
    columns = [[generator.integers(10**8, 10**9, choices) for _ in range(operators)] for _ in range(3)]
    tables: dict[tuple[int, int], IntArray] = {}

    def edge(source: int, target: int) -> Edge:
        place = (source % operators, target - source)
        if place not in tables:
            tables[place] = generator.integers(0, 2 * 10**8, (choices, choices))
        return Edge(source, target, tables[place])

    nodes = number * operators
    middle = operators // 2
    edges = [edge(node, node + 1) for node in range(nodes - 1)]
    for first in range(0, nodes, operators):
        edges += [edge(first, first + middle), edge(first + middle, first + operators - 1)]
    repeated = [tuple(column[node % operators] for node in range(nodes)) for column in columns]
    return CostGraph(*repeated, tuple(edges), tuple(node % operators for node in range(nodes)))


def halfway(graph: CostGraph, fastest: Solution) -> int:
    """Return a limit between what is needed at least and what the fastest choice needs."""
    return (graph.memory(find_leanest_choice(graph)) + fastest.memory) // 2
