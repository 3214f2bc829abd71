"""A machine with factors: each slows its own part, and all together slow a step by exactly as much."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.machine_fit.factored_machine import apply_factors
from meshwise.scenarios.machine_fit.shares import predict_time
from meshwise.scenarios.published.estimates import estimate_step_time
from meshwise.scenarios.published.runs import build_run
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.factors import FACTORS, Factors
from meshwise.simulator.machine.topology import Torus

from ..clusters import clusters
from .small_runs import RUNS


@given(clusters())
@settings(max_examples=100, deadline=None)
def test_factors_of_one_change_nothing(value: Cluster) -> None:
    plain = replace(value, collectives=())  # times of curves are sums, which round
    assert apply_factors(plain, Factors()) == plain


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["row_id"])
def test_a_machine_slower_in_all_takes_exactly_that_much_longer(row) -> None:
    scenario = build_run(row).scenario
    assert scenario is not None
    problem, plan = scenario.problem, scenario.choose_plan()
    slow = replace(problem, cluster=apply_factors(problem.cluster, Factors(other=1.7)))
    assert estimate_step_time(slow, plan) == pytest.approx(1.7 * estimate_step_time(problem, plan), rel=1e-5)


def test_a_slow_machine_reaches_less_of_the_same_peak() -> None:
    machine = cluster("dgx-h100")
    for factor in (1.1, 1.25):
        slow = apply_factors(machine, Factors(compute=factor)).accelerator
        assert slow.peak_flops == machine.accelerator.peak_flops
        assert slow.matmul.fraction == pytest.approx(machine.accelerator.matmul.fraction / factor)
        assert slow.matmul.share("fp8") == pytest.approx(machine.accelerator.matmul.share("fp8") / factor)
    # attention reaches 1.242 x 0.8045 of the peak, and twice as much is more than all of it: the peak then is that
    fast = apply_factors(machine, Factors(compute=0.5)).accelerator
    assert fast.peak("bf16") == pytest.approx(2 * 1.242 * 0.8045 * machine.accelerator.peak("bf16"))
    assert fast.peak("bf16") * fast.matmul.fraction == pytest.approx(
        2 * machine.accelerator.peak("bf16") * machine.accelerator.matmul.fraction
    )


@given(st.sampled_from(FACTORS), st.floats(1.0, 3.0), st.sampled_from(RUNS))
@settings(max_examples=25, deadline=None)
def test_no_factor_makes_a_step_faster(name, factor, row) -> None:
    scenario = build_run(row).scenario
    assert scenario is not None
    problem, plan = scenario.problem, scenario.choose_plan()
    times = [predict_time(problem, plan, Factors(**{name: value}).logarithms) for value in (1.0, factor)]
    assert times[1] >= times[0] * (1 - 1e-5)


def test_curves_inside_a_node_and_between_nodes_have_the_factors_of_their_links() -> None:
    curves = tuple(CollectiveCurve(Collective.ALL_REDUCE, ranks, ((1e3, 1.0), (2e3, 3.0))) for ranks in (8, 16))
    machine = replace(cluster("dgx-h100", 2), collectives=curves)
    slow = apply_factors(machine, Factors(intra_rate=2.0, inter_latency=3.0))
    # the fastest message is latency: 1 s; what a larger one takes besides is transfer: 2 s
    assert [curve.points for curve in slow.collectives] == [
        ((1e3, 1.0), (2e3, 1.0 + 2 * 2.0)),
        ((1e3, 3.0), (2e3, 3.0 + 2.0)),
    ]


def test_links_of_a_fabric_between_devices_are_those_between_nodes() -> None:
    machine = cluster("tpu-v4", 2)
    assert isinstance(machine.fabric, Torus)
    slow = apply_factors(machine, Factors(inter_rate=2.0, intra_rate=4.0))
    assert isinstance(slow.fabric, Torus)
    assert slow.fabric.link.bandwidth == machine.fabric.link.bandwidth / 2
