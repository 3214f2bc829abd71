from collections import Counter
from dataclasses import fields, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.space import CORE, Space, layouts, neighbours

from ..problems import problem as transformer
from .small_problems import PROBLEMS, SPACES, small_problem


def naive(problem: Problem, space: Space) -> set[Layout]:
    """Return the space by trying everything and asking for violations."""
    devices, layers = problem.cluster.num_devices, problem.graph.blocks[0].repeat
    result = set()
    for data, tensor, pipeline in product(range(1, devices + 1), repeat=3):
        if data * tensor * pipeline != devices or pipeline > layers:  # a space has no more ranks than layers
            continue
        for microbatch, (schedule, chunks) in product(
            range(1, problem.training.global_batch + 1),
            [("1f1b", 1), ("gpipe", 1), *(("interleaved", chunks) for chunks in range(2, layers + 1))],
        ):
            for zero, sequence_parallel, recompute in product((0, 1), (False, True), Recompute):
                layout = Layout(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    microbatch=microbatch,
                    schedule=schedule,
                    chunks=chunks,
                    zero=zero,
                    sequence_parallel=sequence_parallel,
                    recompute=recompute,
                )
                layout = replace(layout, stages="even" if layers % (pipeline * chunks) == 0 else "balanced")
                if naively_admitted(problem, space, layout):
                    result.add(layout)
    return result


def naively_admitted(problem: Problem, space: Space, layout: Layout) -> bool:
    limits = {
        field.name: getattr(space, field.name)
        for field in fields(space)
        if field.name not in ("pin", "wide", "core", "accepts", "starts", "devices")
    }
    if any(limit is not None and getattr(layout, name) not in limit for name, limit in limits.items()):
        return False
    if any(violations(problem, layout)):
        return False
    share = problem.training.global_batch // layout.data
    if space.microbatch is None and layout.microbatch not in (1, 2, 4, 8, share):
        return False
    if space.chunks is None and layout.chunks > 1 and layout.stages == "balanced":
        return False
    if layout.pipeline == 1 and layout.schedule == "gpipe" and (space.schedule is None or "1f1b" in space.schedule):
        return False
    return not (layout.data == 1 and layout.zero == 1 and (space.zero is None or 0 in space.zero))


@settings(max_examples=60, deadline=None)
@given(problem=PROBLEMS, space=SPACES)
def test_the_space_is_everything_legal_once(problem: Problem, space: Space) -> None:
    found = list(layouts(problem, space))
    assert max(Counter(found).values(), default=1) == 1
    assert set(found) == naive(problem, space)


def test_two_devices_by_hand() -> None:
    # data 2: 1 microbatch size x 1 schedule x 2 ZeRO levels x 3 recomputes = 6
    # tensor 2: 2 sizes x 1 x 1 x 2 sequence parallel x 3 = 12
    # pipeline 2: (2 schedules of 2 microbatches of 1, GPipe of 1 microbatch of 2; a rank has 1 layer, hence no
    # chunks) x 1 x 1 x 3 = 9
    problem = small_problem(nodes=1, devices_per_node=2, layers=2, global_batch=2)
    found = Counter((layout.data, layout.tensor, layout.pipeline) for layout in layouts(problem, CORE))
    assert found == {(2, 1, 1): 6, (1, 2, 1): 12, (1, 1, 2): 9}


def test_rows_of_a_grid_are_in_the_space_where_it_names_them() -> None:
    problem = transformer(devices=4, layers=4, batch=4)
    usual = list(layouts(problem, CORE))
    grids = [layout for layout in layouts(problem, Space(core=True, tensor_rows=(1, 2, 4))) if layout.tensor_rows > 1]
    assert {layout.tensor_rows for layout in usual} == {1}
    assert {(layout.tensor_rows, layout.tensor) for layout in grids} == {(2, 1), (2, 2), (4, 1)}
    assert not any(layout.microbatch % layout.tensor_rows or layout.sequence_parallel for layout in grids)
    assert not any(list(violations(problem, layout)) for layout in grids)
    everywhere = set(layouts(problem, Space(core=True, tensor_rows=(1, 2, 4))))
    reached, frontier = set(), usual[:1]
    while frontier:
        layout = frontier.pop()
        if layout not in reached:
            reached.add(layout)
            frontier += neighbours(problem, Space(core=True, tensor_rows=(1, 2, 4)), layout)
    assert reached == everywhere == set(usual) | set(grids)


def test_degrees_are_not_only_powers_of_two() -> None:
    problem = small_problem(nodes=1, devices_per_node=6, heads=3, ffn=9, layers=5, global_batch=6)
    degrees = {(layout.data, layout.tensor, layout.pipeline) for layout in layouts(problem, CORE)}
    assert degrees == {(6, 1, 1), (3, 1, 2), (2, 1, 3), (2, 3, 1), (1, 3, 2)}  # pipeline 6 > 5 layers


def test_a_thousand_devices_have_thousands_of_layouts() -> None:
    problem = small_problem(128, 8, layers=96, heads=96, ffn=49152, sequence=2048, global_batch=1536)
    found = list(layouts(problem, CORE))
    assert len(found) == len(set(found)) > 8000
    for layout in found[::100]:
        complete(problem, layout)


def test_a_limit_may_name_what_the_default_leaves_out() -> None:
    problem = small_problem(nodes=1, devices_per_node=2, layers=5, global_batch=12)
    assert 3 not in {layout.microbatch for layout in layouts(problem, CORE)}
    assert {layout.microbatch for layout in layouts(problem, Space(core=True, microbatch=(3, 5)))} == {3}
    assert "interleaved" not in {layout.schedule for layout in layouts(problem, CORE)}  # 2 ranks do not divide 5 layers
    uneven = list(layouts(problem, Space(core=True, chunks=(2, 3, 4), schedule=("interleaved",))))
    # 2 * 3 stages: one a layer and one for the head; 2 * 4 are more than there are blocks for
    assert {(layout.chunks, layout.stages) for layout in uneven} == {(2, "balanced"), (3, "balanced")}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tensor": ()}, "tensor names at least one value"),
        ({"tensor": (0,)}, "tensor is a whole number of at least 1, met 0"),
        ({"microbatch": ("2",)}, "microbatch is a whole number of at least 1, met '2'"),
        ({"data": (True,)}, "data is a whole number of at least 1, met True"),
        ({"schedule": ("gpip",)}, "schedule is one of naive, gpipe, 1f1b, .*, dualpipev, met 'gpip'"),
        ({"zero": (7,)}, "zero is one of 0, 1, 2, 3, met 7"),
        ({"stages": ("odd",)}, "stages is one of even, balanced, paced, or layers a stage, met 'odd'"),
        ({"order": (("rows",),)}, r"order names axes of pipeline, .*, tensor, met \('rows',\)"),
        ({"offload": ("optimizer",)}, "offload holds a value of a layout, met 'optimizer'"),
        ({"recompute": ("half",)}, "recompute is one of none, selective, full, met 'half'"),
    ],
)
def test_limits_that_no_layout_can_meet_are_errors(limits: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space(**limits)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(problem=PROBLEMS, space=SPACES)
def test_neighbours_are_symmetric_and_of_the_space(problem: Problem, space: Space) -> None:
    everywhere = set(layouts(problem, space))
    around = {layout: neighbours(problem, space, layout) for layout in everywhere}
    for layout, near in around.items():
        assert len(near) == len(set(near))
        assert layout not in near
        assert everywhere.issuperset(near)
        assert all(layout in around[other] for other in near)


@settings(max_examples=30, deadline=None)
@given(problem=PROBLEMS, data=st.data())
def test_neighbours_are_exactly_one_decision_apart(problem: Problem, data: st.DataObject) -> None:
    everywhere = list(layouts(problem, CORE))
    if not everywhere:
        return
    layout = data.draw(st.sampled_from(everywhere))
    assert set(neighbours(problem, CORE, layout)) == {o for o in everywhere if decisions_apart(layout, o) == 1}


def decisions_apart(one: Layout, other: Layout) -> int:
    names = ("microbatch", "zero", "sequence_parallel", "recompute")
    count = sum(getattr(one, name) != getattr(other, name) for name in names)
    count += (one.schedule, one.chunks) != (other.schedule, other.chunks)
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("data", "tensor", "pipeline")]
    changed = [(a, b) for a, b in pairs if a != b]
    if changed:  # one factor left one degree and went to another
        count += 1 if len(changed) == 2 and all(max(pair) % min(pair) == 0 for pair in changed) else 2
    return count


def test_a_walk_over_neighbours_reaches_the_whole_space() -> None:
    problem = small_problem(nodes=2, devices_per_node=6, heads=12, ffn=12, layers=8, global_batch=12)
    everywhere = set(layouts(problem, CORE))
    reached, frontier = set(), [next(layouts(problem, CORE))]
    while frontier:
        layout = frontier.pop()
        if layout not in reached:
            reached.add(layout)
            frontier += neighbours(problem, CORE, layout)
    assert reached == everywhere
    assert len(everywhere) > 500
