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
from meshwise.reports.traces.protobuf import (
    encode_message,
    encode_number,
    encode_packed,
    encode_tag,
    encode_text,
    encode_varint,
)
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
_NODES_PER_TASK = 2  # nodes of one task: a shift is a send and a receive


class _Hole(NamedTuple):
    """A position in a class's file whose value differs from rank to rank: the number of its group, or its peer."""

    position: int
    group: str
    content: str


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
        self._first_group: dict[str, int] = {}
        self._next_group = 1
        self._files = [self._build_file(index) for index in range(len(self.classes))]
        self.size = sum(
            len(file.content) * len(members.ranks) for file, members in zip(self._files, self.classes, strict=True)
        )

    def write(self, folder: Path) -> None:
        """Write ``step.RANK.et`` for every rank, and ``comm_group.json`` with the ranks of every group."""
        groups = {
            str(first_group + index): ranks
            for kind, first_group in self._first_group.items()
            for index, ranks in enumerate(self.execution.group_rows(kind).tolist())
        }
        with whole_file(folder / GROUPS_FILE) as draft:
            draft.write_text(json.dumps(groups), encoding="utf-8")
        for file, members in zip(self._files, self.classes, strict=True):
            for rank, content in zip(members.ranks, self._fill_holes(file, members.ranks), strict=True):
                with whole_file(folder / f"{PREFIX}.{rank}.et") as draft:
                    draft.write_bytes(content)

    def _fill_holes(self, file: RankClassFile, ranks: tuple[int, ...]) -> Iterator[bytes]:
        """Yield a class's file for every rank, with its holes filled."""
        values = {
            key: _rank_values(self.execution.group_rows(key[0]), *key, self._first_group.get(key[0], 0), ranks)
            for key in {(hole.group, hole.content) for hole in file.holes}
        }
        for index in range(len(ranks)):
            content = bytearray(file.content)
            for hole in file.holes:
                value = values[hole.group, hole.content][index]
                digits = f"{value:0{_DIGITS}d}".encode() if hole.content == "group" else encode_varint(value, _WIDTH)
                content[hole.position : hole.position + len(digits)] = digits
            yield bytes(content)

    def _build_file(self, rank_class: int) -> RankClassFile:
        content = bytearray(_delimit(encode_text(1, VERSION)))  # GlobalMetadata, whose field 1 is the version
        holes: list[_Hole] = []
        split_tasks: set[int] = set()
        for node in self.execution.list_nodes(rank_class):
            parts = _split_shift(node)
            if len(parts) > 1:
                split_tasks.add(node.task)
            for part, communication in enumerate(parts):
                head = _encode_head(node, part, communication, split_tasks)
                self._append_node(content, holes, head + self._encode_sizes(node, communication), communication)
        return RankClassFile(bytes(content), tuple(holes))

    def _encode_sizes(self, node: Node, communication: Communication | None) -> bytes:
        """Return the attributes for the bytes that move and the collective that moves them."""
        if communication is None:
            return _encode_attribute("tensor_size", UINT64, encode_varint(round(node.size))) if node.size else b""
        is_transfer = communication.sends or communication.receives
        is_gather = communication.collective is Collective.ALL_GATHER
        num_shards = self.execution.group_rows(communication.group).shape[1] if is_gather else 1
        size = _encode_attribute("comm_size", INT64, encode_varint(round(communication.size / num_shards)))
        if is_transfer:
            return size + _encode_attribute("comm_tag", INT32, encode_varint(node.task))
        return size + _encode_attribute("comm_type", INT64, encode_varint(COLLECTIVES[communication.collective]))

    def _append_node(
        self, content: bytearray, holes: list[_Hole], head: bytes, communication: Communication | None
    ) -> None:
        """Append a node; its holes are the last bytes of its last attributes."""
        attributes: list[tuple[bytes, str]] = []
        if communication is not None and not (communication.sends or communication.receives):
            kind = communication.group
            if kind not in self._first_group:
                self._first_group[kind] = self._next_group
                self._next_group += len(self.execution.group_rows(kind))
            attributes = [(_encode_attribute("pg_name", STRING, encode_varint(_DIGITS) + b"0" * _DIGITS), "group")]
        elif communication is not None:
            endpoints = ("own", "next") if communication.sends else ("previous", "own")
            names = ("comm_src", "comm_dst")
            attributes = [
                (_encode_attribute(attribute_name, INT32, encode_varint(0, _WIDTH)), endpoint)
                for attribute_name, endpoint in zip(names, endpoints, strict=True)
            ]
        body = len(head) + sum(len(attribute) for attribute, _ in attributes)
        content += encode_varint(body) + head
        for attribute, hole_content in attributes:
            content += attribute
            width = _DIGITS if hole_content == "group" else _WIDTH
            assert communication is not None
            holes.append(_Hole(len(content) - width, communication.group, hole_content))


def _split_shift(node: Node) -> list[Communication | None]:
    """Return the communications of a task's nodes: a shift is a send to the next, a receive from the previous rank."""
    communication = node.communication
    if communication is None or communication.collective is not Collective.SHIFT:
        return [communication]
    return [communication._replace(sends=True), communication._replace(receives=True)]


def _encode_head(node: Node, part: int, communication: Communication | None, split_tasks: set[int]) -> bytes:
    """Return the encoded fields of a node that all ranks of its class share."""

    def ids(tasks: tuple[int, ...]) -> list[int]:
        return [_NODES_PER_TASK * task + index for task in tasks for index in range(1 + (task in split_tasks))]

    micros = (node.duration + TICKS_PER_MICROSECOND // 2) // TICKS_PER_MICROSECOND
    on_host = node.kind is TaskKind.LAUNCH or node.stream is StreamKind.HOST
    return b"".join(
        (
            encode_number(NODE_ID, _NODES_PER_TASK * node.task + part),
            encode_text(NODE_NAME, node.name + (f" of microbatch {node.microbatch}" if node.microbatch >= 0 else "")),
            encode_number(NODE_TYPE, _node_type(node, communication)),
            encode_packed(CONTROL, ids(node.follows)),
            encode_packed(DATA, ids(node.needs)),
            encode_number(DURATION, micros) if micros else b"",
            _encode_attribute("is_cpu_op", BOOL, encode_varint(on_host)),
            _encode_attribute("ticks", UINT64, encode_varint(node.duration)),
            _encode_attribute("stream", STRING, _delimit(node.stream.encode())),
            _encode_attribute("kind", STRING, _delimit(node.kind.encode())),
        )
    )


def _node_type(node: Node, communication: Communication | None) -> int:
    if communication is not None:
        return SEND if communication.sends else RECEIVE if communication.receives else COLLECTIVE
    return {StreamKind.TO_HOST: MEM_STORE, StreamKind.FROM_HOST: MEM_LOAD}.get(node.stream, COMP)


def _delimit(body: bytes) -> bytes:
    return encode_varint(len(body)) + body


def _encode_attribute(name: str, field: int, value: bytes) -> bytes:
    """Return an encoded attribute of a node; the value comes last, so that a hole can overwrite it."""
    wire = 2 if field == STRING else 0
    return encode_message(ATTRIBUTE, encode_text(1, name), encode_tag(field, wire), value)


def _rank_values(rows: IntArray, kind: str, content: str, first_group: int, ranks: tuple[int, ...]) -> list[int]:
    """Return for every rank the number of its group, its own number, or its neighbour in its group."""
    if content == "own":
        return list(ranks)
    size = int(rows.max(initial=-1)) + 1
    value_of_rank = np.full(max(size, max(ranks) + 1), -1, np.int64)
    if content == "group":
        value_of_rank[rows] = first_group + np.arange(len(rows))[:, None]
    elif content == "next":
        value_of_rank[_list_senders(rows, kind)] = _list_receivers(rows, kind)
    else:
        value_of_rank[_list_receivers(rows, kind)] = _list_senders(rows, kind)
    values: list[int] = value_of_rank[list(ranks)].tolist()
    return values


def _list_senders(rows: IntArray, kind: str) -> IntArray:
    """Return the sending ranks: the first of each pair, or all of a ring."""
    return rows if kind in GROUPS else rows[:, 0]


def _list_receivers(rows: IntArray, kind: str) -> IntArray:
    return np.roll(rows, -1, axis=1) if kind in GROUPS else rows[:, 1]
