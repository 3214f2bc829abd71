import pytest

from meshwise.reports.page.report import Report
from meshwise.reports.page.sections import groups, hops, mesh_axes
from meshwise.strategies.plan.mesh import Axis, Mesh


def test_the_axes_of_a_mesh_are_told_with_their_strides():
    mesh = Mesh((Axis("pipeline", 2), Axis("data", 3), Axis("context", 1), Axis("tensor", 4)))
    told = [tuple(axis.values()) for axis in mesh_axes(mesh)]
    assert told == [("pipeline", 2, 12), ("data", 3, 4), ("tensor", 4, 1)]


def test_groups_are_along_the_axes_of_the_plan_that_have_ranks(small: Report):
    told = {each["name"]: each for each in groups(small.plan, small.cluster)}
    assert {name: each["axes"] for name, each in told.items()} == {"tensor": ["tensor"], "data": ["data"]}
    assert all(len(each["links"]) == 2 for each in told.values())  # one a pipeline position


def test_groups_inside_a_node_use_its_links_and_groups_across_nodes_its_nics(large: Report):
    told = {each["name"]: each["links"][0] for each in groups(large.plan, large.cluster)}
    assert "nic" not in told["tensor"]  # ranks 0 to 7: one node of 8 devices
    assert "nic" in told["data"]  # ranks 0, 8, 16, ...: a node each
    assert "GB/s" in told["tensor"] and "GB/s" in told["data"]


@pytest.mark.parametrize(("name", "links"), [("small", ""), ("large", "nic")])
def test_every_stage_boundary_is_crossed_both_ways(name: str, links: str, request: pytest.FixtureRequest):
    report: Report = request.getfixturevalue(name)
    told = hops(report.plan, report.cluster)
    stages = len(report.plan.stages)
    assert sorted((hop["from"], hop["to"]) for hop in told) == sorted(
        pair for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))
    )
    assert all(links in hop["links"] for hop in told)
