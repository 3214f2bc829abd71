"""What a table makes a device do for one microbatch: bytes that it keeps, reads, writes and exchanges.

With G samples on N ranks, h look-ups and v vectors a sample and rows of b bytes, a rank that has

- the whole table receives ``8 G h`` bytes of indices, and sends ``G v b`` of vectors in an all-to-all;
- an even share of the columns receives as many indices, and sends ``G v b / N``;
- an even share of the rows receives ``8 G h / N``, and has partial sums of all vectors, ``G v b``, which a
  reduce-scatter adds up;
- an even share of the rows on a node of L ranks receives ``8 G h / L``, and has partial sums of all vectors, which a
  reduce-scatter in the node adds up before each rank sends ``G v b / L`` in an all-to-all;
- a replica sends nothing, but gathers ``G h (b + 8)`` of sparse gradients.

Those are the sizes of TorchRec's planner [1]_. Backward moves vectors the other way, a reduce-scatter as an all-gather.
The gradient of a row is the sum of those of its look-ups, and each row that was looked up is read and written once
[2]_: their number is that of `meshwise.strategies.tables.popularity.expect_distinct`. Look-ups fall evenly on the parts
of a table that is cut by rows, as where indices are hashed. Rows and their states lie apart, and what is read or
written of a row takes whole sectors of the device's memory [5]_. Kernels are slower where a rank's rows are narrow: as
slow as if they moved more bytes, by the factors of TorchRec's planner [6]_.

Of a table on hosts the rows that no cache has come to the device once a microbatch, with their states, and go back once
they are updated; those of the cache stay [3]_ [4]_. The sort of indices that backward begins with is not counted.

References
----------
.. [1] pytorch/torchrec, ``distributed/planner/shard_estimators.py``, ``_calculate_shard_io_sizes``.
.. [2] pytorch/FBGEMM, ``split_embedding_configs.py``: exact optimizers coalesce gradients to the same row.
.. [3] pytorch/FBGEMM, pull requests 1893 and 2154 (a prefetch finds the unique indices of a batch, and rows of the
   cache that a batch uses are not evicted before it has updated them).
.. [4] Lian et al. 2021, "Persia: an open, hybrid system scaling deep learning-based recommenders up to 100 trillion
   parameters", arXiv 2111.05897; MindSpore, "Host&Device heterogeneous" training (embeddings on hosts).
.. [5] NVIDIA, CUPTI, ``CUpti_ActivityGlobalAccess2``: transactions with the L2 cache have 32 bytes.
.. [6] pytorch/torchrec, ``distributed/planner/constants.py``: ``HALF_BLOCK_PENALTY`` and ``QUARTER_BLOCK_PENALTY``,
   "empirical studies", for rows of 64 to 127 and of 32 to 63 elements; the latter stands here for narrower ones too.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from meshwise.strategies.tables.embeddings import TABLE_OPTIMIZERS, Embeddings, TableCut, TablePlacement
from meshwise.strategies.tables.popularity import compute_hit_rate, expect_distinct
from meshwise.strategies.tables.table import Table

SECTOR = 32
"""Bytes that a device's memory moves at once."""

BLOCK_PENALTIES = ((128, 1.0), (64, 1.15), (0, 1.75))
"""Time of look-ups in rows of at least so many elements, over that of wide ones."""


class TableLoad(NamedTuple):
    """Bytes of some tables on one rank; those that move are of one microbatch.

    Parameters
    ----------
    parameters, states
        Rows on the device, cached ones too, and their states in the optimizer.
    host_parameters, host_states
        The same on the host.
    forward, backward
        Read and written in the device's memory by look-ups, and by gradients with the update; more for narrow rows.
    host_copies
        Rows and states that come from the host, and go back as many.
    sent_indices, received_indices
        Of the rank's own samples, as often as they are sent; and of all samples, as it receives them.
    vectors
        That the rank has before they are exchanged.
    partial_sums, node_sums
        Vectors of all samples to which every rank adds, or every rank of a node.
    gradients
        Sparse gradients of all ranks together, which each of them gathers.
    """

    parameters: float = 0.0
    states: float = 0.0
    host_parameters: float = 0.0
    host_states: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    host_copies: float = 0.0
    sent_indices: float = 0.0
    received_indices: float = 0.0
    vectors: float = 0.0
    partial_sums: float = 0.0
    gradients: float = 0.0
    node_sums: float = 0.0

    def with_next(self) -> "TableLoad":
        """Return the load where indices, and rows from the host, are there for the next microbatch too."""
        return self._replace(received_indices=2 * self.received_indices, host_copies=2 * self.host_copies)

    @property
    def buffers(self) -> float:
        """Bytes on the device of what is exchanged, and of rows that are there for one microbatch."""
        sums = self.partial_sums + self.node_sums
        return self.received_indices + self.vectors + sums + self.gradients + self.host_copies

    @property
    def device_bytes(self) -> float:
        """Bytes on the device in all."""
        return self.parameters + self.states + self.buffers

    @property
    def host_bytes(self) -> float:
        """Bytes on the host in all."""
        return self.host_parameters + self.host_states


NO_LOAD = TableLoad()
"""A rank that has nothing of a table."""


class TableSharing(NamedTuple):
    """How many samples of a microbatch, on how many ranks together, look up tables that ``optimizer`` updates.

    ``node_ranks`` are the ranks of a node, neighbours all; 0 where all are on one.
    """

    samples: int
    ranks: int
    optimizer: str
    node_ranks: int = 0


def count_load(table: Table, placement: TablePlacement, sharing: TableSharing) -> TableLoad:
    """Return the load of a table on a rank that has a part of it; a replicated table has none."""
    if placement.cut is TableCut.REPLICATED:
        return NO_LOAD
    num_samples, num_ranks = sharing.samples, sharing.ranks
    parts = {TableCut.ROWS: num_ranks, TableCut.NODE_ROWS: sharing.node_ranks or num_ranks}
    by_rows, by_columns = parts.get(placement.cut, 1), num_ranks if placement.cut is TableCut.COLUMNS else 1
    row_state, element_state = TABLE_OPTIMIZERS[sharing.optimizer]
    row_bytes = table.row_bytes / by_columns
    state_bytes = row_state + element_state * table.width / by_columns
    read_bytes, updated_bytes = _fill_sectors(row_bytes), _fill_sectors(row_bytes) + _fill_sectors(state_bytes)
    penalty = next(factor for width, factor in BLOCK_PENALTIES if table.width / by_columns >= width)
    lookups, vectors = num_samples * table.lookups, num_samples * table.vectors
    num_rows, num_cached = table.rows / by_rows, count_cached(table, placement)
    num_kept = num_rows if placement.cache is None else num_cached / by_rows
    num_away = 0.0 if placement.cache is None else num_rows
    num_changed = expect_distinct(table.rows, table.popularity, lookups) / by_rows
    is_local = placement.cut is TableCut.SPARSE
    num_missed = (
        0.0 if placement.cache is None else expect_distinct(table.rows, table.popularity, lookups, num_cached) / by_rows
    )
    local_share = num_ranks if is_local else 1
    return TableLoad(
        parameters=num_kept * row_bytes,
        states=num_kept * state_bytes,
        host_parameters=num_away * row_bytes,
        host_states=num_away * state_bytes,
        forward=penalty * (lookups / by_rows * read_bytes + vectors * row_bytes) / local_share,
        backward=penalty * (lookups / by_rows * row_bytes + 2 * num_changed * updated_bytes),
        host_copies=num_missed * (row_bytes + state_bytes),
        sent_indices=0.0 if is_local else lookups * table.index_size * by_columns / num_ranks,
        received_indices=0.0 if is_local else lookups * table.index_size / by_rows,
        vectors=0.0 if is_local or placement.cut is TableCut.ROWS else vectors * row_bytes / by_rows,
        partial_sums=vectors * row_bytes if placement.cut is TableCut.ROWS else 0.0,
        gradients=lookups * (row_bytes + table.index_size) if is_local else 0.0,
        node_sums=vectors * row_bytes if placement.cut is TableCut.NODE_ROWS else 0.0,
    )


def _fill_sectors(size: float) -> int:
    """Return the bytes of the sectors that so many bytes of a row lie in."""
    return ceil(size / SECTOR) * SECTOR


def count_cached(table: Table, placement: TablePlacement) -> int:
    """Return the number of rows that devices keep of a table on hosts, rounded up."""
    return ceil(round((placement.cache or 0.0) * table.rows, 6))


def find_hit_rate(table: Table, placement: TablePlacement) -> float:
    """Return the share of look-ups in a table on hosts that find their row on a device."""
    return compute_hit_rate(table.rows, table.popularity, count_cached(table, placement))


def add_loads(loads: Iterable[TableLoad]) -> TableLoad:
    """Return loads added up, field by field.

    >>> add_loads([TableLoad(parameters=1.0), TableLoad(parameters=2.0, forward=3.0)])[:5]
    (3.0, 0.0, 0.0, 0.0, 3.0)
    """
    return TableLoad(*map(sum, zip(NO_LOAD, *loads, strict=True)))


def list_owners(placement: TablePlacement, sharing: TableSharing) -> range:
    """Return the ranks that have a table of one rank, or of one node; all ranks where they share it."""
    if placement.device is None:
        return range(sharing.ranks)
    width = (sharing.node_ranks or sharing.ranks) if placement.cut is TableCut.NODE_ROWS else 1
    first_rank = placement.device // width * width
    return range(first_rank, first_rank + width)


def count_loads(
    tables: Iterable[Table], embeddings: Embeddings, samples: int, ranks: int, node_ranks: int = 0
) -> tuple[TableLoad, ...]:
    """Return the load of all tables together on every rank; the device of every whole table is known."""
    sharing = TableSharing(samples, ranks, embeddings.optimizer, node_ranks)
    placed = [(placement, count_load(table, placement, sharing)) for table, placement in _pair(tables, embeddings)]
    shared_load = add_loads(load for placement, load in placed if not placement.is_local)
    own_loads: list[list[TableLoad]] = [[] for _ in range(ranks)]
    for placement, load in placed:
        if placement.device is not None:
            # every rank sends the indices of its samples to those that have the table
            for rank in list_owners(placement, sharing):
                own_loads[rank].append(load._replace(sent_indices=0.0))
    sent_bytes = sum(load.sent_indices for placement, load in placed if placement.device is not None)
    shared_load = shared_load._replace(sent_indices=shared_load.sent_indices + sent_bytes)
    return tuple(add_loads((shared_load, *rank_loads)) for rank_loads in own_loads)


def _pair(tables: Iterable[Table], embeddings: Embeddings) -> Iterator[tuple[Table, TablePlacement]]:
    return ((table, embeddings.find_placement(table.name)) for table in tables)


class TableWork(NamedTuple):
    """The bytes that a rank waits for in a microbatch: of each piece of work those of the rank that has most.

    Ranks wait for each other in every exchange, so that a step takes as long as if one rank had most of everything.

    Parameters
    ----------
    indices, vectors
        Of the all-to-alls, on the rank that sends or receives most.
    """

    indices: float
    host_copies: float
    forward: float
    backward: float
    vectors: float
    partial_sums: float
    gradients: float
    node_sums: float


def find_work(loads: Iterable[TableLoad], ranks: int) -> TableWork:
    """Return the work of the slowest ranks; without exchanges where there is one."""
    rows = list(loads)

    def find_most(name: str) -> float:
        return max(float(getattr(load, name)) for load in rows)

    exchanges = 1 if ranks > 1 else 0
    return TableWork(
        exchanges * max(find_most("sent_indices"), find_most("received_indices")),
        find_most("host_copies"),
        find_most("forward"),
        find_most("backward"),
        exchanges * find_most("vectors"),
        exchanges * find_most("partial_sums"),
        exchanges * find_most("gradients"),
        exchanges * find_most("node_sums"),
    )


class TableBytes(NamedTuple):
    """Bytes that a rank keeps of shared tables: those of the fullest device, and its share of the fullest host."""

    parameters: int
    states: int
    buffers: int
    host_parameters: int
    host_states: int

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.states + self.buffers


def find_bytes(loads: Sequence[TableLoad], hosts: Sequence[int], *, pipelined: bool) -> TableBytes:
    """Return what each rank keeps where every device holds as much as the fullest one.

    ``hosts`` are the hosts of ranks: of the fullest one each of its ranks has an even share. Where it is ``pipelined``
    devices have indices and rows of two microbatches.
    """
    if pipelined:
        loads = [load.with_next() for load in loads]
    fullest = max(loads, key=lambda load: load.device_bytes)
    host_loads = {
        host: add_loads(load for load, load_host in zip(loads, hosts, strict=True) if load_host == host)
        for host in dict.fromkeys(hosts)
    }
    host, fullest_host = max(host_loads.items(), key=lambda item: item[1].host_bytes)
    host_sizes = (size / hosts.count(host) for size in (fullest_host.host_parameters, fullest_host.host_states))
    return TableBytes(ceil(fullest.parameters), ceil(fullest.states), ceil(fullest.buffers), *map(ceil, host_sizes))
