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
_NUMBERS = (7, 9, 11, 13, 27)  # int32, int64, uint32, uint64 and bool of AttributeProto: varints all
_INTEGERS = ("ticks", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "tensor_size")
_TEXTS = ("stream", "kind", "pg_name")
_NAMED = {chakra.NODE_ID, chakra.NODE_TYPE, chakra.DURATION}


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

    def wrong(self, message: str) -> ValueError:
        """Return an error about this node."""
        return ValueError(f"{self.file}: node {self.id} ({self.name[:40]!a}): {message}")

    def needed(self, name: str) -> int:
        """Return a required attribute of the node."""
        if name not in self.numbers:
            raise self.wrong(f"{name}: a number, met none")
        return self.numbers[name]

    @property
    def ticks(self) -> int:
        """Duration in ticks: of the attribute ``ticks``, else of the whole microseconds."""
        return self.numbers.get("ticks", self.micros * chakra.TICKS_PER_MICROSECOND)


def read_nodes(path: Path, most: int = MAX_NODES) -> list[ReadNode]:
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
    found: list[ReadNode] = []
    seen: set[int] = set()
    for start, body in _messages(path, data):
        if len(found) == most:
            raise ValueError(f"{path}: execution traces have at most {MAX_NODES} nodes, met more")
        try:
            node = _node(path.name, body)
        except ValueError as error:
            raise ValueError(f"{path}: byte {start}, node {len(found)}: {error}") from None
        if node.id in seen:
            raise node.wrong("every node has a number of its own, met this one before")
        seen.add(node.id)
        found.append(node)
    return found


def _messages(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield start and body of every message but the first, which describes the file."""
    place, first = 0, True
    # at least once, so that an empty file is refused for its missing metadata
    while place < len(data) or first:
        start = place
        try:
            size, place = read_varint(data, place)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if size > min(MAX_NODE, len(data) - place):
            met = f"{size} bytes of which {len(data) - place} are there"
            raise ValueError(f"{path}: byte {start}: a message has at most {MAX_NODE} bytes, met {met}")
        if not first:
            yield start, data[place : place + size]
        first, place = False, place + size


def _node(file: str, body: bytes) -> ReadNode:
    node = ReadNode(file)
    for number, wire, value in read_fields(body):
        if number in _NAMED and wire != VARINT:
            raise ValueError(f"field {number} is a number, met bytes")
        if number == chakra.NODE_ID:
            node.id = int(value)
        elif number == chakra.NODE_TYPE:
            node.type = int(value)
        elif number == chakra.DURATION:
            node.micros = _bounded(int(value), "duration_micros")
        elif number == chakra.NODE_NAME:
            node.name = _text(value)
        elif number in (chakra.CONTROL, chakra.DATA):
            (node.follows if number == chakra.CONTROL else node.needs).extend(read_packed(value))
        elif number == chakra.ATTRIBUTE:
            _attribute(node, value)
    return node


def _attribute(node: ReadNode, body: int | bytes) -> None:
    """Store a known attribute in the node; unknown ones belong to other programs and are skipped."""
    if isinstance(body, int):
        raise ValueError("an attribute is a message, met a number")
    fields = list(read_fields(body))
    name = next((_text(value) for number, _, value in fields if number == 1), "")
    for number, wire, value in fields:
        if name in _INTEGERS and number in _NUMBERS and wire == VARINT:
            node.numbers[name] = _bounded(int(value), name)
        elif name in _TEXTS and number == chakra.STRING and wire == BYTES:
            node.texts[name] = _text(value)


def _bounded(value: int, name: str) -> int:
    """Return a number that an engine can add up: below 2^62, which also refuses negative ones (large as varints)."""
    limit = 2**62 if name != "duration_micros" else 2**62 // chakra.TICKS_PER_MICROSECOND
    if value >= limit:
        raise ValueError(f"{name}: a number from 0 to {limit - 1}, met {value}")
    return value


def _text(value: int | bytes) -> str:
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
class _Joint:
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
    home = Path(folder)
    files = _files(home)
    groups = _groups(home / chakra.GROUPS_FILE, len(files))
    nodes: list[list[ReadNode]] = []
    left = MAX_NODES
    for file in files:
        nodes.append(read_nodes(file, left))
        left -= len(nodes[-1])
    return _program(nodes, _joined(nodes, groups))


def _files(folder: Path) -> list[Path]:
    """Return the file of every rank."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: a folder of execution traces, met {'a file' if folder.exists() else 'none'}")
    found = {int(m["rank"]): (m["name"], path) for path in folder.iterdir() if (m := _FILE.fullmatch(path.name))}
    if not found or len({name for name, _ in found.values()}) > 1 or len(found) > MAX_RANKS:
        met = sorted({name for name, _ in found.values()})
        held = f"files NAME.RANK.et of one name, of at most {MAX_RANKS} ranks"
        raise ValueError(f"{folder}: {held}, met {len(found)} files of {len(met)} names")
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise ValueError(f"{folder}: ranks are 0 to {max(found)} without a gap, met no file of rank {missing}")
    return [found[rank][1] for rank in range(len(found))]


def _groups(path: Path, num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every group by name."""
    if not path.exists():
        return {}
    if path.stat().st_size > MAX_FILE:
        raise ValueError(f"{path}: a file of groups has at most {MAX_FILE} bytes, met {path.stat().st_size}")
    held = f"groups of ranks from 0 to {num_ranks - 1}, each rank once, by number"
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: {held} as JSON, met something else") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: {held}, met no object")
    result = {}
    for name, ranks in document.items():
        whole = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < num_ranks for rank in ranks)
        if not (whole and ranks and len(set(ranks)) == len(ranks) and re.fullmatch("[0-9]{1,18}", name)):
            raise ValueError(f"{path}: {held}, met {name[:20]!a}: {str(ranks)[:60]}")
        result[str(int(name))] = tuple(ranks)
    return result


def _joined(nodes: Sequence[Sequence[ReadNode]], groups: dict[str, tuple[int, ...]]) -> list[_Joint]:
    """Return all nodes joined into tasks, in order of their first node."""
    found: list[_Joint] = []
    open_ones: dict[tuple[object, ...], _Joint] = {}
    met: dict[tuple[object, ...], int] = {}
    for rank, own in enumerate(nodes):
        for node in own:
            if node.type not in _STREAMS:
                raise node.wrong(f"its type is {_TYPES}, met {node.type}")
            which, expected = _meeting(rank, node, groups, len(nodes))
            number = met[rank, node.type, which] = met.get((rank, node.type, which), -1) + 1
            key = (which, number)
            if which is None:
                found.append(_Joint((rank,), [(rank, node)]))
            elif key in open_ones:
                open_ones[key].nodes.append((rank, node))
            else:
                open_ones[key] = _Joint(expected, [(rank, node)])
                found.append(open_ones[key])
    for joint in open_ones.values():
        _check_joint(joint)
    return found


def _meeting(
    rank: int, node: ReadNode, groups: dict[str, tuple[int, ...]], num_ranks: int
) -> tuple[object, tuple[int, ...]]:
    """Return the key under which a node joins those of other ranks, and these ranks; key ``None`` for a node alone."""
    if node.type == chakra.COLLECTIVE:
        name = node.texts.get("pg_name", "")
        name = str(int(name)) if re.fullmatch("[0-9]{1,18}", name) else name
        if name in ("", "0"):
            return ("all",), tuple(range(num_ranks))
        if name not in groups or rank not in groups[name]:
            held = f"pg_name: a group of {chakra.GROUPS_FILE} with rank {rank}"
            raise node.wrong(f"{held}, met {name[:20]!a}")
        return ("group", name), groups[name]
    if node.type in (chakra.SEND, chakra.RECEIVE):
        sends = node.type == chakra.SEND
        source = rank if sends and "comm_src" not in node.numbers else node.needed("comm_src")
        target = rank if not sends and "comm_dst" not in node.numbers else node.needed("comm_dst")
        own, other = (source, target) if sends else (target, source)
        if own != rank or other >= num_ranks or other == rank:
            raise node.wrong(f"a transfer between rank {rank} and another of {num_ranks}, met {source} to {target}")
        return ("send", source, target, node.numbers.get("comm_tag", 0)), (source, target)
    return None, (rank,)


def _check_joint(joint: _Joint) -> None:
    """Raise ``ValueError`` where a communication lacks a rank, or its ranks disagree on its type or size."""
    _, first = joint.nodes[0]
    missing = set(joint.expected) - {rank for rank, _ in joint.nodes}
    if missing:
        raise first.wrong(f"ranks {', '.join(map(str, joint.expected[:8]))} take part, met none of rank {min(missing)}")
    for name in ("comm_type", "comm_size"):
        said = {node.numbers.get(name) for _, node in joint.nodes}
        if len(said) > 1:
            raise first.wrong(f"{name}: the same on all of its ranks, met {sorted(map(str, said))[:4]}")


def _program(nodes: Sequence[Sequence[ReadNode]], joints: list[_Joint]) -> Program:
    home = {(rank, node.id): index for index, joint in enumerate(joints) for rank, node in joint.nodes}
    before: list[set[int]] = []
    for index, joint in enumerate(joints):
        waits = {_waited(home, rank, node, other) for rank, node in joint.nodes for other in node.follows + node.needs}
        if index in waits:
            raise joint.nodes[0][1].wrong("a node waits for others, met itself")
        before.append(waits)
    order = _order(joints, before)
    place = {joint: number for number, joint in enumerate(order)}
    streams: dict[tuple[Stream, bool], int] = {}
    tasks = []
    for index in order:
        held = [(Stream(rank, _stream(node)), node.type == chakra.RECEIVE) for rank, node in joints[index].nodes]
        numbers = tuple(dict.fromkeys(streams.setdefault(stream, len(streams)) for stream in held))
        tasks.append(_task(joints[index], numbers, tuple(sorted(place[other] for other in before[index]))))
    classes = [RankClass(f"rank {rank}", (), (rank,)) for rank in range(len(nodes))]
    return program_of(classes, [stream for stream, _ in streams], tasks)


def _waited(home: dict[Key, int], rank: int, node: ReadNode, other: int) -> int:
    if (rank, other) not in home:
        raise node.wrong(f"it waits for nodes of its file, met {other}")
    return home[rank, other]


def _order(joints: list[_Joint], before: list[set[int]]) -> list[int]:
    """Return tasks in a topological order; among ready tasks the one with the lowest node number comes first."""
    left = [len(waits) for waits in before]
    after: list[list[int]] = [[] for _ in joints]
    for index, waits in enumerate(before):
        for other in waits:
            after[other].append(index)
    ready = [(joint.nodes[0][1].id, index) for index, joint in enumerate(joints) if not left[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for other in after[index]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (joints[other].nodes[0][1].id, other))
    if len(order) < len(joints):
        stuck = next(index for index, count in enumerate(left) if count)
        many = len(joints) - len(order)
        raise joints[stuck].nodes[0][1].wrong(f"it can run once others have, met {many} that wait for each other")
    return order


def _task(joint: _Joint, streams: tuple[int, ...], predecessors: tuple[int, ...]) -> Task:
    _, first = joint.nodes[0]
    ticks = max(node.ticks for _, node in joint.nodes)
    if first.type in (chakra.SEND, chakra.RECEIVE, chakra.COLLECTIVE) and not ticks and "ticks" not in first.numbers:
        raise first.wrong("a communication with a duration, met none: what it takes is not in the trace")
    known = first.texts.get("kind")
    kind = TaskKind(known) if known in set(TaskKind) else _KINDS[first.type]
    return Task(kind, streams, ticks, predecessors, stage=-1, operators=first.name)


def _stream(node: ReadNode) -> StreamKind:
    said = node.texts.get("stream")
    return StreamKind(said) if said in set(StreamKind) else _STREAMS[node.type]
