"""Views arrange the named dims of a value in any way, with as few views as are needed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from meshwise.executor.operators.arrangements import apply_views, emit_views, list_views  # noqa: E402

SIZES = {"a": 2, "b": 3, "c": 2, "d": 5, "e": 1}


@st.composite
def arrangements(draw: Any, dims: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return dims in some order, in groups of any length, also empty ones."""
    order = draw(st.permutations(dims))
    groups: list[tuple[str, ...]] = [()]
    for dim in order:
        if draw(st.booleans()):
            groups.append(())
        groups[-1] = (*groups[-1], dim)
    return tuple(groups)


@st.composite
def pairs(draw: Any) -> tuple[Any, Any]:
    present = draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True))
    return draw(arrangements(tuple(present))), draw(arrangements(tuple(sorted(SIZES))))


def read_point(value: Any, groups: Any, point: dict[str, int]) -> float:
    """Return the element of a value at a point, by row-major numbers within each torch dim."""
    index = []
    for group in groups:
        number = 0
        for dim in group:
            number = number * SIZES[dim] + point[dim]
        index.append(number)
    return float(value[tuple(index)])


@given(pairs(), st.data())
def test_an_arranged_value_has_the_same_elements(pair: tuple[Any, Any], data: Any) -> None:
    source, target = pair
    shape = [int(torch.tensor([SIZES[dim] for dim in group] or [1]).prod()) for group in source]
    value = torch.rand(shape)
    views = list_views(source, target, SIZES)
    arranged = apply_views(value, views)
    point = {dim: data.draw(st.integers(0, size - 1)) for dim, size in SIZES.items()}
    assert read_point(arranged, target, point) == read_point(value, source, point)
    assert len(views) <= 5
    graph = torch.fx.Graph()
    graph.output(emit_views(graph, graph.placeholder("x"), views))
    assert torch.equal(torch.fx.GraphModule(torch.nn.Module(), graph)(value), arranged)


def test_what_is_arranged_already_needs_no_view() -> None:
    groups = (("a",), (), ("b", "c"))
    assert list_views(groups, groups, SIZES) == ()
    assert [view.method for view in list_views(groups, (("b", "c"), ("a",)), SIZES)] == ["reshape", "permute"]
