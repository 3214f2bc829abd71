"""Replaces the tables of a module by a rank's parts of them."""

from collections.abc import Sequence

import torch
from torch import nn

from meshwise.executor.embedding_tables.cut_table import CutTable
from meshwise.executor.embedding_tables.exchange import Exchange
from meshwise.executor.embedding_tables.lookups import TableLookups, connect
from meshwise.executor.embedding_tables.tables import WEIGHT, Part, Table
from meshwise.executor.starting.first_values import FirstValues


def cut_tables(
    tables: Sequence[Table],
    places: Sequence[Sequence[Part]],
    exchange: Exchange,
    device: torch.device,
    values: FirstValues | None = None,
) -> TableLookups:
    """Have the tables of a module be this rank's parts, and return what looks rows up in them.

    Parameters
    ----------
    places
        For every table the parts of all ranks.
    values
        First values of tables that have none yet; a rank makes one whole table of them at a time.
    """
    cut = []
    for table, parts in zip(tables, places, strict=True):
        part = parts[exchange.rank]
        weight = table.module.weight
        if weight.is_meta:
            assert values is not None
            own_rows = values.read_part(table.names[0], part.offsets, part.sizes)
        else:
            own_rows = part.select(weight.detach(), (part.first_row, part.end_row)).clone()
        own_rows = own_rows.to(device, weight.dtype).contiguous()
        parameter = nn.Parameter(own_rows, requires_grad=weight.requires_grad)
        vars(parameter).update(vars(weight))
        name = table.names[0].removesuffix(f".{WEIGHT}")
        cut.append(CutTable(name, parameter, parts, exchange.rank, table.module))
        table.module._parameters[WEIGHT] = parameter
    lookups = TableLookups(cut, exchange, device)
    for place, table in enumerate(tables):
        connect(table.module, lookups, place)
    return lookups
