"""Protocol Buffers on the wire, written and read: fields as bytes (protobuf.dev, "Encoding").

Only the parts that traces need: numbers, text, bytes and messages. A varint may be longer than necessary, so that one
of fixed width can be overwritten later. Messages that are read are not trusted; groups, which Protocol Buffers no
longer have, are refused.
"""

import struct
from collections.abc import Iterable, Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""


def encode_varint(value: int, width: int = 1) -> bytes:
    """Return a number of at least 0 as 7 bits per byte, lowest first, in at least ``width`` bytes.

    >>> encode_varint(300).hex(), encode_varint(1, 3).hex()
    ('ac02', '818000')
    """
    encoded = bytearray()
    while value > 0x7F or len(encoded) + 1 < width:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_tag(field: int, wire: int) -> bytes:
    """Return the tag that precedes a field's value."""
    return encode_varint(field << 3 | wire)


def encode_number(field: int, value: int) -> bytes:
    """Return a field with an unsigned number, an enum value or a bool."""
    return encode_tag(field, VARINT) + encode_varint(value)


def encode_double(field: int, value: float) -> bytes:
    """Return a field with a double.

    >>> encode_double(3, 1.0).hex()
    '19000000000000f03f'
    """
    return encode_tag(field, FIXED64) + struct.pack("<d", value)


def encode_message(field: int, *parts: bytes) -> bytes:
    """Return a field of bytes: a message whose fields are ``parts``.

    >>> encode_message(3, encode_number(1, 150)).hex()
    '1a03089601'
    """
    body = b"".join(parts)
    return encode_tag(field, BYTES) + encode_varint(len(body)) + body


def encode_text(field: int, value: str) -> bytes:
    """Return a field with text; characters without a UTF-8 encoding become question marks."""
    return encode_message(field, value.encode("utf-8", "replace"))


def encode_packed(field: int, values: Iterable[int]) -> bytes:
    """Return a packed field with unsigned numbers; no bytes where there are none.

    >>> encode_packed(4, [3, 270]).hex(), encode_packed(4, [])
    ('2203038e02', b'')
    """
    body = b"".join(map(encode_varint, values))
    return encode_message(field, body) if body else b""


MAX_VARINT = 10
"""Bytes of a varint of 64 bits."""

Field = tuple[int, int, int | bytes]
"""The number of a field, its wire type, and its value: bytes where it has a length or a fixed size."""


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it.

    Raises
    ------
    ValueError
        Where the data ends inside it, or it does not fit 64 bits.
    """
    value = 0
    for index in range(MAX_VARINT):
        if position + index >= len(data):
            raise ValueError(f"byte {position}: a number ends before the data does, met the end")
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, position + index + 1
    raise ValueError(f"byte {position}: a number has at most 64 bits, met more")


def read_fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message; a malformed one raises ``ValueError`` with its byte."""
    position = 0
    while position < len(data):
        start = position
        key, position = read_varint(data, position)
        field, wire = key >> 3, key & 7
        if not 0 < field < 2**29:
            raise ValueError(f"byte {start}: a field has a number from 1 to {2**29 - 1}, met {field}")
        if wire == VARINT:
            value, position = read_varint(data, position)
            yield field, wire, value
            continue
        if wire == BYTES:
            size, position = read_varint(data, position)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"byte {start}: a wire type is 0, 1, 2 or 5, met {wire}")
        if size > len(data) - position:
            raise ValueError(f"byte {start}: a field of {size} bytes ends in the data, met {len(data) - position} more")
        yield field, wire, data[position : position + size]
        position += size


def read_packed(value: int | bytes) -> list[int]:
    """Return the numbers of a repeated field: one, or several in bytes."""
    if isinstance(value, int):
        return [value]
    numbers, position = [], 0
    while position < len(value):
        number, position = read_varint(value, position)
        numbers.append(number)
    return numbers
