"""What programs call: quick functions are those of the operators that they stand for; draws depend on the seed."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.operators.calls import QUICK_CALLS, Draws, apply_changes, make_move  # noqa: E402


@pytest.mark.parametrize("operator", list(QUICK_CALLS), ids=str)
def test_a_quick_call_takes_what_its_operator_takes(operator: object) -> None:
    """Arguments by position and by name are those of the schema, as far as a program gives any by name."""
    x, number = torch.rand(3, 4), 2.0
    arguments = {
        "cat": ([x, x], 1),
        "embedding": (x, torch.tensor([0, 2]), -1, False, False),
        "gather": (x, 1, torch.zeros(3, 1, dtype=torch.int64)),
        "layer_norm": (x, [4], torch.rand(4), torch.rand(4), 1e-5, False),
        "grouped_product": (x, torch.rand(2, 4, 5), torch.tensor([1, 3])),
        "linear": (x, torch.rand(2, 4), torch.rand(2)),
        "log_softmax": (x, -1),
        "softmax": (x, -1),
        "matmul": (x, x.T),
        "ne": (x, number),
        "pow": (x, number),
        "scaled_dot_product_attention": (x[None, None], x[None, None], x[None, None], None, 0.0, True),
        "view": (x, [4, 3]),
        "_unsafe_view": (x, [4, 3]),
        "where": (x > 0.5, x, number if str(operator).endswith("ScalarOther") else x),
        **dict.fromkeys(("add", "div", "mul", "sub"), (x, x)),
    }
    name = str(operator).split(".")[1]
    given = ((x, [-1], True) if "IntList" in str(operator) else (x,)) if name not in arguments else arguments[name]
    assert torch.equal(operator(*given), QUICK_CALLS[operator](*given))  # type: ignore[operator]


def test_draws_depend_on_the_seed_and_the_number_of_operator_and_part_alone() -> None:
    draws = Draws()
    first, same, other = (draws.make_seeded(torch.rand, number) for number in (1, 1, 2))
    assert torch.equal(first(4), same(4)) and not torch.equal(first(4), other(4))
    before = first(4)
    draws.seed = 1
    assert not torch.equal(first(4), before)


def test_a_move_changes_values_forward_and_gradients_back() -> None:
    x = torch.ones(4, requires_grad=True)
    moved = make_move((lambda part: part[:2],), (lambda part: torch.cat((part, part)),))(x)
    moved.sum().backward()
    assert moved.shape == (2,) and x.grad is not None and x.grad.shape == (4,)
    same = torch.rand(3, 2).T
    assert apply_changes(same, ()) is same
