"""What lacks memory, by how much, and what fills it then: to the byte, as the simulation has it."""

from dataclasses import replace

import pytest

from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category
from meshwise.strategies.explanation.shortfall import find_shortfall
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import Offloading

from ..problems import IDEAL, problem


def test_the_fullest_device_lacks_its_peak_less_what_it_has() -> None:
    roomy = problem(layers=8)
    layout = Layout(data=4, pipeline=2, stages=(6, 2))
    peaks = [each.peak for each in simulate(lower(roomy, complete(roomy, layout)), "longest_path").memory]
    fullest = peaks.index(max(peaks))  # the last stage: logits weigh more than layers of this size
    tight = problem(layers=8, accelerator=replace(IDEAL, memory=max(peaks) - 100))
    found = find_shortfall(tight, complete(tight, layout))
    assert (found.stages, found.needed_memory, found.missing_memory, found.host) == ((fullest,), max(peaks), 100, "")
    assert sum(size for _, size in found.memory_by_kind) == found.needed_memory
    assert [name for name, _ in found.memory_by_kind] == [str(category) for category in CATEGORIES]
    assert " of microbatch " in found.activity


def test_with_a_margin_a_device_may_use_less_than_it_reports() -> None:
    small = replace(problem(), memory_margin=1.25)
    found = find_shortfall(small, complete(small, Layout(data=8)))
    assert found.usable_memory == pytest.approx(IDEAL.memory / 1.25) and found.reported_memory == IDEAL.memory
    assert found.missing_memory < 0


def test_a_host_is_told_where_it_lacks_more_than_any_device() -> None:
    small = problem()
    nodes = tuple((replace(node, host=replace(node.host, memory=1e6)), count) for node, count in small.cluster.nodes)
    small = replace(small, cluster=replace(small.cluster, nodes=nodes))
    found = find_shortfall(small, complete(small, Layout(data=8, offload=Offloading((1.0,)))))
    assert found.host and found.usable_memory == 1e6 and found.missing_memory > 0
    assert dict(found.memory_by_kind)[str(Category.OPTIMIZER)] > 0
    assert found.activity == ""
