"""Tensor parallelism over a grid: the bytes of the papers, shares of memory, and every way to the step time."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.vision import ResNet, VisionTransformer
from meshwise.simulator.operator_graph import OperatorGraph, Tensor
from meshwise.simulator.program import Category, TaskKind
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute, SomeOperators
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.plan.sharding import Redistribution, ShardingSpec, apply_move, redistribute
from meshwise.strategies.schedules.schedule import ActionKind

from ..problems import find_block_cost, find_block_layout, find_block_memory, problem

S, H, V, FP32 = 32, 64, 128, 4  # sequence, hidden, vocabulary and item size of tests/strategies/problems.py
Cuts = tuple[tuple[str, tuple[str, ...]], ...]
GRIDS = [(2, 2), (4, 4), (2, 4), (4, 2)]
VECTORS = ("bias", "norm_weight")


def machine(rows: int, columns: int, data: int = 1, **changes: object) -> Problem:
    """Return the small transformer on a node with as many devices as a grid has, or several grids."""
    return problem(devices=rows * columns * data, **changes)  # type: ignore[arg-type]


def grid(rows: int, columns: int, microbatch: int, **fields: object) -> Layout:
    return Layout(tensor=columns, tensor_rows=rows, microbatch=microbatch, **fields)  # type: ignore[arg-type]


def moved(small: Problem, layout: Layout, block: str, direction: str) -> list[Segment]:
    """Return every collective of one pass of a block."""
    plan, costs = complete(small, layout), StageCosts(small)
    steps: tuple[Segment, ...] = getattr(find_block_cost(costs, plan, block).work.segments, direction)
    return [step for step in steps if step.collective is not None]


def matrices(steps: Iterable[Segment]) -> list[Segment]:
    """Return what the papers' tables count: blocks of matrices, without vectors and statistics."""
    return [s for s in steps if s.collective is not Collective.ALL_REDUCE and not s.tensor.endswith(VECTORS)]


def received(steps: Iterable[Segment], rows: int, columns: int) -> float:
    """Return the bytes that a rank receives of block rows and columns: all but its own part of each."""
    ways = {TENSOR: columns, TENSOR_ROWS: rows}
    return sum(step.size * (ways[step.axis] - 1) / ways[step.axis] for step in steps)


def block(small: Problem, layout: Layout, name: str = "layers") -> tuple[BlockLayout, BlockMemory]:
    plan, costs = complete(small, layout), StageCosts(small)
    return find_block_layout(costs, plan, name), find_block_memory(costs, plan, name)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_a_layer_moves_what_optimus_says(rows: int, columns: int, recompute: Recompute) -> None:
    # Xu and You, table 1: on q x q ranks forward moves 7 b s h / q of activations (1 into query, key and value, 1 into
    # the projection, 1 up and 4 down) and 12 h^2 / q of weights (3 + 1 + 4 + 4), backward twice that, and with the
    # layer checkpointed three times: 21 b s h + 36 h^2. Of a broadcast block row or column a rank receives all but its
    # own part, where the paper writes log2(q) for a tree.
    b = 8
    layout = grid(rows, columns, b, recompute=recompute)
    small = machine(rows, columns)
    activations = 7 * b * S * H / rows * (columns - 1) / columns
    weights = 12 * H * H / columns * (rows - 1) / rows
    times = {"forward": 1, "backward": 2 if recompute is Recompute.NONE else 3}
    for direction, factor in times.items():
        steps = matrices(moved(small, layout, "layers", direction))
        along = {axis: received([s for s in steps if s.axis == axis], rows, columns) for axis in (TENSOR, TENSOR_ROWS)}
        assert along == {TENSOR: factor * activations * FP32, TENSOR_ROWS: factor * weights * FP32}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_vectors_are_gathered_where_they_are_read(direction: str) -> None:
    # a bias is added: backward needs only its gradient; the weight of a norm is multiplied, and read again
    steps = [s for s in moved(machine(2, 2), grid(2, 2, 4), "layers", direction) if s.tensor.endswith(VECTORS)]
    gathered = [s.tensor for s in steps if s.collective is Collective.ALL_GATHER]
    norms = ["input_norm_weight", "feed_forward_norm_weight"]
    biases = ["input_norm_bias", "feed_forward_norm_bias", "qkv_bias", "projection_bias", "up_bias", "down_bias"]
    assert sorted(gathered) == sorted(norms if direction == "backward" else norms + biases)
    scattered = [s.tensor for s in steps if s.collective is Collective.REDUCE_SCATTER]
    assert sorted(scattered) == (sorted(norms + biases) if direction == "backward" else [])
    assert {s.size for s in steps if s.tensor == "up_bias"} == {4 * H / 2 * FP32}


def test_a_product_that_runs_again_gathers_its_weight_again() -> None:
    # once more than forward and backward do: input and weight
    for recompute, count in ((Recompute.NONE, 1), (SomeOperators(("qkv",)), 2)):
        steps = moved(machine(2, 2), grid(2, 2, 4, recompute=recompute), "layers", "backward")
        found = [s.tensor for s in steps if s.collective is Collective.ALL_GATHER]
        assert (found.count("input_norm_out"), found.count("qkv_weight")) == (count, count)


def test_a_boundary_is_the_part_of_a_rank() -> None:
    # nothing is left to slice, as with sequence parallelism
    small = machine(2, 2, data=2, batch=16)
    for slices in (False, True):
        plan = complete(small, grid(2, 2, 4, pipeline=2, scatter_gather=slices))

        costs = StageCosts(small)
        stages = costs.find_keys(plan).stages
        assert costs.count_sent_bytes(stages, 0, 4, plan.slices_boundaries) == 4 * S * H * FP32 / 4


@pytest.mark.parametrize("q", [2, 4])
def test_a_square_of_ranks_moves_less_per_rank_the_larger_it_is(q: int) -> None:
    # O(1 / sqrt(p)): (q - 1) / q^2 * (7 b s h + 12 h^2) forward; b = 8: 7 * 8 * 32 * 64 + 12 * 64^2 = 163840
    found = received(matrices(moved(machine(q, q), grid(q, q, 8), "layers", "forward")), q, q)
    assert found == (q - 1) / q**2 * 163840 * FP32


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_a_layer_norm_sums_two_values_a_token_along_columns(rows: int, columns: int) -> None:
    # the sums of x and x^2 forward, two more backward, of each of b / rows * s tokens; two norms a layer
    b = 8
    for direction in ("forward", "backward"):
        steps = moved(machine(rows, columns), grid(rows, columns, b), "layers", direction)
        sums = [(s.axis, s.size) for s in steps if s.collective is Collective.ALL_REDUCE]
        assert sums == [(TENSOR, 2 * b / rows * S * FP32)] * 2


def test_an_rms_norm_sums_one_value_and_a_norm_of_heads_none() -> None:
    small = machine(2, 2, ffn_kind="swiglu", qk_norm=True)
    steps = moved(small, grid(2, 2, 4), "layers", "forward")
    sums = [s.size for s in steps if s.collective is Collective.ALL_REDUCE]
    assert sums == [1 * 4 / 2 * S * FP32] * 2


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_table_and_output_layer_have_their_vocabulary_along_columns(rows: int, columns: int) -> None:
    # a column of ranks gathers its part of the table, v / c x h; its rows look up what they have of it and sum,
    # b / r x s x h, leaving hidden along columns. The output layer gathers x; the loss sums three values a token.
    b = 8
    small, layout = machine(rows, columns, tied=True), grid(rows, columns, b)
    table, tokens = V / columns * H * FP32, b / rows * S * H * FP32
    found = [(s.collective, s.axis, s.size) for s in matrices(moved(small, layout, "embedding", "forward"))[:2]]
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    assert found == [(gather, TENSOR_ROWS, table), (scatter, TENSOR, tokens)]
    head = matrices(moved(small, layout, "head", "forward"))
    assert [(s.collective, s.axis, s.size) for s in head] == [(gather, TENSOR, tokens), (gather, TENSOR_ROWS, table)]
    sums = [s.size for s in moved(small, layout, "head", "forward") if s.tensor.endswith(("logit", "exponentials"))]
    assert sums == [b / rows * S * FP32] * 3
    back = matrices(moved(small, layout, "embedding", "backward"))
    assert [(s.collective, s.axis, s.size) for s in back if s.tensor != "positions"] == [
        (gather, TENSOR, tokens),
        (scatter, TENSOR_ROWS, table),
    ]


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_a_rank_has_its_share_of_parameters_and_of_what_a_layer_keeps(rows: int, columns: int) -> None:
    changes = {"dropout": True, "attention": "unfused", "heads": 16, "kv_heads": 16}
    small, alone = machine(rows, columns, **changes), problem(devices=1, **changes)  # type: ignore[arg-type]
    for name in ("embedding", "layers", "head"):
        layout, _ = block(small, grid(rows, columns, 8), name)
        assert layout.parameter_elements() * rows * columns == layout.block.num_parameters
    cut, whole = (block(*each)[1] for each in ((small, grid(rows, columns, 8)), (alone, Layout(microbatch=8))))
    assert cut.kept_bytes * rows * columns == whole.kept_bytes


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_a_rank_computes_its_share(rows: int, columns: int) -> None:
    small, b = machine(rows, columns), 8
    for name in ("layers", "head"):
        layout, _ = block(small, grid(rows, columns, b), name)
        for operator in layout.block.operators:
            if operator.flops:
                local = operator.flops_per_point * prod(layout.local_sizes(operator).values())
                assert local * rows * columns == b * operator.flops


def test_what_is_gathered_is_held_while_the_product_runs() -> None:
    # down: the block row of its input is b / r x s x 4 h, c times the share; the block column of its weight
    # 4 h x h / c, r times the share; in backward the whole gradient of the weight besides, before rows sum it
    rows, columns, b = 2, 4, 8
    layout, memory = block(machine(rows, columns), grid(rows, columns, b))
    live = Liveness(layout, FRAMEWORKS["torch"])
    down = next(operator for operator in layout.block.operators if operator.name == "down")
    row, weight, bias = b // rows * S * 4 * H * FP32, 4 * H * H // columns * FP32, H // columns * FP32
    assert live.gathered_input_bytes(down) == row
    assert live.gathered_parameter_bytes(down, down.parameters) == weight + bias
    assert live.weight_gradient_bytes(down) == (weight + bias) + (weight + bias) // rows
    # the fullest moment of forward is one product's, with the block row and the block column it needs
    assert memory.forward >= row + weight


@given(rows=st.sampled_from([2, 4]), columns=st.sampled_from([1, 2]), zero=st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_twice_the_rows_hold_half_the_states(rows: int, columns: int, zero: int) -> None:
    # from two rows on: with one, the norms that a single tensor axis leaves whole are whole
    def states(rows: int) -> int:
        small = machine(rows, columns, data=2)
        changes = lower(small, complete(small, grid(rows, columns, 8, data=2, zero=zero))).resident_memory
        kinds = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
        return sum(change.size for change in changes if change.rank_class == 0 and change.category in kinds)

    assert states(2 * rows) * 2 == states(rows)


def linear(steps: Iterable[Segment]) -> list[Segment]:
    """Return what the projection moves, forward and backward."""
    return [s for s in matrices(steps) if s.tensor in ("context", "projection_weight")]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("q", [2, 4])
def test_a_linear_layer_in_two_and_a_half_dims_moves_what_colossal_ai_says(q: int, depth: int) -> None:
    # Colossal-AI, 2.5D tensor parallelism, table of efficiency: 3 (q - 1) (d + 1) / (d q) for a layer of equal
    # operands, forward and backward; 6 (q - 1) / q where d = 1, its table of 2D. The unit is one operand's block row,
    # h^2 / q; both have h^2 elements where b s = h: b = 16, s = 32, h = 512. Depth is data: b / d sequences a grid.
    size, b = 512, 16
    small = machine(q, q, depth, hidden=size, ffn=256, batch=b, layers=1)
    layout = grid(q, q, b // depth, data=depth)
    steps = [step for way in ("forward", "backward") for step in linear(moved(small, layout, "layers", way))]
    expected = 3 * (q - 1) * (depth + 1) / (depth * q) * size**2 / q
    assert received(steps, q, q) == expected * FP32


@pytest.mark.parametrize("depth", [2, 4])
def test_tesseract_is_the_grid_with_data_parallel_ranks_around_it(depth: int) -> None:
    # Wang et al.: of A (a x b) B (b x c) = C a rank of p = d q^2 has a b / p of A, b c d / p of B and a c / p of C
    q, b = 2, 16
    ranks = depth * q * q
    small = machine(q, q, depth, batch=b, layers=2)
    layout = grid(q, q, b // depth, data=depth)
    cut, _ = block(small, layout)
    tensor = cut.block.tensor
    assert cut.tensor_bytes("input_norm_out", cut.produced_layouts["input_norm_out"]) * ranks == b * S * H * FP32
    assert cut.tensor_bytes("wide", cut.produced_layouts["wide"]) * ranks == b * S * 4 * H * FP32
    assert cut.parameter_share(tensor["up_weight"]) * ranks == depth * H * 4 * H
    # gradients are summed over depth, ranks q^2 apart, once a step: a share of 1 / q^2 of them
    plan, costs = complete(small, layout), StageCosts(small)
    table = costs.build_unfolded_machine(plan).table
    assert table.tables[DATA].devices.tolist() == [[first + q * q * n for n in range(depth)] for first in range(q * q)]
    assert sum(costs.plan_costs(plan).parameters) * q * q == small.graph.num_parameters
    # and inside, every grid does what one alone does with its part of the batch
    alone = machine(q, q, batch=b // depth, layers=2)
    for way in ("forward", "backward"):
        assert moved(small, layout, "layers", way) == moved(alone, grid(q, q, b // depth), "layers", way)


Blocks = dict[tuple[int, int], NDArray[np.float64]]
"""One array a rank of a grid, by row and column."""


class Arrays:
    """Arrays on the ranks of a grid, moved by the collectives of `redistribute`."""

    def __init__(self, rows: int, columns: int) -> None:
        self.sizes = {TENSOR_ROWS: rows, TENSOR: columns}
        self.ranks = list(product(range(rows), range(columns)))

    def place(self, whole: NDArray[np.float64], dims: tuple[str, ...], spec: ShardingSpec) -> Blocks:
        """Return what each rank has of an array."""
        return {rank: self._cut(whole, dims, spec.cuts, rank) for rank in self.ranks}

    def _cut(self, array: NDArray[np.float64], dims: tuple[str, ...], cuts: Cuts, rank: tuple[int, int]) -> Any:
        for dim, axes in cuts:
            for axis in axes:
                array = np.split(array, self.sizes[axis], dims.index(dim))[rank[axis == TENSOR]]
        return array

    def move(self, blocks: Blocks, dims: tuple[str, ...], source: ShardingSpec, target: ShardingSpec) -> Blocks:
        """Return arrays in another layout."""
        for move in redistribute(source, target):
            blocks = {rank: self._moved(blocks, dims, move, rank) for rank in self.ranks}
            source = apply_move(source, move)
        free = [(dim, tuple(axis for axis in axes if axis not in source.axes(dim))) for dim, axes in target.cuts]
        return {rank: self._cut(blocks[rank], dims, tuple(free), rank) for rank in self.ranks}

    def _moved(self, blocks: Blocks, dims: tuple[str, ...], move: Redistribution, rank: tuple[int, int]) -> Any:
        along = move.axis == TENSOR
        peers = [blocks[(rank[0], n) if along else (n, rank[1])] for n in range(self.sizes[move.axis])]
        if move.collective is Collective.ALL_GATHER:
            return np.concatenate(peers, dims.index(move.dim))
        total = sum(peers[1:], peers[0])
        if move.collective is Collective.ALL_REDUCE:
            return total
        return np.split(total, self.sizes[move.axis], dims.index(move.dim))[rank[along]]


@pytest.mark.parametrize("name", ["layers.projection", "layers.up", "layers.down", "head.logits"])
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 4), (4, 2)])
def test_the_layouts_multiply_matrices(rows: int, columns: int, name: str) -> None:
    # with arrays of numbers: what each rank multiplies and what the collectives move is the product, and its gradients
    small = machine(rows, columns, batch=4)
    plan, arrays, random = complete(small, grid(rows, columns, 4)), Arrays(rows, columns), np.random.default_rng(1)
    sharding = next(each for each in plan.shardings if each.operator == name)
    of = next(each for each in small.graph.blocks if each.name == name.split(".")[0])
    operator = next(each for each in of.operators if f"{of.name}.{each.name}" == name)
    a, b, c = (of.tensor[each[0]] for each in (operator.inputs, operator.parameters, operator.outputs))
    letters = {dim: chr(97 + n) for n, dim in enumerate(dict.fromkeys(a.dims + b.dims))}
    terms = {tensor: "".join(letters[dim] for dim in tensor.dims) for tensor in (a, b, c)}

    def multiplied(left: Tensor, right: Tensor, result: Tensor, x: Any, y: Any) -> Any:
        return np.einsum(f"{terms[left]},{terms[right]}->{terms[result]}", x, y)

    whole_a, whole_b, whole_c = (
        random.standard_normal([4 if dim == "batch" else size for dim, size in zip(t.dims, t.shape, strict=True)])
        for t in (a, b, c)
    )
    read = {
        t: arrays.move(
            arrays.place(w, t.dims, sharding.find_kept_spec(t)),
            t.dims,
            sharding.find_kept_spec(t),
            sharding.find_input_spec(t),
        )
        for t, w in ((a, whole_a), (b, whole_b))
    }
    gradient = arrays.place(whole_c, c.dims, sharding.find_output_spec(operator, c))
    made = {
        c: (
            {r: multiplied(a, b, c, read[a][r], read[b][r]) for r in arrays.ranks},
            sharding.find_output_spec(operator, c),
        ),
        a: ({r: multiplied(c, b, a, gradient[r], read[b][r]) for r in arrays.ranks}, sharding.find_gradient_spec(a)),
        b: ({r: multiplied(a, c, b, read[a][r], gradient[r]) for r in arrays.ranks}, sharding.find_gradient_spec(b)),
    }
    expected = {
        c: (multiplied(a, b, c, whole_a, whole_b), sharding.find_output_spec(operator, c)),
        a: (multiplied(c, b, a, whole_c, whole_b), sharding.find_kept_spec(a)),
        b: (multiplied(a, c, b, whole_a, whole_c), sharding.find_kept_spec(b)),
    }
    for tensor, (whole, target) in expected.items():
        blocks, source = made[tensor]
        found, right = arrays.move(blocks, tensor.dims, source, target), arrays.place(whole, tensor.dims, target)
        assert {rank: found[rank].shape for rank in found} == {rank: right[rank].shape for rank in right}
        assert all(np.allclose(found[rank], right[rank]) for rank in arrays.ranks)


def test_gradients_of_weights_are_summed_where_they_are_made() -> None:
    # with the backward split, what only weights wait for goes with them: inputs gathered again, and the sums
    small = machine(2, 2, data=2, batch=16)
    plan, costs = complete(small, grid(2, 2, 2, pipeline=2, schedule="zb1p")), StageCosts(small)
    cost = find_block_cost(costs, plan, "layers")
    inputs, weight_pass = (cost.passes.select(kind) for kind in (ActionKind.INPUT, ActionKind.WEIGHT))
    weights = [s.label for s, _ in weight_pass.segments if s.tensor in ("active", "down_weight", "down_bias")]
    assert weights == [
        "all_gather active",
        "reduce_scatter gradient of down_weight",
        "reduce_scatter gradient of down_bias",
    ]
    assert sum(ticks for part in (inputs, weight_pass) for _, ticks in part.segments) == cost.backward_ticks


@pytest.mark.parametrize(
    ("layout", "field", "message"),
    [
        (
            grid(2, 4, 3, data=1),
            "microbatch",
            "tensor_rows(2) divides microbatch, met 3; nearest: 4",
        ),
        (
            grid(3, 4, 3),
            "tensor_rows",
            "tensor_rows(3) * tensor(4) divides hidden(64), met 12; nearest tensor_rows: 2",
        ),
        (grid(16, 2, 16), "tensor_rows", "tensor_rows divides heads(8), met 16; nearest tensor_rows: 8"),
        (grid(2, 3, 2), "tensor", "tensor divides heads(8), met 3; nearest: 2"),
        (
            grid(2, 2, 2, data=2, sequence_parallel=True),
            "sequence_parallel",
            "tensor_rows(2) leaves sequence_parallel nothing to cut: all activations lie along rows and columns; "
            "nearest: false",
        ),
        (grid(2, 4, 2, data=2), "data", "data(2) * tensor(4) * pipeline(1) * tensor_rows(2) = 16 ranks, cluster has 8"),
        (grid(0, 4, 2), "tensor_rows", "tensor_rows is at least 1, met 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_equation(layout: Layout, field: str, message: str) -> None:
    found = [(violation.field, violation.message.split("; data:")[0]) for violation in violations(problem(), layout)]
    assert (field, message) in found


def test_experts_over_ranks_and_networks_without_a_hidden_dim_are_refused() -> None:
    mixed = Transformer(4, H, 8, 8, 256, V, experts=Experts(8, 2, 64))
    small = replace(problem(), graph=build(mixed, S, "fp32"))
    found = [v for v in violations(small, grid(2, 2, 2, data=2, expert=2)) if v.field == "expert"]
    assert [v.message.split(":")[0] for v in found] == ["tensor_rows(2) needs expert 1"]
    small = replace(problem(), graph=ResNet((1, 1, 1, 1)).graph(S, "fp32"))
    found = [v for v in violations(small, grid(2, 4, 2)) if v.field == "tensor_rows"]
    assert [v.message for v in found] == [
        "tensor_rows needs a transformer's dim hidden, the model has none; nearest: 1"
    ]


def test_a_plan_of_one_row_is_the_plan_it_was() -> None:
    plan = complete(problem(), Layout(tensor=8))
    assert plan == complete(problem(), grid(1, 8, 1))
    assert TENSOR_ROWS not in {axis.name for axis in plan.mesh.axes}
    assert not any(sharding.kept for sharding in plan.shardings)


def test_a_plan_survives_its_document_and_says_its_grid() -> None:
    plan = complete(machine(2, 4), grid(2, 4, 2))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.describe().startswith("data 1 x tensor 2 by 4 x pipeline 1")


FAMILIES = {
    "bert": Bert(2, H, 8, 256, V).graph(S, "fp32"),
    "t5": T5(1, H, 8, 8, 256, V).graph(S, "fp32"),
    "vit": VisionTransformer(2, H, 8, 256, 16, image=64).graph(S, "fp32"),
    "experts": Transformer(2, H, 8, 8, 256, V, experts=Experts(8, 2, 64)).graph(S, "fp32"),
    "grouped": Transformer(2, H, 8, 4, 256, V, ffn_kind="swiglu", positions="rotary").graph(S, "fp32"),
    "unfused": Transformer(2, H, 8, 8, 256, V, attention="unfused", dropout=True).graph(S, "fp32"),
}


@pytest.mark.parametrize("graph", FAMILIES.values(), ids=FAMILIES)
def test_every_family_of_transformers_lies_on_a_grid(graph: OperatorGraph) -> None:
    small = replace(machine(2, 2), graph=graph)
    plan = complete(small, grid(2, 2, 4))
    agree(small, plan)
    (held,) = StageCosts(small).plan_costs(plan).parameters
    # a quarter, but for what a single tensor axis leaves whole too, as a classifier: that lies along rows only
    assert graph.num_parameters / 4 <= held < graph.num_parameters / 2


def test_what_passes_between_blocks_is_cut_along_both_axes() -> None:
    # the decoder's layers of T5 first read what the encoder made in a product, which gathers it
    small = replace(machine(2, 2), graph=T5(2, H, 8, 8, 256, V).graph(S, "fp32"))
    layout, _ = block(small, grid(2, 2, 4), "decoder_layers")
    assert {layout.tensor_bytes(each, layout.produced_layouts[each]) for each in ("x", "encoded")} == {
        4 * S * H * FP32 // 4
    }


def test_what_has_no_batch_is_the_same_in_every_row() -> None:
    # each row adds a bias of every pair of positions to its own scores: the gradients are summed over rows, once
    small = replace(machine(2, 2), graph=T5(2, H, 8, 8, 256, V).graph(S, "fp32"))
    steps = moved(small, grid(2, 2, 4), "first_encoder_layer", "backward")
    found = [(s.collective, s.axis) for s in steps if s.tensor in ("position_bias", "relative_attention_bias")]
    assert found == [(Collective.ALL_REDUCE, TENSOR_ROWS)]


def test_tied_parameters_lie_alike() -> None:
    plan = complete(machine(2, 4, tied=True), grid(2, 4, 2))
    kept = {name: dict(cuts) for sharding in plan.shardings for name, cuts in sharding.kept}
    assert kept["table"] == kept["output_weight"] == {"vocab": (TENSOR,), "hidden": (TENSOR_ROWS,)}


def test_plans_that_share_their_costs_keep_their_own_grid() -> None:
    small = problem(batch=32)
    plans = [complete(small, grid(rows, 2, 4, data=4 // rows)) for rows in (1, 2, 4)]
    shared = SimulatedCost(small)
    assert [shared.evaluate(plan) for plan in plans] == [SimulatedCost(small).evaluate(plan) for plan in plans]
    assert len({shared.peak_memory(plan) for plan in plans}) == 3


def agree(small: Problem, plan: Plan) -> None:
    """Check that every way to the step time and to the peak of memory comes to the same."""
    operators, chains = (lower(small, plan, granularity) for granularity in Granularity)
    unfolded = lower(small, plan, folded=False)
    fine, chained, apart = (step_time(program) for program in (operators, chains, unfolded))
    assert chained == pytest.approx(fine, rel=1e-7, abs=1e-10)
    assert chained == pytest.approx(apart, rel=1e-7, abs=1e-10)
    assert step_time(unfolded, "longest_path") <= apart * (1 + 1e-9)
    cost, path = SimulatedCost(small), step_time(chains, "longest_path")
    assert cost.plan_bound(plan) <= path * (1 + 1e-9) <= chained * (1 + 1e-8)
    assert cost.longest_paths([plan])[0] <= path * (1 + 1e-9)
    assert cost.peak_memory(plan) == simulate(chains).peak_memory
    assert any(work.kind is TaskKind.TENSOR_COMMUNICATION for work in operators.work)


def test_a_grid_of_one_column_beneath_pairs_of_passes() -> None:
    small = machine(2, 1, data=2, batch=16, layers=4)
    agree(small, complete(small, grid(2, 1, 2, pipeline=2, schedule="dualpipev", chunks=2)))


def test_a_pass_gathers_while_it_waits_for_reductions() -> None:
    # the first gather of a pass takes as long as the last reduction before it
    small = problem(nodes=8, devices=1, nics=1, layers=4, batch=16, bandwidth=1e8)
    agree(small, complete(small, grid(2, 1, 2, pipeline=2, context=2, zero=3)))


SCHEDULED = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2), ("dualpipev", 2)]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(2, 1), (2, 2), (4, 2), (2, 4)]),
    data=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
    scheduled=st.sampled_from(SCHEDULED),
    context=st.sampled_from([1, 1, 2]),
    attention=st.sampled_from(Attention),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(Recompute),
    devices=st.sampled_from([1, 2, 4]),
    own_nics=st.booleans(),
    bandwidth=st.sampled_from([1e8, 1e10]),
    tied=st.booleans(),
    slow=st.booleans(),
    launch=st.sampled_from([0.0, 0.0, 1e-6]),
    clipping=st.booleans(),
    overlap=st.booleans(),
    outside=st.booleans(),
    framework=st.sampled_from(sorted(FRAMEWORKS)),
)
def test_every_way_to_the_step_time_agrees(
    shape: tuple[int, int],
    data: int,
    pipeline: int,
    scheduled: tuple[str, int],
    context: int,
    attention: Attention,
    zero: int,
    recompute: Recompute,
    devices: int,
    own_nics: bool,
    bandwidth: float,
    tied: bool,
    slow: bool,
    launch: float,
    clipping: bool,
    overlap: bool,
    outside: bool,
    framework: str,
) -> None:
    rows, columns = shape
    schedule, chunks = scheduled if pipeline > 1 else ("1f1b", 1)
    ranks = rows * columns * data * pipeline * context
    small = problem(
        nodes=ranks // min(devices, ranks),
        devices=min(devices, ranks),
        nics=min(devices, ranks) if own_nics else 1,
        layers=2 * pipeline,
        batch=4 * rows * data * pipeline,
        bandwidth=bandwidth,
        tied=tied,
        launch=launch,
    )
    small = replace(
        small,
        cluster=replace(small.cluster, speeds=((0, 0.5),) if slow else ()),
        training=replace(small.training, gradient_clipping=clipping, framework=framework),
    )
    layout = grid(
        rows,
        columns,
        rows,
        data=data,
        pipeline=pipeline,
        schedule=schedule,
        chunks=chunks,
        context=context,
        attention=attention,
        zero=zero,
        recompute=recompute,
        overlap_gradients=overlap,
        order=(TENSOR_ROWS, "pipeline", "data", "context", "tensor") if outside else Layout().order,
    )
    agree(small, complete(small, layout))
