"""The placement of all tables that loads the slowest device least, within the memory of devices and hosts.

The seconds of a table on a device are those of its bytes (`meshwise.strategies.tables.loads`) at given rates; a
device's seconds are the sum over its tables, and the slowest device's are made least. A whole table has an option for
every device, a cut one an option for all, on devices or on hosts with one of a few caches.

`place_greedily` takes the largest table first and gives it the option after which the slowest device is fastest, as
TorchRec's planner does with one cut after another [1]_. `place_tables` solves the mixed integer program, as RecShard
does for rows on devices and hosts [2]_, from that placement on, and says how far from the least its result may be.

References
----------
.. [1] pytorch/torchrec, ``distributed/planner/partitioners.py``, ``GreedyPerfPartitioner``, and ``proposers.py``,
   ``GreedyProposer``.
.. [2] Sethi et al., "RecShard: statistical feature-based memory optimization for industry-scale neural recommendation",
   ASPLOS 2022, arXiv 2201.10095.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.tables.embeddings import Embeddings, TableCut, TablePlacement
from meshwise.strategies.tables.loads import TableLoad, TableSharing, count_load, list_owners
from meshwise.strategies.tables.table import Table

FloatArray = NDArray[np.float64]

CACHES = (0.0, 0.01, 0.05, 0.2, 0.5)
"""Shares of the rows of a table on hosts that devices may keep."""

PLAIN_CACHE = 0.05
"""Share of those rows in the simplest placements."""

MAX_NODES = 500
"""Nodes of the solver's tree, after which its best placement so far is taken: a limit of time would not repeat."""


VECTOR = 4
"""Elements of a row that FBGEMM's kernels read at once: rows are whole vectors."""


def has_even_columns(table: Table, ranks: int) -> bool:
    """Return whether the columns of a table are even shares of whole vectors."""
    return table.width % (ranks * VECTOR) == 0


class Rates(NamedTuple):
    """Seconds of a byte, and of an element of a replicated table.

    Parameters
    ----------
    memory, host
        Of a byte through a device's memory, and of one that comes from its host and goes back.
    exchange, reduction
        Of a byte in an all-to-all, and in a reduce-scatter and the all-gather of its gradient together; an all-gather
        alone takes half of that.
    dense, dense_bytes
        Seconds of an element of a replicated table in a step, for its dense gradient and its update; and its bytes.
    node_reduction
        As ``reduction``, among the ranks of a node.
    """

    memory: float
    host: float
    exchange: float
    reduction: float
    dense: float
    dense_bytes: float
    node_reduction: float = 0.0


class Option(NamedTuple):
    """A placement of one table: seconds and bytes on every device, and bytes on every host."""

    placement: TablePlacement
    seconds: FloatArray
    device_bytes: FloatArray
    host_bytes: FloatArray


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Tables to be placed, and the room for them.

    Parameters
    ----------
    hosts
        The host of every data rank, numbered from 0.
    device_room
        Bytes on each device.
    host_room
        Bytes on each host.
    """

    tables: tuple[Table, ...]
    sharing: TableSharing
    hosts: tuple[int, ...]
    rates: Rates
    device_room: float
    host_room: float

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes of several ranks each."""
        return 1 < self.sharing.node_ranks < self.sharing.ranks

    @cached_property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        """The options of every table."""
        return tuple(tuple(self._list_options(table)) for table in self.tables)

    def _list_options(self, table: Table) -> Iterator[Option]:
        num_ranks = self.sharing.ranks
        yield self._build_replica(table)
        yield self._build_option(table, TablePlacement(TableCut.SPARSE))
        yield self._build_option(table, TablePlacement(TableCut.ROWS))
        if num_ranks > 1 and has_even_columns(table, num_ranks):
            yield self._build_option(table, TablePlacement(TableCut.COLUMNS))
        if num_ranks > 1:
            for device in range(num_ranks):
                yield self._build_option(table, TablePlacement(TableCut.TABLE, device))
        for device in range(0, num_ranks, self.sharing.node_ranks) if self.has_nodes else ():
            yield self._build_option(table, TablePlacement(TableCut.NODE_ROWS, device))
        for cache in CACHES if self.host_room else ():
            yield self._build_option(table, TablePlacement(TableCut.ROWS, cache=cache))

    def _build_option(self, table: Table, placement: TablePlacement) -> Option:
        load, devices = count_load(table, placement, self.sharing), list(list_owners(placement, self.sharing))
        seconds, device_bytes, rank_host_bytes = np.zeros((3, self.sharing.ranks))
        seconds[devices], device_bytes[devices] = self.count_seconds(load), load.device_bytes
        rank_host_bytes[devices] = load.host_bytes
        host_bytes = np.bincount(self.hosts, rank_host_bytes).astype(np.float64)
        return Option(placement, seconds, device_bytes, host_bytes)

    def _build_replica(self, table: Table) -> Option:
        load = count_load(table, TablePlacement(TableCut.SPARSE), self.sharing)
        elements = table.rows * table.width
        # backward reads as much as forward; the update is that of a dense gradient
        seconds = 2 * load.forward * self.rates.memory + elements * self.rates.dense
        zeros = np.zeros(max(self.hosts) + 1)
        num_ranks = self.sharing.ranks
        return Option(
            TablePlacement(),
            np.full(num_ranks, seconds),
            np.full(num_ranks, elements * self.rates.dense_bytes),
            zeros,
        )

    def count_seconds(self, load: TableLoad) -> float:
        """Return the seconds of a load in a microbatch; nothing is exchanged by one rank."""
        rates, is_shared = self.rates, self.sharing.ranks > 1
        exchanged_bytes, summed_bytes = load.received_indices + 2 * load.vectors, load.partial_sums + load.gradients / 2
        node_seconds = load.node_sums * rates.node_reduction
        seconds = (load.forward + load.backward) * rates.memory + load.host_copies * rates.host
        return seconds + is_shared * (exchanged_bytes * rates.exchange + summed_bytes * rates.reduction + node_seconds)

    def find_slowest(self, choice: Sequence[int]) -> float:
        """Return the seconds of the slowest device under the chosen option of every table."""
        return float(self.add(choice, "seconds").max())

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether devices and hosts have room for the chosen options."""
        device_bytes, host_bytes = (self.add(choice, name) for name in ("device_bytes", "host_bytes"))
        return bool((device_bytes <= self.device_room).all() and (host_bytes <= self.host_room).all())

    def add(self, choice: Sequence[int], name: str) -> FloatArray:
        """Return a figure of the chosen options, added up."""
        pairs = zip(self.options, choice, strict=True)
        rows = [getattr(options[index], name) for options, index in pairs]
        result: FloatArray = np.sum(rows, axis=0)
        return result

    def build_embeddings(self, choice: Sequence[int]) -> Embeddings:
        """Return the chosen placement of every table."""
        placements = (options[index].placement for options, index in zip(self.options, choice, strict=True))
        names = (table.name for table in self.tables)
        return Embeddings(tuple(zip(names, placements, strict=True)), optimizer=self.sharing.optimizer)


class PlacedTables(NamedTuple):
    """A choice of an option for every table, the slowest device's seconds, and a bound that no choice is below."""

    choice: tuple[int, ...]
    seconds: float
    bound: float = 0.0

    @property
    def gap(self) -> float | None:
        """The fraction by which the seconds may be above the least; ``None`` where nothing is known."""
        return max(self.seconds / self.bound - 1, 0.0) if self.bound > 0 else None


def place_largest_on_hosts(problem: PlacementProblem, cut: TableCut) -> PlacedTables | None:
    """Return one cut for all tables, but for as few of the largest as must be on hosts, with `PLAIN_CACHE` of them.

    ``None`` where no number of them suffices, or a table cannot be cut so.
    """
    names = [[option.placement for option in row] for row in problem.options]
    on_devices, on_hosts = TablePlacement(cut), TablePlacement(TableCut.ROWS, cache=PLAIN_CACHE)
    if not all(on_devices in row and on_hosts in row for row in names):
        return None
    choice = [row.index(on_devices) for row in names]
    order = sorted(range(len(choice)), key=lambda place: -problem.tables[place].nbytes)
    for place in (None, *order):
        if place is not None:
            choice[place] = names[place].index(on_hosts)
        if problem.fits(choice):
            return PlacedTables(tuple(choice), problem.find_slowest(choice))
    return None


def place_greedily(problem: PlacementProblem) -> PlacedTables | None:
    """Return a placement, the largest table first; ``None`` where the tables that are left would not fit.

    Room is kept for the leanest option of every table that follows.
    """
    options, num_tables = problem.options, len(problem.tables)
    order = sorted(range(num_tables), key=lambda place: -problem.tables[place].nbytes)
    leanest = [min(range(len(row)), key=lambda index: float(row[index].device_bytes.max())) for row in options]
    device_bytes, host_bytes = (problem.add(leanest, name) for name in ("device_bytes", "host_bytes"))
    seconds, choice = np.zeros(problem.sharing.ranks), list(leanest)
    for place in order:
        lean = options[place][leanest[place]]
        device_bytes, host_bytes = device_bytes - lean.device_bytes, host_bytes - lean.host_bytes
        legal = [
            index
            for index, option in enumerate(options[place])
            if (device_bytes + option.device_bytes <= problem.device_room).all()
            and (host_bytes + option.host_bytes <= problem.host_room).all()
        ]
        if not legal:
            return None
        row = options[place]
        choice[place] = min(
            legal, key=lambda index: (float((seconds + row[index].seconds).max()), float(row[index].seconds.sum()))
        )
        chosen = row[choice[place]]
        seconds, device_bytes = seconds + chosen.seconds, device_bytes + chosen.device_bytes
        host_bytes = host_bytes + chosen.host_bytes
    return PlacedTables(tuple(choice), problem.find_slowest(choice))


def place_tables(problem: PlacementProblem, *, gap: float = 1e-3, max_nodes: int = MAX_NODES) -> PlacedTables | None:
    """Return the best placement within a gap, or after so many nodes of the solver's tree; ``None`` where none fits."""
    greedy = place_greedily(problem)
    solver, scale = _build_solver(problem, gap, max_nodes, greedy), _find_scale(problem, greedy)
    solver.run()
    info = solver.getInfo()
    bound = info.mip_dual_bound * scale * (1 - 1e-6) if np.isfinite(info.mip_dual_bound) else 0.0
    best = greedy
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values, start, choice = np.array(solver.getSolution().col_value), 0, []
        for row in problem.options:
            choice.append(int(values[start : start + len(row)].argmax()))
            start += len(row)
        # the solver rounds: what it found may be a few bytes too large
        if problem.fits(choice) and (best is None or problem.find_slowest(choice) < best.seconds):
            best = PlacedTables(tuple(choice), problem.find_slowest(choice))
    return best and best._replace(bound=min(bound, best.seconds))


def _find_scale(problem: PlacementProblem, greedy: PlacedTables | None) -> float:
    """Return the seconds that count as 1 in the program, whose tolerances are absolute."""
    if greedy is not None and greedy.seconds > 0:
        return greedy.seconds
    return max(float(option.seconds.max()) for row in problem.options for option in row) or 1.0


def _build_solver(problem: PlacementProblem, gap: float, max_nodes: int, greedy: PlacedTables | None) -> highspy.Highs:
    """Return the program: one option a table, the last column at least every device's seconds, and all within room."""
    options = [option for row in problem.options for option in row]
    num_columns, num_ranks = len(options), problem.sharing.ranks
    scale = _find_scale(problem, greedy)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    settings = {"output_flag": False, "threads": 1, "mip_rel_gap": gap, "mip_max_nodes": max_nodes}
    for name, value in settings.items():
        solver.setOptionValue(name, value)
    for _ in options:
        solver.addVar(0.0, 1.0)
    solver.addVar(0.0, highspy.kHighsInf)
    solver.changeColCost(num_columns, 1.0)
    for column in range(num_columns):
        solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    start = 0
    for row in problem.options:
        _add_row(solver, 1.0, 1.0, np.arange(start, start + len(row)), np.ones(len(row)))
        start += len(row)
    seconds = np.array([option.seconds for option in options]) / scale
    device_bytes = np.array([option.device_bytes for option in options]) / problem.device_room
    columns = np.arange(num_columns)
    for rank in range(num_ranks):
        _add_row(solver, -highspy.kHighsInf, 0.0, np.r_[columns, num_columns], np.r_[seconds[:, rank], -1.0])
        _add_row(solver, -highspy.kHighsInf, 1.0, columns, device_bytes[:, rank])
    host_bytes = np.array([option.host_bytes for option in options]) / (problem.host_room or 1.0)
    for host in range(host_bytes.shape[1]):
        _add_row(solver, -highspy.kHighsInf, 1.0, columns, host_bytes[:, host])
    if greedy is not None:
        _set_start(solver, problem, greedy, scale)
    return solver


def _add_row(solver: highspy.Highs, lower: float, upper: float, columns: NDArray[np.int64], values: FloatArray) -> None:
    is_used = values != 0
    solver.addRow(lower, upper, int(is_used.sum()), columns[is_used].astype(np.int32), values[is_used])


def _set_start(solver: highspy.Highs, problem: PlacementProblem, greedy: PlacedTables, scale: float) -> None:
    """Give the solver the greedy placement, so that it has something to prune with."""
    values = [
        float(index == chosen)
        for row, chosen in zip(problem.options, greedy.choice, strict=True)
        for index in range(len(row))
    ]
    solution = highspy.HighsSolution()
    solution.col_value = [*values, greedy.seconds / scale]
    solution.value_valid = True
    solver.setSolution(solution)
