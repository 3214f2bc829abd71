"""Collects tasks and streams while a plan is lowered, and knows the ports of every rank class."""

from collections.abc import Iterable, Sequence

from simulator.cluster import Cluster, Link, Port, PortKind
from simulator.program import (
    Category,
    MemoryChange,
    Origin,
    Program,
    RankClass,
    Stream,
    StreamKind,
    Task,
    Transfer,
)
from strategies.lowering.operator import Step
from strategies.lowering.pieces import Piece


class Emitter:
    """The tasks so far; ``tail`` is each class's last task of the chain of its actions."""

    def __init__(self, cluster: Cluster, rank_classes: tuple[RankClass, ...]) -> None:
        self.cluster, self.rank_classes = cluster, rank_classes
        self.tasks: list[Task] = []
        self.tail: list[int | None] = [None] * len(rank_classes)
        self._streams: dict[Stream, int] = {}
        self._links: dict[Port, Link] = {}
        self._transfers: dict[tuple[float, float, int, int], tuple[Transfer, ...]] = {}

    def stream(self, rank_class: int, kind: StreamKind) -> int:
        """Return the index of a stream, new or known."""
        return self._streams.setdefault(Stream(rank_class, kind), len(self._streams))

    def action(self, unit: Sequence[int], parts: Sequence[Piece], origin: Origin, arrivals: Iterable[int]) -> list[int]:
        """Add the pieces of one action of a tensor group; return the index of each piece's last task."""
        waiting = {member: list(arrivals) for member in unit}
        ends = []
        for part in parts:
            if part.step.kind.communicates:
                self._together(unit, part, origin, waiting)
            else:
                for member in unit:
                    self._alone(member, part, origin, waiting[member])
            waiting = {member: [] for member in unit}
            ends.append(len(self.tasks) - 1)
        return ends

    def _alone(self, member: int, part: Piece, origin: Origin, waiting: list[int]) -> None:
        streams = (self.stream(member, StreamKind.COMPUTE),)
        before = self._before(member, waiting)
        acquired, released = _changes(member, part.acquired, 1), _changes(member, part.released, -1)
        step, label = part.step, Origin(origin.stage, origin.microbatch, part.step.operators)
        self.tail[member] = self._add(Task(step.kind, streams, step.duration, before, label, (), acquired, released))

    def _together(self, unit: Sequence[int], part: Piece, origin: Origin, waiting: dict[int, list[int]]) -> None:
        streams = tuple(self.stream(member, StreamKind.TENSOR) for member in unit)
        before = tuple({index for member in unit for index in self._before(member, waiting[member])})
        transfers = self._joint(part.step, [(member, member) for member in unit])
        acquired = tuple(c for member in unit for c in _changes(member, part.acquired, 1))
        released = tuple(c for member in unit for c in _changes(member, part.released, -1))
        step, label = part.step, Origin(origin.stage, origin.microbatch, part.step.operators)
        index = self._add(Task(step.kind, streams, step.duration, before, label, transfers, acquired, released))
        for member in unit:
            self.tail[member] = index

    def communication(
        self,
        step: Step,
        ends: Sequence[tuple[int, StreamKind]],
        route: tuple[int, int] | None,
        before: Iterable[int],
        origin: Origin,
    ) -> int:
        """Add one communication among classes; ``route`` names sender and receiver, ``None`` all of them."""
        streams = tuple(self.stream(member, kind) for member, kind in ends)
        pairs = [route] if route else [(member, member) for member, _ in ends]
        transfers = self._joint(step, pairs)
        label = Origin(origin.stage, origin.microbatch, step.operators)
        return self._add(Task(step.kind, streams, step.duration, tuple(sorted(set(before))), label, transfers))

    def _joint(self, step: Step, pairs: Sequence[tuple[int, int]]) -> tuple[Transfer, ...]:
        """Return the transfers of one communication among several pairs.

        A step's bytes over a NIC are those of the whole group, so ranks that share one name it once.
        """
        if len(pairs) == 1:
            return self.transfers(step, *pairs[0])
        found: dict[Port, Transfer] = {}
        for source, target in pairs:
            for transfer in self.transfers(step, source, target):
                known = found.get(transfer.port, transfer)
                found[transfer.port] = max(known, transfer, key=lambda t: t.size)
        return tuple(found.values())

    def transfers(self, step: Step, source: int, target: int) -> tuple[Transfer, ...]:
        """Return what a step moves out of one class's ports and into another's."""
        key = (step.device_bytes, step.nic_bytes, source, target)
        if key not in self._transfers:
            self._transfers[key] = self._routed(step, source, target)
        return self._transfers[key]

    def _routed(self, step: Step, source: int, target: int) -> tuple[Transfer, ...]:
        sender, receiver = self.rank_classes[source].representative, self.rank_classes[target].representative
        moved = []
        if step.device_bytes > 0:
            moved.append(Transfer(Port(PortKind.DEVICE_OUT, sender), step.device_bytes))
            moved.append(Transfer(Port(PortKind.DEVICE_IN, receiver), step.device_bytes))
        if step.nic_bytes > 0:
            moved.append(Transfer(Port(PortKind.NIC_OUT, self.cluster.nic(sender)), step.nic_bytes))
            moved.append(Transfer(Port(PortKind.NIC_IN, self.cluster.nic(receiver)), step.nic_bytes))
        for port, _ in moved:
            self._links.setdefault(port, self.cluster.port_link(port))
        return tuple(moved)

    def _before(self, member: int, waiting: list[int]) -> tuple[int, ...]:
        tail = self.tail[member]
        return tuple(waiting) if tail is None or tail in waiting else (tail, *waiting)

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def program(self, resident: tuple[MemoryChange, ...]) -> Program:
        """Return all that was collected as a program."""
        memory = self.cluster.accelerator.memory
        links = tuple(sorted(self._links.items()))
        return Program(self.rank_classes, tuple(self._streams), tuple(self.tasks), resident, memory, links)


def _changes(member: int, sizes: tuple[tuple[Category, int], ...], sign: int) -> tuple[MemoryChange, ...]:
    return tuple(MemoryChange(member, category, sign * size) for category, size in sizes if size)
