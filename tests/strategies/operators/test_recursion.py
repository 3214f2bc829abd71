"""Double recursion over the levels of a machine, and choices that spread from those that are made."""

from math import prod
from random import Random

import numpy as np
import pytest

from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.operator_graph import BATCH, Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, restrict_choices
from meshwise.strategies.operators.recursion import Level, propagate, recurse
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS

from ...pace import measure_cpu
from .brute_force import brute_force

FAST, SLOW = 1.0, 20.0


def cut_dims(
    graph: OperatorGraph, *levels: Level, microbatch: int, microbatches: int = 1, faithful: bool = False
) -> dict:  # type: ignore[type-arg]
    found = recurse(graph, levels, microbatch, microbatches, faithful=faithful)
    return {each.operator: dict(each.cuts) for each in found}


def product(rows: int, inner: int, columns: int) -> OperatorGraph:
    """Return one product A [rows, inner] B [inner, columns] whose rows are samples."""
    tensors = (
        Tensor("a", (BATCH, "inner"), (1, inner), "fp32"),
        Tensor("b", ("inner", "wide"), (inner, columns), "fp32"),
        Tensor("c", (BATCH, "wide"), (1, columns), "fp32"),
    )
    sizes = ((BATCH, 1), ("inner", inner), ("wide", columns))
    operator = Operator("multiply", OperatorKind.MATMUL, sizes, ("a",), ("c",), ("b",), ("inner",))
    return OperatorGraph("product", (Block("layer", (operator,), tensors, ("a",), ("c",)),), 1)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        # as published: cut i -> 0.25 k j / 2, cut j -> i k / 2, cut k -> i j / 2; the least is taken
        ((64, 16, 16), BATCH),  # 32 against 512 and 512
        ((4, 16, 4096), "wide"),  # 32 against 8192 and 8192
        ((4, 4096, 16), "inner"),  # 32 against 8192 and 8192
    ],
)
def test_a_product_is_cut_where_least_moves(shape: tuple[int, int, int], dim: str) -> None:
    found = cut_dims(product(*shape), Level(TENSOR, 2), microbatch=shape[0], faithful=True)
    assert found == {"layer.multiply": {dim: (TENSOR,)}}


def test_levels_cut_what_is_left() -> None:
    # 64 samples in 2 * 2 * 2, the published recursion on 8 devices
    levels = (Level(TENSOR_DEPTH, 2), Level(TENSOR_ROWS, 2), Level(TENSOR, 2))
    found = cut_dims(product(64, 16, 16), *levels, microbatch=64, faithful=True)
    assert found == {"layer.multiply": {BATCH: (TENSOR_DEPTH, TENSOR_ROWS, TENSOR)}}
    # of 4 samples only two halvings are whole: the third level cuts another dim
    found = cut_dims(product(4, 2, 2), *levels, microbatch=4, faithful=True)
    assert prod(2 for axes in found["layer.multiply"].values() for _ in axes) == 8
    assert len(found["layer.multiply"][BATCH]) == 2


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize("ways", [2, 3, 5])
def test_any_number_of_ways_that_divides(ways: int, faithful: bool) -> None:
    graph = product(30, 7, 7)
    assert cut_dims(graph, Level(TENSOR, ways), microbatch=30, faithful=faithful) == {
        "layer.multiply": {BATCH: (TENSOR,)}
    }
    assert cut_dims(graph, Level(TENSOR, 4), microbatch=30, faithful=faithful) == {"layer.multiply": {}}


def test_gpt_3_on_1024_devices_is_data_outside_and_megatron_inside() -> None:
    graph = build(MODELS["gpt3-175b"], 2048, "bf16")
    levels = (Level(TENSOR_ROWS, 128, SLOW), Level(TENSOR, 8, FAST))
    recurse(graph, levels, 384, 4)
    seconds = []
    for _ in range(3):
        with measure_cpu() as spent:
            found = cut_dims(graph, *levels, microbatch=384, microbatches=4)
        seconds.append(spent.seconds)
    assert min(seconds) < 0.05
    layers = {name.removeprefix("layers."): cuts for name, cuts in found.items() if name.startswith("layers.")}
    assert {cuts[BATCH] for cuts in layers.values()} == {(TENSOR_ROWS,)}
    for name, dim in (("qkv", "heads"), ("attention", "heads"), ("up", "ffn"), ("activation", "ffn"), ("down", "ffn")):
        assert layers[name][dim] == (TENSOR,)


def test_choosing_together_is_never_dearer_than_one_after_another() -> None:
    # by the corrected costs of a level, which both are measured with
    from meshwise.strategies.operators.recursion import _Recursion

    for model in ("gpt3-1.3b", "llama3-8b", "t5-small", "resnet-50"):
        recursion = _Recursion(build(MODELS[model], 512, "bf16"), 16, 1)
        level = Level(TENSOR, 8)

        def cost(chosen: list[str | None], of: _Recursion = recursion, at: Level = level) -> int:
            own = sum(int(of._compute_times(n, [dim], at)[0]) for n, dim in enumerate(chosen))
            return own + sum(
                of._count_transfer_ticks(link, chosen[link.source], chosen[link.target], at) for link in of.tensor_edges
            )

        assert cost(recursion.choose_exactly(level)) <= cost(recursion.choose_greedily(level))


def graph(sizes: list[int], edges: list[tuple[int, int, list[list[int]]]]) -> CostGraph:
    zeros = tuple(np.zeros(size, np.int64) for size in sizes)
    tables = tuple(Edge(source, target, np.array(times, np.int64)) for source, target, times in edges)
    return CostGraph(zeros, zeros, zeros, tables, (-1,) * len(sizes))


def test_a_chain_follows_its_seed() -> None:
    same = [[0, 5], [5, 0]]
    chain = graph([2, 2, 2], [(0, 1, same), (1, 2, same)])
    assert propagate(chain, {1: 1}) == (1, 1, 1)
    assert propagate(chain, {1: 0}) == (0, 0, 0)
    assert propagate(chain, {}) == (0, 0, 0)


def test_it_is_greedy() -> None:
    # from node 0 the cheapest step to node 1 is its choice 0, behind which node 2 costs 9: the other way costs 1 in all
    trap = graph([1, 2, 1], [(0, 1, [[0, 1]]), (1, 2, [[9], [0]])])
    assert propagate(trap, {0: 0}) == (0, 0, 0)
    assert trap.time((0, 0, 0)) == 9
    assert brute_force(trap).time == 1  # type: ignore[union-attr]


def test_a_node_of_two_inputs_waits_for_both() -> None:
    # node 2 reads 0 and 1; when 1 has chosen too it is reached from 0, and takes what fits that one alone
    join = graph([1, 2, 2], [(0, 1, [[3, 0]]), (0, 2, [[0, 7]]), (1, 2, [[0, 7], [7, 0]])])
    assert propagate(join, {0: 0}) == (0, 1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_on_a_chain_whose_layouts_are_reached_for_nothing_it_is_the_best(seed: int) -> None:
    random = Random(seed)
    sizes = [random.randint(2, 4) for _ in range(6)]
    edges = []
    for number in range(5):
        times = [[random.randint(1, 9) for _ in range(sizes[number + 1])] for _ in range(sizes[number])]
        for row in times:
            row[random.randrange(len(row))] = 0
        edges.append((number, number + 1, times))
    chain = graph(sizes, edges)
    start = random.randrange(sizes[0])
    pinned = restrict_choices(chain, {0: np.array([start])})
    assert chain.time(propagate(chain, {0: start})) == brute_force(pinned).time == 0  # type: ignore[union-attr]
