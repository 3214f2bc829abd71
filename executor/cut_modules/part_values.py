"""The first values of a rank's parts of parameters whose operators are cut."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.local_stage import Placement
from meshwise.executor.saving.shared_states import Box, list_boxes, list_runs, select_boxes
from meshwise.executor.starting.first_values import FirstValues, select_box


def list_part_boxes(placement: Placement, ranks: RankMesh) -> list[Box]:
    """Return which boxes of a whole tensor a rank's part has.

    A dim of the tensor may consist of several named dims. Where the outermost alone is cut, a part is one range of it;
    else it is several.
    """
    return list_boxes([list_runs(_list_indices(placement, ranks, group)) for group in placement.dims])


def _list_indices(placement: Placement, ranks: RankMesh, group: tuple[str, ...]) -> list[int]:
    """Return the indices that a rank has of a dim of a tensor, which consists of a group of named dims."""
    sizes = [placement.sizes[dim] for dim in group]
    indices = torch.arange(prod(sizes)).view(sizes)
    for place, dim in enumerate(group):
        axes = placement.layout.axes(dim)
        size = sizes[place] // ranks.count_parts(axes)
        indices = indices.narrow(place, ranks.find_part(axes) * size, size)
    result: list[int] = indices.flatten().tolist()
    return result


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
        boxes = list_part_boxes(placement, self._ranks)
        if len(boxes) > 1:
            return placement.cut(self._ranks, self._values.read(name))
        return self._values.read_part(name, boxes[0].offsets, boxes[0].sizes)

    def read_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a part."""
        placement = self._placements.get(name)
        if placement is None:
            return self._values.read_part(name, offsets, sizes)
        boxes = list(select_boxes(list_part_boxes(placement, self._ranks), offsets, sizes))
        if len(boxes) > 1:
            return select_box(self.read(name), offsets, sizes).clone()
        return self._values.read_part(name, boxes[0].offsets, boxes[0].sizes)

    def compute_digest(self) -> str:
        """Return words that are equal on ranks whose whole values are equal."""
        return self._values.compute_digest()
