"""From what a user says of tables to a placement of every table."""

from collections.abc import Sequence
from dataclasses import replace

from meshwise.strategies.tables.embeddings import REPLICATED_TABLE, Embeddings, TableCut, TablePlacement
from meshwise.strategies.tables.loads import TableSharing, count_load, count_loads, list_owners
from meshwise.strategies.tables.table import Table


def complete_embeddings(
    tables: Sequence[Table], embeddings: Embeddings, samples: int, ranks: int, node_ranks: int = 0
) -> Embeddings:
    """Return the placement of every table that is not replicated, those of one rank or one node where they are.

    Tables that name no device go, the largest first, where the least bytes are, as in TorchRec's greedy planner
    (pytorch/torchrec, ``distributed/planner/partitioners.py``, ``GreedyPerfPartitioner``, sorted by storage).
    """
    placements = {table.name: embeddings.find_placement(table.name) for table in tables}
    placed = {name: placement for name, placement in placements.items() if placement.cut is not TableCut.REPLICATED}
    homeless = {name for name, placement in placed.items() if _lacks_device(placement)}
    sharing = TableSharing(samples, ranks, embeddings.optimizer, node_ranks)
    named = tuple((name, placement) for name, placement in placed.items() if name not in homeless)
    stated = replace(embeddings, tables=named, default=REPLICATED_TABLE)
    rank_bytes = [load.device_bytes for load in count_loads(tables, stated, samples, ranks, node_ranks)]
    sizes = {
        table.name: count_load(table, placed[table.name], sharing).device_bytes
        for table in tables
        if table.name in homeless
    }
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        placed[name] = replace(placed[name], device=rank_bytes.index(min(rank_bytes)))
        owners = list_owners(placed[name], sharing)
        placed[name] = replace(placed[name], device=owners[0])
        for rank in owners:
            rank_bytes[rank] += sizes[name]
    return replace(stated, tables=tuple(placed.items()))


def _lacks_device(placement: TablePlacement) -> bool:
    return placement.is_local and placement.device is None
