"""The parts of a tensor are cut along named dims, inside of torch dims too, and together are the whole."""

import pytest

torch = pytest.importorskip("torch")

from one_rank import find_ranks  # noqa: E402

from meshwise.executor.operators.local_stage import Placement  # noqa: E402
from meshwise.strategies.plan.sharding import REPLICATED, ShardingSpec  # noqa: E402

SIZES = {"three": 3, "heads": 4, "width": 2, "hidden": 5}
PACKED = (("three", "heads", "width"), ("hidden",))


@pytest.mark.parametrize("dim", ["heads", "width"])
def test_parts_of_packed_heads_are_the_heads_of_each(dim: str) -> None:
    placement = Placement(PACKED, SIZES, ShardingSpec(((dim, ("tensor",)),)), (24, 5))
    whole = torch.rand(24, 5)
    parts = [placement.cut(find_ranks(2, rank), whole) for rank in range(2)]
    assert all(part.shape == (12, 5) == placement.find_part_shape(find_ranks(2)) for part in parts)
    place = tuple(SIZES).index(dim)
    cut = {**SIZES, dim: SIZES[dim] // 2}
    joined = torch.cat([part.view(*cut.values()) for part in parts], place)
    assert torch.equal(joined.view(24, 5), whole)
    assert placement.count_copies(find_ranks(2)) == 1


def test_a_whole_tensor_is_a_copy_on_every_rank() -> None:
    placement = Placement(PACKED, SIZES, REPLICATED, (24, 5))
    whole = torch.rand(24, 5)
    part = placement.cut(find_ranks(2, 1), whole)
    assert torch.equal(part, whole) and part.data_ptr() != whole.data_ptr()
    assert torch.equal(placement.gather(find_ranks(2, 1), part), whole)
    assert placement.count_copies(find_ranks(2)) == 2
