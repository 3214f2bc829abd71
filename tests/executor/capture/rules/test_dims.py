"""Dims unify, factor and stay apart."""

from itertools import pairwise
from math import prod

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.capture.rules.dims import DimUnifier, refine_sizes


def test_a_dim_that_is_factored_twice_has_the_common_factors() -> None:
    dims = DimUnifier()
    whole = dims.create_dim(24)
    assert dims.unify(whole, dims.merge((dims.create_dim(4), dims.create_dim(6))))
    assert dims.unify(whole, dims.merge((dims.create_dim(2), dims.create_dim(12))))
    # 24 = 4 * 6 = 2 * 12: strides 24, 12, 6, 1
    assert [leaf.size for leaf in whole.leaves] == [2, 2, 6]


def test_dims_of_one_tensor_are_never_one() -> None:
    dims = DimUnifier()
    rows, columns = dims.create_dims((8, 8))
    assert rows is not None and columns is not None
    assert not dims.unify(rows, columns)
    other = dims.create_dim(8)
    assert dims.unify(other, rows)
    assert not dims.unify(other, columns)


def test_parts_of_dims_that_are_apart_are_apart() -> None:
    dims = DimUnifier()
    rows, columns = dims.create_dims((8, 4))
    assert rows is not None and columns is not None
    split = dims.split([rows], (2, 4))
    assert split is not None
    assert not dims.unify(split[1], columns)


def test_the_batch_is_never_factored() -> None:
    dims = DimUnifier()
    batch = dims.create_dim(4, batch=True)
    assert dims.split([batch], (2, 2)) is None
    assert not dims.unify(dims.merge((dims.create_dim(2), dims.create_dim(2))), batch)
    assert dims.unify(dims.create_dim(4), batch)


sizes = st.lists(st.integers(2, 6), min_size=1, max_size=5)


@given(sizes, st.data())
def test_merged_neighbours_are_refined_to_what_they_were_merged_of(parts: list[int], data: st.DataObject) -> None:
    def merged() -> list[int]:
        edges = sorted({0, len(parts), *data.draw(st.sets(st.integers(1, len(parts))))})
        return [prod(parts[a:b]) for a, b in pairwise(edges)]

    one, other = merged(), merged()
    fine = refine_sizes(one, other)
    assert fine is not None and prod(fine) == prod(parts)
    for sizes in (one, other):
        remaining = list(fine)
        for size in sizes:
            total = 1
            while total < size:
                total *= remaining.pop(0)
            assert total == size
