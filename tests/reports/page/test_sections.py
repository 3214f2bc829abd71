"""The sections of a page: who is in which group, what stages hold and send, and the critical path."""

import dataclasses

import pytest

from meshwise.reports.page.html import html
from meshwise.reports.page.report import Report
from meshwise.reports.page.sections import build_stage_rows, format_blocks, list_groups, list_hops, list_mesh_axes
from meshwise.strategies.plan.mesh import Axis, Mesh


def test_the_axes_of_a_mesh_are_told_with_their_strides():
    mesh = Mesh((Axis("pipeline", 2), Axis("data", 3), Axis("context", 1), Axis("tensor", 4)))
    told = [tuple(axis.values()) for axis in list_mesh_axes(mesh)]
    assert told == [("pipeline", 2, 12), ("data", 3, 4), ("tensor", 4, 1)]


def test_groups_are_along_the_axes_of_the_plan_that_have_ranks(small: Report):
    told = {each["name"]: each for each in list_groups(small.plan, small.cluster)}
    assert {name: each["axes"] for name, each in told.items()} == {"tensor": ["tensor"], "data": ["data"]}
    assert all(len(each["links"]) == 2 for each in told.values())  # one a pipeline position


def test_groups_inside_a_node_use_its_links_and_groups_across_nodes_its_nics(large: Report):
    told = {each["name"]: each["links"][0] for each in list_groups(large.plan, large.cluster)}
    assert "nic" not in told["tensor"]  # ranks 0 to 7: one node of 8 devices
    assert "nic" in told["data"]  # ranks 0, 8, 16, ...: a node each
    assert "GB/s" in told["tensor"] and "GB/s" in told["data"]


@pytest.mark.parametrize(("name", "links"), [("small", ""), ("large", "nic")])
def test_every_stage_boundary_is_crossed_both_ways(name: str, links: str, request: pytest.FixtureRequest):
    report: Report = request.getfixturevalue(name)
    told = list_hops(report.plan, report.cluster)
    stages = len(report.plan.stages)
    assert sorted((hop["from"], hop["to"]) for hop in told) == sorted(
        pair for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))
    )
    assert all(links in hop["links"] for hop in told)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((), ""),
        (("head",), "head"),
        (("layers.3", "layers.4", "layers.6"), "layers.3 to 4, layers.6"),
        (("a.1", "b.2", "b.3", "b"), "a.1, b.2 to 3, b"),
        (("layers.2", "layers.1"), "layers.2, layers.1"),
    ],
)
def test_blocks_that_follow_each_other_are_a_range(blocks: tuple[str, ...], text: str):
    assert format_blocks(blocks) == text


def test_sizes_of_a_stage_add_up_to_its_peak_and_ranks_to_all(large: Report):
    rows = build_stage_rows(large)
    assert len(rows) == 16
    assert sum(row["ranks"] for row in rows) == 16384
    assert all(sum(row["sizes"]) == pytest.approx(row["peak"]) for row in rows)
    assert max(row["peak"] for row in rows) == large.timeline.peak_memory
    layers = [row["blocks"].count("layers") for row in rows]
    assert layers == [1] * 16


def test_kinds_of_ranks_that_hold_the_same_are_one_row(small: Report):
    first, second = small.timeline.rank_classes[:2]
    split = (first._replace(ranks=first.ranks[:1]), first._replace(ranks=first.ranks[1:]), second)
    memory = [small.timeline.memory[i] for i in (0, 0, 1)]
    memory = [dataclasses.replace(profile, rank_class=i) for i, profile in enumerate(memory)]
    timeline = dataclasses.replace(small.timeline, rank_classes=split, memory=memory)
    held = small.result["memory"]
    result = {**small.result, "memory": [held[0], held[0], held[1]]}
    assert build_stage_rows(dataclasses.replace(small, timeline=timeline, result=result)) == build_stage_rows(small)


def test_stretches_come_back_to_the_nanosecond(small: Report, unpack):
    document, column = unpack(html(small))
    assert small.path is not None
    unit, path = document["steps"][0]["unit"], document["path"]
    start, which, length = column(path["start"]).cumsum(), column(path["class"]), column(path["duration"])
    found = [(int(of), int(at), int(at + ticks)) for of, at, ticks in zip(which, start, length, strict=True)]
    ticks = unit * small.timeline.columns.per_second
    assert found == [(of, round(first / ticks), round(last / ticks)) for of, first, last in small.path.list_stretches()]
    assert len(found) > 2


def test_every_stretch_is_of_ranks_that_run_something_then(small: Report):
    assert small.path is not None
    spans = list(small.timeline.spans)
    for of, first, last in small.path.list_stretches():
        begin, end = (moment / small.timeline.columns.per_second for moment in (first, last))
        assert any(span.rank_class == of and span.start < end and begin < span.end for span in spans)


def test_a_page_without_a_path_says_so(hostile: Report, unpack):
    document, _ = unpack(html(dataclasses.replace(hostile, path=None)))
    assert document["path"] is None
