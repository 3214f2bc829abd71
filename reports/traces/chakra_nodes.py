"""Nodes of one Chakra execution trace, read from a file of which nothing is believed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from reports.traces import chakra
from reports.traces.protobuf import BYTES, VARINT
from reports.traces.wire import read_fields, read_packed, read_varint

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
    """What a file says of one node."""

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
        """Return the error that says of this node what is wrong."""
        return ValueError(f"{self.file}: node {self.id} ({self.name[:40]!a}): {message}")

    def needed(self, name: str) -> int:
        """Return an attribute that the node must have."""
        if name not in self.numbers:
            raise self.wrong(f"{name}: a number, met none")
        return self.numbers[name]

    @property
    def ticks(self) -> int:
        """Ticks that it takes: those of its attribute, else of its whole microseconds."""
        return self.numbers.get("ticks", self.micros * chakra.TICKS_PER_MICROSECOND)


def read_nodes(path: Path, most: int = MAX_NODES) -> list[ReadNode]:
    """Return the nodes of a file, in order.

    Raises
    ------
    ValueError
        Where it is no execution trace, or too large: more than ``most`` nodes.
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
    """Yield the messages after the first one, which is about the file, and where each starts."""
    place, first = 0, True
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
    """Keep an attribute that is known; others are for other programs."""
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
    """Return a number that an engine can add up: below 2^62, so that a negative one is refused too."""
    limit = 2**62 if name != "duration_micros" else 2**62 // chakra.TICKS_PER_MICROSECOND
    if value >= limit:
        raise ValueError(f"{name}: a number from 0 to {limit - 1}, met {value}")
    return value


def _text(value: int | bytes) -> str:
    if isinstance(value, int):
        raise ValueError("a text, met a number")
    return value.decode("utf-8", "replace")
