from dataclasses import replace

from simulator.engine import simulate
from strategies.completion import complete
from strategies.explanation.guidelines import Recommendation, recommendations, state_bytes
from strategies.layout import Layout
from strategies.lowering import lower
from strategies.problem import Problem

from ..problems import IDEAL, problem


def told(own: Problem, layout: Layout) -> dict[str, Recommendation]:
    plan = complete(own, layout)
    found = recommendations(own, plan, simulate(lower(own, plan)), {})
    return {each.about + ("" if each.about != "data" or "fits" in each.guideline else " sums"): each for each in found}


def test_states_are_sixteen_bytes_a_parameter_in_mixed_precision() -> None:
    # ZeRO, section 3.1: 2 + 2 + K = 12; gradients in fp32 are 4, not 2
    own = problem(precision="bf16")
    assert state_bytes(own) == own.graph.num_parameters * (2 + 4 + 12)


def test_data_parallelism_alone_where_a_replica_fits() -> None:
    own = problem(devices=4)
    assert told(own, Layout(data=4))["data"].follows
    assert not told(own, Layout(data=2, tensor=2))["data"].follows
    small = problem(devices=4, accelerator=replace(IDEAL, memory=state_bytes(own) * 0.9))
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
