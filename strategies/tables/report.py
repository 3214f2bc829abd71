"""How the tables of a plan lie, and what each rank has of them, as JSON-ready data."""

from collections.abc import Sequence
from typing import Any

from meshwise.strategies.tables.embeddings import Embeddings
from meshwise.strategies.tables.loads import TableLoad, count_loads, find_hit_rate
from meshwise.strategies.tables.table import Table


def describe_tables(
    tables: Sequence[Table], embeddings: Embeddings, samples: int, ranks: int, node_ranks: int
) -> dict[str, Any]:
    """Return the rows ``tables``, the largest first, and ``devices``, ranks of equal loads as one row.

    Sizes are bytes. ``hit_rate`` is the share of look-ups in a table on hosts that find their row on a device. What is
    ``read`` or ``exchanged`` is that of one microbatch of ``samples`` on all ranks. ``most_memory`` and ``most_work``
    name the data rank that keeps, or reads and writes, most.
    """
    loads = count_loads(tables, embeddings, samples, ranks, node_ranks)
    memory, work = ([find_figure(load) for load in loads] for find_figure in (_count_kept, _count_read))
    return {
        "tables": [_describe_table(table, embeddings) for table in sorted(tables, key=lambda table: -table.nbytes)],
        "devices": _list_devices(loads),
        "most_memory": memory.index(max(memory)),
        "most_work": work.index(max(work)),
    }


def _describe_table(table: Table, embeddings: Embeddings) -> dict[str, Any]:
    placement = embeddings.find_placement(table.name)
    return {
        "name": table.name,
        "rows": table.rows,
        "size": table.nbytes,
        "placement": str(placement),
        "hit_rate": None if placement.cache is None else find_hit_rate(table, placement),
    }


def _list_devices(loads: Sequence[TableLoad]) -> list[dict[str, Any]]:
    """Return one row for all ranks of equal loads."""
    ranks_of: dict[TableLoad, list[int]] = {}
    for rank, load in enumerate(loads):
        ranks_of.setdefault(load, []).append(rank)
    return [
        {
            "ranks": alike,
            "kept": _count_kept(load),
            "on_host": load.host_bytes,
            "buffers": load.buffers,
            "read": _count_read(load),
            "from_host": load.host_copies,
            "exchanged": _count_exchanged(load),
        }
        for load, alike in ranks_of.items()
    ]


def _count_exchanged(load: TableLoad) -> float:
    vectors = load.vectors + load.partial_sums + load.node_sums
    return load.received_indices + 2 * vectors + load.gradients


def _count_kept(load: TableLoad) -> float:
    return load.parameters + load.states


def _count_read(load: TableLoad) -> float:
    return load.forward + load.backward
