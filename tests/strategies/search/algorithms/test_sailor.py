"""Devices of several kinds and regions for every stage, against every plan of a small machine and other searches."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest

from meshwise.scenarios.loader import load
from meshwise.simulator.machine.topology import Dragonfly, Link
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.metis import Metis
from meshwise.strategies.search.algorithms.sailor import Sailor
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ....examples import LONG
from ...problems import problem
from ..test_speed_division import mixed

MIXED = Path(__file__).parents[4] / "scenarios/gallery/techniques/mixed-devices.yaml"
"""Llama 2 13B on 8 H100 and 8 A100."""


def two_regions(bandwidth: float) -> Problem:
    """Return two regions of two nodes of two devices, with a link between them, and fast links inside."""
    fabric = Dragonfly(2, 1, Link(1e-6, 1e13), Link(1e-6, bandwidth))
    return problem(nodes=4, devices=2, nics=2, layers=4, batch=16, bandwidth=1e13, fabric=fabric)


@pytest.mark.parametrize("layers", range(2, 8) if LONG else (3,))
def test_it_is_never_slower_than_the_plans_of_auto(layers: int) -> None:
    of = mixed(devices=2, layers=layers, batch=8)
    sailor, auto = search(Sailor(), of), search(Auto(), of)
    assert sailor.best is not None and auto.best is not None
    assert sailor.best.evaluation.step_time <= auto.best.evaluation.step_time
    assert sailor.lower_bound == auto.lower_bound  # the proof is about uniform plans


def published_layouts(of: Problem) -> Iterator[Layout]:
    """Yield every layout of Sailor's space: even stages, 1F1B, and any devices, with tensor ranks in one node."""
    devices, batch, layers = range(of.cluster.num_devices), of.training.global_batch, 4
    for pipeline, tensor in product((1, 2, 4), (1, 2)):
        for data, microbatch in product(divisors(batch), (1, 2, 4, 8)):
            ranks = data * tensor * pipeline
            if ranks > len(devices) or batch % (data * microbatch):
                continue
            seen = set()
            for placement in permutations(devices, ranks):
                groups = [placement[first : first + tensor] for first in range(0, ranks, tensor)]
                kinds = tuple(int(of.cluster.device_kinds[device]) for device in placement)
                if kinds not in seen and all(len({of.cluster.node_of(each) for each in row}) == 1 for row in groups):
                    seen.add(kinds)
                    for sequence_parallel in (False, True) if tensor > 1 else (False,):
                        layout = Layout(data=data, tensor=tensor, pipeline=pipeline, microbatch=microbatch)
                        yield replace(
                            layout,
                            placement=placement,
                            stages=(layers // pipeline,) * pipeline,
                            sequence_parallel=sequence_parallel,
                        )


def test_as_published_it_finds_the_best_of_every_plan_of_a_small_machine() -> None:
    of = mixed(devices=2, layers=4, batch=8)
    costs = SimulatedCost(of)
    layouts = [layout for layout in published_layouts(of) if not any(violations(of, layout))]
    times = [costs.evaluate(complete(of, layout)).step_time for layout in layouts]
    result = search(Sailor(faithful=True), of)
    assert result.best is not None and result.lower_bound is None
    assert result.best.evaluation.step_time == pytest.approx(min(times), rel=1e-3)
    for trial in result.trials:
        plan = trial.plan
        assert (plan.schedule, plan.zero, plan.recompute, plan.microbatch) in {
            ("1f1b", 0, Recompute.NONE, size) for size in (1, 2, 4, 8)
        }


def test_a_region_behind_a_slow_link_stays_idle() -> None:
    """Strati et al., SOSP 2025, figure 10: devices of a region whose link is too slow are not worth it."""
    space = Space(core=True, tensor=(1,), recompute=(Recompute.NONE,))
    far, near = (search(Sailor(), two_regions(bandwidth), space) for bandwidth in (1e4, 1e12))
    assert far.best is not None and near.best is not None
    assert far.best.plan.placement == (0, 1, 2, 3)
    assert near.best.plan.mesh.num_ranks == 8
    auto = search(Auto(), two_regions(1e4), space)
    assert auto.best is not None and far.best.evaluation.step_time < auto.best.evaluation.step_time


def test_replicas_of_a_stage_stay_in_one_region() -> None:
    of = two_regions(1e6)
    result = search(Sailor(faithful=True), of)
    assert result.trials
    for plan in (trial.plan for trial in result.trials):
        ranks = plan.mesh.num_ranks // plan.pipeline
        devices = plan.placement or tuple(range(8))
        stages = [devices[first : first + ranks] for first in range(0, plan.mesh.num_ranks, ranks)]
        assert all(len({device // 4 for device in stage}) == 1 for stage in stages)


def test_on_devices_of_one_kind_it_is_auto() -> None:
    of = problem(nodes=2, devices=2, layers=4, batch=8)
    sailor, auto = search(Sailor(), of), search(Auto(), of)
    assert [trial.plan for trial in sailor.trials] == [trial.plan for trial in auto.trials]


def test_as_published_devices_of_one_kind_may_stay_idle() -> None:
    # 4 sequences on 6 devices: 4 data ranks, of which none waits
    of = problem(nodes=1, devices=6, layers=4, batch=4, bandwidth=1e13)
    result = search(Sailor(faithful=True), of)
    assert result.best is not None and result.best.plan.mesh.num_ranks == 4


def test_limits_of_the_space_are_kept() -> None:
    of = mixed(devices=2, layers=4, batch=4)
    for space in (Space(microbatch=(2,)), Space(devices=(4,)), Space(zero=(0,), tensor=(2,))):
        for trial in search(Sailor(), of, space).trials:
            plan = trial.plan
            assert space.microbatch is None or plan.microbatch == 2
            assert space.zero is None or (plan.zero, plan.tensor) == (0, 2)
            assert space.devices is None or plan.mesh.num_ranks == 4


@pytest.mark.parametrize("tensor", [(1, 2, 4, 8) if LONG else (2,)])
def test_on_8_h100_and_8_a100_it_is_as_fast_as_metis(tensor: tuple[int, ...]) -> None:
    of, space = load(MIXED).problem, Space(tensor=tensor, pipeline=None if LONG else (1,))
    sailor, metis = search(Sailor(), of, space), search(Metis(), of, space)
    assert sailor.best is not None and metis.best is not None
    assert sailor.best.evaluation.step_time <= 1.001 * metis.best.evaluation.step_time


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="choices is at least 1, met 0; nearest: 1"):
        Sailor(choices=0)
    of = problem(nodes=4, devices=2, layers=2, batch=8)
    slow = replace(of, cluster=replace(of.cluster, speeds=tuple((device, 0.9 - device / 10) for device in range(6))))
    with pytest.raises(ValueError, match="at most 6 kinds of devices and regions together, met 7; nearest: metis"):
        search(Sailor(), slow)
