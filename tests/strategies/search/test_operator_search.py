"""Searches among shardings of operators: the laws they obey, and known answers that they find by themselves."""

from collections import Counter
from dataclasses import replace
from inspect import isgenerator

import pytest

from meshwise.simulator import catalog
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search.algorithms import OPERATOR_ALGORITHMS
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.operator_search import list_arrangements, list_microbatches
from meshwise.strategies.search.proposals import SearchAlgorithm
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ..problems import problem

EACH = pytest.mark.parametrize("name", OPERATOR_ALGORITHMS)
EXACT = pytest.mark.parametrize("name", ["frontier", "integer_programming"])
ONE_AXIS = Space(tensor=(8,))


def make(name: str) -> SearchAlgorithm:
    return OPERATOR_ALGORITHMS[name]()


def on_node(model: str, batch: int, sequence: int = 2048) -> Problem:
    """Return a published model on a node of 8 H100."""
    return Problem(build(MODELS[model], sequence, "bf16"), catalog.cluster("dgx-h100"), Training(batch, sequence))


def cut_dims(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {each.operator: tuple(dim for dim, _ in each.cuts if dim != "key") for each in plan.shardings}


@EACH
def test_an_algorithm_is_a_frozen_value_with_a_generator(name: str) -> None:
    algorithm, small = make(name), problem(devices=4, layers=2, batch=8)
    assert algorithm == make(name)
    assert hash(algorithm) == hash(make(name))
    assert algorithm.name == name
    assert isgenerator(algorithm.propose(small, Space(), SimulatedCost(small)))


@EACH
def test_plans_are_evaluated_once_and_the_best_is_the_fastest_that_fits(name: str) -> None:
    small = problem(devices=4, layers=2, batch=8)
    first, second = (search(make(name), small, Space(tensor=(2, 4))) for _ in range(2))
    assert [(t.plan, t.evaluation) for t in first.trials] == [(t.plan, t.evaluation) for t in second.trials]
    assert len({trial.plan for trial in first.trials}) == first.evaluations > 0
    fitting = [trial for trial in first.trials if trial.evaluation.fits]
    assert first.best == min(fitting, key=lambda trial: trial.evaluation.step_time)
    # of step times it proves that no device computes faster than its peak
    assert first.lower_bound is not None
    assert 0 < first.lower_bound <= min(trial.evaluation.step_time for trial in first.trials)


@EACH
def test_that_nothing_fits_is_a_result(name: str) -> None:
    small = problem(devices=4, layers=2, batch=8)
    tiny = replace(small.cluster.accelerator, memory=1e5)
    result = search(make(name), problem(devices=4, layers=2, batch=8, accelerator=tiny), Space(tensor=(4,)))
    assert result.best is None


@EXACT
def test_megatrons_columns_and_rows_are_found(name: str) -> None:
    # a batch of one sequence on a node: Shoeybi et al. 2019 (columns, then rows), and the vocabulary for logits and
    # loss; between them the sequence (Korthikanti et al. 2022) or nothing, as sums run beside products
    result = search(make(name), on_node("gpt3-1.3b", 1), ONE_AXIS)
    assert result.best is not None
    found = cut_dims(result.best.plan)
    heads, wide, tokens = ("heads",), ("ffn",), ("sequence",)
    assert {found[f"layers.{each}"] for each in ("qkv", "attention", "projection")} == {heads}
    assert {found[f"layers.{each}"] for each in ("up", "activation", "down")} == {wide}
    between = ("input_norm", "attention_residual", "feed_forward_norm", "feed_forward_residual")
    assert {found[f"layers.{each}"] for each in between} in ({tokens}, {()})
    assert (found["head.logits"], found["head.cross_entropy"]) == (("vocab",), ("vocab",))
    # and no layout of the whole network is faster on one stage that overlaps no more than they do
    by_hand = search(BestFirst(starts=False), on_node("gpt3-1.3b", 1), Space(core=True, pipeline=(1,)))
    assert by_hand.best is not None
    assert result.best.evaluation.step_time <= by_hand.best.evaluation.step_time


@EXACT
def test_a_convolution_net_is_data_parallel(name: str) -> None:
    result = search(make(name), on_node("resnet-50", 512), ONE_AXIS)
    assert result.best is not None
    assert (result.best.plan.data, result.best.plan.operator_ranks) == (8, 1)


@EXACT
def test_a_recommender_shares_its_tables_and_nothing_else(name: str) -> None:
    # Naumov et al. 2019, "Deep learning recommendation model", section 4: model parallel tables, data parallel layers
    result = search(make(name), on_node("dlrm-dcnv2", 4096), ONE_AXIS)
    assert result.best is not None
    found = cut_dims(result.best.plan)
    graph = on_node("dlrm-dcnv2", 4096).graph
    tables = {p.name: p.nbytes for block in graph.blocks for p in block.parameters if p.name.startswith("table_")}
    large = {name for name, size in tables.items() if size > 2**30}
    assert len(large) >= 5
    for name_of in large:
        assert set(found[f"embedding.bag_{name_of.removeprefix('table_')}"]) & {"embedding", f"rows_{name_of[6:]}"}
    dense = [dims for operator, dims in found.items() if "top_" in operator or "bottom_" in operator]
    assert Counter(dense).most_common(1)[0] == ((BATCH,), len(dense))


@EXACT
def test_parameters_are_kept_cut_where_memory_binds(name: str) -> None:
    # 16 bytes of states a parameter on 4 devices: whole ones need more than a device has, a quarter of them less; and
    # 4 times as many tokens as weights a column, so that to gather weights moves less than to sum results
    small = problem(devices=4, layers=4, batch=256, bandwidth=1e11, hidden=512, ffn=2048, heads=8, kv_heads=8)
    whole = 16 * small.graph.num_parameters
    free = search(make(name), small, Space(tensor=(4,), zero=(0,), microbatch=(64,)))
    assert free.best is not None
    assert (free.best.plan.data, free.best.plan.zero) == (4, 0)
    tight = replace(small.cluster.accelerator, memory=free.best.evaluation.peak_memory - 0.5 * whole)
    bound = problem(
        devices=4, layers=4, batch=256, bandwidth=1e11, accelerator=tight, hidden=512, ffn=2048, heads=8, kv_heads=8
    )
    result = search(make(name), bound, Space(tensor=(4,), zero=(0, 3), microbatch=(64,)))
    assert result.best is not None
    plan = result.best.plan
    assert plan.zero == 3 or any(sharding.kept for sharding in plan.shardings)
    assert sum(StageCosts(bound).plan_parameters(plan).elements) < small.graph.num_parameters or plan.zero == 3


def test_arrangements_have_all_devices_and_keep_the_inner_axis_in_a_node() -> None:
    small = problem(nodes=2, devices=6, nics=6)
    found = list(list_arrangements(small, Space()))
    assert found == [
        ((TENSOR, 12),),
        ((TENSOR_ROWS, 2), (TENSOR, 6)),
        ((TENSOR_ROWS, 4), (TENSOR, 3)),
        ((TENSOR_ROWS, 6), (TENSOR, 2)),
    ]
    assert list(list_arrangements(small, Space(tensor=(3,)))) == [((TENSOR_ROWS, 4), (TENSOR, 3))]
    assert list(list_arrangements(small, Space(pipeline=(2,)))) == []
    # a third axis where the space names it: 12 = 3 * 2 * 2, and 5 ranks along it divide nothing
    three = ((TENSOR_DEPTH, 3), (TENSOR_ROWS, 2), (TENSOR, 2))
    assert list(list_arrangements(small, Space(tensor=(2,), tensor_depth=(3, 5)))) == [three]
    assert list(list_arrangements(small, Space(tensor=(6,), tensor_depth=(2,)))) == [((TENSOR_DEPTH, 2), (TENSOR, 6))]
    # 32 sequences by 4 ranks along the first axis: 8 each, halved while that is whole
    assert list(list_microbatches(small, Space(), ((TENSOR_ROWS, 4), (TENSOR, 3)))) == [32, 16, 8, 4]
    assert list(list_microbatches(small, Space(microbatch=(2,)), ((TENSOR_ROWS, 4), (TENSOR, 3)))) == [8]
    assert list(list_microbatches(small, Space(), ((TENSOR_ROWS, 12),))) == [32]


def test_the_outermost_axis_is_searched_where_the_space_names_it() -> None:
    small = problem(nodes=2, devices=4, nics=4, layers=1, batch=2)
    result = search(Frontier(), small, Space(tensor=(4,), tensor_depth=(2,), microbatch=(1,)))
    assert {trial.plan.operator_ranks * trial.plan.data for trial in result.trials} == {8}
    assert result.trials[0].plan.data == 2 or result.trials[0].plan.tensor_depth == 2


def test_a_looser_gap_is_never_better() -> None:
    small = on_node("gpt3-1.3b", 1)
    exact, loose = (search(Frontier(gap=gap), small, ONE_AXIS) for gap in (0.0, 0.5))
    assert exact.best is not None
    assert loose.best is not None
    assert exact.best.evaluation.step_time <= loose.best.evaluation.step_time
    with pytest.raises(ValueError, match="gap is at least 0 and less than 1, met 2"):
        Frontier(gap=2)


@EACH
def test_operators_that_share_a_parameter_keep_it_in_one_layout(name: str) -> None:
    tied = problem(devices=4, layers=2, batch=8, tied=True, vocab=4096)
    result = search(make(name), tied, Space(tensor=(4,), microbatch=(1, 2)))
    (block, table), (head, weight) = tied.graph.tied[0]
    assert result.trials
    for trial in result.trials:
        costs = StageCosts(tied)
        cut = costs.find_keys(trial.plan).cut
        shapes = [costs.blocks.layout(cut, each, 1).parameter_shape for each in (block, head)]
        tensors = [dict(tied.graph.occurrences)[each].tensor for each in (block, head)]
        first, second = shapes[0](tensors[0][table]), shapes[1](tensors[1][weight])
        dims = tensors[0][table].dims, tensors[1][weight].dims
        assert dict(zip(dims[0], first, strict=True)) == dict(zip(dims[1], second, strict=True))
