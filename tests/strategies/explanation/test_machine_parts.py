from dataclasses import replace

import pytest

from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link, Torus
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.machine_parts import machine_parts, with_memory
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ..problems import IDEAL, on, problem

SPEC = Transformer(8, hidden=64, heads=8, kv_heads=8, ffn=256, vocab=128, tied_embeddings=False)
CLUSTER = build_homogeneous("still", IDEAL, Host("host", 1e12), 2, 4, Link(0.0, 1e9), Link(0.0, 3e8), 2)


@pytest.mark.parametrize("factor", [0.5, 1.01, 2.0])
def test_a_machine_of_which_all_is_faster_is_as_much_faster(factor: float) -> None:
    # nothing has a latency: a step is FLOP, bytes over memory and bytes over links alone
    faster = CLUSTER
    for index in range(len(machine_parts(CLUSTER, "fp32"))):
        faster = machine_parts(faster, "fp32")[index].scale_cluster(factor)
    before, after = on(CLUSTER, SPEC, 32), on(faster, SPEC, 32)
    layout = Layout(data=2, tensor=2, pipeline=2, microbatch=2, zero=1)
    plan = complete(before, layout)
    times = [SimulatedCost(each).evaluate(plan).step_time for each in (before, after)]
    assert times[0] / times[1] == pytest.approx(factor, rel=1e-6)


def test_the_links_of_a_machine() -> None:
    names = [part.name for part in machine_parts(CLUSTER, "fp32")]
    assert names == ["FLOP/s", "memory bandwidth", "links inside a node", "links between nodes"]
    assert "links between nodes" not in [part.name for part in machine_parts(problem().cluster, "fp32")]
    torus = replace(CLUSTER, fabric=Torus((4, 2), Link(0.0, 5e8)))
    parts = {part.name: part for part in machine_parts(torus, "fp32")}
    assert "links inside a node" not in parts
    assert parts["links between devices"].scale_cluster(2.0).fabric == Torus((4, 2), Link(0.0, 1e9))


def test_measured_curves_are_links_too() -> None:
    inside = CollectiveCurve(Collective.ALL_REDUCE, 4, ((1.0, 2.0),))
    between = CollectiveCurve(Collective.ALL_REDUCE, 8, ((1.0, 6.0),))
    parts = {part.name: part for part in machine_parts(replace(CLUSTER, collectives=(inside, between)), "fp32")}
    assert parts["links inside a node"].scale_cluster(2.0).collectives == (
        replace(inside, points=((1.0, 1.0),)),
        between,
    )
    assert parts["links between nodes"].scale_cluster(2.0).collectives == (
        inside,
        replace(between, points=((1.0, 3.0),)),
    )


def test_memory() -> None:
    assert with_memory(CLUSTER, lambda memory: memory + 5).accelerator.memory == IDEAL.memory + 5
