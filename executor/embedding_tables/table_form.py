"""States of a rank with parts of tables in a checkpoint, which is the same under any plan, and whole tables."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.embedding_tables.cut_table import CutTable
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

    def share(self, name: str, state: Tensor) -> Tensor:
        """Return a state as this rank's box of the whole, in the same memory."""
        table = self.tables.get(name)
        if table is None or state.shape != table.parameter.shape:
            return state
        part = table.part
        boxes = [Box(part.offsets, (0, 0), part.sizes)] if state.numel() else []
        return SharedState(state, (table.num_rows, table.width), boxes)

    def gather(self, name: str, state: Tensor) -> Tensor:
        """Return the whole of a weight on the first rank; other ranks, and other states, keep what they are."""
        table = self.tables.get(name)
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
