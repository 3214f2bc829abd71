"""Parts of first values, read as boxes of a whole or made of it, are those that a rank cuts."""

from collections.abc import Sequence
from random import Random

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from meshwise.executor.cut_modules.part_values import PartValues  # noqa: E402
from meshwise.executor.operators.collectives import RankMesh  # noqa: E402
from meshwise.executor.operators.local_stage import Placement  # noqa: E402
from meshwise.executor.starting.first_values import select_box  # noqa: E402
from meshwise.strategies.plan.sharding import ShardingSpec  # noqa: E402

SIZES = {"a": 4, "b": 6, "c": 8}
GROUPS = ((("a", "b"), ("c",)), (("a",), ("b", "c")), (("c", "a", "b"),), ((), ("b",)))


class Ranks(RankMesh):
    """The mesh as a rank sees it that sends nothing."""

    def __init__(self, size: dict[str, int], coordinate: dict[str, int]) -> None:
        self.size, self.coordinate = size, coordinate


class Whole:
    """A parameter, of which parts are read; how many elements of it were."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.count = values, 0

    def read(self, name: str) -> Tensor:
        self.count += self.values.numel()
        return self.values.clone()

    def read_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        part = select_box(self.values, offsets, sizes).clone()
        self.count += part.numel()
        return part

    def compute_digest(self) -> str:
        return "whole"


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_those_that_a_rank_cuts(seed: int) -> None:
    random = Random(seed)
    groups = random.choice(GROUPS)
    names = [name for group in groups for name in group]
    cuts = tuple((name, axes) for name, axes in zip(random.sample(names, len(names)), (("x",), ("y",)), strict=False))
    if random.random() < 0.3:
        cuts = ((random.choice(["a" if "a" in names else "b", names[0]]), ("x", "y")),)
    size = {"x": 2, "y": 1 if any(len(axes) > 1 and name == "b" for name, axes in cuts) else 2}
    ranks = Ranks(size, {axis: random.randrange(number) for axis, number in size.items()})
    shape = [torch.Size([SIZES[name] for name in group]).numel() for group in groups]
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    placement = Placement(groups, {name: SIZES[name] for name in names}, ShardingSpec(cuts), tuple(shape))
    whole = Whole(values)
    parts = PartValues(whole, {"w": placement}, ranks)
    expected = placement.cut(ranks, values)
    assert torch.equal(parts.read("w"), expected)
    inner = [group for group in groups if any(name in dict(cuts) for name in group[1:])]
    if not inner:  # the outermost dims alone are cut, so that a part is a box
        assert whole.count == expected.numel()
    first, last = [length // 2 for length in expected.shape], list(expected.shape)
    sizes = [end - start for start, end in zip(first, last, strict=True)]
    assert torch.equal(parts.read_part("w", first, sizes), select_box(expected, first, sizes))
    assert torch.equal(parts.read("other"), values) and parts.compute_digest() == "whole"
