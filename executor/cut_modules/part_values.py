"""The first values of a rank's parts of parameters whose operators are cut."""

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.local_stage import Placement
from meshwise.executor.starting.first_values import FirstValues, select_box

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part begins along each dim of a tensor, and its sizes."""


def find_box(placement: Placement, ranks: RankMesh) -> Box | None:
    """Return which box of a whole tensor a rank's part is; ``None`` where it is none.

    A dim of the tensor may consist of several named dims: a part is a range of it where the outermost alone is cut.
    """
    offsets, sizes = [], []
    for group in placement.dims:
        cut_dims = [dim for dim in group if ranks.count_parts(placement.layout.axes(dim)) > 1]
        if cut_dims and cut_dims != [group[0]]:
            return None
        axes = placement.layout.axes(group[0]) if cut_dims else ()
        size = prod(placement.sizes[dim] for dim in group) // ranks.count_parts(axes)
        offsets.append(ranks.find_part(axes) * size)
        sizes.append(size)
    return tuple(offsets), tuple(sizes)


class PartValues:
    """Values of this rank's parts, as `FirstValues`: each of one whole parameter, or of the box that it is.

    Parameters
    ----------
    values
        Those of whole parameters.
    placements
        How ranks have them, by name; others are whole on every rank.
    """

    def __init__(self, values: FirstValues, placements: Mapping[str, Placement], ranks: RankMesh) -> None:
        self._values, self._placements, self._ranks = values, dict(placements), ranks

    def read(self, name: str) -> Tensor:
        """Return the values of a part."""
        placement = self._placements.get(name)
        if placement is None:
            return self._values.read(name)
        box = find_box(placement, self._ranks)
        if box is None:
            return placement.cut(self._ranks, self._values.read(name))
        return self._values.read_part(name, *box)

    def read_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a part."""
        placement = self._placements.get(name)
        box = None if placement is None else find_box(placement, self._ranks)
        if placement is not None and box is None:
            return select_box(self.read(name), offsets, sizes).clone()
        first = (0,) * len(offsets) if box is None else box[0]
        return self._values.read_part(name, [a + b for a, b in zip(first, offsets, strict=True)], sizes)

    def compute_digest(self) -> str:
        """Return words that are equal on ranks whose whole values are equal."""
        return self._values.compute_digest()
