"""Chakra execution traces read back as a program that the simulator runs; the files are not trusted.

Every rank is its own rank class. The n-th collective of a group on each of its ranks is one task of all of them; a
send and a receive with the same ends, tag and number are one task of both ranks. Dependencies of nodes are kept, and
every stream runs its tasks in one order that satisfies all of them. A rank may send and receive at the same time.
"""

import heapq
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwise.reports.traces import chakra
from meshwise.reports.traces.protobuf import BYTES, VARINT, read_fields, read_packed, read_varint
from meshwise.simulator.program import Program, RankClass, Stream, StreamKind, Task, TaskKind, program_of

MAX_FILE = 2**30
"""Bytes of one file."""
MAX_NODE = 2**20
"""Bytes of one node."""
MAX_NODES = 2_000_000
"""Nodes of all files."""
_INTEGER_FIELDS = (7, 9, 11, 13, 27)  # int32, int64, uint32, uint64 and bool of AttributeProto: varints all
_INTEGERS = ("ticks", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "tensor_size")
_TEXTS = ("stream", "kind", "pg_name")
_NUMERIC_FIELDS = {chakra.NODE_ID, chakra.NODE_TYPE, chakra.DURATION}


@dataclass(slots=True)
class ReadNode:
    """One node as its file states it."""

    file: str
    id: int = 0
    name: str = ""
    type: int = 0
    follows: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    micros: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def to_error(self, message: str) -> ValueError:
        """Return an error about this node."""
        return ValueError(f"{self.file}: node {self.id} ({self.name[:40]!a}): {message}")

    def require_number(self, name: str) -> int:
        """Return a required attribute of the node."""
        if name not in self.numbers:
            raise self.to_error(f"{name}: a number, met none")
        return self.numbers[name]

    @property
    def ticks(self) -> int:
        """Duration in ticks: of the attribute ``ticks``, else of the whole microseconds."""
        return self.numbers.get("ticks", self.micros * chakra.TICKS_PER_MICROSECOND)


def read_nodes(path: Path, max_nodes: int = MAX_NODES) -> list[ReadNode]:
    """Return the nodes of a file, in order.

    Raises
    ------
    ValueError
        Where it is no execution trace, or has more than ``max_nodes`` nodes.
    """
    try:
        if (size := path.stat().st_size) > MAX_FILE:
            raise ValueError(f"{path}: an execution trace has at most {MAX_FILE} bytes, met {size}")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read: {error.strerror}") from None
    nodes: list[ReadNode] = []
    ids: set[int] = set()
    for start, body in _split_messages(path, data):
        if len(nodes) == max_nodes:
            raise ValueError(f"{path}: execution traces have at most {MAX_NODES} nodes, met more")
        try:
            node = _decode_node(path.name, body)
        except ValueError as error:
            raise ValueError(f"{path}: byte {start}, node {len(nodes)}: {error}") from None
        if node.id in ids:
            raise node.to_error("every node has a number of its own, met this one before")
        ids.add(node.id)
        nodes.append(node)
    return nodes


def _split_messages(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield start and body of every message but the first, which describes the file."""
    position, is_first = 0, True
    # at least once, so that an empty file is refused for its missing metadata
    while position < len(data) or is_first:
        start = position
        try:
            size, position = read_varint(data, position)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if size > min(MAX_NODE, len(data) - position):
            size_text = f"{size} bytes of which {len(data) - position} are there"
            raise ValueError(f"{path}: byte {start}: a message has at most {MAX_NODE} bytes, met {size_text}")
        if not is_first:
            yield start, data[position : position + size]
        is_first, position = False, position + size


def _decode_node(file: str, body: bytes) -> ReadNode:
    node = ReadNode(file)
    for number, wire, value in read_fields(body):
        if number in _NUMERIC_FIELDS and wire != VARINT:
            raise ValueError(f"field {number} is a number, met bytes")
        if number == chakra.NODE_ID:
            node.id = int(value)
        elif number == chakra.NODE_TYPE:
            node.type = int(value)
        elif number == chakra.DURATION:
            node.micros = _check_bound(int(value), "duration_micros")
        elif number == chakra.NODE_NAME:
            node.name = _decode_text(value)
        elif number in (chakra.CONTROL, chakra.DATA):
            (node.follows if number == chakra.CONTROL else node.needs).extend(read_packed(value))
        elif number == chakra.ATTRIBUTE:
            _decode_attribute(node, value)
    return node


def _decode_attribute(node: ReadNode, body: int | bytes) -> None:
    """Store a known attribute in the node; unknown ones belong to other programs and are skipped."""
    if isinstance(body, int):
        raise ValueError("an attribute is a message, met a number")
    fields = list(read_fields(body))
    name = next((_decode_text(value) for number, _, value in fields if number == 1), "")
    for number, wire, value in fields:
        if name in _INTEGERS and number in _INTEGER_FIELDS and wire == VARINT:
            node.numbers[name] = _check_bound(int(value), name)
        elif name in _TEXTS and number == chakra.STRING and wire == BYTES:
            node.texts[name] = _decode_text(value)


def _check_bound(value: int, name: str) -> int:
    """Return a number that an engine can add up: below 2^62, which also refuses negative ones (large as varints)."""
    limit = 2**62 if name != "duration_micros" else 2**62 // chakra.TICKS_PER_MICROSECOND
    if value >= limit:
        raise ValueError(f"{name}: a number from 0 to {limit - 1}, met {value}")
    return value


def _decode_text(value: int | bytes) -> str:
    if isinstance(value, int):
        raise ValueError("a text, met a number")
    return value.decode("utf-8", "replace")


MAX_RANKS = 65_536
_FILE = re.compile(r"(?P<name>.*)\.(?P<rank>0|[1-9][0-9]{0,6})\.et")
_STREAMS = {
    chakra.COMP: StreamKind.COMPUTE,
    chakra.MEM_LOAD: StreamKind.FROM_HOST,
    chakra.MEM_STORE: StreamKind.TO_HOST,
    chakra.SEND: StreamKind.SEND_FORWARD,
    chakra.RECEIVE: StreamKind.RECEIVE_FORWARD,
    chakra.COLLECTIVE: StreamKind.DATA,
}
_KINDS = {
    chakra.COMP: TaskKind.FORWARD,
    chakra.MEM_LOAD: TaskKind.HOST_COPY,
    chakra.MEM_STORE: TaskKind.HOST_COPY,
    chakra.SEND: TaskKind.PIPELINE_COMMUNICATION,
    chakra.RECEIVE: TaskKind.PIPELINE_COMMUNICATION,
    chakra.COLLECTIVE: TaskKind.DATA_COMMUNICATION,
}
_TYPES = "MEM_LOAD, MEM_STORE, COMP, COMM_SEND, COMM_RECV or COMM_COLL (2 to 7)"
Key = tuple[int, int]
"""A rank and the number of one of its nodes."""


@dataclass(slots=True)
class _JointTask:
    """Nodes of several ranks that form one task, and the ranks that are expected to take part."""

    expected: tuple[int, ...]
    nodes: list[tuple[int, ReadNode]] = field(default_factory=list)


def read_chakra(folder: Path | str) -> Program:
    """Return the program of the execution traces in a folder: ``NAME.RANK.et`` and, optionally, the file of groups.

    Raises
    ------
    ValueError
        Where a file is no execution trace, ranks are missing, nodes wait for what is not there or for each other, or
        a communication lacks one of its ends.
    """
    folder_path = Path(folder)
    files = _list_files(folder_path)
    groups = _read_groups(folder_path / chakra.GROUPS_FILE, len(files))
    nodes: list[list[ReadNode]] = []
    num_allowed = MAX_NODES
    for file in files:
        nodes.append(read_nodes(file, num_allowed))
        num_allowed -= len(nodes[-1])
    return _build_program(nodes, _join_nodes(nodes, groups))


def _list_files(folder: Path) -> list[Path]:
    """Return the file of every rank."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: a folder of execution traces, met {'a file' if folder.exists() else 'none'}")
    file_of_rank = {
        int(match["rank"]): (match["name"], path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))
    }
    if not file_of_rank or len({name for name, _ in file_of_rank.values()}) > 1 or len(file_of_rank) > MAX_RANKS:
        names = sorted({name for name, _ in file_of_rank.values()})
        requirement = f"files NAME.RANK.et of one name, of at most {MAX_RANKS} ranks"
        raise ValueError(f"{folder}: {requirement}, met {len(file_of_rank)} files of {len(names)} names")
    missing = next((rank for rank in range(len(file_of_rank)) if rank not in file_of_rank), None)
    if missing is not None:
        raise ValueError(f"{folder}: ranks are 0 to {max(file_of_rank)} without a gap, met no file of rank {missing}")
    return [file_of_rank[rank][1] for rank in range(len(file_of_rank))]


def _read_groups(path: Path, num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every group by name."""
    if not path.exists():
        return {}
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path}: a file of groups has at most {MAX_FILE} bytes, met {path.stat().st_size}")
    requirement = f"groups of ranks from 0 to {num_ranks - 1}, each rank once, by number"
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: {requirement} as JSON, met something else") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: {requirement}, met no object")
    result = {}
    for name, ranks in document.items():
        is_valid = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < num_ranks for rank in ranks)
        if not (is_valid and ranks and len(set(ranks)) == len(ranks) and re.fullmatch("[0-9]{1,18}", name)):
            raise ValueError(f"{path}: {requirement}, met {name[:20]!a}: {str(ranks)[:60]}")
        result[str(int(name))] = tuple(ranks)
    return result


def _join_nodes(nodes: Sequence[Sequence[ReadNode]], groups: dict[str, tuple[int, ...]]) -> list[_JointTask]:
    """Return all nodes joined into tasks, in order of their first node."""
    joints: list[_JointTask] = []
    open_joints: dict[tuple[object, ...], _JointTask] = {}
    num_met: dict[tuple[object, ...], int] = {}
    for rank, rank_nodes in enumerate(nodes):
        for node in rank_nodes:
            if node.type not in _STREAMS:
                raise node.to_error(f"its type is {_TYPES}, met {node.type}")
            meeting, expected = _meeting_point(rank, node, groups, len(nodes))
            number = num_met[rank, node.type, meeting] = num_met.get((rank, node.type, meeting), -1) + 1
            key = (meeting, number)
            if meeting is None:
                joints.append(_JointTask((rank,), [(rank, node)]))
            elif key in open_joints:
                open_joints[key].nodes.append((rank, node))
            else:
                open_joints[key] = _JointTask(expected, [(rank, node)])
                joints.append(open_joints[key])
    for joint in open_joints.values():
        _check_joint(joint)
    return joints


def _meeting_point(
    rank: int, node: ReadNode, groups: dict[str, tuple[int, ...]], num_ranks: int
) -> tuple[object, tuple[int, ...]]:
    """Return the key under which a node joins those of other ranks, and these ranks; key ``None`` for a node alone."""
    if node.type == chakra.COLLECTIVE:
        name = node.texts.get("pg_name", "")
        name = str(int(name)) if re.fullmatch("[0-9]{1,18}", name) else name
        if name in ("", "0"):
            return ("all",), tuple(range(num_ranks))
        if name not in groups or rank not in groups[name]:
            requirement = f"pg_name: a group of {chakra.GROUPS_FILE} with rank {rank}"
            raise node.to_error(f"{requirement}, met {name[:20]!a}")
        return ("group", name), groups[name]
    if node.type in (chakra.SEND, chakra.RECEIVE):
        is_send = node.type == chakra.SEND
        source = rank if is_send and "comm_src" not in node.numbers else node.require_number("comm_src")
        target = rank if not is_send and "comm_dst" not in node.numbers else node.require_number("comm_dst")
        own_rank, other_rank = (source, target) if is_send else (target, source)
        if own_rank != rank or other_rank >= num_ranks or other_rank == rank:
            raise node.to_error(f"a transfer between rank {rank} and another of {num_ranks}, met {source} to {target}")
        return ("send", source, target, node.numbers.get("comm_tag", 0)), (source, target)
    return None, (rank,)


def _check_joint(joint: _JointTask) -> None:
    """Raise ``ValueError`` where a communication lacks a rank, or its ranks disagree on its type or size."""
    _, first_node = joint.nodes[0]
    missing = set(joint.expected) - {rank for rank, _ in joint.nodes}
    if missing:
        raise first_node.to_error(
            f"ranks {', '.join(map(str, joint.expected[:8]))} take part, met none of rank {min(missing)}"
        )
    for name in ("comm_type", "comm_size"):
        values = {node.numbers.get(name) for _, node in joint.nodes}
        if len(values) > 1:
            raise first_node.to_error(f"{name}: the same on all of its ranks, met {sorted(map(str, values))[:4]}")


def _build_program(nodes: Sequence[Sequence[ReadNode]], joints: list[_JointTask]) -> Program:
    joint_of = {(rank, node.id): index for index, joint in enumerate(joints) for rank, node in joint.nodes}
    predecessors: list[set[int]] = []
    for index, joint in enumerate(joints):
        waited = {
            _find_waited(joint_of, rank, node, other_id)
            for rank, node in joint.nodes
            for other_id in node.follows + node.needs
        }
        if index in waited:
            raise joint.nodes[0][1].to_error("a node waits for others, met itself")
        predecessors.append(waited)
    order = _order_tasks(joints, predecessors)
    position = {joint: number for number, joint in enumerate(order)}
    streams: dict[tuple[Stream, bool], int] = {}
    tasks = []
    for index in order:
        node_streams = [
            (Stream(rank, _node_stream(node)), node.type == chakra.RECEIVE) for rank, node in joints[index].nodes
        ]
        numbers = tuple(dict.fromkeys(streams.setdefault(stream, len(streams)) for stream in node_streams))
        task_predecessors = tuple(sorted(position[other_id] for other_id in predecessors[index]))
        tasks.append(_build_task(joints[index], numbers, task_predecessors))
    classes = [RankClass(f"rank {rank}", (), (rank,)) for rank in range(len(nodes))]
    return program_of(classes, [stream for stream, _ in streams], tasks)


def _find_waited(joint_of: dict[Key, int], rank: int, node: ReadNode, other_id: int) -> int:
    if (rank, other_id) not in joint_of:
        raise node.to_error(f"it waits for nodes of its file, met {other_id}")
    return joint_of[rank, other_id]


def _order_tasks(joints: list[_JointTask], predecessors: list[set[int]]) -> list[int]:
    """Return tasks in a topological order; among ready tasks the one with the lowest node number comes first."""
    num_waits = [len(waited) for waited in predecessors]
    successors: list[list[int]] = [[] for _ in joints]
    for index, waited in enumerate(predecessors):
        for successor in waited:
            successors[successor].append(index)
    ready = [(joint.nodes[0][1].id, index) for index, joint in enumerate(joints) if not num_waits[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for successor in successors[index]:
            num_waits[successor] -= 1
            if not num_waits[successor]:
                heapq.heappush(ready, (joints[successor].nodes[0][1].id, successor))
    if len(order) < len(joints):
        blocked = next(index for index, count in enumerate(num_waits) if count)
        num_blocked, (_, node) = len(joints) - len(order), joints[blocked].nodes[0]
        raise node.to_error(f"it can run once others have, met {num_blocked} that wait for each other")
    return order


def _build_task(joint: _JointTask, streams: tuple[int, ...], predecessors: tuple[int, ...]) -> Task:
    _, first_node = joint.nodes[0]
    ticks = max(node.ticks for _, node in joint.nodes)
    communicates = first_node.type in (chakra.SEND, chakra.RECEIVE, chakra.COLLECTIVE)
    if communicates and not ticks and "ticks" not in first_node.numbers:
        raise first_node.to_error("a communication with a duration, met none: what it takes is not in the trace")
    kind_name = first_node.texts.get("kind")
    kind = TaskKind(kind_name) if kind_name in set(TaskKind) else _KINDS[first_node.type]
    return Task(kind, streams, ticks, predecessors, stage=-1, operators=first_node.name)


def _node_stream(node: ReadNode) -> StreamKind:
    stream_name = node.texts.get("stream")
    return StreamKind(stream_name) if stream_name in set(StreamKind) else _STREAMS[node.type]
