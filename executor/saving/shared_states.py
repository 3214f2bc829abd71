"""A rank's boxes of a tensor that ranks share, which torch's distributed checkpoint writes and reads where they lie.

So no rank has the whole of it for a checkpoint. A ``DTensor`` has one box a rank; parts of operators may have several.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Run(NamedTuple):
    """Indices of a dim that follow each other, in the whole and in a rank's part."""

    first: int
    own_first: int
    size: int


class Box(NamedTuple):
    """A box of a whole tensor: where it begins there and in a rank's part, and its sizes."""

    offsets: tuple[int, ...]
    own_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def list_runs(indices: Sequence[int]) -> list[Run]:
    """Return the runs of the indices of a dim that a part has, in their order.

    >>> list_runs([0, 1, 4, 5])
    [Run(first=0, own_first=0, size=2), Run(first=4, own_first=2, size=2)]
    """
    starts = [place for place, index in enumerate(indices) if not place or index != indices[place - 1] + 1]
    ends = [*starts[1:], len(indices)]
    return [Run(indices[start], start, end - start) for start, end in zip(starts, ends, strict=True)]


def list_boxes(runs: Sequence[Sequence[Run]]) -> list[Box]:
    """Return the boxes of a part from the runs of each dim."""
    return [
        Box(tuple(run.first for run in row), tuple(run.own_first for run in row), tuple(run.size for run in row))
        for row in product(*runs)
    ]


def select_boxes(boxes: Sequence[Box], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Box]:
    """Yield what a box of a part has of its boxes; its own places are those in that box.

    >>> list(select_boxes([Box((0,), (0,), (2,)), Box((4,), (2,), (2,))], (1,), (2,)))
    [Box(offsets=(1,), own_offsets=(0,), sizes=(1,)), Box(offsets=(4,), own_offsets=(1,), sizes=(1,))]
    """
    for box in boxes:
        firsts = [max(own, offset) for own, offset in zip(box.own_offsets, offsets, strict=True)]
        ends = [
            min(own + own_size, offset + size)
            for own, own_size, offset, size in zip(box.own_offsets, box.sizes, offsets, sizes, strict=True)
        ]
        if all(first < end for first, end in zip(firsts, ends, strict=True)):
            moved = [start + f - own for start, own, f in zip(box.offsets, box.own_offsets, firsts, strict=True)]
            places = [first - offset for first, offset in zip(firsts, offsets, strict=True)]
            lengths = [end - first for first, end in zip(firsts, ends, strict=True)]
            yield Box(tuple(moved), tuple(places), tuple(lengths))


class SharedState(Tensor):
    """A rank's part of a tensor; its shape and size are those of the whole, for who reads and writes checkpoints.

    Parameters
    ----------
    part
        This rank's values, whose memory it is.
    boxes
        Which of the whole they are.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    part: Tensor
    whole: torch.Size
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, part: Tensor, whole: Sequence[int], boxes: Sequence[Box]) -> Self:
        """Return the state."""
        result: Self = part.detach().as_subclass(cls)
        result.part, result.whole, result.boxes = part.detach(), torch.Size(whole), tuple(boxes)
        return result

    def __init__(self, part: Tensor, whole: Sequence[int], boxes: Sequence[Box]) -> None:
        super().__init__()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole."""
        return self.whole

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole."""
        return self.whole if dim is None else self.whole[dim]

    def replace(self, part: Tensor) -> "SharedState":
        """Return the state with another part of the same shape."""
        return SharedState(part, self.whole, self.boxes)

    # what torch asks of a tensor of which a rank has chunks

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what is written of it."""
        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return its chunks."""
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return a chunk, in the memory of the part."""
        box = next(box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        result = self.part
        for dim, (offset, size) in enumerate(zip(box.own_offsets, box.sizes, strict=True)):
            result = result.narrow(dim, offset, size)
        return result
