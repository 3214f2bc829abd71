"""States of a rank with parts of tables in a checkpoint, which is the same under any plan, and whole tables."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.embedding_tables.cut_table import CutTable
from meshwise.executor.embedding_tables.tables import TableError
from meshwise.executor.saving.names import strip_compiled
from meshwise.executor.saving.shared_states import Box, SharedState


class TableForm:
    """States of a checkpoint as those of a rank with parts (`meshwise.executor.modules.states.StateForm`).

    Parameters
    ----------
    tables
        Those that are cut, by the names of their weights.
    """

    def __init__(self, tables: Mapping[str, CutTable]) -> None:
        self.tables = dict(tables)
        self._by_name = {strip_compiled(name): table for name, table in tables.items()}

    def share(self, name: str, state: Tensor) -> Tensor:
        """Return a state as this rank's box of the whole, in the same memory: of all elements, or one a row.

        Raises
        ------
        TableError
            Where it is none of these.
        """
        table = self._by_name.get(strip_compiled(name))
        if table is None or not state.dim():
            return state
        part, others = table.part, tuple(state.shape[1:])
        offsets: tuple[int, ...]
        whole: tuple[int, ...]
        if state.shape == table.parameter.shape:
            offsets, whole = part.offsets, (table.num_rows, table.width)
        elif len(state) == len(table.parameter) and part.width == table.width:
            offsets, whole = (part.first_row, *(0 for _ in others)), (table.num_rows, *others)
        else:
            rule = "tables: an optimizer keeps states of elements or of whole rows of a cut table"
            raise TableError(f"{rule}, met shape {list(state.shape)} for {table.name}; nearest: tables=rows")
        boxes = [Box(offsets, (0,) * state.dim(), tuple(state.shape))] if state.numel() else []
        return SharedState(state, whole, boxes)

    def gather(self, name: str, state: Tensor) -> Tensor:
        """Return the whole of a weight on the first rank; other ranks, and other states, keep what they are."""
        table = self._by_name.get(strip_compiled(name))
        return state if table is None else gather_first(table, state)


@torch.no_grad()
def gather_first(table: CutTable, part: Tensor) -> Tensor:
    """Return a whole table in host memory on the first rank, to which others send their parts."""
    rank = dist.get_rank()
    if rank:
        if part.numel():
            dist.send(part.contiguous(), 0)
        return part
    whole = torch.empty((table.num_rows, table.width), dtype=part.dtype)
    for source, box in enumerate(table.parts):
        if 0 in box.sizes:
            continue
        values = part if source == 0 else part.new_empty(box.sizes)
        if source:
            dist.recv(values, source)
        box.select(whole, (box.first_row, box.end_row)).copy_(values)
    return whole
