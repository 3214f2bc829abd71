"""Protocol Buffers read: fields of a message of which nothing is believed.

Numbers are those of `reports.traces.protobuf`; groups, which Protocol Buffers no longer have, are refused.
"""

from collections.abc import Iterator

from reports.traces.protobuf import BYTES, FIXED32, FIXED64, VARINT

MAX_VARINT = 10
"""Bytes of a varint of 64 bits."""

Field = tuple[int, int, int | bytes]
"""The number of a field, its wire type, and its value: bytes where it has a length or a fixed size."""


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number and where the next field starts.

    Raises
    ------
    ValueError
        Where the data ends in it, or it does not fit 64 bits.
    """
    value = 0
    for index in range(MAX_VARINT):
        if place + index >= len(data):
            raise ValueError(f"byte {place}: a number ends before the data does, met the end")
        byte = data[place + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, place + index + 1
    raise ValueError(f"byte {place}: a number has at most 64 bits, met more")


def read_fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message; ``ValueError`` with the byte where there is none."""
    place = 0
    while place < len(data):
        start = place
        key, place = read_varint(data, place)
        field, wire = key >> 3, key & 7
        if not 0 < field < 2**29:
            raise ValueError(f"byte {start}: a field has a number from 1 to {2**29 - 1}, met {field}")
        if wire == VARINT:
            value, place = read_varint(data, place)
            yield field, wire, value
            continue
        if wire == BYTES:
            size, place = read_varint(data, place)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"byte {start}: a wire type is 0, 1, 2 or 5, met {wire}")
        if size > len(data) - place:
            raise ValueError(f"byte {start}: a field of {size} bytes ends in the data, met {len(data) - place} more")
        yield field, wire, data[place : place + size]
        place += size


def read_packed(value: int | bytes) -> list[int]:
    """Return the numbers of a repeated field: one, or several in bytes."""
    if isinstance(value, int):
        return [value]
    found, place = [], 0
    while place < len(value):
        number, place = read_varint(value, place)
        found.append(number)
    return found
