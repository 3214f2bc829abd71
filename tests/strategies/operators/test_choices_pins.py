"""What the user has decided of single operators."""

import pytest

from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.choices import Pin, filter_choices, find_pin_violation, list_choices, resolve_pins
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS
from meshwise.strategies.search.algorithms import OPERATOR_ALGORITHMS, PINNED_ALGORITHMS
from meshwise.strategies.search.operator_search import check_pins
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ..problems import problem

SMALL = problem(devices=4, layers=3, batch=8)
DEGREES = {TENSOR_ROWS: 2, TENSOR: 2}


def test_a_block_pins_all_layers_and_an_occurrence_one() -> None:
    pins = resolve_pins(
        SMALL.graph, (Pin("layers.1.up", (("sequence", (TENSOR,)),)), Pin("layers.up", (("ffn", (TENSOR,)),)))
    )
    assert {name: pin.cuts for name, pin in pins.items()} == {
        "layers.0.up": (("ffn", (TENSOR,)),),
        "layers.1.up": (("sequence", (TENSOR,)),),
        "layers.2.up": (("ffn", (TENSOR,)),),
    }


def test_axes_in_order_are_of_the_dims_that_may_be_cut() -> None:
    # of attention: batch, heads, group, sequence; data is the outer axis
    (found,) = resolve_pins(SMALL.graph, (Pin("layers.0.attention", ((0, ("data",)), (1, ("tensor",)))),)).values()
    assert found.cuts == (("batch", (TENSOR_ROWS,)), ("heads", (TENSOR,)))
    legal = list_choices("layers", found.block, found.operator, DEGREES, 8)
    assert [each.cuts for each in filter_choices({"layers.0.attention": found}, "layers.0.attention", legal)] == [
        found.cuts
    ]
    assert filter_choices({}, "layers.0.attention", legal) == legal


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (
            Pin("layers.atention", ()),
            "pin names an operator of the model, met layers.atention; nearest: layers.attention",
        ),
        (Pin("layers.7.attention", ()), "met layers.7.attention; nearest: layers.[012].attention"),
        (
            Pin("layers.up", (("fn", (TENSOR,)),)),
            "of layers.up may be cut: batch, sequence, ffn, hidden, met fn; nearest: ffn",
        ),
        (Pin("layers.up", (("ffn", ("tensors",)),)), "axis is one of data, .*, met tensors; nearest: tensor"),
        (Pin("layers.up", (("ffn", (TENSOR,)), ("batch", (TENSOR,)))), "an axis cuts one dim, met tensor for two"),
        (Pin("layers.up", tuple((n, ()) for n in range(5))), "layers.up has 4 dims that may be cut .*, met 5"),
    ],
)
def test_what_is_not_there_is_named_with_the_nearest(pin: Pin, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_pins(SMALL.graph, (pin,))


def test_a_cut_that_does_not_divide_is_an_equation() -> None:
    pins = resolve_pins(SMALL.graph, (Pin("layers.0.up", (("batch", ("data", "tensor")),)),))
    assert find_pin_violation(pins, DEGREES, 6) == (
        "layers.0.up: tensor_rows(2) * tensor(2) divides batch(6), met 4; nearest: 3"
    )
    assert find_pin_violation(pins, DEGREES, 8) == ""
    assert find_pin_violation(pins, {TENSOR: 4}, 8) == "layers.0.up: axis tensor_rows has one rank"
    odd = problem(devices=3, layers=3, batch=8)
    with pytest.raises(ValueError, match=r"layers.0.up: tensor\(3\) divides ffn\(256\), met 3; nearest: 2"):
        check_pins(odd, Space(pin=(Pin("layers.0.up", (("ffn", (TENSOR,)),)),)))


@pytest.mark.parametrize("name", PINNED_ALGORITHMS)
def test_every_plan_keeps_the_pins(name: str) -> None:
    space = Space(tensor=(4,), pin=(Pin("layers.1.up", (("hidden", (TENSOR,)),)),))
    result = search(OPERATOR_ALGORITHMS[name](), SMALL, space)
    assert result.trials
    for trial in result.trials:
        kinds = StageCosts(SMALL).find_keys(trial.plan).cut.kinds
        kind = kinds.by_name[kinds.kind_names["layers.1"]]
        up = next(s for o, s in zip(kind.block.operators, kind.shardings, strict=True) if o.name == "up")
        assert up.cuts == (("hidden", (TENSOR,)),)
