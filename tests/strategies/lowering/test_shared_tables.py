"""Tables that data ranks share, in a simulated step: bytes on links by hand, memory to the byte, and what is equal."""

from typing import Any

import pytest

from meshwise.simulator.engine import simulate
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.program import Category, StreamKind
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.tables.embeddings import parse_embeddings
from meshwise.strategies.tables.popularity import expect_distinct

from ..tables.recommender import HOTS, ROWS, recommender

CUTS = ("table", "rows", "columns", "sparse")
HALF_CACHED = {"placement": "host", "cache": 0.5}


def plan_of(problem: Problem, embeddings: Any, **decisions: Any) -> Plan:
    ranks, value = problem.cluster.num_devices, parse_embeddings(embeddings)
    sizes = {"data": ranks, "microbatch": problem.training.global_batch // ranks}
    return complete(problem, Layout(**sizes | decisions, embeddings=value))


def run(problem: Problem, embeddings: Any, **decisions: Any) -> Timeline:
    return simulate(lower(problem, plan_of(problem, embeddings, **decisions)))


def list_messages(timeline: Timeline) -> dict[str, float]:
    """Return the bytes of every message that names tables or rows, by name."""
    spans = (span for span in timeline.spans if span.bytes and ("table" in span.operators or "rows" in span.operators))
    return {span.operators.removeprefix("embedding: "): span.bytes for span in spans}


# 32 samples on 4 ranks, bags of 5, 2 and 1 indices of 8 bytes, rows of 16 * 4 = 64 bytes


def test_rows_exchange_indices_once_and_sum_all_vectors() -> None:
    assert list_messages(run(recommender(), "rows")) == {
        "all_to_all indices of tables": 8 * 8 * 8,  # those of a rank's 8 samples, 8 in all
        "reduce_scatter vectors of tables cut by rows": 32 * 3 * 64,
        "all_gather gradients of tables cut by rows": 32 * 3 * 64,
    }


def test_columns_send_indices_to_all_and_exchange_parts_of_vectors() -> None:
    assert list_messages(run(recommender(), "columns")) == {
        "all_to_all indices of tables": 4 * 8 * 8 * 8,
        "all_to_all vectors of tables": 32 * 3 * 64 / 4,
        "all_to_all gradients of vectors of tables": 32 * 3 * 64 / 4,
    }


def test_whole_tables_exchange_as_much_as_their_fullest_rank() -> None:
    placed = {f"table_{table}": {"cut": "table", "device": device} for table, device in enumerate((1, 2, 2))}
    assert list_messages(run(recommender(), placed)) == {
        "all_to_all indices of tables": 32 * 5 * 8,  # table 0 receives more than tables 1 and 2: 5 against 3
        "all_to_all vectors of tables": 32 * 2 * 64,  # tables 1 and 2 on one rank
        "all_to_all gradients of vectors of tables": 32 * 2 * 64,
    }


def test_rows_of_a_node_are_summed_on_its_own_links() -> None:
    # table 0 on the second node's 2 ranks, the others replicated: 32 vectors there, of which each rank sends 16
    placed = {"table_0": {"cut": "node_rows", "device": 2}}
    timeline = run(recommender(devices=2, nodes=2), placed)
    assert list_messages(timeline) == {
        "all_to_all indices of tables": 32 * 5 * 8 / 2,
        "reduce_scatter vectors of tables cut in a node": 32 * 64,
        "all_to_all vectors of tables": 32 * 64 / 2,
        "all_to_all gradients of vectors of tables": 32 * 64 / 2,
        "all_gather gradients of tables cut in a node": 32 * 64,
    }
    # within a node a rank has 1e9 byte/s, and a ring of two moves half of the sum after 2 latencies of 1 us or less
    spans = {span.operators.removeprefix("embedding: "): span for span in timeline.spans}
    sums = spans["reduce_scatter vectors of tables cut in a node"]
    assert 32 * 64 / 2 / 1e9 <= sums.duration <= 32 * 64 / 2 / 1e9 + 2e-6
    assert sums.end <= spans["all_to_all vectors of tables"].start


def test_sparse_replicas_gather_their_gradients_alone() -> None:
    assert list_messages(run(recommender(), "sparse")) == {"all_gather sparse gradients of tables": 32 * 8 * (64 + 8)}


@pytest.mark.parametrize("cut", ["table", "columns"])
def test_links_carry_what_leaves_a_rank(cut: str) -> None:
    # of an all-to-all of S bytes 3 S / 4 leave each of 4 ranks, and of a ring all-reduce of D bytes 6 D / 4
    timeline = run(recommender(), cut)
    dense_bytes = sum(
        tensor.nbytes
        for block in recommender().graph.blocks
        for tensor in block.parameters
        if not tensor.name.startswith("table_")
    )
    exchanged_bytes = sum(list_messages(timeline).values())
    (link,) = (link for link in timeline.links if link.name == "device 0 out")
    assert link.bytes == pytest.approx(0.75 * exchanged_bytes + 1.5 * dense_bytes, rel=1e-9)


@pytest.mark.parametrize(
    "embeddings", [*CUTS, "host", {"default": HALF_CACHED}, {"default": "rows", "pipelined": True}]
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_equal_ranks_are_simulated_once(embeddings: Any, nodes: int) -> None:
    problem = recommender(devices=2, nodes=nodes)
    plan = plan_of(problem, embeddings)
    folded, whole = (lower(problem, plan, folded=is_folded) for is_folded in (True, False))
    assert finish_times(folded)[1].max() == finish_times(whole)[1].max()


def test_equal_ranks_are_simulated_once_with_sums_in_nodes() -> None:
    problem = recommender(devices=2, nodes=2)
    plan = plan_of(problem, "node_rows")
    folded, whole = (lower(problem, plan, folded=is_folded) for is_folded in (True, False))
    assert finish_times(folded)[1].max() == finish_times(whole)[1].max()
    assert PlanMemory(StageCosts(problem)).peak(plan) == simulate(folded).peak_memory


def test_on_one_device_all_cuts_are_one() -> None:
    problem = recommender(devices=1, batch=8)
    times = {cut: run(problem, cut).step_time for cut in CUTS}
    assert len(set(times.values())) == 1
    # dense gradients and their update read and write every row, the others those that were looked up
    dense = run(problem, "replicated")
    num_changed = sum(expect_distinct(rows, 0.0, 8 * hots) for rows, hots in zip(ROWS, HOTS, strict=True))
    assert num_changed < sum(ROWS) / 80
    assert dense.step_time > times["rows"]


def test_a_cache_of_all_rows_is_the_table_on_devices() -> None:
    problem = recommender(popularity=1.1)
    whole = {"placement": "host", "cache": 1.0}
    assert run(problem, {"default": whole}).step_time == run(problem, "rows").step_time
    assert run(problem, {"default": whole}).peak_memory == run(problem, "rows").peak_memory


def test_without_a_cache_all_rows_that_are_looked_up_come_and_go() -> None:
    lookups = [32 * hots for hots in HOTS]
    num_rows = sum(expect_distinct(rows, 0.9, n) for rows, n in zip(ROWS, lookups, strict=True))
    messages = list_messages(run(recommender(popularity=0.9), "host"))
    # each of 4 ranks has a quarter of the rows, with 4 bytes of state each
    assert messages["rows from host"] == messages["rows to host"] == pytest.approx(num_rows / 4 * 68)


def test_step_times_rise_as_the_cache_shrinks() -> None:
    problem = recommender(popularity=0.8)
    caches = [{"default": {"placement": "host", "cache": share}} for share in (1.0, 0.5, 0.1, 0.01, 0.0)]
    times = [run(problem, cache).step_time for cache in caches]
    assert times == sorted(times)
    assert len(set(times)) == 5


def test_rows_come_beside_look_ups_and_go_on_their_own_stream() -> None:
    spans = {span.operators: span for span in run(recommender(), {"default": HALF_CACHED}).spans}
    rows, lookups = spans["embedding: rows from host"], spans["embedding: look-ups"]
    assert (rows.stream, rows.start) == (StreamKind.FROM_HOST, lookups.start)
    assert spans["embedding: rows to host"].stream is StreamKind.TO_HOST


def test_pipelined_copies_hide_until_they_are_the_step() -> None:
    fast, slow = recommender(pcie=1e12), recommender(pcie=1e5)
    hidden = run(fast, {"default": "host", "pipelined": True}).step_time
    messages = list_messages(run(fast, "host"))
    assert hidden < run(fast, "host").step_time
    exposed = run(slow, {"default": "host", "pipelined": True}).step_time
    # the copy begins when the indices are there, and takes as long as the slot needs
    copy_seconds = messages["rows from host"] / 1e5
    assert copy_seconds < exposed < copy_seconds + hidden


@pytest.mark.parametrize("embeddings", [*CUTS, "host", {"default": HALF_CACHED, "pipelined": True}])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_known_without_a_program(embeddings: Any, zero: int) -> None:
    problem = recommender(popularity=1.0)
    plan = plan_of(problem, embeddings, zero=zero)
    assert PlanMemory(StageCosts(problem)).peak(plan) == simulate(lower(problem, plan)).peak_memory


def test_devices_and_hosts_hold_what_the_tables_weigh() -> None:
    problem = recommender()
    costs, rows = StageCosts(problem), sum(ROWS)
    plan = plan_of(problem, {"default": {"placement": "host", "cache": 0.25}})
    tables = costs.find_table_bytes(plan)
    assert tables is not None
    assert (tables.parameters, tables.states) == (rows / 4 * 64 / 4, rows / 4 * 4 / 4)
    assert (tables.host_parameters, tables.host_states) == (rows * 64 / 4, rows * 4 / 4)
    resident = [change for change in lower(problem, plan).resident_memory if change.category is Category.PARAMETERS]
    on_hosts = sum(change.size for change in resident if change.host)
    assert on_hosts == rows * 64 / 4  # of each rank, all alike


def test_a_host_that_is_too_small_does_not_fit() -> None:
    weight = sum(ROWS) * 68
    for memory, fits in ((weight + 8, True), (weight - 8, False)):
        problem = recommender(host_memory=memory)
        evaluation = SimulatedCost(problem).evaluate(plan_of(problem, "host"))
        assert evaluation.fits is fits


def test_every_microbatch_updates_the_tables() -> None:
    problem = recommender()
    timeline = run(problem, "rows", microbatch=2)
    updates = [span for span in timeline.spans if span.operators.endswith("gradients and update of tables")]
    assert len(updates) == 4
