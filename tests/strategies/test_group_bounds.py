from dataclasses import replace
from math import inf
from random import Random

import pytest

from strategies.completion import complete
from strategies.cost_model import SimulatedCost
from strategies.layout import Layout
from strategies.layout_rules import violations
from strategies.offloading import Offloading
from strategies.search.choices import family_of
from strategies.search.space import Space, choices_of, count, groups, layouts

from .problems import problem as on_one_node
from .search.scenarios import small_scenario

OFFLOADS = (
    Offloading(),
    Offloading(optimizer=(0.5,)),
    Offloading((1.0,), (1.0,)),
    Offloading(activations=(0.5,)),
)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_families_and_groups_are_below_those_of_members_and_these_below_the_simulation(seed: int) -> None:
    problem, _ = small_scenario(seed)
    draw = Random(seed)
    space = Space(wide=True, overlap_gradients=(True, False), offload=OFFLOADS)
    costs, found = SimulatedCost(problem), list(groups(problem, space))
    for group in draw.sample(found, min(10, len(found))):
        floor, table = costs.floor(family_of(group.layout)), costs.table(group)
        reach = 0.0 if group.layout.schedule == "dualpipev" else costs.reach(family_of(group.layout))
        cells = [(row, column) for row, line in enumerate(group.legal) for column, legal in enumerate(line) if legal]
        for row, column in draw.sample(cells, min(4, len(cells))):
            plan = complete(problem, group.member(row, column))
            evaluation = costs.evaluate(plan)
            if not evaluation.fits:
                continue
            (path,) = costs.longest_paths([plan])
            assert max(floor, reach, table[row, column]) <= costs.bound(plan) <= path <= evaluation.step_time
        assert (table[~group.legal] == inf).all()


def test_slow_ranks_of_different_columns_do_not_slow_one_microbatch_twice() -> None:
    # rank 0 is the first stage of one column, rank 3 the second of the other: a microbatch meets one of them
    plain = on_one_node(devices=4, batch=8)
    slow = replace(plain, cluster=replace(plain.cluster, speeds=((0, 0.5), (3, 0.5))))
    plan = complete(slow, Layout(data=2, pipeline=2, schedule="naive", chunks=1))
    costs = SimulatedCost(slow)
    (path,) = costs.longest_paths([plan])
    assert costs.bound(plan) <= path


@pytest.mark.parametrize("seed", range(4))
def test_the_count_is_that_of_all_layouts_and_all_are_legal(seed: int) -> None:
    problem, _ = small_scenario(seed)
    for space in (Space(), Space(wide=True, microbatch=(1,), zero=(0, 3), zero_shards=(0, 2))):
        found = list(layouts(problem, space))
        assert count(problem, space) == len(found) == len(set(found))
        for layout in Random(seed).sample(found, min(60, len(found))):
            assert not list(violations(problem, layout))
            assert choices_of(problem, space).contains(layout)
            assert not choices_of(problem, space).contains(replace(layout, microbatch=7))
