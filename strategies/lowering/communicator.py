"""What the communications of one class of groups cost, and what they put on links."""

from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.collective import measured_time
from simulator.collective_kinds import Algorithm, Collective
from simulator.pace import ticks_at
from simulator.program import Flow
from simulator.units import TICKS_PER_SECOND, to_ticks
from strategies.lowering.classes import ClassTable, Row


class Leg(NamedTuple):
    """One phase of a communication: ticks before its bytes move, ticks in all when idle, and the bytes by link."""

    latency: int
    ticks: int
    flow: Flow


class Communicator:
    """A class of groups: its collectives in ticks and flows, each computed once.

    Links are link classes of the `ClassTable`.
    """

    def __init__(self, table: ClassTable, kind: str, index: int) -> None:
        self.table, self.kind, self.index = table, kind, index
        self.size = table.tables[kind].devices.shape[1]
        self._legs: dict[tuple[Collective, float], tuple[Leg, ...]] = {}

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.table.cluster

    def legs(self, collective: Collective, size: float) -> tuple[Leg, ...]:
        """Return the phases of a collective of ``size`` bytes, by the algorithm that is fastest for a group alone."""
        key = (collective, size)
        if key not in self._legs:
            self._legs[key] = self._fastest(collective, size)
        return self._legs[key]

    def ticks(self, collective: Collective, size: float) -> int:
        """Return the ticks of a collective where nothing contends with it."""
        return sum(leg.ticks for leg in self.legs(collective, size))

    def _fastest(self, collective: Collective, size: float) -> tuple[Leg, ...]:
        if size <= 0:
            return ()
        measured = measured_time(self.cluster, collective, self.size, size)
        if measured is not None:
            ticks = to_ticks(measured)
            return (Leg(ticks, ticks, Flow(())),)
        possible = self.table.possible(self.kind, collective, self.index)
        ways = [self._rows(collective, algorithm) for algorithm in possible]
        fastest = min(ways, key=lambda rows: sum(self._alone(row, size)[0] for row in rows)) if ways[1:] else ways[0]
        return tuple(self._leg(row, size) for row in fastest)

    def _rows(self, collective: Collective, algorithm: Algorithm) -> list[Row]:
        return [row[self.index] for row in self.table.rows(self.kind, collective, algorithm)]

    def _alone(self, row: Row, size: float) -> tuple[int, float, float]:
        """Return the ticks of a phase for one group alone, which is what a library knows when it chooses a protocol.

        With them the latency of that protocol, and the bytes on links for each byte of the phase.
        """
        ways = self.cluster.library.ways(row.latency, row.launch, row.messages)
        return min((_ticks(latency, size * moved, row.alone), latency, moved) for latency, moved in ways)

    def _leg(self, row: Row, size: float) -> Leg:
        _, latency, moved = self._alone(row, size)
        size *= moved
        unit, loads = row.unit, row.loads
        waiting, capacity = to_ticks(latency), self.table.bandwidth
        usage = tuple([(link, load * size) for link, load in loads])
        seconds = max([carried / capacity[link] for link, carried in usage], default=0.0)
        if not seconds:
            return Leg(waiting, waiting, Flow(usage, unit * size))
        one = unit * size or max(carried for _, carried in usage)
        return Leg(waiting, waiting + ticks_at(one * TICKS_PER_SECOND, one / seconds), Flow(usage, unit * size))


def _ticks(latency: float, size: float, seconds_per_byte: float) -> int:
    moving = ticks_at(size * TICKS_PER_SECOND, 1 / seconds_per_byte) if seconds_per_byte else 0
    return to_ticks(latency) + moving
