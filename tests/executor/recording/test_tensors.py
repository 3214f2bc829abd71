"""Several tensors as one vector, and back into the very same storage."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.recording.tensors import fill, flatten, to_local  # noqa: E402


def test_a_vector_holds_all_elements_in_order_and_comes_back() -> None:
    shapes = [(2, 3), (), (4,), (0,)]
    tensors = [torch.randn(shape) for shape in shapes]
    flat = flatten(tensors)
    assert flat.shape == (6 + 1 + 4,)
    empty = [torch.zeros(shape) for shape in shapes]
    places = [each.data_ptr() for each in empty]
    fill(empty, flat)
    assert all(torch.equal(one, other) for one, other in zip(empty, tensors, strict=True))
    assert [each.data_ptr() for each in empty] == places


def test_tensors_that_are_turned_are_read_in_their_own_order() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    assert flatten([turned]).tolist() == [0, 3, 1, 4, 2, 5]
    target = torch.zeros(2, 3).t()
    fill([target], flatten([turned]))
    assert torch.equal(target, turned)
    assert to_local(turned) is turned
