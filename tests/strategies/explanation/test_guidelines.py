from dataclasses import replace

from meshwise.simulator.engine import simulate
from meshwise.strategies.explanation.guidelines import (
    Recommendation,
    count_sharded_bytes,
    count_state_bytes,
    recommendations,
)
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem

from ..problems import IDEAL, problem


def told(own: Problem, layout: Layout) -> dict[str, Recommendation]:
    plan = complete(own, layout)
    found = recommendations(own, plan, simulate(lower(own, plan)), {})
    return {each.about + ("" if each.about != "data" or "fits" in each.guideline else " sums"): each for each in found}


def test_states_are_sixteen_bytes_a_parameter_in_mixed_precision() -> None:
    # ZeRO, section 3.1: 2 + 2 + K = 12; gradients in fp32 are 4, not 2
    own = problem(precision="bf16")
    assert count_state_bytes(own) == own.graph.num_parameters * (2 + 4 + 12)


def test_data_parallelism_alone_where_a_replica_fits() -> None:
    own = problem(devices=4)
    assert told(own, Layout(data=4))["data"].follows
    assert not told(own, Layout(data=2, tensor=2))["data"].follows
    small = problem(devices=4, accelerator=replace(IDEAL, memory=count_state_bytes(own) * 0.9))
    assert not told(small, Layout(data=4))["data"].follows
    assert told(small, Layout(data=2, tensor=2))["data"].follows


def test_operators_are_cut_inside_a_node() -> None:
    own = problem(nodes=2, devices=2, nics=1)
    found = told(own, Layout(tensor=4))["operator"]
    assert not found.follows
    # inside 1e9 byte/s a device; one NIC of 2.5e8 byte/s for two devices
    assert "1 GB/s inside it and 125 MB/s out of it; the plan cuts them over 4" in found.numbers
    assert told(own, Layout(data=2, tensor=2))["operator"].follows


def test_the_bubble_is_the_formula() -> None:
    # 32 sequences, 2 data ranks, microbatches of 2: 8 of them; (4 - 1) / (1 * 8)
    found = told(problem(devices=8), Layout(data=2, pipeline=4, microbatch=2))["pipeline"]
    assert "3 / (1 * 8) = 37.5%" in found.numbers
    assert not found.follows  # the model fits in a device
    assert told(problem(devices=8), Layout(data=8))["pipeline"].follows


def test_optimizer_states_are_shared() -> None:
    own = problem(devices=4, precision="bf16")
    assert not told(own, Layout(data=4))["optimizer"].follows
    assert told(own, Layout(data=4, zero=1))["optimizer"].follows
    assert told(own, Layout(tensor=4))["optimizer"].follows  # there is no one to share with


def test_what_zero_shares_need_not_be_cut() -> None:
    own = problem(devices=4, precision="bf16")
    parameters = own.graph.num_parameters
    # of 2 + 4 + 12 bytes a parameter, four ranks keep: ZeRO-1 2 + 4 + 12 / 4 = 9, ZeRO-3 18 / 4 = 4.5
    small = problem(devices=4, precision="bf16", accelerator=replace(IDEAL, memory=parameters * 5.0))
    assert count_sharded_bytes(own, 1, 4) == parameters * 9
    assert count_sharded_bytes(own, 2, 4) == parameters * (2 + 4 / 4 + 12 / 4)
    assert told(small, Layout(data=4, zero=3))["data"].follows
    assert "by ZeRO-3), are at most" in told(small, Layout(data=4, zero=3))["data"].numbers
    assert not told(small, Layout(data=4, zero=1))["data"].follows
    assert told(small, Layout(data=2, tensor=2, zero=3))["data"].follows  # a whole replica does not fit


def test_stages_where_the_shared_states_exceed_a_node_alone() -> None:
    own = problem(nodes=2, devices=2, precision="bf16")
    # a node of two devices has 16 bytes a parameter: less than the 18 of a replica, more than 18 / 2 on two nodes
    small = problem(
        nodes=2, devices=2, precision="bf16", accelerator=replace(IDEAL, memory=own.graph.num_parameters * 8.0)
    )
    assert not told(small, Layout(data=4))["pipeline"].follows
    fully_sharded = told(small, Layout(data=4, zero=3))["pipeline"]
    assert fully_sharded.follows and "one stage has no bubble" in fully_sharded.numbers
    assert told(small, Layout(tensor=2, pipeline=2))["pipeline"].follows
