"""Chakra execution traces of a step, one file a rank, as ASTRA-sim replays them.

The schema is ``schema/protobuf/et_def.proto`` of github.com/mlcommons/chakra: a file is a ``GlobalMetadata`` and then
``Node`` messages, each after its length. Attributes have the names and types that ASTRA-sim's feeder reads
(github.com/astra-sim/astra-sim, ``astra-sim/workload``). Our own attributes, which others pass over, are ``ticks`` (the
time of a node in ps, for Chakra's own field has whole microseconds), ``stream`` and ``kind``.

Sizes are bytes of a rank's own buffer, as ASTRA-sim counts them: the shard for an all-gather, else the whole tensor.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwise.reports.traces.execution import Communication, Execution, Node
from meshwise.reports.traces.protobuf import message, number, packed, tag, text, varint
from meshwise.simulator.collective import Collective
from meshwise.simulator.files import whole_file
from meshwise.simulator.program import IntArray, StreamKind, TaskKind
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.plan.mesh import GROUPS

VERSION = "0.0.4"
GROUPS_FILE = "comm_group.json"
PREFIX = "step"
MEM_LOAD, MEM_STORE, COMP, SEND, RECEIVE, COLLECTIVE = 2, 3, 4, 5, 6, 7
"""Values of NodeType."""
COLLECTIVES = {
    Collective.ALL_REDUCE: 0,
    Collective.PUSH_PULL: 0,
    Collective.ALL_GATHER: 2,
    Collective.BROADCAST: 5,
    Collective.ALL_TO_ALL: 6,
    Collective.REDUCE_SCATTER: 7,
}
"""Values of CollectiveCommType; the replaying system chooses the algorithm of a sum, not the trace."""
TICKS_PER_MICROSECOND = TICKS_PER_SECOND // 10**6
NODE_ID, NODE_NAME, NODE_TYPE, CONTROL, DATA, DURATION, ATTRIBUTE = 1, 2, 3, 4, 5, 7, 10  # of Node
INT32, INT64, UINT64, BOOL, STRING = 7, 9, 13, 27, 29  # of AttributeProto, whose name is 1
_DIGITS, _WIDTH = 8, 5  # of the number of a group, and of a varint of a rank: they are written over for every rank
_LAST = 2  # nodes of one task: a shift is a send and a receive


class _Hole(NamedTuple):
    """A position in a class's file whose value differs from rank to rank: the number of its group, or its peer."""

    place: int
    group: str
    what: str


class RankClassFile(NamedTuple):
    """The file that all ranks of a class share, except for its holes."""

    content: bytes
    holes: tuple[_Hole, ...]


class Chakra:
    """The execution traces of a step; ``size`` is the total of all files in bytes.

    A class's file is encoded once; its holes have a fixed width, so that they can be overwritten for every rank.
    """

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.classes = execution.sited.program.rank_classes
        self._first: dict[str, int] = {}
        self._count = 1
        self._files = [self._file(index) for index in range(len(self.classes))]
        self.size = sum(len(f.content) * len(c.ranks) for f, c in zip(self._files, self.classes, strict=True))

    def write(self, folder: Path) -> None:
        """Write ``step.RANK.et`` for every rank, and ``comm_group.json`` with the ranks of every group."""
        groups = {
            str(first + index): ranks
            for kind, first in self._first.items()
            for index, ranks in enumerate(self.execution.group_rows(kind).tolist())
        }
        with whole_file(folder / GROUPS_FILE) as draft:
            draft.write_text(json.dumps(groups), encoding="utf-8")
        for file, members in zip(self._files, self.classes, strict=True):
            for rank, content in zip(members.ranks, self._contents(file, members.ranks), strict=True):
                with whole_file(folder / f"{PREFIX}.{rank}.et") as draft:
                    draft.write_bytes(content)

    def _contents(self, file: RankClassFile, ranks: tuple[int, ...]) -> Iterator[bytes]:
        """Yield a class's file for every rank, with its holes filled."""
        known = {
            key: _values(self.execution.group_rows(key[0]), *key, self._first.get(key[0], 0), ranks)
            for key in {(hole.group, hole.what) for hole in file.holes}
        }
        for index in range(len(ranks)):
            content = bytearray(file.content)
            for hole in file.holes:
                value = known[hole.group, hole.what][index]
                filled = f"{value:0{_DIGITS}d}".encode() if hole.what == "group" else varint(value, _WIDTH)
                content[hole.place : hole.place + len(filled)] = filled
            yield bytes(content)

    def _file(self, rank_class: int) -> RankClassFile:
        content = bytearray(_delimited(text(1, VERSION)))  # GlobalMetadata, whose field 1 is the version
        holes: list[_Hole] = []
        twice: set[int] = set()
        for node in self.execution.nodes(rank_class):
            parts = _parts(node)
            if len(parts) > 1:
                twice.add(node.task)
            for part, communication in enumerate(parts):
                head = _head(node, part, communication, twice) + self._sizes(node, communication)
                self._add(content, holes, head, communication)
        return RankClassFile(bytes(content), tuple(holes))

    def _sizes(self, node: Node, communication: Communication | None) -> bytes:
        """Return the attributes for the bytes that move and the collective that moves them."""
        if communication is None:
            return _attribute("tensor_size", UINT64, varint(round(node.size))) if node.size else b""
        transfer = communication.sends or communication.receives
        gathers = communication.collective is Collective.ALL_GATHER
        shares = self.execution.group_rows(communication.group).shape[1] if gathers else 1
        size = _attribute("comm_size", INT64, varint(round(communication.size / shares)))
        if transfer:
            return size + _attribute("comm_tag", INT32, varint(node.task))
        return size + _attribute("comm_type", INT64, varint(COLLECTIVES[communication.collective]))

    def _add(self, content: bytearray, holes: list[_Hole], head: bytes, communication: Communication | None) -> None:
        """Append a node; its holes are the last bytes of its last attributes."""
        found: list[tuple[bytes, str]] = []
        if communication is not None and not (communication.sends or communication.receives):
            kind = communication.group
            if kind not in self._first:
                self._first[kind] = self._count
                self._count += len(self.execution.group_rows(kind))
            found = [(_attribute("pg_name", STRING, varint(_DIGITS) + b"0" * _DIGITS), "group")]
        elif communication is not None:
            ends = ("own", "next") if communication.sends else ("previous", "own")
            names = ("comm_src", "comm_dst")
            found = [(_attribute(n, INT32, varint(0, _WIDTH)), end) for n, end in zip(names, ends, strict=True)]
        body = len(head) + sum(len(attribute) for attribute, _ in found)
        content += varint(body) + head
        for attribute, what in found:
            content += attribute
            width = _DIGITS if what == "group" else _WIDTH
            assert communication is not None
            holes.append(_Hole(len(content) - width, communication.group, what))


def _parts(node: Node) -> list[Communication | None]:
    """Return the communications of a task's nodes: a shift is a send to the next, a receive from the previous rank."""
    said = node.communication
    if said is None or said.collective is not Collective.SHIFT:
        return [said]
    return [said._replace(sends=True), said._replace(receives=True)]


def _head(node: Node, part: int, communication: Communication | None, twice: set[int]) -> bytes:
    """Return the encoded fields of a node that all ranks of its class share."""

    def ids(tasks: tuple[int, ...]) -> list[int]:
        return [_LAST * task + more for task in tasks for more in range(1 + (task in twice))]

    micros = (node.duration + TICKS_PER_MICROSECOND // 2) // TICKS_PER_MICROSECOND
    on_host = node.kind is TaskKind.LAUNCH or node.stream is StreamKind.HOST
    return b"".join(
        (
            number(NODE_ID, _LAST * node.task + part),
            text(NODE_NAME, _name(node)),
            number(NODE_TYPE, _type(node, communication)),
            packed(CONTROL, ids(node.follows)),
            packed(DATA, ids(node.needs)),
            number(DURATION, micros) if micros else b"",
            _attribute("is_cpu_op", BOOL, varint(on_host)),
            _attribute("ticks", UINT64, varint(node.duration)),
            _attribute("stream", STRING, _said(node.stream)),
            _attribute("kind", STRING, _said(node.kind)),
        )
    )


def _name(node: Node) -> str:
    where = f" of microbatch {node.microbatch}" if node.microbatch >= 0 else ""
    return f"{node.name}{where}"


def _type(node: Node, communication: Communication | None) -> int:
    if communication is not None:
        return SEND if communication.sends else RECEIVE if communication.receives else COLLECTIVE
    return {StreamKind.TO_HOST: MEM_STORE, StreamKind.FROM_HOST: MEM_LOAD}.get(node.stream, COMP)


def _said(value: str) -> bytes:
    return varint(len(value)) + value.encode()


def _attribute(name: str, field: int, value: bytes) -> bytes:
    """Return an encoded attribute of a node; the value comes last, so that a hole can overwrite it."""
    wire = 2 if field == STRING else 0
    return message(ATTRIBUTE, text(1, name), tag(field, wire), value)


def _delimited(body: bytes) -> bytes:
    return varint(len(body)) + body


def _values(rows: IntArray, kind: str, what: str, first: int, ranks: tuple[int, ...]) -> list[int]:
    """Return for every rank the number of its group, its own number, or its neighbour in its group."""
    if what == "own":
        return list(ranks)
    size = int(rows.max(initial=-1)) + 1
    found = np.full(max(size, max(ranks) + 1), -1, np.int64)
    if what == "group":
        found[rows] = first + np.arange(len(rows))[:, None]
    elif what == "next":
        found[_senders(rows, kind)] = _receivers(rows, kind)
    else:
        found[_receivers(rows, kind)] = _senders(rows, kind)
    chosen: list[int] = found[list(ranks)].tolist()
    return chosen


def _senders(rows: IntArray, kind: str) -> IntArray:
    """Return the sending ranks: the first of each pair, or all of a ring."""
    return rows if kind in GROUPS else rows[:, 0]


def _receivers(rows: IntArray, kind: str) -> IntArray:
    return np.roll(rows, -1, axis=1) if kind in GROUPS else rows[:, 1]
