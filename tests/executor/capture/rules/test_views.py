"""Other dims of the same values: names follow them, and where sizes do not nest no axis cuts them."""

import pytest

pytest.importorskip("torch")

from meshwise.simulator.operator_graph import OperatorKind

from .single import operators_of, random

X = random(4, 6, 8)


def test_a_dim_in_two_is_both_of_them_for_what_comes_before_too() -> None:
    found = operators_of(lambda x, w: (x * w).reshape(4, 6, 2, 4).transpose(1, 2) * 2, X, (8,))
    assert [name for name in found if "reshape" in name or "transpose" in name] == []
    before, after = (dict(found[name].dims) for name in ("mul", "mul_2"))
    assert before == after and list(before.values()) == [1, 6, 2, 4] and list(after) != list(before.values())
    assert [dim for dim, _ in found["mul_2"].dims][1] == [dim for dim, _ in found["mul"].dims][2]


def test_sizes_that_do_not_nest_have_new_names_and_the_old_ones_are_not_cut() -> None:
    found = operators_of(lambda x, w: (x * w).reshape(4, 4, 12) * 2, X, (8,))
    [view] = [each for each in found.values() if each.kind is OperatorKind.VIEW]
    assert set(view.uncut) == {dim for dim, _ in found["mul"].dims} - {"batch"}
    assert [size for _, size in found["mul_2"].dims] == [1, 4, 12]


def test_dims_of_one_have_no_name() -> None:
    found = operators_of(lambda x, w: (x * w).unsqueeze(1) * 2, X, (8,))
    assert dict(found["mul_2"].dims) == dict(found["mul"].dims)
